"""A small training run to save and load, sharded over the ranks that there are."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from checkpoint.config import CheckpointConfig
from checkpoint.folders import committed_steps
from checkpoint.manager import CheckpointManager
from checkpoint.state import ModelState, OptimizerState, RngState
from parallelisms.fsdp import whole

VOCAB, DIM = 17, 6


class TinyModel(nn.Module):
    def __init__(self, tied: bool = False, dim: int = DIM, layers: int = 2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.output = nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.output(x)


class Counter:
    """Stands for the trainer's own state: changes in place, holds a list and a tensor."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"step": 0, "losses": [], "lanes": torch.zeros(3, dtype=torch.int64)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Run:
    """A small training run, sharded over the ranks. `seed` None: other weights each time."""

    def __init__(self, folder: Path, /, seed: int | None = None, tied: bool = False, **settings: Any):
        torch.manual_seed(random.SystemRandom().randrange(2**31) if seed is None else seed)
        self.model = TinyModel(tied)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, weight_decay=0.1)
        self.counter = Counter()
        self.drawn: list[tuple[float, float]] = []
        self.states = {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.model, self.optimizer),
            "train_state": self.counter,
            "rng": RngState(torch.device("cpu")),
        }
        self.manager = CheckpointManager(CheckpointConfig(enable=True, **settings), folder, self.states)

    def train(self, steps: int) -> None:
        """Each rank on data of its own random numbers."""
        for _ in range(steps):
            tokens = torch.randint(VOCAB, (10,))
            self.model(tokens).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.counter.state["step"] += 1
            self.counter.state["losses"].append(self.counter.state["step"] / 7)
            self.counter.state["lanes"] += 3
            self.drawn.append((random.random(), np.random.rand()))  # noqa: NPY002

    def values(self) -> dict[str, Any]:
        """All that a resume must bring back: copies, of this rank's shards."""
        tensors = {**self.states["model"].state_dict(), **self.states["optimizer"].state_dict()}
        local = {k: (v.to_local() if hasattr(v, "to_local") else v).detach().clone() for k, v in tensors.items()}
        return {**local, **copy.deepcopy(self.counter.state)}

    def full_model(self) -> dict[str, Tensor]:
        return {name: whole(p.detach()).clone() for name, p in self.model.named_parameters()}


def steps_in(folder: Path) -> list[int]:
    return committed_steps(LocalFileSystem(), str(folder))


def seed_ranks() -> None:
    """Fresh random numbers, others on each rank."""
    seed = [random.SystemRandom().randrange(2**31)]
    dist.broadcast_object_list(seed)
    torch.manual_seed(seed[0] + dist.get_rank())
    random.seed(seed[0] + dist.get_rank())
    np.random.seed(seed[0] + dist.get_rank())  # noqa: NPY002


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        same = torch.equal(a[key], b[key]) if isinstance(a[key], Tensor) else a[key] == b[key]
        assert same, f"{key}: {a[key]} is not {b[key]}"


def differ(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return any(not torch.equal(a[key], b[key]) for key in a if isinstance(a[key], Tensor))
