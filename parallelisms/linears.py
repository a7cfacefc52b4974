"""The matmuls of a block as explicit autograd functions: bf16 or row-wise float8, on one rank or tensor parallel.

A *column group* is the linears that share one input (wq, wk, wv; w1, w3; the output head): their rows are split over
the ranks, the input's tokens are gathered. A *row linear* (wo, w2) is the mirror image: its columns are split, its
output is summed and scattered. Between them the tokens are split, (tokens / tp, dim).

Row-wise float8 makes three matmuls of each, and each operand is scaled along the sum:

    out = x @ w.T      x by rows, w by rows              a row of x is quantised where it lives, then gathered as float8
    dx  = g @ w        g by rows, w by columns
    dw  = g.T @ x      g by columns, x by columns        both made from the float8 rows (float8/quantise.py)

With the recipe rowwise_with_gw_hp the last one is computed from the unquantised g and x instead.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from float8.quantise import columns_from_rows, quantise_columns, quantise_rows
from float8.scaled import Float8Rows, scaled_mm
from parallelisms import tp_ops


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
        return ColumnLinears.apply(x, self.column_recipe, self.group, self.fused, layer, *weights)

    def row(self, layer: str, x: Tensor, linear: nn.Linear) -> Tensor:
        """x: (tokens, in / tp) -> (tokens / tp, dim)."""
        weight = local_weight(linear)
        if self.row_recipe is None and not self.group:
            return F.linear(x, weight)
        return RowLinear.apply(x, self.row_recipe, self.group, self.fused, layer, weight)


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


class ColumnLinears(torch.autograd.Function):
    """x: (tokens / tp, dim), w_i: (out_i / tp, dim) -> gather(x) @ w_i.T, (tokens, out_i / tp) each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """rest: recipe, group, fused, layer, *weights. Not by their names: without gradients torch 2.13's compiler takes
        a forward that is given one argument more than it names for one without ctx, and *weights may be that one."""
        recipe, group, fused, layer, *weights = rest
        ctx.recipe, ctx.group, ctx.fused, ctx.layer = recipe, group, fused, layer
        if recipe is None:
            ctx.save_for_backward(x, *weights)
            return tuple(tp_ops.gather_matmul(x, [w.t() for w in weights], group, fused, layer, False))
        xq = quantise_rows(x)
        ctx.save_for_backward(*((xq.data, xq.scale) if recipe == "rowwise" else (x,)), *weights)
        outs, _ = gather_times(xq, [quantise_rows(w) for w in weights], x.dtype, group, fused, layer)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, fused, layer = ctx.group, ctx.fused, ctx.layer + " backward"
        # A sum of matmuls is one matmul over the columns side by side.
        g = torch.cat(grads, dim=1)
        if ctx.recipe == "rowwise":
            data, scale, *weights = ctx.saved_tensors
            gq = quantise_rows(g)
            dx = times_scatter(gq, quantise_columns(torch.cat(weights)), g.dtype, group, fused, layer)
            xq = Float8Rows(gather(data, g, group, layer), gather(scale, g, group, layer))
            dw = scaled_mm(columns_from_rows(gq), columns_from_rows(xq), g.dtype)
        else:
            x, *weights = ctx.saved_tensors
            if ctx.recipe is None:
                dx = tp_ops.matmul_scatter(g, torch.cat(weights), group, fused, layer)
            else:
                wq = quantise_columns(torch.cat(weights))
                dx = times_scatter(quantise_rows(g), wq, g.dtype, group, fused, layer)
            dw = g.t() @ gather(x, g, group, layer)
        return dx, None, None, None, None, *dw.split([w.shape[0] for w in weights])


class RowLinear(torch.autograd.Function):
    """x: (tokens, in / tp), w: (dim, in / tp) -> scatter(x @ w.T), (tokens / tp, dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recipe: str | None, group: str, fused: bool, layer: str, weight: Tensor) -> Tensor:
        ctx.recipe, ctx.group, ctx.fused, ctx.layer = recipe, group, fused, layer
        if recipe is None:
            ctx.save_for_backward(x, weight)
            return tp_ops.matmul_scatter(x, weight.t(), group, fused, layer)
        xq = quantise_rows(x)
        ctx.save_for_backward(*((xq.data, xq.scale) if recipe == "rowwise" else (x,)), weight)
        return times_scatter(xq, quantise_rows(weight), x.dtype, group, fused, layer)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        group, fused, layer = ctx.group, ctx.fused, ctx.layer + " backward"
        *saved, weight = ctx.saved_tensors
        if ctx.recipe is None:
            dx, g_full = tp_ops.gather_matmul(g, [weight], group, fused, layer, True)
            return dx, None, None, None, None, g_full.t() @ saved[0]
        # The gathered float8 gradient serves its own weight gradient too.
        keep = ctx.recipe == "rowwise"
        wq = quantise_columns(weight)
        (dx,), gq_full = gather_times(quantise_rows(g), [wq], g.dtype, group, fused, layer, keep)
        if keep:
            dw = scaled_mm(columns_from_rows(gq_full), columns_from_rows(Float8Rows(*saved)), g.dtype)
        else:
            dw = gather(g, g, group, layer).t() @ saved[0]
        return dx, None, None, None, None, dw


# The same on one rank (`group` is empty: nothing to gather or to scatter) and on several.


def gather(x: Tensor, g: Tensor, group: str, layer: str) -> Tensor:
    return tp_ops.gather(x, g, group, layer) if group else x


def gather_times(
    xq: Float8Rows, wqs: list[Float8Rows], dtype: torch.dtype, group: str, fused: bool, layer: str, keep: bool = False
) -> tuple[list[Tensor], Float8Rows]:
    """(gather(x) @ w_i.T for each, gather(x)); without `keep` x itself in the place of the latter."""
    if not group:
        return [scaled_mm(xq, wq, dtype) for wq in wqs], xq
    data, scales = [wq.data for wq in wqs], [wq.scale for wq in wqs]
    outs = tp_ops.gather_scaled_matmul(xq.data, xq.scale, data, scales, dtype, group, fused, layer, keep)
    return outs[: len(wqs)], Float8Rows(*outs[len(wqs) :]) if keep else xq


def times_scatter(xq: Float8Rows, wq: Float8Rows, dtype: torch.dtype, group: str, fused: bool, layer: str) -> Tensor:
    """scatter(x @ w.T)"""
    if not group:
        return scaled_mm(xq, wq, dtype)
    return tp_ops.scaled_matmul_scatter(xq.data, xq.scale, wq.data, wq.scale, dtype, group, fused, layer)
