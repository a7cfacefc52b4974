"""Tensor parallelism on flattened tokens, for what is not a block's linear: embedding, norms, output head, loss.

Between the column groups and the row linears (parallelisms/linears.py) a rank holds its share of the tokens,
(tokens / tp, dim), rows in the order of the batch. Parameters are DTensors, so that FSDP2, clipping and checkpoints
see whole ones; what computes takes the local part.
"""

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from loss import IGNORE_INDEX
from parallelisms import tp_ops
from parallelisms.linears import local_weight


def split_parameter(module: nn.Linear | nn.Embedding | nn.RMSNorm, mesh: DeviceMesh, placement: Placement) -> None:
    """Makes the module's weight a DTensor over `mesh`. The model is on the meta device: nothing is sent."""
    weight = distribute_tensor(module.weight.detach(), mesh, [placement], src_data_rank=None)
    module.weight = nn.Parameter(weight)


def rows_here(ids: Tensor, rank: int, rows: int) -> tuple[Tensor, Tensor]:
    """Where the ids are among the rank's `rows` vocabulary rows (0 for another rank's), and which are: both as ids."""
    here = ids - rank * rows
    mine = (here >= 0) & (here < rows)
    return here.where(mine, 0), mine


class ScatterTokens(torch.autograd.Function):
    """(tokens, dim), each rank's summand -> (tokens / tp, dim) of the sum. Backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, layer: str) -> Tensor:
        ctx.group, ctx.layer = group, layer
        return tp_ops.scatter(x, group, layer)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return tp_ops.gather(g.contiguous(), g, ctx.group, ctx.layer + " backward"), None, None


def split_embedding(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Vocabulary rows over the ranks: ids (tokens,) -> (tokens / tp, dim)."""
    split_parameter(embedding, mesh, Shard(0))
    group, rank = mesh.get_group().group_name, mesh.get_local_rank()

    def forward(self: nn.Embedding, ids: Tensor) -> Tensor:
        weight = local_weight(self)
        here, mine = rows_here(ids, rank, weight.shape[0])
        rows = F.embedding(here, weight) * mine[:, None]
        return ScatterTokens.apply(rows, group, "tok_embeddings")

    embedding.forward = types.MethodType(forward, embedding)  # type: ignore[method-assign]


class SumGradient(torch.autograd.Function):
    """A weight that each rank uses on its own tokens: itself forward, its gradient summed over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: str) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        # In float32, as FSDP2 reduces: one rounding of the sum instead of one an addition.
        return tp_ops.all_reduce(g.float(), "sum", ctx.group, "norm backward").to(g.dtype), None


def split_norm_tokens(norm: Any, mesh: DeviceMesh) -> None:
    """Every rank has the whole weight and some of the tokens: (tokens / tp, dim) -> (tokens / tp, dim)."""
    split_parameter(norm, mesh, Replicate())
    norm.tp_group = mesh.get_group().group_name
    # One function for all norms, not a closure each: the compiled blocks share a graph.
    norm.forward = types.MethodType(norm_of_token_share, norm)


def norm_of_token_share(self: Any, x: Tensor) -> Tensor:
    weight = SumGradient.apply(local_weight(self), self.tp_group)
    return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """logits: (tokens, vocab / tp) of this rank; labels: int64 (tokens,) -> summed nats, the same on every rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rank: int, group: str) -> Tensor:
        x = logits.float()
        here, mine = rows_here(labels, rank, x.shape[1])
        maximum = tp_ops.all_reduce(x.amax(dim=1), "max", group, "loss")
        denominator = (x - maximum[:, None]).exp().sum(dim=1)
        target = x.gather(1, here[:, None])[:, 0] * mine
        denominator, target = tp_ops.all_reduce(torch.stack((denominator, target)), "sum", group, "loss").unbind()
        log_denominator = denominator.log() + maximum
        counts = labels != IGNORE_INDEX
        ctx.save_for_backward(logits, log_denominator, here, mine, counts)
        return ((log_denominator - target) * counts).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_denominator, here, mine, counts = ctx.saved_tensors
        probability = (logits.float() - log_denominator[:, None]).exp()
        columns = torch.arange(logits.shape[1], device=logits.device)
        is_target = (columns == here[:, None]) & mine[:, None]
        return ((probability - is_target.float()) * (counts * g)[:, None]).to(logits.dtype), None, None, None


def vocab_parallel_cross_entropy_sum(mesh: DeviceMesh) -> Any:
    """loss.cross_entropy_sum for logits whose vocabulary is split over the mesh."""
    group, rank = mesh.get_group().group_name, mesh.get_local_rank()

    def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
        return VocabParallelCrossEntropy.apply(logits, labels, rank, group)

    return cross_entropy_sum
