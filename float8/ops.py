"""The float8 work around the matmuls as ops on plain tensors: torch.ops.rowhouse.<name>, called by float8/kernels.py.

A compiled graph holds an op of its own as it is, and activation checkpointing can save or recompute it by name. On CUDA
an op launches Triton kernels; everywhere else it is the reference, in plain PyTorch. None has a derivative.

The functions below are those references. Where column maxima are not asked for, they are (0, cols).
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from float8 import fused, quantise
from float8.quantise import FLOAT8_MAX, dequantise, row_scale
from float8.scaled import ALIGNMENT, FLOAT8, Float8Rows

Function = Callable[..., Any]
REFERENCES: dict[str, Function] = {}
"""Name of the op -> its reference."""


WHOLE_ROWS = {
    "quantise_rows", "quantise_parts", "quantise_weights", "rms_norm_rows", "swiglu_rows", "swiglu_backward_rows",
}  # fmt: skip
"""The ops whose kernels hold whole rows, of up to WIDEST_ROW values."""
WIDEST_ROW = 32768  # 16 warps hold 64 values a thread, and all registers of a multiprocessor hold 65536.
TURNED = {"columns_from_rows", "quantise_columns", "quantise_weights"}
"""The ops whose kernels turn a matrix over. Where a thread reads fewer than 16 bytes of a row at once, Triton 3.6
writes -384 in the place of some results (Hopper, 2026-12-02): in float32, and where rows are not aligned."""


def has_kernel(name: str, x: Tensor | list[Tensor]) -> bool:
    """Whether an op on CUDA launches its kernel for x, or else runs the reference."""
    parts = [x] if isinstance(x, Tensor) else x
    width = sum(part.shape[1] for part in parts) if name == "quantise_parts" else parts[0].shape[1]
    if name in WHOLE_ROWS and width > WIDEST_ROW:  # The feed-forward rows of 405B on one rank, say.
        return False
    return name not in TURNED or (width % ALIGNMENT == 0 and all(part.itemsize <= 2 for part in parts))


def launcher(name: str) -> Function:
    """What launches an op's kernels. Triton is imported only here: it is not there on every machine."""
    fused_ops = ("rms_norm_rows", "rms_norm_backward", "swiglu_rows", "swiglu_backward_rows")
    module = importlib.import_module("float8.triton_fused" if name in fused_ops else "float8.triton_quantise")
    return getattr(module, name)


def op(fake: Function) -> Callable[[Function], Function]:
    """Makes a reference the op of its name. `fake` gives empty tensors like its results."""

    def register(reference: Function) -> Function:
        name = reference.__name__

        def on_cuda(*args: Any) -> Any:
            return (launcher(name) if has_kernel(name, args[0]) else reference)(*args)

        REFERENCES[name] = reference
        made = torch.library.custom_op(f"rowhouse::{name}", reference, mutates_args=())
        made.register_kernel("cuda", on_cuda)
        made.register_fake(fake)
        return made

    return register


def empty_rows(like: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    return like.new_empty((rows, cols), dtype=FLOAT8), like.new_empty((rows, 1), dtype=torch.float32)


def empty_maxima(like: Tensor, cols: int, wanted: bool) -> Tensor:
    return like.new_empty((1 if wanted else 0, cols), dtype=torch.bfloat16)


def maxima_of(rows: Float8Rows, wanted: bool) -> Tensor:
    if not wanted:
        return empty_maxima(rows.data, rows.data.shape[1], False)
    return dequantise(rows).abs().amax(dim=0, keepdim=True).bfloat16()


@op(lambda x, maxima: (*empty_rows(x, *x.shape), empty_maxima(x, x.shape[1], maxima)))
def quantise_rows(x: Tensor, maxima: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = quantise.quantise_rows(x)
    return rows.data, rows.scale, maxima_of(rows, maxima)


def empty_parts(parts: list[Tensor], maxima: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols = parts[0].shape[0], sum(part.shape[1] for part in parts)
    return (*empty_rows(parts[0], rows, cols), empty_maxima(parts[0], cols, maxima))


@op(empty_parts)
def quantise_parts(parts: list[Tensor], maxima: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = quantise.quantise_rows(torch.cat(parts, dim=1))
    return rows.data, rows.scale, maxima_of(rows, maxima)


@op(lambda data, scale, maxima: empty_rows(data, data.shape[1], data.shape[0]))
def columns_from_rows(data: Tensor, scale: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    rows = Float8Rows(data, scale)
    if len(maxima) == 0:
        columns = quantise.columns_from_rows(rows)
        return columns.data, columns.scale
    # The given maxima decide, as they do in the kernel: wrong ones show on a CPU too.
    column_scale = row_scale(maxima.float().amax(dim=0)[:, None])
    values = (dequantise(rows).t() * column_scale.reciprocal()).clamp(-FLOAT8_MAX, FLOAT8_MAX)
    return values.to(FLOAT8).contiguous(), column_scale


@op(lambda x: empty_rows(x, x.shape[1], x.shape[0]))
def quantise_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    columns = quantise.quantise_columns(x)
    return columns.data, columns.scale


def empty_weights(weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, cols = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    return (*empty_rows(weights[0], out, cols), *empty_rows(weights[0], cols, out))


@op(empty_weights)
def quantise_weights(weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = torch.cat(weights)
    rows, columns = quantise.quantise_rows(weight), quantise.quantise_columns(weight)
    return rows.data, rows.scale, columns.data, columns.scale


def empty_normed(
    x: Tensor, weight: Tensor, eps: float, maxima: bool, normed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    rstd, result = x.new_empty((rows,), dtype=torch.float32), x.new_empty((rows if normed else 0, cols))
    return (*empty_rows(x, rows, cols), rstd, empty_maxima(x, cols, maxima), result)


@op(empty_normed)
def rms_norm_rows(
    x: Tensor, weight: Tensor, eps: float, maxima: bool, normed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, rstd, result = fused.rms_norm_rows(x, weight, eps)
    return rows.data, rows.scale, rstd, maxima_of(rows, maxima), result if normed else x.new_empty((0, x.shape[1]))


@op(lambda dy, x, weight, rstd, residual: (x.new_empty(x.shape), x.new_empty((x.shape[1],), dtype=torch.float32)))
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    return fused.rms_norm_backward(dy, x, weight, rstd, residual)


@op(lambda h1, h3, maxima: (*empty_rows(h1, *h1.shape), empty_maxima(h1, h1.shape[1], maxima)))
def swiglu_rows(h1: Tensor, h3: Tensor, maxima: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = fused.swiglu_rows(h1, h3)
    return rows.data, rows.scale, maxima_of(rows, maxima)


@op(
    lambda dy, h1, h3, maxima: (
        *empty_rows(dy, dy.shape[0], 2 * dy.shape[1]),
        empty_maxima(dy, 2 * dy.shape[1], maxima),
    )
)
def swiglu_backward_rows(dy: Tensor, h1: Tensor, h3: Tensor, maxima: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = fused.swiglu_backward_rows(dy, h1, h3)
    return rows.data, rows.scale, maxima_of(rows, maxima)
