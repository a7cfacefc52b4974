"""Norm and SwiGLU that give float8 rows at once, against the same block in steps: norm, quantise, multiply."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelisms.linears import Linears

TOKENS, DIM, HIDDEN = 64, 32, 48


class Part(nn.Module):
    """A norm and linears, their weights and the input in one dtype; all that has a gradient by name."""

    def __init__(self, dtype: torch.dtype, **sizes: tuple[int, int]):
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        nn.init.normal_(self.norm.weight, mean=1.0, std=0.2)
        for name, (out, into) in sizes.items():
            setattr(self, name, nn.Linear(into, out, bias=False))
        self.to(dtype)
        self.x = nn.Parameter((torch.randn(TOKENS, DIM) * torch.rand(TOKENS, 1)).to(dtype))

    def gradients(self, *outs: Tensor) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        self.zero_grad()
        torch.autograd.backward(outs, [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outs])
        return {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """The weights' gradients are made of the same float8 values; what goes through the norm is rounded otherwise."""
    assert found.keys() == expected.keys()
    for name in expected:
        if name.startswith("w"):
            assert torch.equal(found[name], expected[name]), name
        else:
            error = (found[name].double() - expected[name].double()).norm() / expected[name].double().norm()
            assert error < (1e-5 if dtype == torch.float32 else 2.0**-7), (name, error)


LINEARS = Linears(column_recipe="rowwise", row_recipe="rowwise", group="", fused=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_column_group(dtype: torch.dtype) -> None:
    part = Part(dtype, wq=(48, DIM), wk=(32, DIM), wv=(16, DIM))
    layers = (part.wq, part.wk, part.wv)
    outs = LINEARS.norm_column("wq wk wv", part.x, part.norm, *layers)
    expected = LINEARS.column("wq wk wv", part.norm(part.x), *layers)
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    compare(part.gradients(*outs), part.gradients(*expected), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_feed_forward(dtype: torch.dtype) -> None:
    part = Part(dtype, w1=(HIDDEN, DIM), w3=(HIDDEN, DIM), w2=(DIM, HIDDEN))
    out = LINEARS.feed_forward(part.x, part.norm, part.w1, part.w3, part.w2)
    gate, up = LINEARS.column("w1 w3", part.norm(part.x), part.w1, part.w3)
    expected = part.x + LINEARS.row("w2", F.silu(gate) * up, part.w2)
    assert torch.equal(out, expected)
    compare(part.gradients(out), part.gradients(expected), dtype)


def test_what_is_kept_of_the_norm_and_of_swiglu_is_float8() -> None:
    part = Part(torch.bfloat16, w1=(HIDDEN, DIM), w3=(HIDDEN, DIM), w2=(DIM, HIDDEN))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        LINEARS.feed_forward(part.x, part.norm, part.w1, part.w3, part.w2)
    of_tokens = sorted((t.shape[1], t.dtype.itemsize) for t in kept if t.dim() == 2 and t.shape[0] == TOKENS)
    # The input, its norm in float8, gate and up, their product in float8; and two columns of scales in float32.
    assert of_tokens == [(1, 4), (1, 4), (DIM, 1), (DIM, 2), (HIDDEN, 1), (HIDDEN, 2), (HIDDEN, 2)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    part = Part(torch.bfloat16, w1=(HIDDEN, DIM), w3=(HIDDEN, DIM), w2=(DIM, HIDDEN))
    with torch.no_grad():
        part.x[5, 3] = bad
    out = LINEARS.feed_forward(part.x, part.norm, part.w1, part.w3, part.w2)
    assert out[5].isnan().all() and out[[4, 6]].isfinite().all()
    assert all(grad.isnan().any() for grad in part.gradients(out).values())
