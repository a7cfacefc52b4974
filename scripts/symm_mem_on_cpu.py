"""torch's fused symmetric-memory matmuls on a machine without GPUs, for tests of their index algebra.

torch has no CPU kernels for them. Their CUDA implementations are Python: they cut, gather and reassemble rows around
three helpers that move data between GPUs while they compute. Only those three are replaced here, by gloo collectives
with the same meaning. torch's own fallbacks are not used: they hide the errors that the real code makes
(docs/scale-shapes.md).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from parallelisms.tp_ops import all_gather

aten = torch.ops.aten


def gather_and_consume(
    shards: list[Tensor], consume: Callable[[list[Tensor], int], None], outs: list[Tensor], group: Any, *_: Any
) -> None:
    """Gathers each shard into its out, and hands every rank's parts to `consume`."""
    for shard, out in zip(shards, outs, strict=True):
        out.copy_(all_gather(shard, group).view(out.shape))
    ranks = _resolve_process_group(group).size()
    for rank in range(ranks):
        consume([out.chunk(ranks)[rank] for out in outs], rank)


def gather_one_and_consume(
    shard: Tensor, consume: Callable[[Tensor, int], None], out: Tensor, group: Any, *_: Any
) -> None:
    gather_and_consume([shard], lambda parts, rank: consume(parts[0], rank), [out], group)


def produce_and_all_to_all(
    produce: Callable[[int, Tensor], None], output: Tensor, group: Any, out_chunk_dim: int = 0
) -> None:
    """`produce` makes what goes to each rank; output's chunks are what came from each."""
    process_group = _resolve_process_group(group)
    chunks = output.chunk(process_group.size(), dim=out_chunk_dim)
    sent = torch.stack([torch.empty_like(chunk, memory_format=torch.contiguous_format) for chunk in chunks])
    for rank, part in enumerate(sent):
        produce(rank, part)
    received = torch.empty_like(sent)
    # As bytes: gloo has no all-to-all of bfloat16.
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=process_group)
    for chunk, part in zip(chunks, received, strict=True):
        chunk.copy_(part)


def gather_matmul(a: Tensor, bs: list[Tensor], dim: int, group: Any, *, return_A: bool = True) -> Any:
    return symm_mem._fused_all_gather_matmul_impl(
        aten.mm.out, a, bs, None, [{} for _ in bs], [b.dtype for b in bs], dim, group, return_A
    )


def gather_scaled_matmul(
    a: Tensor, bs: list[Tensor], a_scale: Tensor, b_scales: list[Tensor], dim: int, group: Any, biases: list,
    result_scales: list, out_dtypes: list, fast: list[bool],
) -> Any:  # fmt: skip
    dtypes = symm_mem._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    options = [
        {"scale_b": s, "bias": bias, "scale_result": result, "out_dtype": dtype, "use_fast_accum": f}
        for s, bias, result, dtype, f in zip(b_scales, biases, result_scales, dtypes, fast, strict=True)
    ]
    return symm_mem._fused_all_gather_matmul_impl(
        aten._scaled_mm.out, a, bs, a_scale, options, dtypes, dim, group, True
    )


def matmul_scatter(a: Tensor, b: Tensor, op: str, dim: int, group: Any) -> Tensor:
    return symm_mem._fused_matmul_reduce_scatter_impl(aten.mm.out, a, b, {}, a.dtype, op, dim, group)


def scaled_matmul_scatter(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, op: str, orig_dim: int, dim: int, group: Any,
    output_shape: list[int], bias: Any = None, result_scale: Any = None, out_dtype: Any = None, fast: bool = False,
) -> Tensor:  # fmt: skip
    options = {
        "scale_b": b_scale, "bias": bias, "scale_result": result_scale, "out_dtype": out_dtype, "use_fast_accum": fast,
    }  # fmt: skip
    return symm_mem._fused_scaled_matmul_reduce_scatter_impl(
        aten._scaled_mm.out, a, b, a_scale, options, out_dtype, op, orig_dim, dim, group, list(output_shape)
    )


def install() -> torch.library.Library:
    """Gives the four fused ops CPU kernels in this process, for as long as the returned library lives."""
    for name, replacement in {
        "_pipelined_multi_all_gather_and_consume": gather_and_consume,
        "_pipelined_all_gather_and_consume": gather_one_and_consume,
        "_pipelined_produce_and_all2all": produce_and_all_to_all,
    }.items():
        if not hasattr(symm_mem, name):
            raise RuntimeError(f"torch {torch.__version__} has no {name} to replace; see what its fused ops call now")
        setattr(symm_mem, name, replacement)
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("fused_all_gather_matmul", gather_matmul)
    library.impl("fused_all_gather_scaled_matmul", gather_scaled_matmul)
    library.impl("fused_matmul_reduce_scatter", matmul_scatter)
    library.impl("fused_scaled_matmul_reduce_scatter", scaled_matmul_scatter)
    return library
