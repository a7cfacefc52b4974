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

from typing import Any

import torch
from torch import Tensor

from float8.kernels import columns_from_rows, quantise_rows
from float8.scaled import Float8Rows, scaled_mm
from parallelisms import tp_ops


class ColumnLinears(torch.autograd.Function):
    """x: (tokens / tp, dim), w_i: (out_i / tp, dim) -> gather(x) @ w_i.T, (tokens, out_i / tp) each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """rest: recipe, group, fused, layer, the four of `quantised_weights` (None without a recipe), *weights.

        Not by their names: without gradients torch 2.13's compiler takes a forward that is given one argument more than
        it names for one without ctx, and *weights may be that one.
        """
        recipe, group, fused, layer, w_data, w_scale, w_columns, w_column_scale, *weights = rest
        ctx.recipe, ctx.group, ctx.fused, ctx.layer = recipe, group, fused, layer
        ctx.outs = [w.shape[0] for w in weights]
        if recipe is None:
            ctx.save_for_backward(x, *weights)
            return tuple(tp_ops.gather_matmul(x, [w.t() for w in weights], group, fused, layer, False))
        keep = recipe == "rowwise"
        xq, maxima = quantise_rows(x, maxima=keep and not group)
        ctx.save_for_backward(*((xq.data, xq.scale, maxima) if keep else (x,)), w_columns, w_column_scale)
        outs, _ = gather_times(xq, split_rows(w_data, w_scale, ctx.outs), x.dtype, group, fused, layer)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, fused, layer = ctx.group, ctx.fused, ctx.layer + " backward"
        # A sum of matmuls is one matmul over the columns side by side.
        g = torch.cat(grads, dim=1)
        if ctx.recipe == "rowwise":
            data, scale, maxima, *w_columns = ctx.saved_tensors
            gq, g_maxima = quantise_rows(g, maxima=True)
            how = (g.dtype, group, fused, layer)
            dx, dw = column_gradients(gq, g_maxima, Float8Rows(data, scale), maxima, Float8Rows(*w_columns), *how)
        else:
            x, *saved = ctx.saved_tensors
            if ctx.recipe is None:
                dx = tp_ops.matmul_scatter(g, torch.cat(saved), group, fused, layer)
            else:
                dx = times_scatter(quantise_rows(g)[0], Float8Rows(*saved), g.dtype, group, fused, layer)
            dw = g.t() @ gather(x, g, group, layer)
        return dx, *(None,) * 8, *dw.split(ctx.outs)


class RowLinear(torch.autograd.Function):
    """x: (tokens, in / tp), w: (dim, in / tp) -> scatter(x @ w.T), (tokens / tp, dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        recipe: str | None,
        group: str,
        fused: bool,
        layer: str,
        w_data: Tensor | None,
        w_scale: Tensor | None,
        w_columns: Tensor | None,
        w_column_scale: Tensor | None,
        weight: Tensor,
    ) -> Tensor:
        """w_...: the four of `quantised_weights`; None without a recipe."""
        ctx.recipe, ctx.group, ctx.fused, ctx.layer = recipe, group, fused, layer
        if recipe is None:
            ctx.save_for_backward(x, weight)
            return tp_ops.matmul_scatter(x, weight.t(), group, fused, layer)
        keep = recipe == "rowwise"
        xq, maxima = quantise_rows(x, maxima=keep)
        ctx.save_for_backward(*((xq.data, xq.scale, maxima) if keep else (x,)), w_columns, w_column_scale)
        assert w_data is not None and w_scale is not None
        return times_scatter(xq, Float8Rows(w_data, w_scale), x.dtype, group, fused, layer)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        group, fused, layer = ctx.group, ctx.fused, ctx.layer + " backward"
        if ctx.recipe is None:
            x, weight = ctx.saved_tensors
            dx, g_full = tp_ops.gather_matmul(g, [weight], group, fused, layer, True)
            return dx, *(None,) * 8, g_full.t() @ x
        # The gathered float8 gradient serves its own weight gradient too.
        *saved, w_columns, w_column_scale = ctx.saved_tensors
        keep = ctx.recipe == "rowwise"
        gq, g_maxima = quantise_rows(g, maxima=keep and not group)
        how = (g.dtype, group, fused, layer)
        (dx,), gq_full = gather_times(gq, [Float8Rows(w_columns, w_column_scale)], *how, keep)
        if keep:
            data, scale, maxima = saved
            xq = columns_from_rows(Float8Rows(data, scale), maxima)
            dw = scaled_mm(columns_from_rows(gq_full, g_maxima), xq, g.dtype)
        else:
            dw = gather(g, g, group, layer).t() @ saved[0]
        return dx, *(None,) * 8, dw


def column_gradients(
    gq: Float8Rows, g_maxima: Tensor, xq: Float8Rows, x_maxima: Tensor, w_columns: Float8Rows, dtype: torch.dtype,
    group: str, fused: bool, layer: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of a column group: (gradient of the input (tokens / tp, dim), that of the weights side by side (out / tp, dim)).

    gq: (tokens, out / tp); xq: (tokens / tp, dim), whose maxima are known where there is nothing to gather;
    w_columns: the weights side by side, (dim, out / tp).
    """
    dx = times_scatter(gq, w_columns, dtype, group, fused, layer)
    xq = Float8Rows(gather(xq.data, gq.data, group, layer), gather(xq.scale, gq.data, group, layer))
    return dx, scaled_mm(columns_from_rows(gq, g_maxima), columns_from_rows(xq, x_maxima), dtype)


def split_rows(data: Tensor, scale: Tensor, outs: list[int]) -> list[Float8Rows]:
    """Weights one below the other -> each, (out_i, in)."""
    return [Float8Rows(*rows) for rows in zip(data.split(outs), scale.split(outs), strict=True)]


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
