"""Head and loss in chunks, on one rank and with the vocabulary split over two, against the definition in float64."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loss import IGNORE_INDEX
from parallelisms import linear_loss
from parallelisms.linear_loss import HeadLoss, loss_and_gradient, rows_of_chunk, scaled
from scripts.local_ranks import launch

TOKENS, VOCAB, DIM = 48, 64, 16


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, labels, count."""
    x, weight = 3 * torch.randn(TOKENS, DIM), torch.randn(VOCAB, DIM)
    labels = torch.randint(VOCAB, (TOKENS,))
    labels[::5] = IGNORE_INDEX
    return x.to(dtype), weight.to(dtype), labels, torch.tensor(31.0)


def oracle(x: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient of x, gradient of weight) in float64."""
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(x @ weight.t(), labels, reduction="sum", ignore_index=IGNORE_INDEX) / count.double()
    loss.backward()
    return loss.detach(), x.grad, weight.grad


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in [out] if isinstance(t, Tensor))])
        return out


@pytest.mark.parametrize("elements", [8 * VOCAB, 2**29, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients(dtype: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", elements)
    x, weight, labels, count = problem(dtype)
    x.requires_grad_()
    weight.requires_grad_()
    with Largest() as largest:
        loss = HeadLoss(loss_and_gradient, scaled).of_linear(x, weight, labels, count)
        (7 * loss).backward()
    exact, dx, dw = oracle(x, weight, labels, count)
    # bf16: the logits are rounded, their gradient, the products and the scaled products: half a step of 2**-8 each.
    allowed = 2e-6 if dtype == torch.float32 else 4 * 2**-8
    assert loss.dtype == torch.float32 and abs(loss.item() / exact.item() - 1) < allowed
    assert error(x.grad, 7 * dx) < allowed
    assert error(weight.grad, 7 * dw) < allowed
    if elements < 2**29:
        assert largest.elements < TOKENS * VOCAB  # No tensor of all the logits was made.


def test_logits_that_are_there() -> None:
    x, weight, labels, count = problem()
    logits = (x @ weight.t()).requires_grad_()
    loss = HeadLoss(loss_and_gradient, scaled).of_logits(logits, labels, count)
    (3 * loss).backward()
    exact, dx, _ = oracle(x, weight, labels, count)
    assert abs(loss.item() / exact.item() - 1) < 1e-6
    assert error(logits.grad @ weight, 3 * dx) < 2e-6


def test_without_gradients_none_are_computed() -> None:
    x, weight, labels, count = problem()
    weight.requires_grad_()
    calls = []

    def chunk_loss(*args: Any) -> tuple[Tensor, Tensor]:
        loss, gradient = loss_and_gradient(*args)
        calls.append(gradient)
        return loss, None  # type: ignore[return-value]  # Who used it would fail.

    with torch.no_grad():
        loss = HeadLoss(chunk_loss, scaled).of_linear(x, weight, labels, count)
    assert len(calls) == 1 and abs(loss.item() / oracle(x, weight, labels, count)[0].item() - 1) < 1e-6


def test_no_chunk_outlives_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", 8 * VOCAB)
    x, weight, labels, count = problem()
    before: list[weakref.ref[Tensor]] = []

    def chunk_loss(*args: Any) -> tuple[Tensor, Tensor]:
        assert not [gradient for gradient in before if gradient() is not None]
        loss, gradient = loss_and_gradient(*args)
        before.append(weakref.ref(gradient))
        return loss, gradient

    HeadLoss(chunk_loss, scaled).of_linear(x.requires_grad_(), weight.requires_grad_(), labels, count).backward()
    assert len(before) == TOKENS // 8


def test_ignored_labels_count_for_nothing() -> None:
    x, weight, labels, count = problem()
    x.requires_grad_()
    loss = HeadLoss(loss_and_gradient, scaled).of_linear(x, weight, torch.full_like(labels, IGNORE_INDEX), count)
    loss.backward()
    assert loss.item() == 0 and not x.grad.any()


def test_nan_is_not_hidden() -> None:
    x, weight, labels, count = problem()
    x[7, 3] = torch.nan
    x.requires_grad_()
    loss = HeadLoss(loss_and_gradient, scaled).of_linear(x, weight, labels, count)
    loss.backward()
    assert loss.isnan() and x.grad[7].isnan().all()


@pytest.mark.parametrize(
    ("tokens", "vocab", "rows"),
    [(16384, 128256, 4096), (8192, 128256, 4096), (1000, 2048, 1000), (40960, 128256, 4096), (7, 2**30, 1)],
)
def test_chunks_are_alike_and_as_large_as_may_be(tokens: int, vocab: int, rows: int) -> None:
    assert rows_of_chunk(tokens, vocab) == rows


def split_vocabulary() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    half_rows, half_words = slice(rank * 24, rank * 24 + 24), slice(rank * 32, rank * 32 + 32)
    for elements in (8 * 32, 2**29):
        linear_loss.CHUNK_ELEMENTS = elements
        torch.manual_seed(1)
        x, weight, labels, count = problem()
        exact, dx, dw = oracle(x, weight, labels, count)
        mine, words = x[half_rows].clone().requires_grad_(), weight[half_words].clone().requires_grad_()
        loss = HeadLoss(loss_and_gradient, scaled, rank, group).of_linear(mine, words, labels, count)
        loss.backward()
        assert abs(loss.item() / exact.item() - 1) < 1e-6
        assert error(mine.grad, dx[half_rows]) < 2e-6
        assert error(words.grad, dw[half_words]) < 2e-6
        logits = (x @ weight[half_words].t()).requires_grad_()
        of_logits = HeadLoss(loss_and_gradient, scaled, rank, group).of_logits(logits, labels, count)
        of_logits.backward()
        assert abs(of_logits.item() / exact.item() - 1) < 1e-6
        assert error(logits.grad.t() @ x, dw[half_words]) < 2e-6


def test_a_split_vocabulary() -> None:
    launch(split_vocabulary, 2)
