"""The output head and the loss in one, a chunk of tokens at a time: the logits of all tokens never exist.

The logits of 16,384 tokens and 128,256 words take 3.9 GiB in bf16, and their gradient as much. But the loss is the last
thing that the forward pass computes and the first that the backward pass needs, so a chunk can be carried through at
once, to its part of the gradients of input and weight (as in Liger Kernel, arXiv 2410.10989). What backward then has
left to do is to multiply them by the gradient that arrives, which is 1 in training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from loss import IGNORE_INDEX
from parallelisms import tp_ops

CHUNK_ELEMENTS = (
    2**29
)  # Logits of one chunk: 1 GiB in bf16. Smaller matmuls would be slower, larger ones are no faster.

ChunkLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor, int, str], tuple[Tensor, Tensor]]


def rows_here(ids: Tensor, rank: int, rows: int) -> tuple[Tensor, Tensor]:
    """Where the ids are among the rank's `rows` vocabulary rows (0 for another rank's), and which are: both as ids."""
    here = ids - rank * rows
    mine = (here >= 0) & (here < rows)
    return here.where(mine, 0), mine


def loss_and_gradient(logits: Tensor, labels: Tensor, count: Tensor, rank: int, group: str) -> tuple[Tensor, Tensor]:
    """(summed nats / count, its gradient). logits: (tokens, vocab) or, of a tensor parallel `group`, this rank's part.

    The loss is float32 and the same on all ranks of the group; the gradient has the logits' shape and dtype.
    labels: int64 (tokens,); count: float32 scalar.
    """
    x = logits.float()
    here, mine = rows_here(labels, rank, x.shape[1])
    maximum = x.amax(dim=1)
    if group:
        maximum = tp_ops.all_reduce(maximum, "max", group, "loss")
    denominator = (x - maximum[:, None]).exp().sum(dim=1)
    target = x.gather(1, here[:, None])[:, 0] * mine
    if group:
        denominator, target = tp_ops.all_reduce(torch.stack((denominator, target)), "sum", group, "loss").unbind()
    log_denominator = denominator.log() + maximum
    scale = (labels != IGNORE_INDEX) / count
    loss = ((log_denominator - target) * scale).sum()
    columns = torch.arange(x.shape[1], device=x.device)
    is_target = (columns == here[:, None]) & mine[:, None]
    gradient = ((x - log_denominator[:, None]).exp() - is_target.float()) * scale[:, None]
    return loss, gradient.to(logits.dtype)


def rows_of_chunk(tokens: int, vocab: int) -> int:
    """The most tokens whose logits stay below CHUNK_ELEMENTS, all chunks alike: one compilation serves them."""
    fewest = -(-tokens * vocab // CHUNK_ELEMENTS)
    return next((tokens // n for n in range(max(fewest, 1), tokens) if tokens % n == 0), 1)


def plus_product(dw: Tensor | None, gradient: Tensor, x: Tensor) -> Tensor:
    """dw + gradient.T @ x in float32, over dw: in bf16 each further chunk would be rounded away in part.

    gradient: (tokens, vocab), x: (tokens, dim), dw: float32 (vocab, dim). On CUDA the matmul adds them up itself.
    """
    if x.is_cuda and x.dtype != torch.float32:
        if dw is None:
            return torch.mm(gradient.t(), x, out_dtype=torch.float32)
        return torch.addmm(dw, gradient.t(), x, out_dtype=torch.float32, out=dw)
    product = gradient.t() @ x
    return product.float() if dw is None else dw.add_(product)


def scaled(gradient: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * g, g a scalar. Compiled it is one pass, in eager a product, slow with a scalar tensor, and a cast."""
    return (gradient * g).to(dtype)


@dataclass(frozen=True)
class HeadLoss:
    """The loss of an output head, whose vocabulary may be split over the ranks of a tensor parallel `group`."""

    chunk_loss: ChunkLoss
    """loss_and_gradient, compiled or not."""
    scaled: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    """The function of that name, compiled or not."""
    rank: int = 0
    group: str = ""

    def of_linear(self, x: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        """Loss of the logits x @ weight.T, made in chunks. x: (tokens / tp, dim); weight: (vocab / tp, dim)."""
        return LossOfLinear.apply(x, weight, labels, count, self, torch.is_grad_enabled())

    def of_logits(self, logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        """Loss of logits that are there. logits: (tokens, vocab / tp)."""
        return LossOfLogits.apply(logits, labels, count, self)


class LossOfLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, count: Tensor, head: HeadLoss, needs_gradient: bool
    ) -> Tensor:
        ctx.head, ctx.dtype = head, weight.dtype
        if head.group:
            x = tp_ops.gather(x, x, head.group, "output")
        rows = rows_of_chunk(x.shape[0], weight.shape[0])
        losses, dx, dw = [], [], None
        for x_chunk, label_chunk in zip(x.split(rows), labels.split(rows), strict=True):
            loss, gradient = head.chunk_loss(x_chunk @ weight.t(), label_chunk, count, head.rank, head.group)
            losses.append(loss)
            if needs_gradient:
                dx.append(gradient @ weight)
                dw = gradient.t() @ x_chunk if rows == x.shape[0] else plus_product(dw, gradient, x_chunk)
            del gradient  # As large as the logits, it would still be there while the next chunk's is made.
        if needs_gradient:
            assert dw is not None
            ctx.save_for_backward(torch.cat(dx), dw)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        dx, dw = ctx.head.scaled(dx, g, dx.dtype), ctx.head.scaled(dw, g, ctx.dtype)
        if ctx.head.group:
            dx = tp_ops.scatter(dx, ctx.head.group, "output backward")
        return dx, dw, None, None, None, None


class LossOfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, count: Tensor, head: HeadLoss) -> Tensor:
        ctx.head = head
        loss, gradient = head.chunk_loss(logits, labels, count, head.rank, head.group)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return ctx.head.scaled(gradient, g, gradient.dtype), None, None, None
