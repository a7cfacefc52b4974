"""Quantising in Triton: what float8/kernels.py runs on CUDA (compute capability 8.9 and later).

Everything here moves bytes, so everything here is read once and written once:

    rows      A program takes some rows, one after the other; the next one is fetched while this one is worked on. A row
              stays in registers between its maximum and its rounding. The columns' maxima are kept on the way.
    maxima    The programs' maxima become one row of maxima.
    columns   A program takes a tile of 128 x 128 values, re-scales it, and turns it over in shared memory.

Maxima are taken of the bits of absolute values, as integers: they order floats rightly, NaN above infinity, so that
what is not finite can't get lost. Float minima and maxima that propagate NaN would do it too, but they are what makes
Triton write garbage in transposed stores of single bytes (triton issue 11111). Such stores are avoided besides: four
rows' values are put into one word, and words are transposed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.scaled import ALIGNMENT, FLOAT8, ScaleShapeError

INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
SMALLEST_AMAX_BITS: tl.constexpr = tl.constexpr((127 - 80) << 23)  # float8.quantise.SMALLEST_AMAX
NO_MAXIMA: tl.constexpr = tl.constexpr(0)
OF_QUANTISED: tl.constexpr = tl.constexpr(1)
OF_INPUT: tl.constexpr = tl.constexpr(2)
WIDEST_WITH_MAXIMA = 16384


@triton.jit
def magnitude(x):
    """The bits of |x|, as int32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits):
    """float8.quantise.row_scale of a maximum given as bits, and the scale's inverse. NaN gives inf and 0, as inf does:
    of the largest NaN, which is CUDA's own, the sum below would overflow.
    """
    rounded = (tl.minimum(tl.maximum(bits, SMALLEST_AMAX_BITS), INFINITY) + 0x1FFFFF) & INFINITY
    scale = rounded.to(tl.float32, bitcast=True) * 0.00390625  # 2**-8
    # 2**(e - 8 - 127) has the inverse 2**(254 - (e - 8) - 127).
    inverse = tl.where(rounded == INFINITY, 0, (0x7F000000 - rounded) + 0x04000000)
    return scale, inverse.to(tl.float32, bitcast=True)


@triton.jit
def vectors(BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """0 ... BLOCK - 1, with `VECTOR` neighbours a thread: 16 bytes of what is loaded."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), VECTOR), VECTOR)


@triton.jit
def quantise_rows_kernel(
    x, data, scales, maxima, rows, each, x_stride,
    COLS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    MAXIMA: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    column = vectors(BLOCK, VECTOR)
    largest = tl.zeros((BLOCK,), tl.int32)
    for i in tl.range(0, each, num_stages=STAGES):
        row = (tl.program_id(0) * each + i).to(tl.int64)
        mask = (column < COLS) & (row < rows)
        value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        scale, inverse = scale_of(tl.max(magnitude(value), axis=0))
        rounded = (value * inverse).to(tl.float8e4nv)
        tl.store(data + row * COLS + column, rounded, mask=mask)
        tl.store(scales + row, scale, mask=row < rows)
        if MAXIMA == OF_QUANTISED:
            largest = tl.maximum(largest, magnitude(rounded.to(tl.float32) * scale))
        if MAXIMA == OF_INPUT:
            largest = tl.maximum(largest, magnitude(value))
    if MAXIMA != NO_MAXIMA:
        at = maxima + tl.program_id(0).to(tl.int64) * COLS + column
        tl.store(at, (largest >> SHIFT).to(maxima.dtype.element_ty), mask=column < COLS)


@triton.jit
def quantise_parts_kernel(
    x0, x1, x2, data, scales, maxima, rows, each, stride0, stride1, stride2,
    END0: tl.constexpr, END1: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    STAGES: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """quantise_rows_kernel of [x0 | x1 | x2], which end before the columns END0, END1 and COLS."""
    column = vectors(BLOCK, VECTOR)
    largest = tl.zeros((BLOCK,), tl.int32)
    for i in tl.range(0, each, num_stages=STAGES):
        row = (tl.program_id(0) * each + i).to(tl.int64)
        there = row < rows
        # Where two of them are 0, the sum is the third.
        value = tl.load(x0 + row * stride0 + column, mask=there & (column < END0), other=0.0).to(tl.float32)
        mask = there & (column >= END0) & (column < END1)
        value += tl.load(x1 + row * stride1 + (column - END0), mask=mask, other=0.0).to(tl.float32)
        mask = there & (column >= END1) & (column < COLS)
        value += tl.load(x2 + row * stride2 + (column - END1), mask=mask, other=0.0).to(tl.float32)
        scale, inverse = scale_of(tl.max(magnitude(value), axis=0))
        rounded = (value * inverse).to(tl.float8e4nv)
        tl.store(data + row * COLS + column, rounded, mask=there & (column < COLS))
        tl.store(scales + row, scale, mask=there)
        if MAXIMA:
            largest = tl.maximum(largest, magnitude(rounded.to(tl.float32) * scale))
    if MAXIMA:
        at = maxima + tl.program_id(0).to(tl.int64) * COLS + column
        tl.store(at, (largest >> 16).to(tl.int16), mask=column < COLS)


@triton.jit
def column_maxima_kernel(
    x, scales, maxima, rows, cols, x_stride,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
    SCALED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLS + vectors(COLS, VECTOR)
    largest = tl.zeros((ROWS, COLS), tl.int32)
    for tile in tl.range(0, TILES, num_stages=3):
        row = ((tl.program_id(1) * TILES + tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < cols)[None, :]
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            value *= tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        largest = tl.maximum(largest, magnitude(value))
    at = maxima + tl.program_id(1).to(tl.int64) * cols + column
    tl.store(at, (tl.max(largest, axis=0) >> SHIFT).to(maxima.dtype.element_ty), mask=column < cols)


@triton.jit
def reduce_maxima_kernel(partial, maxima, parts, cols, PARTS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr):
    column = tl.program_id(0) * COLS + vectors(COLS, VECTOR)
    largest = tl.zeros((PARTS, COLS), partial.dtype.element_ty)
    for start in tl.range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & (column < cols)[None, :]
        at = partial + part.to(tl.int64)[:, None] * cols + column[None, :]
        largest = tl.maximum(largest, tl.load(at, mask=mask, other=0))
    tl.store(maxima + column, tl.max(largest, axis=0).to(maxima.dtype.element_ty), mask=column < cols)


@triton.jit
def columns_kernel(
    x, scales, maxima, out, out_scales, rows, cols, parts, x_stride, out_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr, SCALED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLS + vectors(COLS, VECTOR)
    largest = tl.zeros((COLS,), tl.int32)
    for part in range(parts):
        at = maxima + part * cols + column
        largest = tl.maximum(largest, tl.load(at, mask=column < cols, other=0).to(tl.int32))
    scale, inverse = scale_of(largest << SHIFT)
    if tl.program_id(1) == 0:
        tl.store(out_scales + column, scale, mask=column < cols)
    # A word holds the values of four neighbouring rows.
    word = tl.program_id(1) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    mask = (word < rows // 4)[:, None] & (column < cols)[None, :]
    words = tl.zeros((ROWS // 4, COLS), tl.int32)
    for byte in tl.static_range(4):
        row = word.to(tl.int64) * 4 + byte
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            # Not by scale / scale: the quotient can overflow where the value is zero.
            value *= tl.load(scales + row, mask=word < rows // 4, other=0.0)[:, None]
        rounded = (value * inverse[None, :]).to(tl.float8e4nv)
        words |= rounded.to(tl.uint8, bitcast=True).to(tl.int32) << (8 * byte)
    # The stride is counted in 16 bytes, which tells the compiler that its stores of 16 bytes are aligned.
    at = out + column.to(tl.int64)[:, None] * (out_stride * 4) + word[None, :]
    tl.store(at, tl.trans(words), mask=(column < cols)[:, None] & (word < rows // 4)[None, :])


def quantise_rows(x: Tensor, maxima: bool, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    x = by_rows(x)
    data, scale = out or new_rows(x, x.shape[1])
    partial = partial_maxima(x, torch.int16) if maxima and x.shape[1] <= WIDEST_WITH_MAXIMA else None
    write_rows(x, data, scale, partial, NO_MAXIMA if partial is None else OF_QUANTISED)
    return data, scale, finished_maxima(data, scale, partial, maxima)


def quantise_parts(parts: list[Tensor], maxima: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, widths = parts[0].shape[0], [part.shape[1] for part in parts]
    cols = sum(widths)
    if len(parts) != 3 or cols > WIDEST_WITH_MAXIMA:  # The kernel is made for queries, keys and values.
        return quantise_rows(torch.cat(parts, dim=1), maxima)
    x0, x1, x2 = (by_rows(part) for part in parts)
    data, scale = new_rows(x0, cols)
    each = rows_a_program(rows)
    partial = x0.new_empty((triton.cdiv(rows, each), cols), dtype=torch.int16) if maxima else None
    quantise_parts_kernel[(triton.cdiv(rows, each),)](
        x0, x1, x2, data, scale, partial, rows, each, x0.stride(0), x1.stride(0), x2.stride(0),
        END0=widths[0], END1=widths[0] + widths[1], COLS=cols, MAXIMA=maxima, **row_layout(cols, x0.itemsize),
    )  # fmt: skip
    return data, scale, finished_maxima(data, scale, partial, maxima)


def columns_from_rows(
    data: Tensor, scale: Tensor, maxima: Tensor, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    if not len(maxima):
        maxima = quantised_maxima(data, scale)
    columns, column_scale = out or new_columns(data, *data.shape)
    write_columns(data, scale, maxima.contiguous().view(torch.int16), columns, column_scale)
    return columns, column_scale


def quantise_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    x = by_rows(x)
    out, out_scale = new_columns(x, *x.shape)
    partial = x.new_empty((triton.cdiv(len(x), COLUMN_MAXIMA_ROWS), x.shape[1]), dtype=bits_dtype([x]))
    write_column_maxima(x, None, partial)
    write_columns(x, None, reduce_maxima(partial), out, out_scale)
    return out, out_scale


def quantise_weights(weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights = [by_rows(weight) for weight in weights]
    sizes, cols, first = [len(weight) for weight in weights], weights[0].shape[1], weights[0]
    if any(size % ALIGNMENT for size in sizes):
        raise ScaleShapeError(f"weights of {sizes} rows; side by side each has to have a multiple of {ALIGNMENT}")
    data = first.new_empty((sum(sizes), cols), dtype=FLOAT8)
    scale = first.new_empty((sum(sizes), 1), dtype=torch.float32)
    out, out_scale = new_columns(first, sum(sizes), cols)
    partials = [triton.cdiv(size, rows_a_program(size)) for size in sizes]
    partial = first.new_empty((sum(partials), cols), dtype=bits_dtype(weights))
    for parts in zip(weights, data.split(sizes), scale.split(sizes), partial.split(partials), strict=True):
        write_rows(*parts, OF_INPUT)
    maxima = reduce_maxima(partial)
    for weight, columns in zip(weights, out.split(sizes, dim=1), strict=True):
        write_columns(weight, None, maxima, columns, out_scale)
    return data, scale, out, out_scale


def quantised_maxima(data: Tensor, scale: Tensor) -> Tensor:
    """bf16 (1, cols), from the float8 rows themselves."""
    partial = data.new_empty((triton.cdiv(len(data), COLUMN_MAXIMA_ROWS), data.shape[1]), dtype=torch.int16)
    write_column_maxima(data, scale, partial)
    return reduce_maxima(partial).view(torch.bfloat16)


# The launches. Tiles are chosen so that a multiprocessor has 30 KB and more of loads under way.


def rows_a_program(rows: int) -> int:
    """16, so that maxima add a twelfth to the traffic; fewer where that would leave multiprocessors without work."""
    return min(16, max(4, rows // 512))


def row_layout(cols: int, itemsize: int) -> dict[str, int]:
    """Up to 8192 columns a thread has 16 values, then up to 64. Two rows are on their way where they are narrow."""
    block = triton.next_power_of_2(cols)
    return {
        "BLOCK": block,
        "VECTOR": min(block, 16 // itemsize),
        "STAGES": 3 if block * itemsize <= 2**14 else 2,
        "num_warps": min(16, max(1, block // 512)),
    }


def write_rows(x: Tensor, data: Tensor, scale: Tensor, partial: Tensor | None, maxima: tl.constexpr) -> None:
    rows, cols = x.shape
    each = rows_a_program(rows)
    quantise_rows_kernel[(triton.cdiv(rows, each),)](
        x, data, scale, partial, rows, each, x.stride(0),
        COLS=cols, MAXIMA=maxima, SHIFT=shift(partial), **row_layout(cols, x.itemsize),
    )  # fmt: skip


COLUMN_MAXIMA_ROWS = 32 * 16


def write_column_maxima(x: Tensor, scale: Tensor | None, partial: Tensor) -> None:
    rows, cols = x.shape
    column_maxima_kernel[(triton.cdiv(cols, 128), len(partial))](
        x, scale, partial, rows, cols, x.stride(0),
        TILES=16, ROWS=32, COLS=128, VECTOR=16 // x.itemsize, SCALED=scale is not None, SHIFT=shift(partial),
        num_warps=4,
    )  # fmt: skip


def reduce_maxima(partial: Tensor) -> Tensor:
    """(parts, cols) -> (1, cols), bits as before."""
    parts, cols = partial.shape
    maxima = partial.new_empty((1, cols))
    vector = 16 // partial.itemsize
    reduce_maxima_kernel[(triton.cdiv(cols, 32),)](
        partial, maxima, parts, cols, PARTS=256, COLS=32, VECTOR=vector, num_warps=8
    )
    return maxima


def write_columns(x: Tensor, scale: Tensor | None, maxima: Tensor, out: Tensor, out_scale: Tensor) -> None:
    """out: (cols, rows), whose rows may be parts of longer ones; maxima: bits, (parts, cols)."""
    rows, cols = x.shape
    columns_kernel[(triton.cdiv(cols, 128), triton.cdiv(rows, 128))](
        x, scale, maxima, out.view(torch.int32), out_scale, rows, cols, len(maxima), x.stride(0), out.stride(0) // 16,
        ROWS=128, COLS=128, VECTOR=16 // x.itemsize, SCALED=scale is not None, SHIFT=shift(maxima),
        num_warps=4,
    )  # fmt: skip


def by_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def new_rows(like: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    return like.new_empty((len(like), cols), dtype=FLOAT8), like.new_empty((len(like), 1), dtype=torch.float32)


def finished_maxima(data: Tensor, scale: Tensor, partial: Tensor | None, wanted: bool) -> Tensor:
    """bf16 (1, cols), or (0, cols) where they are not wanted."""
    if not wanted:
        return data.new_empty((0, data.shape[1]), dtype=torch.bfloat16)
    return quantised_maxima(data, scale) if partial is None else reduce_maxima(partial).view(torch.bfloat16)


def new_columns(like: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    if rows % ALIGNMENT:
        raise ScaleShapeError(
            f"({rows}, {cols}) by columns: the kernels and matmuls take multiples of {ALIGNMENT} rows"
        )
    return like.new_empty((cols, rows), dtype=FLOAT8), like.new_empty((cols, 1), dtype=torch.float32)


def partial_maxima(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((triton.cdiv(len(x), rows_a_program(len(x))), x.shape[1]), dtype=dtype)


def bits_dtype(inputs: list[Tensor]) -> torch.dtype:
    """Maxima of bf16 values, as those of quantised ones, have no bits below the upper 16."""
    return torch.int16 if all(x.dtype == torch.bfloat16 for x in inputs) else torch.int32


def shift(maxima: Tensor | None) -> int:
    return 0 if maxima is None or maxima.dtype == torch.int32 else 16
