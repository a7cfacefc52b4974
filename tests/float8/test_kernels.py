"""The ops: on a CPU the reference, under the compiler one op each; and the Triton kernels, in their own process."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from float8 import kernels, quantise
from float8.ops import REFERENCES
from float8.quantise import dequantise
from float8.scaled import Float8Rows, ScaleShapeError

ROOT = Path(__file__).parent.parent.parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (Linux)")


def python(*arguments: str, **environment: str) -> str:
    """Fails with what was printed last."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env={**inherited, **environment}
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


@needs_triton
def test_triton_kernels_are_the_reference() -> None:
    """Natively where there is a GPU, else interpreted."""
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    python("-m", "pytest", "tests/float8/kernel_tests.py", **environment)


@needs_triton
def test_kernels_compile_for_hopper_and_hardly_spill() -> None:
    from scripts.bench_kernels import CASES, compile_cases

    compiled = list(compile_cases())
    assert {case for case, _ in compiled} == set(CASES)
    for case, kernel in compiled:
        told = f"{case.op} {case.shape}: {kernel.kernel} takes {kernel.registers} registers, {kernel.shared} bytes"
        # Held to 128 registers, the two of SwiGLU spill a little, and are faster than without (docs/performance.md).
        assert kernel.spilled <= (64 if "swiglu" in kernel.kernel else 0), f"{told}, and spills"
        assert kernel.programs >= 1, f"{told}: too much"
        # What triton issue 11111 needs besides a transposed store of bytes.
        assert not re.search(r"(min|max)\.NaN", kernel.ptx)
        # 16 bytes a thread, by way of shared memory or not.
        assert re.search(r"ld\.global[.\w]*\.v4\.b32|cp\.async\.cg\.shared\.global [^;]* 0x10", kernel.ptx), told
        assert kernel.kernel != "columns_kernel" or re.search(r"st\.global[.\w]*\.v4\.b32", kernel.ptx), told


def test_benchmark_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("it would measure")
    assert "can't be measured" in python("-m", "scripts.bench_kernels")


def test_triton_is_not_imported_with_the_ops() -> None:
    python("-c", "import sys; sys.modules['triton'] = None; import float8.kernels")


def activations() -> dict[str, tuple[Any, ...]]:
    """Op -> arguments."""
    x, h, dy = (torch.randn(32, 48, dtype=torch.bfloat16) for _ in range(3))
    rows, maxima = kernels.quantise_rows(x, maxima=True)
    weight, rstd = x[0].clone(), torch.rand(32)
    return {
        "quantise_rows": (x, True),
        "quantise_parts": ([x, h[:, :16], dy], True),
        "columns_from_rows": (rows.data, rows.scale, maxima),
        "quantise_columns": (x,),
        "quantise_weights": ([x, h[:16]],),
        "rms_norm_rows": (x, weight, 1e-5, True, True),
        "rms_norm_backward": (dy, x, weight, rstd, h),
        "swiglu_rows": (x, h, True),
        "swiglu_backward_rows": (dy, x, h, False),
    }


@pytest.mark.parametrize("name", REFERENCES)
def test_compiler_is_told_the_right_shapes(name: str) -> None:
    torch.library.opcheck(
        getattr(torch.ops.rowhouse, name).default, activations()[name], test_utils=("test_faketensor",)
    )


def equal(a: Float8Rows, b: Float8Rows) -> bool:
    return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)


def test_quantising_is_the_reference() -> None:
    x = torch.randn(48, 64, dtype=torch.bfloat16)
    rows, maxima = kernels.quantise_rows(x, maxima=True)
    assert equal(rows, quantise.quantise_rows(x))
    assert torch.equal(maxima.float()[0], dequantise(rows).abs().amax(dim=0))
    assert kernels.quantise_rows(x)[1].shape == (0, 64)
    assert equal(kernels.quantise_columns(x), quantise.quantise_columns(x))
    both = kernels.quantise_weights([x[:32], x[32:]])
    assert equal(both[0], rows)
    assert equal(both[1], quantise.quantise_columns(x))


def test_column_maxima_save_a_look_and_change_nothing() -> None:
    x = torch.randn(48, 64)
    rows, maxima = kernels.quantise_rows(x, maxima=True)
    expected = quantise.columns_from_rows(rows)
    assert equal(kernels.columns_from_rows(rows, maxima), expected)
    assert equal(kernels.columns_from_rows(rows, maxima[:0]), expected)
    # Those of two ranks' rows, gathered.
    parts = [kernels.quantise_rows(part, maxima=True)[1] for part in x.split(16)]
    assert equal(kernels.columns_from_rows(rows, torch.cat(parts)), expected)
    # They are taken at their word.
    assert torch.equal(kernels.columns_from_rows(rows, maxima * 2).scale, expected.scale * 2)


def test_what_is_not_a_matrix_with_its_scales_is_refused() -> None:
    with pytest.raises(ScaleShapeError):
        kernels.quantise_rows(torch.randn(2, 3, 4))


def feed(x: Tensor, weight: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    rows, maxima, rstd, _ = kernels.rms_norm_rows(x, weight, 1e-5, maxima=True)
    columns = kernels.columns_from_rows(rows, maxima)
    back, _ = kernels.swiglu_backward_rows(x, h, x)
    return columns.data.float(), columns.scale, rstd, back.data.float()


def test_compiled_in_one_graph() -> None:
    x, h = torch.randn(2, 32, 48, dtype=torch.bfloat16).unbind()
    arguments = (x, x[0].clone(), h)
    compiled = torch.compile(feed, fullgraph=True)(*arguments)
    assert all(map(torch.equal, compiled, feed(*arguments)))


class Quantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows, _ = kernels.quantise_rows(x)
        ctx.save_for_backward(rows.data, rows.scale)
        return dequantise(rows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * dequantise(Float8Rows(*ctx.saved_tensors))


@pytest.mark.parametrize("kept", [True, False])
def test_selective_checkpointing_can_name_them(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    computed, reference = [], quantise.quantise_rows

    def counting(x: Tensor) -> Float8Rows:
        computed.append(x)
        return reference(x)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = kept and op == torch.ops.rowhouse.quantise_rows.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    monkeypatch.setattr(quantise, "quantise_rows", counting)
    x = torch.randn(16, 32, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(Quantised.apply, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert torch.equal(x.grad, dequantise(reference(x.detach())))
    assert len(computed) == (1 if kept else 2)
