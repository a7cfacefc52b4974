"""RMSNorm and SwiGLU to float8 rows, and back: the reference in plain PyTorch (float8/triton_fused.py has the kernels).

Both are computed as the model computes them, rounded to the dtype of their input where it does; then the result is
quantised as float8/quantise.py does it. A kernel sums and exponentiates in another order or way: its float32 values
differ in their last bits, so that now and then one of bf16 falls to its neighbour, and of those one in 16 to the
neighbouring float8 value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.quantise import quantise_rows
from float8.scaled import Float8Rows


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> tuple[Float8Rows, Tensor, Tensor]:
    """x: (rows, cols), weight: (cols,) -> (rows of RMSNorm(x) * weight, rstd, the same unquantised) (arXiv 1910.07467).

    rstd is 1 / sqrt(mean(x**2) + eps): float32 (rows,), which the backward pass wants.
    """
    normed = F.rms_norm(x, (x.shape[1],), weight, eps).to(x.dtype)
    rstd = torch.rsqrt(x.float().square().mean(dim=1) + eps)
    return quantise_rows(normed), rstd, normed


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy, x: (rows, cols) -> (dx, dweight): in x's dtype (rows, cols), float32 (cols,).

    `residual` is the gradient that came to x past the norm: it is added to dx, which is rounded before and after.
    """
    unit = x.float() * rstd[:, None]
    grad = dy.float() * weight.float()
    along = (grad * unit).mean(dim=1, keepdim=True)
    dx = ((grad - unit * along) * rstd[:, None]).to(x.dtype)
    return dx if residual is None else dx + residual, (dy.float() * unit).sum(dim=0)


def swiglu_rows(h1: Tensor, h3: Tensor) -> Float8Rows:
    """h1, h3: (rows, cols) -> rows of silu(h1) * h3 (arXiv 2002.05202)."""
    return quantise_rows(F.silu(h1) * h3)


def swiglu_backward_rows(dy: Tensor, h1: Tensor, h3: Tensor) -> Float8Rows:
    """All (rows, cols) -> rows of [dh1 | dh3], (rows, 2 * cols): what w1 and w3 side by side take back."""
    dh1 = torch.ops.aten.silu_backward(dy * h3, h1)
    return quantise_rows(torch.cat((dh1, dy * F.silu(h1)), dim=1))
