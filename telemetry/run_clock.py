"""RunClock: all the times of a run, as the trainer tells it what it does."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from telemetry.goodput import Goodput
from telemetry.metrics import StepClock, StepTimes
from telemetry.recompiles import Recompiles
from telemetry.stopwatch import StepSeconds
from telemetry.stragglers import Stragglers, gather


class RunClock:
    """The pace of the steps, their percentiles, the run's goodput, recompilations, and which rank is slow.

    A step costs an event on CUDA, a few looks at clocks and counters, and no wait; ranks compare at a log. Times are in
    seconds.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.interval = StepClock()
        self.goodput = Goodput()
        self.each_step = StepSeconds(device)
        self.data_of_first_step = self.compilation = 0.0
        self.is_first = True
        self.recompiles: Recompiles | None = None
        self.stragglers: Stragglers | None = None

    def begin(self, folder: Path, step: int, block: nn.Module, *, compiles: bool) -> None:
        """Set-up is done, and training goes on after `step`. `block` is one that the model has many of."""
        self.goodput.begin(folder, step)
        self.recompiles = Recompiles() if compiles else None
        self.stragglers = Stragglers(block, self.device) if dist.get_world_size() > 1 else None
        self.interval.start()
        self.each_step.watch.begin()

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Around the call that fetches a batch."""
        return self.interval.waiting_for_data()

    @contextmanager
    def outside(self, part: str) -> Iterator[None]:
        """Around what is no part of a step, but of `part`, a key of goodput.PARTS.

        The device first finishes the steps, whose time is theirs.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        with self.interval.outside():
            yield
        self.goodput.seconds[part] += time.perf_counter() - began
        self.each_step.watch.begin()
        if self.recompiles is not None:
            self.recompiles.skip()

    def step(self, tokens: int) -> None:
        """A step has ended that trained on this many tokens."""
        self.interval.step(tokens)
        self.each_step.watch.end()
        if self.is_first:
            self.data_of_first_step, self.is_first = self.interval.data_seconds, False
        if self.recompiles is not None:
            self.recompiles.step()

    def read(self, step: int) -> tuple[StepTimes, dict[str, float]]:
        """The interval up to here, and what is to be logged of it and of the run. For all ranks at once.

        The host must have waited for the device.
        """
        times = self.interval.read()
        values: dict[str, float] = self.each_step.read()
        block = 0.0 if self.stragglers is None else self.stragglers.read()
        recompiled = 0 if self.recompiles is None else self.recompiles.count
        mine = [block, times.data_seconds, self.data_of_first_step, recompiled]
        blocks, waits, first_waits, recompiles = zip(*gather(mine), strict=True)
        if self.stragglers is not None:
            values |= self.stragglers.compare(step, list(blocks))
            values["data_share_max"] = max(waits) / times.seconds
        if self.recompiles is not None:
            values["recompiles"] = int(max(recompiles))
            if recompiled and dist.get_rank() == recompiles.index(max(recompiles)):
                self.recompiles.warn(step)
        # The others wait for the rank that waits; it may have begun before this one.
        self.goodput.seconds["run_data_seconds"] += min(max(waits), times.seconds)
        self.count_compilation(max(first_waits))
        return times, values | self.goodput.totals()

    def count_compilation(self, waited: float) -> None:
        """What the first step took beyond its wait for data and the median of the later steps, once there are any."""
        if self.each_step.first is None:
            return
        found = max(self.each_step.first - waited - self.each_step.percentile(50), 0.0)
        self.goodput.seconds["run_compile_seconds"] += found - self.compilation
        self.compilation = found
