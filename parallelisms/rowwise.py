"""Row-wise float8 with what surrounds the matmuls in it: RMSNorm and SwiGLU give float8 rows at once.

Between the matmuls of a block lie a norm or SwiGLU, and then the quantisation of what they give. As operations of their
own these read and write the activations in bf16 several times, close to a third of a row-wise block's time
(docs/performance.md). Here each is one pass (float8/kernels.py): their results exist as float8 only, and SwiGLU's
backward pass makes the gradient of w1 and w3 side by side, quantised. The matmuls, their operands' scales and the
tensor parallel collectives are those of parallelisms/matmuls.py.
"""

from typing import Any

import torch
from torch import Tensor

from float8.kernels import (
    columns_from_rows,
    quantise_parts,
    quantise_rows,
    rms_norm_backward,
    rms_norm_rows,
    swiglu_backward_rows,
    swiglu_rows,
)
from float8.scaled import Float8Rows, scaled_mm
from parallelisms import tp_ops
from parallelisms.matmuls import column_gradients, gather_times, split_rows, times_scatter


class NormColumnLinears(torch.autograd.Function):
    """x: (tokens / tp, dim), w_i: (out_i / tp, dim) -> gather(norm(x)) @ w_i.T, (tokens, out_i / tp) each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """rest: norm weight (dim,), eps, group, fused, layer, the four of `quantised_weights`, *weights; see
        ColumnLinears.forward for why."""
        norm_weight, eps, group, fused, layer, w_data, w_scale, w_columns, w_column_scale, *weights = rest
        ctx.group, ctx.fused, ctx.layer, ctx.outs = group, fused, layer, [w.shape[0] for w in weights]
        xq, maxima, rstd, _ = rms_norm_rows(x, norm_weight, eps, maxima=not group)
        ctx.save_for_backward(x, norm_weight, rstd, xq.data, xq.scale, maxima, w_columns, w_column_scale)
        outs, _ = gather_times(xq, split_rows(w_data, w_scale, ctx.outs), x.dtype, group, fused, layer)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, rstd, data, scale, maxima, *w_columns = ctx.saved_tensors
        gq, g_maxima = quantise_parts(list(grads), maxima=True)
        how = (x.dtype, ctx.group, ctx.fused, ctx.layer + " backward")
        dnormed, dw = column_gradients(gq, g_maxima, Float8Rows(data, scale), maxima, Float8Rows(*w_columns), *how)
        dx, dnorm = norm_gradients(dnormed, x, norm_weight, rstd, None, ctx.group)
        return dx, dnorm, *(None,) * 8, *dw.split(ctx.outs)


class FeedForward(torch.autograd.Function):
    """x: (tokens / tp, dim) -> x + w2(silu(w1 n) * w3 n) with n = norm(x).

    w1, w3: (hidden / tp, dim), w2: (dim, hidden / tp).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        """rest: norm weight (dim,), eps, group, fused, the four of `quantised_weights` for w1 and w3, those for w2, w1,
        w3, w2."""
        norm_weight, eps, group, fused, w13_data, w13_scale, *w13_columns = rest[:8]
        w2_data, w2_scale, *w2_columns, w1, w3, _ = rest[8:]
        ctx.group, ctx.fused, ctx.outs = group, fused, [w1.shape[0], w3.shape[0]]
        xq, x_maxima, rstd, _ = rms_norm_rows(x, norm_weight, eps, maxima=not group)
        w13 = split_rows(w13_data, w13_scale, ctx.outs)
        (gate, up), _ = gather_times(xq, w13, x.dtype, group, fused, "w1 w3")
        hq, h_maxima = swiglu_rows(gate, up, maxima=True)
        y = times_scatter(hq, Float8Rows(w2_data, w2_scale), x.dtype, group, fused, "w2")
        kept = (xq.data, xq.scale, x_maxima, gate, up, hq.data, hq.scale, h_maxima)
        ctx.save_for_backward(x, norm_weight, rstd, *kept, *w13_columns, *w2_columns)
        return x + y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, rstd, *kept = ctx.saved_tensors
        x_data, x_scale, x_maxima, gate, up, h_data, h_scale, h_maxima = kept[:8]
        w13_columns, w2_columns = Float8Rows(*kept[8:10]), Float8Rows(*kept[10:])
        group, fused, dtype = ctx.group, ctx.fused, x.dtype
        gq, g_maxima = quantise_rows(g, maxima=not group)
        # The gathered float8 gradient serves w2's own gradient too.
        (dh,), gq = gather_times(gq, [w2_columns], dtype, group, fused, "w2 backward", True)
        dw2 = scaled_mm(
            columns_from_rows(gq, g_maxima), columns_from_rows(Float8Rows(h_data, h_scale), h_maxima), dtype
        )
        dq, d_maxima = swiglu_backward_rows(dh, gate, up, maxima=True)
        how = (dtype, group, fused, "w1 w3 backward")
        dnormed, dw = column_gradients(dq, d_maxima, Float8Rows(x_data, x_scale), x_maxima, w13_columns, *how)
        dx, dnorm = norm_gradients(dnormed, x, norm_weight, rstd, g, group)
        return dx, dnorm, *(None,) * 11, *dw.split(ctx.outs), dw2


def norm_gradients(
    dnormed: Tensor, x: Tensor, norm_weight: Tensor, rstd: Tensor, residual: Tensor | None, group: str
) -> tuple[Tensor, Tensor]:
    """(gradient of x, with what came past the norm; gradient of the norm's weight, summed over the ranks' tokens)."""
    dx, dnorm = rms_norm_backward(dnormed, x, norm_weight, rstd, residual)
    if group:
        dnorm = tp_ops.all_reduce(dnorm, "sum", group, "norm backward")
    return dx, dnorm.to(norm_weight.dtype)
