"""RMSNorm and SwiGLU in Triton, from and to float8 rows: what float8/fused.py runs on CUDA.

As in float8/triton_quantise.py a program takes some rows, one after the other, and keeps a row in registers from its
load to its store: what the model would write in bf16, to read it again for quantising it, never leaves the chip. It is
rounded where the model rounds.

The registers of a multiprocessor hold 65536 values. A row of SwiGLU's backward pass has 28672 results and 43008 inputs
(in Llama 3 8B), which leaves none for the columns' maxima: those are taken from the float8 rows afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.triton_quantise import (
    WIDEST_WITH_MAXIMA,
    by_rows,
    finished_maxima,
    magnitude,
    new_rows,
    partial_maxima,
    row_layout,
    rows_a_program,
    scale_of,
    vectors,
)

WIDEST_NORM_WITH_MAXIMA = 8192


@triton.jit
def rounded_to(value, dtype: tl.constexpr):
    """float32, rounded to what `dtype` holds. Triton multiplies bf16 as such nowhere here: its interpreter can't."""
    return value.to(dtype).to(tl.float32)


@triton.jit
def quantised(value):
    """A float32 row -> (float8 row, its scale)."""
    scale, inverse = scale_of(tl.max(magnitude(value), axis=0))
    return (value * inverse).to(tl.float8e4nv), scale


@triton.jit
def rms_norm_kernel(
    x, weight, data, scales, maxima, normed, rstds, rows, each, x_stride, eps,
    COLS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    MAXIMA: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    column = vectors(BLOCK, VECTOR)
    factor = tl.load(weight + column, mask=column < COLS, other=0.0).to(tl.float32)
    largest = tl.zeros((BLOCK,), tl.int32)
    for i in tl.range(0, each, num_stages=STAGES):
        row = (tl.program_id(0) * each + i).to(tl.int64)
        mask = (column < COLS) & (row < rows)
        value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(value * value, axis=0) / COLS + eps)
        result = rounded_to(value * rstd * factor, x.dtype.element_ty)
        rounded, scale = quantised(result)
        tl.store(data + row * COLS + column, rounded, mask=mask)
        tl.store(scales + row, scale, mask=row < rows)
        tl.store(rstds + row, rstd, mask=row < rows)
        if NORMED:
            tl.store(normed + row * COLS + column, result.to(x.dtype.element_ty), mask=mask)
        if MAXIMA:
            largest = tl.maximum(largest, magnitude(rounded.to(tl.float32) * scale))
    if MAXIMA:
        at = maxima + tl.program_id(0).to(tl.int64) * COLS + column
        tl.store(at, (largest >> 16).to(tl.int16), mask=column < COLS)


@triton.jit
def rms_norm_backward_kernel(
    dy, x, weight, rstds, residual, dx, dweights, rows, each, dy_stride, x_stride, residual_stride,
    COLS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    column = vectors(BLOCK, VECTOR)
    factor = tl.load(weight + column, mask=column < COLS, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(0, each, num_stages=STAGES):
        row = (tl.program_id(0) * each + i).to(tl.int64)
        mask = (column < COLS) & (row < rows)
        grad = tl.load(dy + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row, mask=row < rows, other=0.0)
        unit = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32) * rstd
        dweight += grad * unit
        grad *= factor
        along = tl.sum(grad * unit, axis=0) / COLS
        result = rounded_to((grad - unit * along) * rstd, dx.dtype.element_ty)
        if RESIDUAL:
            result += tl.load(residual + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + row * COLS + column, result.to(dx.dtype.element_ty), mask=mask)
    tl.store(dweights + tl.program_id(0).to(tl.int64) * COLS + column, dweight, mask=column < COLS)


@triton.jit
def swiglu_kernel(
    h1, h3, data, scales, maxima, rows, each, h1_stride, h3_stride,
    COLS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    column = vectors(BLOCK, VECTOR)
    largest = tl.zeros((BLOCK,), tl.int32)
    for i in tl.range(0, each, num_stages=STAGES):
        row = (tl.program_id(0) * each + i).to(tl.int64)
        mask = (column < COLS) & (row < rows)
        gate = tl.load(h1 + row * h1_stride + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(h3 + row * h3_stride + column, mask=mask, other=0.0).to(tl.float32)
        silu = rounded_to(gate / (1 + tl.exp(-gate)), h1.dtype.element_ty)
        rounded, scale = quantised(rounded_to(silu * up, h1.dtype.element_ty))
        tl.store(data + row * COLS + column, rounded, mask=mask)
        tl.store(scales + row, scale, mask=row < rows)
        if MAXIMA:
            largest = tl.maximum(largest, magnitude(rounded.to(tl.float32) * scale))
    if MAXIMA:
        at = maxima + tl.program_id(0).to(tl.int64) * COLS + column
        tl.store(at, (largest >> 16).to(tl.int16), mask=column < COLS)


@triton.jit
def swiglu_backward_kernel(
    dy, h1, h3, data, scales, rows, each, dy_stride, h1_stride, h3_stride,
    COLS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = vectors(BLOCK, VECTOR)
    dtype: tl.constexpr = dy.dtype.element_ty
    for i in tl.range(0, each, num_stages=STAGES):
        row = (tl.program_id(0) * each + i).to(tl.int64)
        mask = (column < COLS) & (row < rows)
        grad = tl.load(dy + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(h1 + row * h1_stride + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(h3 + row * h3_stride + column, mask=mask, other=0.0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-gate))
        dh3 = rounded_to(grad * rounded_to(gate * sigmoid, dtype), dtype)
        dsilu = rounded_to(grad * up, dtype)
        dh1 = rounded_to(dsilu * sigmoid * (1 + gate * (1 - sigmoid)), dtype)
        scale, inverse = scale_of(tl.max(tl.maximum(magnitude(dh1), magnitude(dh3)), axis=0))
        at = data + row * (2 * COLS) + column
        tl.store(at, (dh1 * inverse).to(tl.float8e4nv), mask=mask)
        tl.store(at + COLS, (dh3 * inverse).to(tl.float8e4nv), mask=mask)
        tl.store(scales + row, scale, mask=row < rows)


def rms_norm_rows(
    x: Tensor, weight: Tensor, eps: float, maxima: bool, normed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, weight = by_rows(x), weight.contiguous()
    rows, cols = x.shape
    each = rows_a_program(rows)
    data, scale = new_rows(x, cols)
    rstd = x.new_empty((rows,), dtype=torch.float32)
    result = x.new_empty((rows if normed else 0, cols))
    fused = maxima and cols <= WIDEST_NORM_WITH_MAXIMA
    partial = partial_maxima(x, torch.int16) if fused else None
    rms_norm_kernel[(triton.cdiv(rows, each),)](
        x, weight, data, scale, partial, result, rstd, rows, each, x.stride(0), eps,
        COLS=cols, MAXIMA=fused, NORMED=normed, **row_layout(cols, x.itemsize),
    )  # fmt: skip
    return data, scale, rstd, finished_maxima(data, scale, partial, maxima), result


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    dy, x, weight = by_rows(dy), by_rows(x), weight.contiguous()
    residual = None if residual is None else by_rows(residual)
    rows, cols = x.shape
    # Two programs a multiprocessor of 16384 tokens: their sums add a fiftieth to the traffic.
    each = min(64, max(4, rows // 256))
    dx = x.new_empty((rows, cols))
    sums = x.new_empty((triton.cdiv(rows, each), cols), dtype=torch.float32)
    rms_norm_backward_kernel[(len(sums),)](
        dy, x, weight, rstd, residual, dx, sums, rows, each, dy.stride(0), x.stride(0),
        0 if residual is None else residual.stride(0),
        COLS=cols, RESIDUAL=residual is not None, **row_layout(cols, x.itemsize),
    )  # fmt: skip
    return dx, sums.sum(dim=0)


def swiglu_rows(h1: Tensor, h3: Tensor, maxima: bool) -> tuple[Tensor, Tensor, Tensor]:
    h1, h3 = by_rows(h1), by_rows(h3)
    rows, cols = h1.shape
    each = rows_a_program(rows)
    data, scale = new_rows(h1, cols)
    fused = maxima and cols <= WIDEST_WITH_MAXIMA
    partial = partial_maxima(h1, torch.int16) if fused else None
    swiglu_kernel[(triton.cdiv(rows, each),)](
        h1, h3, data, scale, partial, rows, each, h1.stride(0), h3.stride(0),
        COLS=cols, MAXIMA=fused, **swiglu_layout(cols, h1.itemsize),
    )  # fmt: skip
    return data, scale, finished_maxima(data, scale, partial, maxima)


def swiglu_backward_rows(dy: Tensor, h1: Tensor, h3: Tensor, maxima: bool) -> tuple[Tensor, Tensor, Tensor]:
    dy, h1, h3 = by_rows(dy), by_rows(h1), by_rows(h3)
    rows, cols = dy.shape
    data, scale = new_rows(dy, 2 * cols)
    # One row a program: there are no maxima to keep over several, and other programs are at work while one waits.
    swiglu_backward_kernel[(rows,)](
        dy, h1, h3, data, scale, rows, 1, dy.stride(0), h1.stride(0), h3.stride(0),
        COLS=cols, **(swiglu_layout(cols, dy.itemsize) | {"STAGES": 1}),
    )  # fmt: skip
    return data, scale, finished_maxima(data, scale, None, maxima)


def swiglu_layout(cols: int, itemsize: int) -> dict[str, int]:
    """Of wide rows 64 values a thread in 128 registers: two programs at once on a multiprocessor, where their length
    lets them, hide each other's waiting. (docs/performance.md has the other layouts' times.)"""
    layout = row_layout(cols, itemsize)
    return layout | ({"num_warps": layout["BLOCK"] // 2048, "maxnreg": 128} if layout["BLOCK"] > 8192 else {})
