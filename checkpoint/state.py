"""What a checkpoint holds of a run, as the state dicts that torch.distributed.checkpoint (DCP) writes and reads.

Model and optimizer are flat dicts of tensors, named as in the model that the user wrote: without the prefixes of
wrappers (compile, activation checkpointing), and sharded as the ranks hold them, so that any number of ranks can load
them. All other states are small, the same on every rank, and packed into one tensor of bytes.
"""

import io
import logging
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

logger = logging.getLogger("rowhouse")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class ModelState:
    """Parameters and persistent buffers: name -> Tensor or DTensor, the live ones. A tied weight has both its names."""

    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


class OptimizerState:
    """Moments and step counts: "state.<parameter>.exp_avg" and so on -> Tensor or DTensor, the live ones.

    The hyperparameters (learning rate, betas, weight decay) are not part of it: a resumed run takes them from its
    configuration, where the user may have changed them.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Before the optimizer's first step this creates its state, as zeros that a load can fill."""
        full = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        return {key: value for key, value in full.items() if key.startswith("state.")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        full = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        set_optimizer_state_dict(self.model, self.optimizer, {**full, **state}, options=FLAT)


class RngState:
    """The random number generators of all ranks: Python's, NumPy's, PyTorch's on the CPU and on this rank's GPU.

    With other ranks than at the save, those that the checkpoint does not know keep the seed that they have.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def state_dict(self) -> dict[str, Any]:
        """{"rank-0": ..., "rank-1": ...}: gathered, so a collective call; the same on all ranks."""
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.own_state())
        return {f"rank-{rank}": state for rank, state in enumerate(states)}

    def own_state(self) -> dict[str, Any]:
        numpy_state: Any = np.random.get_state()  # noqa: NPY002
        name, keys, *position = numpy_state
        state = {
            "python": random.getstate(),
            "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *position),
            "torch": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if rank == 0 and len(state) < world_size:
            logger.info(
                "random numbers: the checkpoint has the state of %d ranks; ranks %d to %d keep their seed",
                len(state), len(state), world_size - 1,
            )  # fmt: skip
        own = state.get(f"rank-{rank}")
        if own is None:
            return
        random.setstate(own["python"])
        name, keys, *position = own["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *position))  # noqa: NPY002
        torch.set_rng_state(own["torch"])
        if self.device.type == "cuda" and "cuda" in own:
            torch.cuda.set_rng_state(own["cuda"], self.device)


def pack(state: dict[str, Any]) -> Tensor:
    """A state of numbers, strings, containers and tensors as bytes, uint8 (length,): a snapshot.

    DCP would pickle such values and unpickle them without restriction; of tensors it reads weights only, as `unpack`
    does. Raises pickle.UnpicklingError for a state that `unpack` would refuse, here and not when it is needed.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    packed = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).clone()
    unpack(packed)
    return packed


def unpack(packed: Tensor) -> dict[str, Any]:
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)


class DataState:
    """The position in the data, of all ranks: the same on each, so that any number of ranks can resume from it.

    `loader` is this rank's data.loader.BatchLoader; `dp_group` are the ranks whose lanes make up the global batch.
    """

    def __init__(self, loader: Any, dp_group: dist.ProcessGroup):
        self.loader = loader
        self.dp_group = dp_group

    def state_dict(self) -> dict[str, Any]:
        state = self.loader.state_dict()
        parts: list[Any] = [None] * self.dp_group.size()
        dist.all_gather_object(parts, (state["lanes"], state["documents_per_epoch"]), group=self.dp_group)
        del state["first_lane"]
        # A rank that has not come to the end of an epoch does not know its length yet: 0.
        return {
            **state,
            "lanes": torch.cat([p[0] for p in parts]),
            "documents_per_epoch": max(p[1] for p in parts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
