"""One shard of data parallelism: weights in the compute precision, and gradients as they come, without FSDP2.

FSDP2 also works on one shard, but gathers into and reduces out of buffers of its own there: copies of every weight and
gradient, and hooks that take the host longer than a block of Llama 3 8B takes an H200 (docs/performance.md). Here a
unit (a block, the embedding, the final norm, the head) casts its weights before it is entered, or quantises them, and
lets go of them afterwards: what its backward pass needs, autograd keeps until then. Parameters stay what the optimizer
and checkpoints see: float32, of a tensor parallel mesh DTensors.

A gradient that nothing is added to stays in the compute precision, in which it was made: float32 would hold the same
values in twice the memory. Those of several micro-batches are added up in float32; the blocks then take their weights
for the first one, and the others use them too.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelisms.float8_gather import Float8Gather
from parallelisms.linears import local_weight


class TakenWeight(torch.autograd.Function):
    """A weight in `dtype`, or, where it is multiplied by in float8, what gives its gradient a place and a shape and has
    no values. The gradient goes to the parameter in `grad_dtype`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, grad_dtype: torch.dtype, in_float8: bool) -> Tensor:
        ctx.grad_dtype = grad_dtype
        return weight.new_empty((), dtype=dtype).expand(weight.shape) if in_float8 else weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return g.to(ctx.grad_dtype), None, None, None


def cast_weights(
    model: Any,
    dtype: torch.dtype,
    gathers: list[Float8Gather],
    *,
    is_compiled: bool,
    micro_batches: int,
    grad_dtype: torch.dtype,
) -> None:
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
        is_block = unit in set(model.layers)
        # Of tied weights the head uses those that the embedding took.
        stays = is_tied if unit is model.tok_embeddings else not is_compiled and is_block
        # Autograd keeps a block's weights to the end of the forward pass; to keep them further takes no more memory.
        uses = micro_batches if is_block else 1
        unit.forward = taking(unit.forward, modules, own, uses, stays, dtype, grad_dtype)


def norm_forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, self.normalized_shape, local_weight(self), self.eps)


def embedding_forward(self: nn.Embedding, ids: Tensor) -> Tensor:
    return F.embedding(ids, local_weight(self))


def taking(
    forward: Callable[..., Tensor], modules: list[Any], gathers: list[Float8Gather], uses: int, stays: bool,
    dtype: torch.dtype, grad_dtype: torch.dtype,
) -> Callable[..., Tensor]:  # fmt: skip
    """`forward` with weights that are taken anew after so many uses in training, and for each one without gradients."""
    in_float8 = {linear for gather in gathers for linear in gather.linears}
    used = 0

    def take_and_forward(*args: Any) -> Tensor:
        nonlocal used
        if used == 0:
            for gather in gathers:
                gather.quantise(dtype)
            for module in modules:
                take(module, dtype, grad_dtype, module in in_float8)
        result = forward(*args)
        used = (used + 1) % uses if torch.is_grad_enabled() else 0
        if used == 0 and not stays:
            for gather in gathers:
                del gather.linears[0].gathered
            for module in modules:
                del module.__dict__["taken_weight"]
        return result

    return take_and_forward


def take(module: Any, dtype: torch.dtype, grad_dtype: torch.dtype, in_float8: bool) -> None:
    module.__dict__.pop("taken_weight", None)
    module.weight.grad_dtype = grad_dtype
    # Not by setattr: that takes tensors of a parameter for parameters.
    module.__dict__["taken_weight"] = TakenWeight.apply(local_weight(module), dtype, grad_dtype, in_float8)
