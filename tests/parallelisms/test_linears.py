"""Row-wise float8 linears on one rank: outputs and gradients at the float8 floor of their operands."""

import pytest
import torch
from torch import nn

from parallelisms.linears import Linears

# Rounding to e4m3 leaves a relative error of 0.0263 (tests/float8/test_quantise.py). Two operands with independent
# errors make a product off by sqrt(2) times that; 1.2 covers the scatter of the measured norms.
FLOOR = 0.0263 * 2**0.5
ALLOWED = 1.2 * FLOOR


def linears_of(recipe: str | None) -> Linears:
    return Linears(column_recipe=recipe, row_recipe=recipe, group="", fused=False)


def linear(out: int, into: int) -> nn.Linear:
    module = nn.Linear(into, out, bias=False)
    nn.init.normal_(module.weight)
    return module


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_column_group(recipe: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(96, 64, requires_grad=True)
    modules = [linear(n, 64) for n in (48, 32, 16)]
    weights = [module.weight for module in modules]
    outs = linears_of(recipe).column("wq wk wv", x, *modules)
    grads = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, grads)
    for out, w in zip(outs, weights, strict=True):
        assert 0.5 * FLOOR < error(out, x @ w.t()) < ALLOWED
    assert 0.5 * FLOOR < error(x.grad, sum(g @ w for g, w in zip(grads, weights, strict=True))) < ALLOWED
    for g, w in zip(grads, weights, strict=True):
        exact = error(w.grad, g.t() @ x)
        assert exact < (ALLOWED if recipe == "rowwise" else 1e-6)
        assert recipe != "rowwise" or exact > 0.5 * FLOOR  # It was float8 indeed.


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_row_linear(recipe: str) -> None:
    torch.manual_seed(1)
    x, module = torch.randn(96, 64, requires_grad=True), linear(48, 64)
    out, w = linears_of(recipe).row("wo", x, module), module.weight
    g = torch.randn_like(out)
    out.backward(g)
    assert 0.5 * FLOOR < error(out, x @ w.t()) < ALLOWED
    assert 0.5 * FLOOR < error(x.grad, g @ w) < ALLOWED
    assert error(w.grad, g.t() @ x) < (ALLOWED if recipe == "rowwise" else 1e-6)


def test_saved_activations_are_float8() -> None:
    x, module = torch.randn(96, 64, requires_grad=True), linear(48, 64)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linears_of("rowwise").row("wo", x, module)
        linears_of("rowwise").column("w1 w3", x, module, module)
    activations = [t for t in kept if t.shape[0] == 96]
    assert {t.dtype for t in activations} == {torch.float8_e4m3fn, torch.float32}
    assert all(t.shape == (96, 1) for t in activations if t.dtype == torch.float32)


def test_without_a_recipe_or_a_group_it_is_the_plain_linear() -> None:
    x, module, plain = torch.randn(4, 8), linear(16, 8), linears_of(None)
    assert torch.equal(plain.row("wo", x, module), module(x))
    assert torch.equal(plain.column("wq", x, module)[0], module(x))


@pytest.mark.parametrize("recipe", ["rowwise", None])
def test_compiled_without_gradients(recipe: str | None) -> None:
    """As validation runs them."""
    linears = linears_of(recipe)
    x, modules = torch.randn(32, 16), [nn.Linear(16, 16 * n, bias=False) for n in (1, 2, 3)]
    for count in (1, 2, 3):

        def column(x: torch.Tensor, count: int = count) -> tuple[torch.Tensor, ...]:
            return linears.column("a b c", linears.row("d", x, modules[0]), *modules[:count])

        expected = column(x)
        with torch.no_grad():
            found = torch.compile(column, backend="eager", fullgraph=True)(x)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
