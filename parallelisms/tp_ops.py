"""The collectives of tensor parallelism, each one op with its matmul: gather tokens and multiply, multiply and scatter.

All of them work on dim 0 of matrices (tokens, features). With `fused` they are torch's symmetric-memory ops, which send
one rank's part while they multiply another's (async TP); without, a collective and a matmul: the same shapes and the
same numbers up to the order of a sum. They are custom ops, so the compiler neither looks into them nor moves them, and
selective checkpointing can tell them by the name of the `layer` that they serve.

Signatures of the fused ops are the private torch.distributed._symmetric_memory's; parallelisms/async_tp.py asks at
start whether they are there and right.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers torch.ops.symm_mem
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from float8.scaled import Float8Rows, check_rows, fast_accumulation, scaled_mm

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # Their names until torch 2.12.
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

symm_mem = torch.ops.symm_mem


@dataclass(frozen=True)
class Collective:
    """One collective as it ran on this rank."""

    layer: str
    """What it served: the linears' names, with "backward" for their gradients."""
    kind: str
    fused: bool
    """Ran inside its matmul."""
    recomputed: bool
    """A forward pass's, run again in the backward pass by activation checkpointing."""
    sent: int
    """Bytes that this rank sends."""


RECORDS: list[list[Collective]] = []
"""Where the collectives that run are written, while `recording` is on."""


@contextlib.contextmanager
def recording() -> Iterator[list[Collective]]:
    """Lists the collectives that this process carries out, in eager and in compiled code."""
    collectives: list[Collective] = []
    RECORDS.append(collectives)
    try:
        yield collectives
    finally:
        # By identity: two lists of the same collectives are equal.
        RECORDS[:] = [record for record in RECORDS if record is not collectives]


def record(layer: str, kind: str, group: str, *gathered: Tensor, scattered: int = 0, fused: bool = False) -> None:
    """`gathered` are this rank's parts of gathers, `scattered` the bytes that go into a reduce-scatter."""
    if RECORDS:
        others = ranks_of(group) - 1
        sent = others * sum(t.nbytes for t in gathered) + scattered * others // (others + 1)
        in_backward = torch._C._current_graph_task_id() != -1
        recomputed = in_backward and not layer.endswith("backward")
        for collectives in RECORDS:
            collectives.append(Collective(layer, kind, fused, recomputed, sent))


def ranks_of(group: str) -> int:
    return process_group(group).size()


def process_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]  # Its own type for names is newer than 2.11.


# The collectives below wait where they are called. Ranks that share a GPU over gloo died of SIGSEGV at the first ones
# while these were functional collectives (torch 2.11); whether that was why is not known yet.


def all_gather(x: Tensor, group: str) -> Tensor:
    """(rows, ...) -> (ranks * rows, ...). Moves float8 as bytes: gloo knows no float8."""
    moved = x.contiguous().view(torch.uint8) if x.element_size() == 1 else x.contiguous()
    out = moved.new_empty((ranks_of(group) * x.shape[0], *x.shape[1:]))
    all_gather_single(out, moved, group=process_group(group))
    return out.view(x.dtype)


def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """(ranks * rows, ...) -> (rows, ...), summed over the ranks."""
    out = x.new_empty((x.shape[0] // ranks_of(group), *x.shape[1:]))
    reduce_scatter_single(out, x.contiguous(), group=process_group(group))
    return out


@torch.library.custom_op("rowhouse::gather", mutates_args=())
def gather(x: Tensor, after: Tensor, group: str, layer: str) -> Tensor:
    """x: (rows, cols) of each rank -> (ranks * rows, cols).

    `after` is a tensor that the op does not read. In backward it is the incoming gradient: without it the compiler
    would gather an activation in the forward pass already, and keep it.
    """
    record(layer, "gather", group, x)
    return all_gather(x, group)


@gather.register_fake
def _(x: Tensor, after: Tensor, group: str, layer: str) -> Tensor:
    return x.new_empty((x.shape[0] * ranks_of(group), x.shape[1]))


@torch.library.custom_op("rowhouse::scatter", mutates_args=())
def scatter(x: Tensor, group: str, layer: str) -> Tensor:
    """x: (ranks * rows, cols), each rank's summand -> (rows, cols) of the sum."""
    record(layer, "scatter", group, scattered=x.nbytes)
    return reduce_scatter(x, group)


@scatter.register_fake
def _(x: Tensor, group: str, layer: str) -> Tensor:
    return x.new_empty((x.shape[0] // ranks_of(group), x.shape[1]))


@torch.library.custom_op("rowhouse::all_reduce", mutates_args=())
def all_reduce(x: Tensor, op: str, group: str, layer: str) -> Tensor:
    """The "sum" or "max" of x over the ranks."""
    record(layer, f"all_reduce {op}", group, scattered=2 * x.nbytes)
    out = x.clone()
    dist.all_reduce(out, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group=process_group(group))
    return out


@all_reduce.register_fake
def _(x: Tensor, op: str, group: str, layer: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rowhouse::gather_matmul", mutates_args=())
def gather_matmul(a: Tensor, bs: list[Tensor], group: str, fused: bool, layer: str, keep: bool) -> list[Tensor]:
    """a: (rows, K); bs: (K, N_i) -> gather(a) @ b_i, (ranks * rows, N_i) each; with `keep` gather(a) follows."""
    record(layer, "gather_matmul", group, a, fused=fused)
    if fused:
        gathered, outs = symm_mem.fused_all_gather_matmul(a.contiguous(), bs, 0, group, return_A=keep)
    else:
        gathered = all_gather(a, group)
        outs = [gathered @ b for b in bs]
    return [*outs, gathered] if keep else outs


@gather_matmul.register_fake
def _(a: Tensor, bs: list[Tensor], group: str, fused: bool, layer: str, keep: bool) -> list[Tensor]:
    rows = a.shape[0] * ranks_of(group)
    outs = [a.new_empty((rows, b.shape[1])) for b in bs]
    return [*outs, a.new_empty((rows, a.shape[1]))] if keep else outs


@torch.library.custom_op("rowhouse::matmul_scatter", mutates_args=())
def matmul_scatter(a: Tensor, b: Tensor, group: str, fused: bool, layer: str) -> Tensor:
    """a: (ranks * rows, K of this rank); b: (K of this rank, N) -> this rank's (rows, N) of the sum of a @ b."""
    record(layer, "matmul_scatter", group, scattered=a.shape[0] * b.shape[1] * a.element_size(), fused=fused)
    if fused:
        return symm_mem.fused_matmul_reduce_scatter(a.contiguous(), b, "sum", 0, group)
    return reduce_scatter(a @ b, group)


@matmul_scatter.register_fake
def _(a: Tensor, b: Tensor, group: str, fused: bool, layer: str) -> Tensor:
    return a.new_empty((a.shape[0] // ranks_of(group), b.shape[1]))


@torch.library.custom_op("rowhouse::gather_scaled_matmul", mutates_args=())
def gather_scaled_matmul(
    a: Tensor,
    a_scale: Tensor,
    bs: list[Tensor],
    b_scales: list[Tensor],
    out_dtype: torch.dtype,
    group: str,
    fused: bool,
    layer: str,
    keep: bool,
) -> list[Tensor]:
    """a, a_scale: float8 rows of each rank; bs, b_scales: float8 rows (N_i, K) -> gather(a) @ b_i.T,
    (ranks * rows, N_i) each; with `keep` gather(a) and gather(a_scale) follow. float8 is what travels."""
    check_rows(a, a_scale, layer)
    for b, scale in zip(bs, b_scales, strict=True):
        check_rows(b, scale, layer)
    record(layer, "gather_scaled_matmul", group, a, a_scale, fused=fused)
    if fused:
        dtype, n = torch.bfloat16 if a.is_cuda else out_dtype, len(bs)
        gathered, outs = symm_mem.fused_all_gather_scaled_matmul(
            a, [b.t() for b in bs], a_scale, [scale.t() for scale in b_scales], 0, group,
            [None] * n, [None] * n, [dtype] * n, [fast_accumulation()] * n,
        )  # fmt: skip
        outs = [out.to(out_dtype) for out in outs]
        # The op gathers the scales too, but does not hand them out. They are 4 bytes a row.
        gathered_scale = all_gather(a_scale, group) if keep else a_scale
    else:
        gathered, gathered_scale = all_gather(a, group), all_gather(a_scale, group)
        rows = Float8Rows(gathered, gathered_scale)
        outs = [scaled_mm(rows, Float8Rows(b, scale), out_dtype) for b, scale in zip(bs, b_scales, strict=True)]
    return [*outs, gathered, gathered_scale] if keep else outs


@gather_scaled_matmul.register_fake
def _(
    a: Tensor, a_scale: Tensor, bs: list[Tensor], b_scales: list[Tensor], out_dtype: torch.dtype, group: str,
    fused: bool, layer: str, keep: bool,
) -> list[Tensor]:  # fmt: skip
    check_rows(a, a_scale, layer)
    rows = a.shape[0] * ranks_of(group)
    outs = [a.new_empty((rows, b.shape[0]), dtype=out_dtype) for b in bs]
    return [*outs, a.new_empty((rows, a.shape[1])), a_scale.new_empty((rows, 1))] if keep else outs


@torch.library.custom_op("rowhouse::scaled_matmul_scatter", mutates_args=())
def scaled_matmul_scatter(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype,
    group: str,
    fused: bool,
    layer: str,
) -> Tensor:
    """a: float8 rows (ranks * rows, K of this rank); b: float8 rows (N, K of this rank) -> this rank's (rows, N) of the
    sum of a @ b.T. Each summand is de-scaled before the sum: no rank needs another's scales."""
    check_rows(a, a_scale, layer)
    check_rows(b, b_scale, layer)
    nbytes = a.shape[0] * b.shape[0] * out_dtype.itemsize
    record(layer, "scaled_matmul_scatter", group, scattered=nbytes, fused=fused)
    if not fused:
        return reduce_scatter(scaled_mm(Float8Rows(a, a_scale), Float8Rows(b, b_scale), out_dtype), group)
    dtype, shape = torch.bfloat16 if a.is_cuda else out_dtype, [a.shape[0], b.shape[0]]
    out = symm_mem.fused_scaled_matmul_reduce_scatter(
        a, b.t(), a_scale, b_scale.t(), "sum", 0, 0, group, shape, None, None, dtype, fast_accumulation()
    )
    return out.to(out_dtype)


@scaled_matmul_scatter.register_fake
def _(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype, group: str, fused: bool, layer: str
) -> Tensor:  # fmt: skip
    check_rows(a, a_scale, layer)
    return a.new_empty((a.shape[0] // ranks_of(group), b.shape[0]), dtype=out_dtype)
