"""Tensor parallelism on flattened tokens, for what is not a block's linear: embedding and norms.

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

from parallelisms import tp_ops
from parallelisms.linear_loss import rows_here
from parallelisms.linears import local_weight


def split_parameter(module: nn.Linear | nn.Embedding | nn.RMSNorm, mesh: DeviceMesh, placement: Placement) -> None:
    """Makes the module's weight a DTensor over `mesh`. The model is on the meta device: nothing is sent."""
    weight = distribute_tensor(module.weight.detach(), mesh, [placement], src_data_rank=None)
    module.weight = nn.Parameter(weight)


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
