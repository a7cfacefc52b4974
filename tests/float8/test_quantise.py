"""The reference quantisers: power-of-two scales, the float8 floor, and columns from rows without a second rounding."""

import math

import pytest
import torch

from float8.quantise import columns_from_rows, dequantise, quantise_columns, quantise_rows, row_scale
from float8.scaled import FLOAT8

# e4m3 keeps 3 bits behind the leading one: a value in [1, 2) is off by at most 1/16, evenly spread, so by
# 1/16/sqrt(3) on the root mean square, relative to values of root mean square sqrt(7/3): 0.0236. Normal values fill an
# octave unevenly, and those under 2**-6 of the scale are subnormal: 0.0263 measured, within 0.001 over 8192 values.
FLOOR = 0.03


def matrix(rows: int, cols: int) -> torch.Tensor:
    """Rows of very different sizes."""
    return torch.randn(rows, cols) * torch.logspace(-12, 12, rows)[:, None]


def test_scales_are_the_smallest_powers_of_two_that_cover() -> None:
    amax = torch.cat((torch.logspace(-20, 20, 1001), 448 * 2.0 ** torch.arange(-30, 30), torch.tensor([448.00003])))
    scale = row_scale(amax)
    assert torch.equal(scale, torch.exp2(scale.log2().round()))
    assert bool((amax / scale <= 448).all())
    assert bool((amax / (scale / 2) > 448).all())


def test_rows_are_at_the_float8_floor() -> None:
    x = matrix(64, 512)
    rows = quantise_rows(x)
    error = (dequantise(rows) - x).abs()
    # Half a step: 2**-4 of a normal value at most, 2**-10 of the scale for a subnormal one.
    assert bool((error <= torch.maximum(2**-4 * x.abs(), 2**-10 * rows.scale)).all())
    assert (error / x.norm(dim=1, keepdim=True)).norm() < FLOOR * 64**0.5
    assert rows.data.dtype == FLOAT8
    assert rows.scale.shape == (64, 1)


def test_columns_are_rows_of_the_transpose() -> None:
    x = matrix(48, 80)
    columns, rows = quantise_columns(x), quantise_rows(x.t().contiguous())
    assert torch.equal(columns.data.view(torch.uint8), rows.data.view(torch.uint8))
    assert torch.equal(columns.scale, rows.scale)


def test_columns_from_rows_do_not_round_again() -> None:
    x = torch.randn(64, 128)
    rows = quantise_rows(x)
    columns = columns_from_rows(rows)
    exact, got = dequantise(rows).t(), dequantise(columns)
    # Only what is subnormal in the new scale, or was in the old one, can differ: by half of 2**-9 of the scale.
    assert bool(((got - exact).abs() <= 2**-10 * columns.scale).all())
    normal = exact.abs() >= 2**-6 * columns.scale
    assert torch.equal(got[normal], exact[normal])
    assert normal.float().mean() > 0.9
    # From a fresh draw of bf16 values the result is as good as quantising them directly.
    assert (got - x.t()).norm() < FLOOR * x.norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    x = torch.randn(16, 32)
    x[3, 5] = bad
    values = dequantise(quantise_rows(x))
    assert bool(values[3].isnan().all())
    assert bool(values[[0, 1, 2, 4]].isfinite().all())
    assert bool(dequantise(columns_from_rows(quantise_rows(x))).isnan().any(dim=0)[3])


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, 0x7F800000])
def test_the_scale_of_any_nan_is_infinite(bits: int) -> None:
    bad = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert row_scale(bad.abs()).item() == math.inf
    x = torch.randn(16, 32)
    x[3, 5] = bad[0]
    assert bool(dequantise(quantise_rows(x))[3].isnan().all())
    assert bool(dequantise(quantise_columns(x))[5].isnan().all())


def test_zeros_stay_zeros() -> None:
    x = torch.randn(16, 32)
    x[2] = 0
    rows = quantise_rows(x)
    assert bool((dequantise(rows)[2] == 0).all())
    assert bool(rows.scale.isfinite().all())
    assert bool((dequantise(columns_from_rows(quantise_rows(torch.zeros(16, 32)))) == 0).all())
