"""How a block multiplies: Linears takes the place of the model's plain ones.

It chooses between parallelisms/matmuls.py (bf16, or float8 from and to bf16; tensor parallel) and
parallelisms/rowwise.py (norm and SwiGLU give float8 as well).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from float8.kernels import quantise_weights
from parallelisms.matmuls import ColumnLinears, RowLinear
from parallelisms.rowwise import FeedForward, NormColumnLinears


@dataclass(frozen=True)
class Linears:
    """How the blocks of a model multiply. Takes the place of models.llama.model.PlainLinears."""

    column_recipe: str | None
    row_recipe: str | None
    """None (the compute precision), "rowwise" or "rowwise_with_gw_hp"."""
    group: str
    """Name of the tensor parallel process group; empty on one rank."""
    fused: bool
    """Collectives run inside their matmuls (async TP)."""

    def column(self, layer: str, x: Tensor, *linears: nn.Linear | nn.Embedding) -> tuple[Tensor, ...]:
        """x: (tokens / tp, dim) -> one (tokens, out / tp) each."""
        weights = [local_weight(linear) for linear in linears]
        if self.column_recipe is None and not self.group:
            return tuple(F.linear(x, weight) for weight in weights)
        quantised = (None,) * 4 if self.column_recipe is None else quantised_weights(linears, weights)
        return ColumnLinears.apply(x, self.column_recipe, self.group, self.fused, layer, *quantised, *weights)

    def norm_column(self, layer: str, x: Tensor, norm: nn.RMSNorm, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """`column` of norm(x); in the recipe rowwise the norm gives float8 rows at once."""
        if self.column_recipe != "rowwise":
            return self.column(layer, norm(x), *linears)
        weights = [local_weight(linear) for linear in linears]
        quantised = quantised_weights(linears, weights)
        how = (norm.eps, self.group, self.fused, layer)
        return NormColumnLinears.apply(x, local_weight(norm), *how, *quantised, *weights)

    def row(self, layer: str, x: Tensor, linear: nn.Linear) -> Tensor:
        """x: (tokens, in / tp) -> (tokens / tp, dim)."""
        weight = local_weight(linear)
        if self.row_recipe is None and not self.group:
            return F.linear(x, weight)
        quantised = (None,) * 4 if self.row_recipe is None else quantised_weights([linear], [weight])
        return RowLinear.apply(x, self.row_recipe, self.group, self.fused, layer, *quantised, weight)

    def feed_forward(self, x: Tensor, norm: nn.RMSNorm, w1: nn.Linear, w3: nn.Linear, w2: nn.Linear) -> Tensor:
        """x + SwiGLU(norm(x)): (tokens / tp, dim) -> (tokens / tp, dim)."""
        if self.column_recipe == self.row_recipe == "rowwise":
            weights = [local_weight(w) for w in (w1, w3, w2)]
            quantised = (*quantised_weights((w1, w3), weights[:2]), *quantised_weights((w2,), weights[2:]))
            how = (norm.eps, self.group, self.fused)
            return FeedForward.apply(x, local_weight(norm), *how, *quantised, *weights)
        gate, up = self.column("w1 w3", norm(x), w1, w3)
        return x + self.row("w2", F.silu(gate) * up, w2)


def quantised_weights(linears: Sequence[Any], weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of linears that share an input: float8 rows (sum of out_i, in) and scale, columns (in, sum of out_i) and scale.

    As FSDP2 gathered them (parallelisms/float8_gather.py), or else made here of weights that it gathered.
    """
    if hasattr(linears[0], "gathered"):
        return linears[0].gathered
    rows, columns = quantise_weights([weight.detach() for weight in weights])
    return rows.data, rows.scale, columns.data, columns.scale


def local_weight(module: Any) -> Tensor:
    """This rank's part of the module's weight; inside a block, the one that `take_local_weights` took before."""
    if hasattr(module, "taken_weight"):
        return module.taken_weight
    return module.weight.to_local() if isinstance(module.weight, DTensor) else module.weight


def take_local_weights(block: nn.Module) -> None:
    """Takes the local part of the block's DTensors before its forward is entered, so that a compiled forward sees none.

    With DTensors among the inputs of a compiled graph that is recomputed in full, torch 2.13 fails on a CPU: a
    DeviceMesh is found among the saved tensors. And without them the graph is entered faster.
    """
    split: list[Any] = [m for m in block.modules() if isinstance(getattr(m, "weight", None), DTensor)]
    inner = block.forward

    def forward(*args: Any) -> Any:
        for module in split:
            # Not by setattr: that takes tensors of a parameter for parameters.
            module.__dict__["taken_weight"] = module.weight.to_local()
        return inner(*args)

    block.forward = forward
