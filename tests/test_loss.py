"""The loss: exact to float32's rounding, blind to ignored labels, and additive over any split of the batch."""

import torch

from loss import IGNORE_INDEX, cross_entropy_sum, valid_tokens

TOKENS, VOCAB = 96, 500


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, labels), a third of the labels ignored."""
    torch.manual_seed(0)
    logits, labels = 4 * torch.randn(TOKENS, VOCAB), torch.randint(VOCAB, (TOKENS,))
    labels[::3] = IGNORE_INDEX
    return logits.to(dtype), labels


def oracle(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient of the logits) in float64 from the definition."""
    logits = logits.double()
    counts = labels != IGNORE_INDEX
    at_label = logits.gather(1, labels.where(counts, 0)[:, None])[:, 0]
    loss = (torch.logsumexp(logits, dim=1) - at_label)[counts].sum()
    gradient = torch.softmax(logits, dim=1)
    gradient[torch.arange(TOKENS), labels.where(counts, 0)] -= 1
    return loss, gradient * counts[:, None]


def test_the_loss_and_its_gradient() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits, labels = batch(dtype)
        logits.requires_grad_()
        loss = cross_entropy_sum(logits, labels)
        loss.backward()
        exact_loss, exact_gradient = oracle(logits.detach(), labels)
        assert loss.dtype == torch.float32
        # The logits of bf16 are exact in float32, so the loss has float32's error; the gradient is rounded to bf16.
        assert abs(loss.double() - exact_loss) < 1e-6 * exact_loss
        error = (logits.grad.double() - exact_gradient).norm() / exact_gradient.norm()
        assert error < (1e-6 if dtype == torch.float32 else 2.0**-8)


def test_ignored_labels_count_for_nothing() -> None:
    logits, labels = batch()
    logits.requires_grad_()
    cross_entropy_sum(logits, labels).backward()
    ignored = labels == IGNORE_INDEX
    assert not logits.grad[ignored].any() and logits.grad[~ignored].any(dim=1).all()
    kept = cross_entropy_sum(logits.detach()[~ignored], labels[~ignored])
    assert torch.allclose(cross_entropy_sum(logits.detach(), labels), kept, rtol=1e-6)


def test_a_batch_without_a_valid_label_is_zero() -> None:
    logits, labels = torch.randn(4, VOCAB, requires_grad=True), torch.full((4,), IGNORE_INDEX)
    loss = cross_entropy_sum(logits, labels)
    loss.backward()
    assert loss == 0 and valid_tokens(labels) == 0 and not logits.grad.any()


def test_any_split_adds_up_to_the_whole() -> None:
    logits, labels = batch()
    whole = cross_entropy_sum(logits, labels)
    for sizes in ([48, 48], [1, 95], [10, 20, 30, 36]):
        parts = [cross_entropy_sum(x, y) for x, y in zip(logits.split(sizes), labels.split(sizes), strict=True)]
        assert torch.allclose(torch.stack(parts).sum(), whole, rtol=1e-6), sizes
        counts = [valid_tokens(y) for y in labels.split(sizes)]
        assert torch.stack(counts).sum() == valid_tokens(labels)


def test_valid_tokens_are_counted_in_float32() -> None:
    _, labels = batch()
    count = valid_tokens(labels.view(4, 24))
    assert count == TOKENS - TOKENS // 3 and count.dtype == torch.float32 and count.shape == ()
