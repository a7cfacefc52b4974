"""Traces and memory snapshots of a running job."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

logger = logging.getLogger("rowhouse")

SNAPSHOT_EVENTS = 100_000  # Allocations kept in a memory snapshot's history.


@dataclass(frozen=True)
class ProfilingConfig:
    """torch.profiler traces and CUDA memory snapshots."""

    enable_profiling: bool = False
    """Write a Chrome trace of each rank every profile_freq steps."""
    save_traces_folder: str = "profile_traces"
    """Where, within the run's folder."""
    profile_freq: int = 10
    """A trace, or a snapshot, every so many steps."""
    profiler_active: int = 1
    """Steps in a trace."""
    profiler_warmup: int = 3
    """Steps of profiling before them that are thrown away."""
    enable_memory_snapshot: bool = False
    """Write a snapshot of CUDA memory every profile_freq steps, and when memory runs out."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Where, within the run's folder."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.profiler_active < 1 or self.profiler_warmup < 0:
            found.append(
                ("profiler_active", "a trace needs 1 active step or more, after 0 or more of warm-up")
            )
        if self.profile_freq < self.profiler_active + self.profiler_warmup:
            needed = self.profiler_active + self.profiler_warmup
            found.append(
                (
                    "profile_freq",
                    f"{self.profile_freq} steps are fewer than warm-up and active, {needed}; raise it",
                )
            )
        if self.enable_memory_snapshot and not torch.cuda.is_available():
            found.append(("enable_memory_snapshot", "there is no CUDA device here; set it to false"))
        return found


class Profiler(Protocol):
    def step(self) -> None: ...


class Together:
    """Steps several profilers at once."""

    def __init__(self, profilers: list[Profiler]):
        self.profilers = profilers

    def step(self) -> None:
        for profiler in self.profilers:
            profiler.step()


class MemorySnapshots:
    """Dumps the history of CUDA allocations every `freq` steps, for pytorch.org/memory_viz."""

    def __init__(self, folder: Path, step: int, freq: int, rank: int):
        self.folder, self.count, self.freq, self.rank = folder, step, freq, rank

    def step(self) -> None:
        self.count += 1
        if self.count % self.freq == 0:
            self.dump(f"step_{self.count}")

    def dump(self, name: str) -> None:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / f"rank{self.rank}_memory_snapshot.pickle"))
        logger.info("memory snapshot: %s", folder)


@contextlib.contextmanager
def maybe_profile(config: ProfilingConfig, folder: Path, *, start_step: int, rank: int) -> Iterator[Profiler]:
    """An object whose `step()` is called after each training step, whatever is enabled."""
    with contextlib.ExitStack() as stack:
        profilers: list[Profiler] = []
        if config.enable_profiling:
            profilers.append(
                stack.enter_context(
                    trace_profiler(config, folder / config.save_traces_folder, start_step, rank)
                )
            )
        if config.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
            stack.callback(torch.cuda.memory._record_memory_history, enabled=None)
            snapshots = MemorySnapshots(
                folder / config.save_memory_snapshot_folder, start_step, config.profile_freq, rank
            )
            profilers.append(snapshots)
        try:
            yield Together(profilers)
        except torch.cuda.OutOfMemoryError:
            if config.enable_memory_snapshot:
                snapshots.dump(f"step_{snapshots.count + 1}_out_of_memory")
            raise


def trace_profiler(config: ProfilingConfig, folder: Path, start_step: int, rank: int) -> Any:
    """torch.profiler that waits, warms up, records and writes, over and over."""

    def write(profiler: torch.profiler.profile) -> None:
        step_folder = folder / f"step_{start_step + profiler.step_num}"
        step_folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(step_folder / f"rank{rank}_trace.json"))
        logger.info("trace: %s", step_folder)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    wait = config.profile_freq - config.profiler_warmup - config.profiler_active
    schedule = torch.profiler.schedule(
        wait=wait, warmup=config.profiler_warmup, active=config.profiler_active
    )
    return torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write)
