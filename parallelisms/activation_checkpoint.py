"""Activation checkpointing: keep less of the forward pass, and compute it again in the backward pass.

It wraps a block's forward function, not the block, so that the parameters keep their names.
"""

import functools
import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Both register torch.ops.rowhouse.
import float8.scaled  # noqa: F401
import parallelisms.tp_ops  # noqa: F401

aten = torch.ops.aten
ATTENTION_OPS = {
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
}
MATMUL_OPS = {aten.mm.default, aten._scaled_mm.default, torch.ops.rowhouse.scaled_mm.default}
MATMULS = 7  # Of a block, in this order: wq wk wv wo w1 w3 w2. Backward does not need what the last one gives.
# Tensor parallel matmuls come with a collective, and are told apart by the layer that they serve. Those kept save a
# collective in backward each.
TENSOR_PARALLEL_OPS = {
    torch.ops.rowhouse.gather_matmul.default,
    torch.ops.rowhouse.matmul_scatter.default,
    torch.ops.rowhouse.gather_scaled_matmul.default,
    torch.ops.rowhouse.scaled_matmul_scatter.default,
}
# The amax of a whole tensor (tensor-wise float8) is one number: dear to compute, free to keep.
SELECTED_OPS = ATTENTION_OPS | {aten.max.default}
OPTIONS = {  # selective_ac_option -> what is kept: matmuls of a block, counted from 1; tensor parallel ones; other ops
    "op": ({1, 3, 5}, {"wq wk wv", "wo"}, SELECTED_OPS),
    "matmuls": (set(range(1, MATMULS)), {"wq wk wv", "wo", "w1 w3"}, SELECTED_OPS),
}
NOTHING: tuple[set, set, set] = (set(), set(), set())


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """What the forward pass keeps for the backward pass."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "selective"
    """none keeps all; full a block's input; selective: see selective_ac_option; memory_budget: the compiler chooses."""
    selective_ac_option: str = "op"
    """"op" keeps attention and every second matmul of a block (tensor parallel: wq, wk, wv and wo); "matmuls" keeps
    attention and all matmuls, and computes norms, SwiGLU and float8 values again; a number n checkpoints every n-th
    block in full."""
    memory_budget: float = 0.5
    """With mode memory_budget: the share of activations that may be kept, 0 (as full) to 1 (as none). Needs compile."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        option = self.selective_ac_option
        if option not in OPTIONS and not (option.isdecimal() and int(option) > 0):
            text = f'"{option}" is neither "op" nor "matmuls" nor a positive number; give one of them'
            found.append(("selective_ac_option", text))
        if not 0 <= self.memory_budget <= 1:
            found.append(("memory_budget", f"{self.memory_budget} is not a share; give a number from 0 to 1"))
        return found


def selective_contexts(kept: tuple[set, set, set]) -> tuple[Any, Any]:
    """`kept`: one of OPTIONS. A matmul's output costs the more to compute again the longer its sum, and all but w2's
    are as long: none is better to keep than another, attention is before all.

    The forward pass and its recomputation count separately and meet the same operations in the same order.
    """
    matmuls: dict[bool, int] = defaultdict(int)
    kept_matmuls, kept_layers, kept_ops = kept

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in MATMUL_OPS:
            matmuls[ctx.is_recompute] += 1
            keep = matmuls[ctx.is_recompute] in kept_matmuls
        elif op in TENSOR_PARALLEL_OPS:
            keep = not kept_layers.isdisjoint(arg for arg in args if isinstance(arg, str))
        else:
            keep = op in kept_ops
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_activation_checkpointing(layers: nn.ModuleList, config: ActivationCheckpointConfig) -> int:
    """Wraps the forward of the blocks that the mode names. Returns how many."""
    # The compiler's own choice of what to keep is a setting of the process: 1 keeps all that it would keep.
    by_budget = config.mode == "memory_budget"
    torch._functorch.config.activation_memory_budget = config.memory_budget if by_budget else 1.0
    if by_budget or config.mode == "none":
        return len(layers) if by_budget else 0
    option = config.selective_ac_option if config.mode == "selective" else "1"
    kept, every = (OPTIONS[option], 1) if option in OPTIONS else (NOTHING, int(option))
    # A policy also where nothing is kept: without one, torch 2.11's compiler recomputes nothing inside of an
    # autograd.Function, and does not say so (docs/architecture.md). Nothing in a block is random, so no generator state
    # needs to be kept for the recomputation.
    context_fn = functools.partial(selective_contexts, kept)
    # torch tells every compiled run that operations in place would not do: there are none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": context_fn}
    chosen = [layer for i, layer in enumerate(layers) if i % every == 0]
    for layer in chosen:
        layer.forward = functools.partial(checkpoint, layer.forward, **options)
    return len(chosen)
