"""The scale-shape matrix with real symmetric memory, ranks sharing one GPU; and the canary for torch's own path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from float8.quantise import quantise_rows
from scripts.local_ranks import launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(__file__).parent.parent.parent


def test_matrix_on_a_shared_gpu() -> None:
    command = [sys.executable, "-m", "scripts.scale_shape_matrix", "--quick", "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def stock_path(folder: Path) -> None:
    """scaled_mm -> reduce-scatter over the sequence, batch 2: compiled with torch's own pass, against eager."""
    import torch._inductor.config
    import torch.distributed._functional_collectives as functional
    import torch.distributed._symmetric_memory as symm_mem

    group, batch, seq = dist.group.WORLD, 2, 512
    symm_mem.enable_symm_mem_for_group(group.group_name)
    torch._inductor.config._micro_pipeline_tp = True
    torch.manual_seed(dist.get_rank())
    x = torch.randn(batch, seq, 256, device="cuda", dtype=torch.bfloat16)
    weight = quantise_rows(torch.randn(384, 256, device="cuda"))

    def matmul_scatter(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).float() / 448
        data = (x.float() / scale).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(
            data.flatten(0, 1), weight.data.t(), scale.flatten(0, 1), weight.scale.t(), out_dtype=torch.bfloat16
        )
        return functional.reduce_scatter_tensor(out.view(batch, seq, -1), "sum", 1, group)

    expected = matmul_scatter(x).float()
    got = torch.compile(matmul_scatter, fullgraph=True)(x).float()
    error = ((got - expected).norm() / expected.norm()).item()
    (folder / f"{dist.get_rank()}").write_text(str(error))


def test_canary_the_stock_path_is_still_wrong_above_batch_one(tmp_path: Path) -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    launch(stock_path, 2, tmp_path)
    error = float((tmp_path / "0").read_text())
    assert error > 0.5, "torch's fused path is right for batch 2 now: tell so in docs/scale-shapes.md"
