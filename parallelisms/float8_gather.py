"""FSDP2 gathers the weights of row-wise float8 linears as float8: half of bf16's bytes, quantised once a gather.

A row's scale depends on that row alone, so a rank quantises the rows that it holds, from float32, and the gathered rows
need nothing more. The columns, which the gradient of the input is multiplied by, are made from the gathered rows: the
ranks' column maxima travel with them. Both serve every use until FSDP2 frees them: forward, recomputation, backward.

FSDP2 asks the local tensor of a sharded parameter for `fsdp_pre_all_gather` and `fsdp_post_all_gather`, and makes the
parameter that the module sees of what the latter returns. Nobody reads that one here: it gives its gradient a place
and a shape, and lies over the bytes of the float8 matrices.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from float8.kernels import columns_from_rows_into, copy, quantise_rows, quantise_rows_into
from float8.scaled import FLOAT8, Float8Rows
from parallelisms.fsdp import local

keep_version = torch.autograd._unsafe_preserve_version_counter


class Float8Gather:
    """The weights of linears that share an input: (outs[i], in) each on this tensor parallel rank, which FSDP2 shards
    evenly by rows.

    What is gathered is the attribute `gathered` of the first linear: float8 data (sum of outs, in) and scale, and
    float8 data (in, sum of outs) and scale of the columns.
    """

    def __init__(self, linears: list[nn.Linear], outs: list[int]):
        self.linears, self.outs = linears, outs
        self.maxima: dict[int, Tensor] = {}
        """Of the linears whose rows have come."""

    def install(self) -> None:
        for i, linear in enumerate(self.linears):
            weight: Any = linear.weight
            shard = weight._local_tensor
            shard.fsdp_pre_all_gather = functools.partial(before_gather, shard)
            shard.fsdp_post_all_gather = functools.partial(self.after_gather, i)

    @torch.no_grad()
    def after_gather(
        self, i: int, outputs: tuple[Tensor, ...], shard: Tensor | None, dtype: torch.dtype, *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]] | None:  # fmt: skip
        """Takes the rows of linear i. Returns its parameter's tensor and what FSDP2 frees and allocates from now on."""
        if out is None and not self.maxima:
            self.allocate(outputs[0] if shard is None else shard, dtype)
        start = sum(self.outs[:i])
        mine = slice(start, start + self.outs[i])
        rows = Float8Rows(self.rows.data[mine], self.rows.scale[mine])
        with keep_version((self.buffer, self.rows.scale, self.columns.scale)):
            if shard is None:
                data, scale, self.maxima[i] = outputs
                copy(Float8Rows(data.view(FLOAT8), scale), rows)
                for output in (data, scale):  # FSDP2 would keep them as long as the parameter.
                    output.untyped_storage().resize_(0)
            else:
                self.maxima[i] = quantise_rows_into(shard, rows)
            if len(self.maxima) == len(self.linears):
                columns_from_rows_into(self.rows, torch.cat(list(self.maxima.values())), self.columns)
                self.maxima.clear()
        if out is not None:
            return None
        return self.buffer.view(dtype), [self.buffer, self.rows.scale, self.columns.scale]

    def quantise(self, dtype: torch.dtype) -> None:
        """The same without FSDP2, where this rank has all the rows: whoever holds `gathered` holds the memory."""
        for i, linear in enumerate(self.linears):
            self.after_gather(i, (), local(linear.weight).detach(), dtype)
        del self.buffer, self.rows, self.columns

    def allocate(self, like: Tensor, dtype: torch.dtype) -> None:
        """One buffer for rows and columns, over which the parameters lie, each from its start."""
        rows, cols = sum(self.outs), like.shape[1]
        size, nbytes = rows * cols, max(2 * rows, max(self.outs) * dtype.itemsize) * cols
        self.buffer = like.new_empty(nbytes, dtype=torch.uint8)
        by_rows, by_columns = (part.view(FLOAT8) for part in self.buffer[: 2 * size].split(size))
        self.rows = Float8Rows(by_rows.view(rows, cols), like.new_empty((rows, 1), dtype=torch.float32))
        self.columns = Float8Rows(by_columns.view(cols, rows), like.new_empty((cols, 1), dtype=torch.float32))
        gathered: Any = (self.rows.data, self.rows.scale, self.columns.data, self.columns.scale)
        self.linears[0].gathered = gathered


@torch.no_grad()
def before_gather(
    shard: Tensor, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module,
    policy: Any,
) -> tuple[tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    """shard: float32 (out / ranks, in) -> (what is gathered, what FSDP2 hands on to after_gather)."""
    if mesh.size() == 1:  # Then FSDP2 gathers nothing, and makes a copy of the first tensor.
        return (shard.new_empty(0),), shard
    rows, maxima = quantise_rows(shard, maxima=True)
    return (rows.data.view(torch.uint8), rows.scale, maxima), None


def gather_in_float8(model: nn.Module, gathers: list[Float8Gather]) -> None:
    """From the model's first forward pass on. Call it after FSDP2 has sharded the model."""

    def install(*_: Any) -> None:
        for gather in gathers:
            gather.install()
        hook.remove()

    # Not now: to_empty has yet to make the tensors that are asked. FSDP2 looks at them in a hook that comes after this.
    hook = model.register_forward_pre_hook(install, prepend=True)
