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
    """Ranks that split each matmul. Only 1 is supported so far."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallel communication with the matmuls. Not supported so far."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        for key in ("data_parallel_replicate_degree", "tensor_parallel_degree"):
            if getattr(self, key) < 1:
                found.append((key, f"{getattr(self, key)} is not a degree; give 1 or more"))
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            found.append(("data_parallel_shard_degree", "must be 1 or more, or -1 for the ranks that remain"))
        if self.tensor_parallel_degree > 1:
            found.append(("tensor_parallel_degree", "tensor parallelism is not supported yet; set it to 1"))
        if self.enable_async_tensor_parallel:
            found.append(("enable_async_tensor_parallel", "async TP is not supported yet; set it to false"))
        return found

    def degrees(self, world_size: int) -> tuple[int, int]:
        """(replicate, shard) for this many ranks."""
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        return replicate, world_size // replicate if shard == -1 else shard

    def data_parallel_degree(self, world_size: int) -> int:
        """Parts that the batch is split into."""
        replicate, shard = self.degrees(world_size)
        return replicate * shard


@dataclass(frozen=True)
class CommConfig:
    """Process groups."""

    init_timeout_seconds: int = 300
    """Patience with the start: rendezvous, first collectives, compilation."""
    train_timeout_seconds: int = 100
    """Patience with a collective once the first step is done."""

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


def build_mesh(config: ParallelismConfig, device: torch.device) -> DeviceMesh:
    """The data parallel mesh: ("dp_replicate", "dp_shard") for HSDP, else ("dp_shard",)."""
    replicate, shard = config.degrees(dist.get_world_size())
    if replicate > 1:
        return init_device_mesh(device.type, (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh(device.type, (shard,), mesh_dim_names=("dp_shard",))


def set_timeouts(config: CommConfig, mesh: DeviceMesh) -> None:
    """After the first step a collective that hangs is a fault: from here on the shorter patience holds.

    For the groups that train. The checkpoints' own group keeps its patience: a save may take long.
    """
    patience = timedelta(seconds=config.train_timeout_seconds)
    for group in [dist.group.WORLD, *mesh.get_all_groups()]:
        dist.distributed_c10d._set_pg_timeout(patience, group)
