"""Starts ranks on this machine: one launch, many cases."""

import faulthandler
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from errors import leave

# NVLink multicast can take the GPUs of a host that is not set up for it out of service: benchmarks leave it off.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def launch(function: Callable[..., None], world_size: int, *args: Any, nccl: bool = False) -> None:
    """Runs `function(*args)` on `world_size` ranks of gloo; an exception on one of them fails the caller with its text.

    With a GPU, tensors on it go through gloo as well, and all ranks may share it. With `nccl` each has one of its own.
    """
    mp.spawn(_rank, (world_size, free_port(), nccl, function, args), nprocs=world_size)


def _rank(rank: int, world_size: int, port: int, nccl: bool, function: Callable[..., None], args: tuple) -> None:
    device = rank % max(torch.cuda.device_count(), 1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(device), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    faulthandler.enable()  # A crash in a library says where.
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    dist.init_process_group(f"cpu:gloo,cuda:{'nccl' if nccl else 'gloo'}" if torch.cuda.is_available() else "gloo")
    try:
        function(*args)
    except Exception:
        traceback.print_exc()
        raise
    dist.destroy_process_group()
    leave(0)
