"""The Triton kernels against the reference: on a GPU where there is one, else in Triton's interpreter.

Not collected by name: tests/float8/test_kernels.py starts this file in a process of its own, since Triton reads
TRITON_INTERPRET when it is imported. By hand: TRITON_INTERPRET=1 pytest tests/float8/kernel_tests.py
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import triton_fused, triton_quantise
from float8.ops import REFERENCES, launcher
from float8.quantise import dequantise
from float8.scaled import FLOAT8, Float8Rows, ScaleShapeError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float32]
# Blocks are powers of two of columns, 4 rows of a program, tiles of 128: none of these fits.
SHAPES = [(50, 96), (7, 1000), (1, 33)]
TURNED_SHAPES = [(48, 96), (160, 200), (160, 208), (16, 33), (1040, 20)]


@pytest.fixture(autouse=True, scope="module")
def exact_conversions() -> Any:
    """The interpreter cuts bf16 off and knows no NaN nor rounding of float8; torch converts as the GPU does."""
    if DEVICE == "cuda":
        yield
        return
    from triton.runtime import interpreter

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16, "fp8e4nv": FLOAT8}
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

    def convert(values: np.ndarray, old: Any, new: Any, rounding: Any) -> np.ndarray:
        held = torch.frombuffer(bytearray(values.tobytes()), dtype=dtypes[old.name]).to(dtypes[new.name])
        return held.view(unsigned[held.itemsize]).numpy().reshape(values.shape)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(interpreter, "_convert_float", convert)
        yield


@pytest.fixture(autouse=True)
def fresh_numbers() -> None:
    print("torch.manual_seed:", torch.seed())


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def hard(rows: int, cols: int, dtype: torch.dtype, finite: bool = False) -> Tensor:
    """Rows of very different sizes: one of zeros, one subnormal in float32 and bf16, some with what stands out."""
    x = torch.randn(rows, cols) * torch.logspace(-12, 12, rows)[torch.randperm(rows), None]
    standing_out = [1e9, -1e30] if finite else [1e9, 3.3e38, math.nan, math.inf, -math.inf]
    zero, subnormal, *others = torch.randperm(rows).tolist() if rows > 6 else [0, 0]
    for row, value in zip(others, standing_out, strict=False):
        x[row, torch.randint(cols, ())] = value
    x[zero] = 0
    x[subnormal] *= 1e-38
    return x.to(dtype)


def run(name: str, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(what the kernels give, what the reference gives), both on the CPU."""
    there = [
        [t.to(DEVICE) for t in a] if isinstance(a, list) else a.to(DEVICE) if isinstance(a, Tensor) else a
        for a in arguments
    ]
    return tuple(result.cpu() for result in kernel(name)(*there)), REFERENCES[name](*arguments)


def kernel(name: str) -> Any:
    """The op on a GPU, where it knows what its kernels can't do; on a CPU the kernels, interpreted."""
    return getattr(torch.ops.rowhouse, name) if DEVICE == "cuda" else launcher(name)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for the sign and the payload of NaN."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    a, b = a.float(), b.float()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def assert_same(name: str, *arguments: Any) -> None:
    got, expected = run(name, *arguments)
    assert len(got) == len(expected)
    assert all(map(same, got, expected)), [same(a, b) for a, b in zip(got, expected, strict=True)]


def assert_close_rows(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """data, scale. The float32 values before may differ by their last bits, say by 2**-20: one bf16 value in 2**11
    falls to its neighbour then, which a float8 value follows at times, to its own. One in 500 is let go."""
    a, b = dequantise(Float8Rows(*got)), dequantise(Float8Rows(*expected))
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num(), b.nan_to_num()
    step = torch.maximum(2**-3 * b.abs(), 2**-9 * torch.maximum(got[1], expected[1]).nan_to_num(posinf=0))
    assert bool(((a - b).abs() <= step).all())
    assert (a != b).sum() <= max(1, a.numel() // 500)


def assert_neighbours(a: Tensor, b: Tensor) -> None:
    """bf16: equal, or, as in `assert_close_rows`, one in 500 the next value: 2**-8 to 2**-7 away, by its mantissa."""
    assert torch.equal(a.isnan(), b.isnan())
    known = ~a.isnan() & (a != b)  # -0 is 0.
    steps = (a.view(torch.int16).int() - b.view(torch.int16).int()).abs()[known]
    assert bool((steps == 1).all()) and len(steps) <= max(1, a.numel() // 500)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_same("quantise_rows", hard(*shape, dtype), True)
    assert_same("quantise_rows", hard(*shape, dtype), False)


def test_rows_that_lie_apart_and_columns_that_do() -> None:
    x = hard(48, 192, torch.bfloat16, finite=True)
    for part in (x[:, 64:160], x.t()):
        assert_same("quantise_rows", part, True)
        assert_same("quantise_columns", part)
        assert_same("quantise_weights", [part, part])


@pytest.mark.parametrize("widths", [(64, 16, 16), (50, 7, 93), (16, 16), (1, 1, 1, 1)])
def test_rows_of_parts_side_by_side(widths: tuple[int, ...]) -> None:
    whole = hard(50, sum(widths) + 8, torch.bfloat16)
    parts = [part.contiguous() if i % 2 else part for i, part in enumerate(whole[:, 8:].split(widths, dim=1))]
    for maxima in (True, False):
        assert_same("quantise_parts", parts, maxima)
        got, rows = run("quantise_parts", parts, maxima)[0], run("quantise_rows", whole[:, 8:], maxima)[0]
        assert all(map(same, got, rows))


@pytest.mark.parametrize("shape", TURNED_SHAPES)
def test_columns_from_rows(shape: tuple[int, int]) -> None:
    for x in (hard(*shape, torch.bfloat16, finite=True), normal(*shape)):
        data, scale, maxima = REFERENCES["quantise_rows"](x, True)
        assert_same("columns_from_rows", data, scale, maxima)
        assert_same("columns_from_rows", data, scale, maxima[:0])
        parts = torch.cat((maxima / 2, maxima, maxima / 4))
        assert_same("columns_from_rows", data, scale, parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", TURNED_SHAPES)
def test_columns(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_same("quantise_columns", hard(*shape, dtype, finite=True))
    assert_same("quantise_columns", normal(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_side_by_side(dtype: torch.dtype) -> None:
    weights = [normal(rows, 150, dtype=dtype) for rows in (64, 16, 144)]
    assert_same("quantise_weights", weights)
    assert_same("quantise_weights", [hard(48, 150, dtype, finite=True), *weights])
    assert_same("quantise_weights", weights[:1])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_maxima_of_many_programs(dtype: torch.dtype) -> None:
    partial = torch.randint(torch.iinfo(dtype).max, (600, 50), dtype=dtype)
    got = triton_quantise.reduce_maxima(partial.to(DEVICE)).cpu()
    assert torch.equal(got, partial.amax(dim=0, keepdim=True))


def test_maxima_of_rows_too_wide_for_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_quantise, "WIDEST_WITH_MAXIMA", 64)
    assert_same("quantise_rows", hard(530, 70, torch.bfloat16), True)


@pytest.mark.parametrize("bad", [0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000, 0x7F800000, -0x800000])
def test_what_is_not_finite_makes_all_it_is_scaled_with_nan(bad: int) -> None:
    """Every NaN, the largest too, which is the one that CUDA's arithmetic gives, and both infinities."""
    x = normal(64, 48, dtype=torch.float32)
    x[3, 5] = torch.tensor(bad, dtype=torch.int32).view(torch.float32)
    data, scale, maxima = kernel("quantise_rows")(x.to(DEVICE), True)
    columns = kernel("columns_from_rows")(data, scale, maxima)
    assert torch.equal(scale.isinf().any(dim=1).nonzero().cpu(), torch.tensor([[3]]))
    assert maxima.isnan().sum() + maxima.isinf().sum() == 48
    for got in ((data, scale), columns):
        values = dequantise(Float8Rows(*got)).cpu()
        values = values if len(values) == 64 else values.t()
        assert bool(values[3].isnan().all())
    direct = dequantise(Float8Rows(*kernel("quantise_columns")(x.to(DEVICE)))).cpu()
    assert bool(direct[5].isnan().all())
    assert direct.isnan().sum() == 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = (1 + normal(shape[1]) / 8).to(dtype)
    for x in (normal(*shape, dtype=dtype), hard(*shape, dtype)):
        got, expected = run("rms_norm_rows", x, weight, 1e-5, True, True)
        assert_close_rows(got[:2], expected[:2])
        # rstd: a sum of squares and a root.
        torch.testing.assert_close(got[2], expected[2], rtol=2**-20, atol=0, equal_nan=True)
        # The rows and the maxima are those of the normed values that the kernel gives.
        assert all(map(same, (*got[:2], got[3]), REFERENCES["quantise_rows"](got[4], True)))
        if dtype == torch.bfloat16:
            assert_neighbours(got[4], expected[4])
        else:
            torch.testing.assert_close(got[4], expected[4], rtol=2**-20, atol=0, equal_nan=True)
    bare, _ = run("rms_norm_rows", x, weight, 1e-5, False, False)
    assert all(map(same, bare[:3], got[:3]))
    assert bare[3].shape == bare[4].shape == (0, shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_backward(shape: tuple[int, int], dtype: torch.dtype) -> None:
    dy, x, residual = (normal(*shape, dtype=dtype) for _ in range(3))
    weight = (1 + normal(shape[1]) / 8).to(dtype)
    rstd = torch.rsqrt(x.float().square().mean(dim=1) + 1e-5)
    for added in (None, residual):
        (dx, dweight), (expected, expected_dweight) = run("rms_norm_backward", dy, x, weight, rstd, added)
        # Relative to the terms, whose difference can be small; bf16 falls to a neighbour once, with a residual twice.
        terms = (dy.float().abs() * weight.float().abs() + 2 * x.float().abs() * rstd[:, None]) * rstd[:, None]
        last_bit = 2**-7 * expected.float().abs() + 2**-8 * terms if dtype == torch.bfloat16 else 0
        off = (dx.float() - expected.float()).abs()
        assert bool((off <= last_bit + 2**-19 * (terms + expected.float().abs())).all())
        assert dtype == torch.float32 or (off > 0).sum() <= max(1, off.numel() // 100)
        torch.testing.assert_close(dweight, expected_dweight, rtol=2**-18, atol=2**-18 * shape[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, cols = shape
    h = 3 * normal(rows, 2 * cols, dtype=dtype)
    if rows >= 7:
        h[0, 0], h[1, 1], h[2, 2], h[3, -1], h[4] = math.nan, math.inf, -math.inf, math.nan, 0
        h[5, :cols], h[6, :cols] = -100, 100
    h1, h3 = h.split(cols, dim=1)  # What one matmul by both weights gives.
    got, expected = run("swiglu_rows", h1, h3, True)
    assert_close_rows(got[:2], expected[:2])
    maxima = dequantise(Float8Rows(*got[:2])).abs().amax(dim=0, keepdim=True)
    assert same(got[2].float(), maxima)
    got, expected = run("swiglu_backward_rows", normal(*shape, dtype=dtype), h1, h3, True)
    assert_close_rows(got[:2], expected[:2])
    maxima = dequantise(Float8Rows(*got[:2])).abs().amax(dim=0, keepdim=True)
    assert same(got[2].float(), maxima)


def test_swiglu_maxima_of_rows_too_wide_for_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_fused, "WIDEST_WITH_MAXIMA", 64)
    monkeypatch.setattr(triton_fused, "WIDEST_NORM_WITH_MAXIMA", 64)
    got, _ = run("swiglu_rows", normal(20, 70), normal(20, 70), True)
    assert same(got[2].float(), dequantise(Float8Rows(*got[:2])).abs().amax(dim=0, keepdim=True))
    got, _ = run("rms_norm_rows", normal(20, 70), normal(70), 1e-5, True, False)
    assert same(got[3].float(), dequantise(Float8Rows(*got[:2])).abs().amax(dim=0, keepdim=True))


def test_norm_into_columns_is_the_norm() -> None:
    """The way of an activation: normed and quantised, then turned over for its weight's gradient."""
    x, weight = normal(64, 256), 1 + normal(256) / 8
    rows, _, maxima, _ = _norm(x, weight)
    columns, scale = (t.cpu() for t in triton_quantise.columns_from_rows(*rows, maxima))
    exact = F.rms_norm(x.float(), (256,), weight.float(), 1e-5)
    error = (columns.float() * scale).t() - exact
    assert error.norm() < 0.03 * exact.norm()  # the floor of float8, see test_quantise.py


def _norm(x: Tensor, weight: Tensor) -> Any:
    data, scale, rstd, maxima, normed = triton_fused.rms_norm_rows(x.to(DEVICE), weight.to(DEVICE), 1e-5, True, False)
    return (data, scale), rstd, maxima, normed


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ScaleShapeError, match="multiples of 16 rows"):
        triton_quantise.quantise_columns(normal(40, 32).to(DEVICE))
    with pytest.raises(ScaleShapeError, match="multiple of 16"):
        triton_quantise.quantise_weights([normal(24, 32).to(DEVICE), normal(8, 32).to(DEVICE)])
