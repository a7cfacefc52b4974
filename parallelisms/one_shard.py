"""One shard of data parallelism: weights in the compute precision, and gradients in float32, without FSDP2.

FSDP2 also works on one shard, but gathers into and reduces out of buffers of its own there: copies of every weight and
gradient, and hooks that take the host longer than a block of Llama 3 8B takes an H200 (docs/performance.md). Here a
unit (a block, the embedding, the final norm, the head) casts its weights before it is entered, or quantises them, and
lets go of them afterwards: what its backward pass needs, autograd keeps until then. Parameters stay what the optimizer
and checkpoints see: float32, of a tensor parallel mesh DTensors.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelisms.float8_gather import Float8Gather
from parallelisms.linears import local_weight


class StandIn(torch.autograd.Function):
    """A weight that is multiplied by in float8: gives its gradient a place and a shape, and has no values."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_empty((), dtype=dtype).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g.to(ctx.dtype), None


def cast_weights(model: Any, dtype: torch.dtype, gathers: list[Float8Gather], is_compiled: bool) -> None:
    """Has every unit of a Llama take its weights in `dtype`, or quantised by one of `gathers`, when it is called.

    The blocks multiply by Linears already. Where they are not compiled, a checkpoint calls them again in backward: they
    keep their weights until the next forward pass.
    """
    for norm in (*(norm for block in model.layers for norm in (block.attention_norm, block.ffn_norm)), model.norm):
        if "forward" not in norm.__dict__:  # Else it has tensor parallelism's.
            norm.forward = types.MethodType(norm_forward, norm)
    if "forward" not in model.tok_embeddings.__dict__:
        model.tok_embeddings.forward = types.MethodType(embedding_forward, model.tok_embeddings)
    is_tied = model.output is None
    units = [model.tok_embeddings, *model.layers, model.norm, *([] if is_tied else [model.output])]
    for unit in units:
        modules = [module for module in unit.modules() if getattr(module, "weight", None) is not None]
        own = [gather for gather in gathers if gather.linears[0] in modules]
        # Of tied weights the head uses those that the embedding took.
        stays = is_tied if unit is model.tok_embeddings else not is_compiled and unit in set(model.layers)
        unit.forward = taking(unit.forward, modules, own, dtype, stays)


def norm_forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, self.normalized_shape, local_weight(self), self.eps)


def embedding_forward(self: nn.Embedding, ids: Tensor) -> Tensor:
    return F.embedding(ids, local_weight(self))


def taking(
    forward: Callable[..., Tensor], modules: list[Any], gathers: list[Float8Gather], dtype: torch.dtype, stays: bool
) -> Callable[..., Tensor]:
    in_float8 = {linear for gather in gathers for linear in gather.linears}

    def take_and_forward(*args: Any) -> Tensor:
        for gather in gathers:
            gather.quantise(dtype)
        take(modules, in_float8, dtype)
        result = forward(*args)
        if not stays:
            for gather in gathers:
                del gather.linears[0].gathered
            for module in modules:
                del module.__dict__["taken_weight"]
        return result

    return take_and_forward


def take(modules: list[Any], in_float8: set[Any], dtype: torch.dtype) -> None:
    for module in modules:
        module.__dict__.pop("taken_weight", None)
        weight = local_weight(module)
        # Not by setattr: that takes tensors of a parameter for parameters.
        module.__dict__["taken_weight"] = StandIn.apply(weight, dtype) if module in in_float8 else weight.to(dtype)
