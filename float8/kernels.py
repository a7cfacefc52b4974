"""The float8 work around the matmuls, on matrices with their scales: Triton kernels on CUDA, plain PyTorch elsewhere.

What each computes is said by its reference, in float8/quantise.py and float8/fused.py; each is an op (float8/ops.py).

A matrix that is quantised by rows is often wanted by columns later: as the operand of a weight's gradient. It would be
read twice for that, for the columns' maxima and for the values. *Column maxima* save the first: bf16 (n, cols), whose
maximum over dim 0 is the largest magnitude of each column of the dequantised rows, which bf16 holds exactly. The
quantisers give n = 1, or n = 0 where `maxima` is false: not known. Maxima of parts of the rows, gathered along dim 0,
are those of the gathered rows.

On CUDA the references serve rows of more than 32768 columns too, and what the kernels can't turn over: float32, and
widths that are no multiple of 16. The kernels turn over multiples of 16 rows, as the matmuls want; else a
ScaleShapeError. Matrices whose rows aren't contiguous are copied first; rows may lie apart.
"""

from torch import Tensor

from float8 import ops
from float8.scaled import Float8Rows


def quantise_rows(x: Tensor, maxima: bool = False) -> tuple[Float8Rows, Tensor]:
    """x: bf16 or float32 (rows, cols) -> (its rows, column maxima)."""
    data, scale, found = ops.quantise_rows(x, maxima)
    return Float8Rows(data, scale), found


def columns_from_rows(rows: Float8Rows, maxima: Tensor) -> Float8Rows:
    """Rows (rows, cols) and their column maxima -> the transpose, (cols, rows)."""
    return Float8Rows(*ops.columns_from_rows(rows.data, rows.scale, maxima))


def quantise_parts(parts: list[Tensor], maxima: bool = False) -> tuple[Float8Rows, Tensor]:
    """parts: (rows, cols_i) each -> `quantise_rows` of them side by side, (rows, sum of cols_i)."""
    data, scale, found = ops.quantise_parts(parts, maxima)
    return Float8Rows(data, scale), found


def quantise_rows_into(x: Tensor, out: Float8Rows) -> Tensor:
    """As quantise_rows(x, maxima=True), written over `out`: the maxima. For eager code: no op of a graph."""
    if x.is_cuda and ops.has_kernel("quantise_rows", x):
        return ops.launcher("quantise_rows")(x, True, (out.data, out.scale))[2]
    rows, maxima = quantise_rows(x, maxima=True)
    copy(rows, out)
    return maxima


def columns_from_rows_into(rows: Float8Rows, maxima: Tensor, out: Float8Rows) -> None:
    """As columns_from_rows, written over `out`. For eager code: no op of a graph."""
    if rows.data.is_cuda and ops.has_kernel("columns_from_rows", rows.data):
        ops.launcher("columns_from_rows")(rows.data, rows.scale, maxima, (out.data, out.scale))
    else:
        copy(columns_from_rows(rows, maxima), out)


def copy(rows: Float8Rows, out: Float8Rows) -> None:
    out.data.copy_(rows.data)
    out.scale.copy_(rows.scale)


def quantise_columns(x: Tensor) -> Float8Rows:
    """x: bf16 or float32 (rows, cols) -> its transpose, (cols, rows)."""
    return Float8Rows(*ops.quantise_columns(x))


def quantise_weights(weights: list[Tensor]) -> tuple[Float8Rows, Float8Rows]:
    """Weights that share an input: bf16 or float32 (out_i, in) each -> ((sum of out_i, in), (in, sum of out_i)).

    The first is for the output, the second for the gradient of the input. The first out_0 rows are the first weight's.
    """
    data, scale, columns, column_scale = ops.quantise_weights(weights)
    return Float8Rows(data, scale), Float8Rows(columns, column_scale)


def rms_norm_rows(
    x: Tensor, weight: Tensor, eps: float, maxima: bool = False, normed: bool = False
) -> tuple[Float8Rows, Tensor, Tensor, Tensor]:
    """x: (rows, cols), weight: (cols,) -> (rows of RMSNorm(x) * weight, column maxima, rstd, the norm unquantised).

    rstd: float32 (rows,), for `rms_norm_backward`. The last is in x's dtype, and (0, cols) without `normed`.
    """
    data, scale, rstd, found, result = ops.rms_norm_rows(x, weight, eps, maxima, normed)
    return Float8Rows(data, scale), found, rstd, result


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy, x, residual: (rows, cols) -> (dx + residual in x's dtype, dweight in float32 (cols,)). Deterministic."""
    return ops.rms_norm_backward(dy, x, weight, rstd, residual)


def swiglu_rows(h1: Tensor, h3: Tensor, maxima: bool = False) -> tuple[Float8Rows, Tensor]:
    """h1, h3: (rows, cols) -> (rows of silu(h1) * h3, column maxima)."""
    data, scale, found = ops.swiglu_rows(h1, h3, maxima)
    return Float8Rows(data, scale), found


def swiglu_backward_rows(dy: Tensor, h1: Tensor, h3: Tensor, maxima: bool = False) -> tuple[Float8Rows, Tensor]:
    """All (rows, cols) -> (rows of [dh1 | dh3], (rows, 2 * cols), column maxima)."""
    data, scale, found = ops.swiglu_backward_rows(dy, h1, h3, maxima)
    return Float8Rows(data, scale), found
