"""FSDP2: parameters, gradients and optimizer states sharded over the ranks, a block gathered when it is needed."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Sharding:
    """The FSDP units made, how many gather again in backward, and bytes a rank sends for one forward and backward."""

    units: int
    resharded: int
    all_gather_bytes: float
    reduce_bytes: float


class InPlaceReduction:
    """Takes FSDP2's place for a reduce-scatter over one shard: its output is its input.

    FSDP2 asks for the input's memory, then for the output's, and copies the one to the other: 8 bytes a parameter and
    step for nothing (docs/performance.md).
    """

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.buffer is None:
            self.buffer = torch.empty(size, dtype=dtype, device=device)
            return self.buffer
        output, self.buffer = self.buffer, None
        return output

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a reduce-scatter over one shard sends nothing, and FSDP2 does not call for it")


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: str,
    cpu_offload: bool,
    in_float8: Sequence[torch.Tensor] = (),
) -> Sharding:
    """Shards a Llama over the data parallel mesh.

    Gradients are *summed* over the ranks: the loss is divided by the valid tokens of the global batch before.
    `in_float8` are gathered so (parallelisms/float8_gather.py): fewer bytes are counted for them.
    """
    # Inputs are not cast: the rotary table stays in float32, and the residual stream has the embedding's precision.
    options: dict = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
    }
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    # On one shard (of torchao's linears, say), freeing gathered parameters costs a second cast and copy in backward and
    # saves nothing at the step's peak: that is at the end of backward, when they are freed in any case.
    reshard = reshard_after_forward == "always" or (reshard_after_forward == "default" and mesh.size(-1) > 1)
    assert isinstance(model.layers, nn.ModuleList)
    units: list[tuple[list, bool]] = [([layer], reshard) for layer in model.layers]
    if model.output is not None:
        units.append(([model.tok_embeddings], reshard))
        # Backward needs the last group again at once.
        units.append(([model.norm, model.output], reshard_after_forward == "always"))
    # Tied weights are used at both ends of the model: they stay in the root's unit, which is gathered throughout.
    shards, replicas = mesh.size(-1), mesh.size() // mesh.size(-1)
    numel = sum(local(p).numel() for p in model.parameters())
    float8 = set(in_float8)
    nbytes = {p: gathered_bytes(local(p), shards, param_dtype, p in float8) for p in model.parameters()}
    gathered = sum(nbytes.values())
    for modules, again in units:
        gathered += again * sum(nbytes[p] for module in modules for p in module.parameters())
        fully_shard(modules, **options, reshard_after_forward=again)
    fully_shard(model, **options)
    # torch's fused matmuls hand out views. Nothing here changes a tensor in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            if mesh.size() > 1:  # One rank adds up nothing; asking for it costs a copy.
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
            if mesh.size(-1) == 1:
                unit.set_custom_reduce_scatter(InPlaceReduction())  # type: ignore[arg-type]

    # A ring passes (n - 1) / n of a buffer through every rank; an all-reduce does so twice.
    ring = (shards - 1) / shards
    all_reduce = 2 * (replicas - 1) / replicas / shards
    return Sharding(
        units=len(units) + 1,
        resharded=sum(again for _, again in units),
        all_gather_bytes=gathered * ring,
        reduce_bytes=numel * reduce_dtype.itemsize * (ring + all_reduce),
    )


def local(p: torch.Tensor) -> torch.Tensor:
    """What this rank and its shards hold: of a tensor parallel parameter the local part."""
    return p.to_local() if isinstance(p, DTensor) else p


def whole(p: torch.Tensor) -> torch.Tensor:
    """All of a parameter, on every rank: of a DTensor a collective call."""
    return p.full_tensor() if isinstance(p, DTensor) else p


def gathered_bytes(p: torch.Tensor, shards: int, param_dtype: torch.dtype, in_float8: bool) -> int:
    """Bytes of a parameter as it is gathered. In float8: rows, a float32 scale each, and bf16 maxima of each shard."""
    return p.shape[0] * (p.shape[1] + 4) + shards * p.shape[1] * 2 if in_float8 else p.numel() * param_dtype.itemsize
