"""A float8 matrix with one scale a row, and the contract that keeps the two together (docs/scale-shapes.md).

Row i stands for `scale[i] * data[i]`. The shapes are fixed where a matrix is made and checked again where a matmul or
a collective takes it: data (rows, cols), scale (rows, 1), both contiguous. There is no reshape, so a scale can't part
from its rows, which is how torchtitan issue 864 came about: A (1, 8192, 2048) met a scale that was (8192, 1) already.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from errors import UserError

FLOAT8 = torch.float8_e4m3fn  # 4 exponent and 3 mantissa bits, finite up to 448 (arXiv 2209.05433)
ALIGNMENT = 16  # torch._scaled_mm wants the sizes of both operands to be multiples of it.


class ScaleShapeError(UserError):
    """A float8 matrix and its scales do not fit together, or not into the matmul that they were given to."""


@dataclass(frozen=True)
class Float8Rows:
    """data: float8 (rows, cols); scale: float32 (rows, 1), powers of two. Only the quantisers make one.

    Raises ScaleShapeError where the shapes, dtypes or layouts are others.
    """

    data: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        check_rows(self.data, self.scale, "a float8 matrix")


def check_rows(data: Tensor, scale: Tensor, where: str) -> None:
    """Raises ScaleShapeError, naming `where`, unless data is (rows, cols) and scale (rows, 1), both contiguous."""
    if data.dim() != 2 or scale.shape != (data.shape[0], 1):
        raise ScaleShapeError(
            f"{where}: data {tuple(data.shape)} with scale {tuple(scale.shape)}; it takes data (rows, columns) with "
            "scale (rows, 1): flatten the batch to tokens before it is quantised (docs/scale-shapes.md)"
        )
    if data.dtype != FLOAT8 or scale.dtype != torch.float32:
        raise ScaleShapeError(f"{where}: data is {data.dtype} and scale {scale.dtype}; they are {FLOAT8} and float32")
    if not (data.is_contiguous() and scale.is_contiguous()):
        raise ScaleShapeError(
            f"{where}: data {tuple(data.shape)} has strides {data.stride()}, scale {tuple(scale.shape)} has "
            f"{scale.stride()}; both are contiguous: quantise the matrix itself, not a view of one that was"
        )


def fast_accumulation(on: bool | None = None) -> bool:
    """Whether float8 matmuls of this process accumulate fast, which is less exact (docs/performance.md); sets it too.

    Of the process, like torch's own such switches: compiled code reads it when it runs.
    """
    global _fast_accumulation
    _fast_accumulation = _fast_accumulation if on is None else on
    return _fast_accumulation


_fast_accumulation = True


@torch.library.custom_op("rowhouse::scaled_mm", mutates_args=())
def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a, a_scale: float8 rows (M, K); b, b_scale: float8 rows (N, K) -> a @ b.T, (M, N).

    An op of its own, because the compiler keeps the strides of what a custom op takes. With torch._scaled_mm in the
    compiled graph gradients were five times too small on CUDA, without a warning (torch 2.11), and right with this op:
    the compiler seems free to lay out a transposed operand as it likes there, "contiguous" or not.
    """
    check_rows(a, a_scale, "the left side of a float8 matmul")
    check_rows(b, b_scale, "the right side of a float8 matmul")
    # CUDA's row-wise kernel writes bfloat16 only.
    dtype = torch.bfloat16 if a.is_cuda else out_dtype
    fast = fast_accumulation()
    out = torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=dtype, use_fast_accum=fast)
    return out.to(out_dtype)


@multiply.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def scaled_mm(a: Float8Rows, b: Float8Rows, out_dtype: torch.dtype) -> Tensor:
    """a @ b.T: (a.rows, b.rows) in `out_dtype`, accumulated in float32. Both are scaled along the sum."""
    if a.data.shape[1] != b.data.shape[1]:
        raise ScaleShapeError(
            f"a float8 matmul over {a.data.shape[1]} columns on the left, {b.data.shape[1]} on the right"
        )
    return multiply(a.data, a.scale, b.data, b.scale, out_dtype)
