"""The references of RMSNorm and SwiGLU in float8 are what the model computes, quantised; their gradients autograd's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.quantise import quantise_rows
from float8.scaled import Float8Rows

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float32]


def equal(a: Float8Rows, b: Float8Rows) -> bool:
    return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)


def close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((got.double() - expected).norm() <= tolerance * expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_the_models(dtype: torch.dtype) -> None:
    norm = torch.nn.RMSNorm(96, eps=EPS, dtype=dtype)
    torch.nn.init.normal_(norm.weight)
    x = 3 * torch.randn(40, 96, dtype=dtype)
    rows, _, rstd, normed = kernels.rms_norm_rows(x, norm.weight.detach(), EPS, normed=True)
    assert torch.equal(normed, norm(x))
    assert equal(rows, quantise_rows(norm(x).detach()))
    assert close(rstd, (x.double().square().mean(dim=1) + EPS).rsqrt(), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_backward_is_autograds(dtype: torch.dtype) -> None:
    dy, residual = (torch.randn(40, 96, dtype=dtype) for _ in range(2))
    weight = torch.randn(96, dtype=dtype)
    x = 3 * torch.randn(40, 96, dtype=dtype)
    rstd = kernels.rms_norm_rows(x, weight, EPS)[2]
    exact = [t.double().requires_grad_() for t in (x, weight)]
    F.rms_norm(exact[0], (96,), exact[1], EPS).backward(dy.double())
    dx, dweight = kernels.rms_norm_backward(dy, x, weight, rstd)
    # A value is off by half of its last bit at most, half of that on average: 2**-9 / sqrt(3) in bf16.
    last_bit = 2**-9 if dtype == torch.bfloat16 else 1e-6
    assert close(dx, exact[0].grad, last_bit)
    assert close(dweight, exact[1].grad, 1e-6)
    assert dweight.dtype == torch.float32
    with_residual, _ = kernels.rms_norm_backward(dy, x, weight, rstd, residual)
    assert torch.equal(with_residual, dx + residual)
    assert close(with_residual, exact[0].grad + residual, 2 * last_bit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_is_the_models_and_its_gradient_autograds(dtype: torch.dtype) -> None:
    h1, h3 = (3 * torch.randn(40, 192, dtype=dtype)).split(96, dim=1)
    dy = torch.randn(40, 96, dtype=dtype)
    inputs = [h.clone().requires_grad_() for h in (h1, h3)]
    y = F.silu(inputs[0]) * inputs[1]
    y.backward(dy)
    assert equal(kernels.swiglu_rows(h1, h3)[0], quantise_rows(y.detach()))
    # Bit by bit: autograd rounds where the reference does.
    side_by_side = torch.cat([h.grad for h in inputs], dim=1)
    assert equal(kernels.swiglu_backward_rows(dy, h1, h3)[0], quantise_rows(side_by_side))
