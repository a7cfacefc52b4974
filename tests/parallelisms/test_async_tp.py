"""The probe decides by behaviour: right ops are used, wrong or missing or changed ones are not. And the canary."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from float8.quantise import quantise_rows
from float8.scaled import scaled_mm
from parallelisms import async_tp
from parallelisms.tp_ops import reduce_scatter
from scripts import symm_mem_on_cpu
from scripts.local_ranks import launch


def probe(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = {"without kernels": async_tp.why_not_fused(mesh, float8=True)}
    library = symm_mem_on_cpu.install()
    found["right"] = async_tp.why_not_fused(mesh, float8=True)

    import torch.distributed._symmetric_memory as symm_mem

    right = symm_mem._pipelined_produce_and_all2all

    def rows_swapped(produce, output, group, out_chunk_dim=0):
        right(produce, output, group, out_chunk_dim)
        output.copy_(output.roll(1, 0))

    # Wrong on one rank only: all must hear of it.
    if dist.get_rank() == 1:
        symm_mem._pipelined_produce_and_all2all = rows_swapped
    found["wrong rows on rank 1"] = async_tp.why_not_fused(mesh, float8=True)
    symm_mem._pipelined_produce_and_all2all = right

    async_tp.SIGNATURES["fused_all_gather_matmul"] = ["A", "Bs"]
    found["another signature"] = async_tp.why_not_fused(mesh, float8=True)
    found["stock path"] = stock_path_error()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    del library


def stock_path_error() -> float:
    """Relative error of what torch's compiler pass makes of scaled_mm -> reduce-scatter over the sequence, batch 2."""
    batch, seq, k, n, ranks, group = 2, 64, 64, 32, 2, dist.group.WORLD.group_name
    torch.manual_seed(dist.get_rank())
    a, b = quantise_rows(torch.randn(batch * seq, k)), quantise_rows(torch.randn(n, k))
    summand = scaled_mm(a, b, torch.bfloat16).view(batch, seq, n)
    expected = reduce_scatter(summand.movedim(1, 0), group).movedim(0, 1).float()
    # The flattened A, the scatter dim of the 3-D output: torch/_inductor/fx_passes/micro_pipeline_tp.py.
    got = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        a.data, b.data.t(), a.scale, b.scale.t(), "sum", 1, 0, group, [batch, seq, n], None, None, torch.bfloat16, True
    )
    assert got.shape == (batch, seq // ranks, n)
    return ((got.float() - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("probe")
    launch(probe, 2, folder)
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    for name in first:
        assert name == "stock path" or first[name] == second[name]  # All ranks decide alike.
    return first


def test_the_probe(found: dict) -> None:
    assert found["without kernels"] == "torch has no symmetric memory on cpu"
    assert found["right"] == ""
    assert "is wrong here" in found["wrong rows on rank 1"]
    assert "symm_mem.fused_all_gather_matmul takes" in found["another signature"]


def test_canary_the_stock_path_is_still_wrong_above_batch_one(found: dict) -> None:
    assert found["stock path"] > 0.5, (
        "torch's fused scaled matmul + reduce-scatter over the sequence is right for batch 2 now: tell so in "
        "docs/scale-shapes.md, and think again about what is worked around"
    )


def test_the_plan_is_compared_by_layer() -> None:
    from parallelisms.tp_ops import Collective

    layers = [layer for layers in async_tp.PLAN.values() for layer in layers]
    ran = [Collective(layer, "gather_matmul", True, False, 100) for layer in layers for _ in range(3)]
    ran += [Collective("w1 w3", "gather_matmul", True, True, 100) for _ in range(3)]
    plan = async_tp.compare_with_plan(ran, blocks=3)
    assert plan.fused == {"forward": 4, "backward": 4}
    assert (plan.missing, plan.recomputed, plan.sent) == ([], 1, 2700)
    lacking = [c for c in ran if c.layer != "wo"] + [Collective("wo", "matmul_scatter", False, False, 100)] * 3
    plan = async_tp.compare_with_plan(lacking, blocks=3)
    assert plan.fused == {"forward": 3, "backward": 4}
    assert plan.missing == ["wo"]
