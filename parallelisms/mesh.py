"""Process groups and the device mesh: which rank holds which part of the model and of the batch."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from errors import UserError


@dataclass(frozen=True)
class ParallelismConfig:
    """How the model and the batch are split over the ranks."""

    data_parallel_replicate_degree: int = 1
    """Replicas of the sharded model (HSDP); gradients are summed over them."""
    data_parallel_shard_degree: int = -1
    """Ranks that FSDP shards parameters, gradients and optimizer states over; -1 takes the ranks that remain."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward pass: default frees all but the last unit (norm and output head), and
    on one shard none; always saves memory there when gradients are accumulated."""
    tensor_parallel_degree: int = 1
    """Ranks that split each matmul."""
    enable_async_tensor_parallel: bool = False
    """Run tensor parallel collectives inside their matmuls (symmetric memory). Where the machine cannot, plain
    collectives take their place, and the log says why."""
    async_tensor_parallel_strict: bool = False
    """Stop where async TP cannot be had, or where a step has fewer fused collectives than planned."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        for key in ("data_parallel_replicate_degree", "tensor_parallel_degree"):
            if getattr(self, key) < 1:
                found.append((key, f"{getattr(self, key)} is not a degree; give 1 or more"))
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            found.append(("data_parallel_shard_degree", "must be 1 or more, or -1 for the ranks that remain"))
        if self.enable_async_tensor_parallel and self.tensor_parallel_degree == 1:
            text = "there is nothing to overlap at tensor_parallel_degree 1; raise that, or set this to false"
            found.append(("enable_async_tensor_parallel", text))
        if self.async_tensor_parallel_strict and not self.enable_async_tensor_parallel:
            text = "is about async TP, which is off; set enable_async_tensor_parallel, or this to false"
            found.append(("async_tensor_parallel_strict", text))
        return found

    def degrees(self, world_size: int) -> tuple[int, int, int]:
        """(replicate, shard, tensor parallel) for this many ranks."""
        replicate, shard, tp = (
            self.data_parallel_replicate_degree, self.data_parallel_shard_degree, self.tensor_parallel_degree
        )  # fmt: skip
        return replicate, world_size // (replicate * tp) if shard == -1 else shard, tp


@dataclass(frozen=True)
class CommConfig:
    """Process groups."""

    init_timeout_seconds: int = 300
    """Patience with the start, which compiles: the rendezvous, and each thing up to the end of the first step."""
    train_timeout_seconds: int = 100
    """Patience with a step, its wait for data and each collective in it, once the first step is done. A run that hangs
    dumps its stacks to the run's folder after 0.8 of it, and ends with status 5."""

    def problems(self) -> list[tuple[str, str]]:
        keys = ("init_timeout_seconds", "train_timeout_seconds")
        return [(key, "must be 1 second or more") for key in keys if getattr(self, key) < 1]


def init_process_group(config: CommConfig) -> torch.device:
    """Joins the ranks that torchrun started (or becomes the only one) and returns this rank's device."""
    if "RANK" not in os.environ:
        # Started as plain `python train.py`: a world of one, met through this process itself.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if torch.cuda.is_available():
        local_rank = int(os.environ["LOCAL_RANK"])
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} here): start torchrun "
                f"with --nproc-per-node {torch.cuda.device_count()}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=config.init_timeout_seconds))
    return device


@dataclass(frozen=True)
class Meshes:
    """The ranks by what they share. `tp` is None without tensor parallelism."""

    whole: DeviceMesh
    fsdp: DeviceMesh
    """("dp_replicate", "dp_shard") for HSDP, else ("dp_shard",)."""
    dp: DeviceMesh
    """The same ranks in one dimension: those that read different data."""
    tp: DeviceMesh | None


def build_meshes(config: ParallelismConfig, device: torch.device) -> Meshes:
    """Tensor parallel ranks are neighbours, so that they share a node."""
    replicate, shard, tp = config.degrees(dist.get_world_size())
    sizes = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp}
    used = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    whole = init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))
    fsdp = whole["dp_replicate", "dp_shard"] if replicate > 1 else whole["dp_shard"]
    dp = fsdp._flatten("dp") if replicate > 1 else fsdp
    return Meshes(whole, fsdp, dp, whole["tp"] if tp > 1 else None)


def set_timeouts(seconds: float, meshes: Meshes) -> None:
    """The patience with collectives from here on: after the first step one that hangs is a fault.

    For the groups that train. The checkpoints' own group keeps its patience: a save may take long.
    """
    patience = timedelta(seconds=seconds)
    for group in [dist.group.WORLD, meshes.dp.get_group(), *meshes.whole.get_all_groups()]:
        dist.distributed_c10d._set_pg_timeout(patience, group)
