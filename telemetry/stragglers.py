"""The rank that the others wait for: which it is, and by how much.

FSDP's collectives keep the ranks in step, so that all take equally long for a step, whoever is slow. What differs is
the time from one collective to the next. Here it is that of a block's forward pass, once its weights are gathered.
(Tensor parallel ranks meet inside of a block too: they are slow together.)
"""

import logging
import socket
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from telemetry.stopwatch import Stopwatch

logger = logging.getLogger("rowhouse")

MOST_CALLS = 32
"""Forward passes since the last log that count: the last ones."""
SLOW, LOGS = 1.25, 3
"""A rank is told of that takes so many times as long as the median one, in so many logs in a row."""


def gather(values: list[float]) -> list[list[float]]:
    """Each rank's values, all ranks having as many. Of the host: the device is not waited for."""
    mine = torch.tensor(values, dtype=torch.float64)
    of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, mine)
    return [of_rank.tolist() for of_rank in of_all]


class Stragglers:
    """Times the forward passes of `block` in training. Give it a block that FSDP has been applied to."""

    def __init__(self, block: nn.Module, device: torch.device):
        self.watch = Stopwatch(device, MOST_CALLS)
        self.slow_rank, self.slow_logs, self.told = -1, 0, False
        # Between FSDP's own hooks, which wait for the weights before, and free them after.
        block.register_forward_pre_hook(self.begin)
        block.register_forward_hook(self.end, prepend=True)

    def begin(self, block: nn.Module, inputs: Any) -> None:
        if block.training:
            self.watch.begin()

    def end(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if block.training:
            self.watch.end()

    def read(self) -> float:
        """This rank's mean of the calls since the last log, in seconds. On CUDA the host must have waited for them."""
        return statistics.fmean(self.watch.read() or [0.0])

    def compare(self, step: int, seconds: list[float]) -> dict[str, float]:
        """From all ranks' means: the median's, the slowest's, and its rank, which warns where it stays slow."""
        median, slowest = statistics.median_low(seconds), max(range(len(seconds)), key=seconds.__getitem__)
        is_slow = seconds[slowest] > SLOW * median
        self.slow_logs = self.slow_logs + 1 if is_slow and slowest == self.slow_rank else int(is_slow)
        self.slow_rank = slowest
        if self.slow_logs >= LOGS and slowest == dist.get_rank() and not self.told:
            self.told = True
            logger.warning(
                "rank %d on %s is slow, and the others wait for it: %.2f ms for a block's forward pass, the median "
                "rank %.2f ms (step %d): look at its clock, its temperature and what else runs there",
                slowest, socket.gethostname(), 1e3 * seconds[slowest], 1e3 * median, step,
            )  # fmt: skip
        return {"block_seconds": median, "block_seconds_max": seconds[slowest], "slowest_rank": slowest}
