"""Quantising to float8 rows: the reference in plain PyTorch, which is what runs on a CPU and what tests trust.

Scales are powers of two, so a float8 value times its scale is exact, and a matrix can be re-scaled from rows to columns
without a second rounding, but for values that become subnormal. An activation is therefore kept once, as float8 rows;
the operand of the weight gradient is made from it.
"""

import torch
from torch import Tensor

from float8.scaled import FLOAT8, Float8Rows

FLOAT8_MAX = 448.0
SMALLEST_AMAX = 2.0**-80  # A row of zeros gets this for its maximum: 2**-88 as scale, whose inverse is finite.


def row_scale(amax: Tensor) -> Tensor:
    """The smallest power of two s with amax / s <= 448. float32 -> float32; inf and NaN give inf.

    In bits: amax = m * 2**e and 448 = 1.75 * 2**8, so s = 2**(e - 8) if m <= 1.75, else 2**(e - 7). Adding 0x1FFFFF
    carries into the exponent exactly when the mantissa is above 0.75 = 0x600000; no logarithm can round wrongly.
    """
    # NaN has many bit patterns, also negative ones; as they are they would overflow the sum, and end as a scale of 0.
    bits = (amax.clamp(min=SMALLEST_AMAX).view(torch.int32) & 0x7FFFFFFF).clamp(max=0x7F800000)
    return ((bits + 0x1FFFFF) & 0x7F800000).view(torch.float32) * 2.0**-8


def quantise_rows(x: Tensor) -> Float8Rows:
    """x: (rows, cols), any float dtype and strides. An inf or NaN makes its whole row NaN in every product."""
    x = x.float()
    scale = row_scale(x.abs().amax(dim=1, keepdim=True))
    # The clamp matters where a compiler rounds x differently here and in the maximum.
    data = (x * scale.reciprocal()).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
    return Float8Rows(data.contiguous(), scale)


def quantise_columns(x: Tensor) -> Float8Rows:
    """x: (rows, cols) -> its transpose, (cols, rows), with one scale a column of x."""
    return quantise_rows(x.t())


def columns_from_rows(rows: Float8Rows) -> Float8Rows:
    """(rows, cols) with a scale a row -> its transpose, (cols, rows), with a scale a column of the original.

    Exact, but for values that are subnormal before or after: those lose bits below 2**-9 of the new scale.
    """
    return quantise_columns(dequantise(rows))


def dequantise(rows: Float8Rows) -> Tensor:
    """float32 (rows, cols), exact."""
    return rows.data.float() * rows.scale
