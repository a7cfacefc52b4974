"""What a checkpoint holds of a run, each part as DCP takes it: with state_dict and load_state_dict."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


class ModelState:
    """The parameters by name, sharded as they are."""

    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


class OptimizerState:
    """The moments and settings by parameter name, so that another split of the parameters finds its own."""

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=self.options)


class RngState:
    """torch's random generators of this rank, on the host and on the device; another number of ranks keeps its seed."""

    def __init__(self, device: torch.device):
        self.device = device
        self.rank = dist.get_rank()

    def state_dict(self) -> dict[str, Any]:
        state = {f"host{self.rank}": torch.get_rng_state()}
        if self.device.type == "cuda":
            state[f"cuda{self.rank}"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state[f"host{self.rank}"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state[f"cuda{self.rank}"], self.device)
