"""How long work takes where it runs, without waiting for it: single pieces, and percentiles of steps."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy
import torch

MOST_STEPS = 1000
"""Steps between two logs whose times are kept: the last ones."""
SHORTEST, RATIO, BINS = 1e-4, 1.02, 1000
"""Of the histogram: each bin's upper edge is RATIO times the one below; they span 0.1 ms to 11 hours."""


class Stopwatch:
    """The last `limit` pieces of work.

    On CUDA a moment is an event in the current stream: the host does not wait, and what is timed is the device's work,
    however far the host is ahead. Elsewhere it is the host's clock, `now`.
    """

    def __init__(self, device: torch.device, limit: int, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self.on_cuda = device.type == "cuda"
        self.began: Any = None
        self.pieces: deque[tuple[Any, Any]] = deque(maxlen=limit)

    def moment(self) -> Any:
        if not self.on_cuda:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """A piece of work begins."""
        self.began = self.moment()

    def end(self) -> None:
        """It ends, and the next one begins, unless `begin` says otherwise."""
        ended = self.moment()
        if self.began is not None:
            self.pieces.append((self.began, ended))
        self.began = ended

    def read(self) -> list[float]:
        """Seconds of each piece since the last read. On CUDA the host must have waited for their end."""
        pieces, self.pieces = self.pieces, deque(maxlen=self.pieces.maxlen)
        if self.on_cuda:
            return [began.elapsed_time(ended) / 1000 for began, ended in pieces]
        return [ended - began for began, ended in pieces]


class StepSeconds:
    """Percentiles of the time that a step takes: of the steps since the last read, and of all in this process.

    The first step is no part of the latter: it compiles. All are kept as a histogram, exact to 1 %, not as a list.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter):
        self.watch = Stopwatch(device, MOST_STEPS, now)
        self.first: float | None = None
        self.edges = [SHORTEST * RATIO**i for i in range(BINS)]
        self.counts = [0] * (BINS + 1)
        self.longest = 0.0

    def read(self) -> dict[str, float]:
        """p50, p95 and max in seconds. On CUDA the host must have waited for the last step."""
        seconds = self.watch.read()
        if not seconds:
            return {}
        p50, p95 = numpy.percentile(seconds, [50, 95])
        found = {
            "step_seconds_p50": float(p50),
            "step_seconds_p95": float(p95),
            "step_seconds_max": max(seconds),
        }
        if self.first is None:
            self.first = seconds.pop(0)
        for one in seconds:
            self.counts[bisect_left(self.edges, one)] += 1
            self.longest = max(self.longest, one)
        if self.longest:
            found["process_step_seconds_p50"] = self.percentile(50)
            found["process_step_seconds_p95"] = self.percentile(95)
            found["process_step_seconds_max"] = self.longest
        return found

    def percentile(self, percent: float) -> float:
        """Of all steps but the first; 0 where there is none."""
        sums = list(accumulate(self.counts))
        upper = bisect_left(sums, sums[-1] * percent / 100)
        return min(SHORTEST * RATIO ** (upper - 0.5), self.longest)
