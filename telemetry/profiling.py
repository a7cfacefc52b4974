"""Traces of where the time goes (torch.profiler) and of where the memory goes (CUDA's allocation history)."""

import json
import logging
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from errors import UserError
from telemetry.profile_summary import summarise

logger = logging.getLogger("rowhouse")

SNAPSHOT_ENTRIES = 100_000  # Allocations and frees that a snapshot remembers.


@dataclass(frozen=True)
class ProfilingConfig:
    """Traces for performance work."""

    enable_profiling: bool = False
    """Write Chrome traces (open in https://ui.perfetto.dev), one a rank. Slows the traced steps down."""
    save_traces_folder: str = "profile_traces"
    """Where, in the run's folder: step_N/rankR_trace.json, and beside it rankR_summary.txt: time by kind of kernel."""
    profile_freq: int = 10
    """A trace every so many steps, counted from where the run starts or resumes."""
    profiler_active: int = 1
    """Steps in a trace, the last ones of each profile_freq."""
    profiler_warmup: int = 3
    """Steps before them that are traced and thrown away."""
    enable_memory_snapshot: bool = False
    """Write CUDA allocation histories (open in https://pytorch.org/memory_viz) every profile_freq steps, and when
    memory runs out."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Where, in the run's folder: step_N/rankR_memory_snapshot.pickle."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.profiler_active < 1:
            found.append(("profiler_active", f"{self.profiler_active} steps are no trace; give 1 or more"))
        if self.profiler_warmup < 0:
            found.append(("profiler_warmup", f"{self.profiler_warmup} is negative; give 0 or more"))
        if self.profile_freq < max(1, self.profiler_warmup + self.profiler_active):
            text = (
                f"{self.profile_freq} steps have no room for {self.profiler_warmup} of warm-up (profiler_warmup) and "
                f"{self.profiler_active} traced (profiler_active); raise it, or lower one of these"
            )
            found.append(("profile_freq", text))
        return found


class StepProfiler:
    """Follows the training steps and writes what is due. Made by `maybe_profile`."""

    def __init__(self, config: ProfilingConfig, folder: Path, start_step: int, rank: int):
        self.config = config
        self.folder = folder
        self.rank = rank
        self.steps_done = 0
        self.start_step = start_step
        self.last_traced = 0
        self.trace = self.make_trace() if config.enable_profiling else None
        self.asked = False
        """By SIGUSR2, since the last step."""
        self.trace_asked_for: profile | None = None
        """Of the step under way."""

    def make_trace(self) -> profile:
        active, warmup = self.config.profiler_active, self.config.profiler_warmup
        return profile(
            activities=activities(),
            schedule=schedule(wait=self.config.profile_freq - warmup - active, warmup=warmup, active=active),
            on_trace_ready=self.write_trace,
            record_shapes=True,
        )

    def step(self) -> None:
        """Call after each training step."""
        self.steps_done += 1
        if self.trace is not None:
            self.trace.step()
        if self.config.enable_memory_snapshot and self.steps_done % self.config.profile_freq == 0:
            self.write_snapshot(f"step_{self.start_step + self.steps_done}")
        if self.trace_asked_for is not None:
            trace, self.trace_asked_for = self.trace_asked_for, None
            trace.step()
            trace.stop()
        if self.asked:
            self.asked = False
            self.answer()

    def ask(self, *_: object) -> None:
        """SIGUSR2's handler."""
        self.asked = True

    def answer(self) -> None:
        """Between two steps: writes a memory snapshot, and begins a trace of the next step. Says what it cannot do."""
        step = self.start_step + self.steps_done
        if self.config.enable_memory_snapshot:
            self.write_snapshot(f"step_{step}_asked")
        else:
            logger.warning("SIGUSR2: no memory snapshot: profiling.enable_memory_snapshot is off, and needs a GPU")
        if self.trace is not None:
            logger.warning("SIGUSR2: no trace of the next step: profiling.enable_profiling writes its own")
            return
        once = schedule(wait=0, warmup=0, active=1, repeat=1)
        folder = self.folder / self.config.save_traces_folder / f"step_{step + 1}_asked"
        self.trace_asked_for = profile(
            activities=activities(), schedule=once, record_shapes=True,
            on_trace_ready=lambda trace: self.write(trace, folder),
        )  # fmt: skip
        self.trace_asked_for.start()

    def write_trace(self, trace: profile) -> None:
        # The profiler also calls this at its end, with a window that is not whole or has just begun.
        if self.steps_done % self.config.profile_freq != 0 or self.steps_done == self.last_traced:
            return
        self.last_traced = self.steps_done
        self.write(trace, self.folder / self.config.save_traces_folder / f"step_{self.start_step + self.steps_done}")

    def write(self, trace: profile, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self.rank}_trace.json"
        trace.export_chrome_trace(str(path))
        summary = summarise(trace.events())
        (folder / f"rank{self.rank}_summary.txt").write_text(summary.text())
        (folder / f"rank{self.rank}_summary.json").write_text(json.dumps(summary.as_json(), indent=1) + "\n")
        logger.info("trace: %s\n%s", path, summary.kinds_text())

    def write_snapshot(self, name: str) -> None:
        folder = self.folder / self.config.save_memory_snapshot_folder / name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self.rank}_memory_snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info("memory snapshot: %s", path)


def activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


@contextmanager
def maybe_profile(config: ProfilingConfig, folder: Path, *, start_step: int, rank: int) -> Iterator[StepProfiler]:
    """For the training loop: gives an object whose `step()` is called after each step; writes below `folder`.

    SIGUSR2 asks this rank for a memory snapshot and a trace of the next step, whatever the configuration says.
    Raises UserError for memory snapshots without CUDA.
    """
    if config.enable_memory_snapshot and not torch.cuda.is_available():
        raise UserError(
            "profiling.enable_memory_snapshot: snapshots are of CUDA memory and there is no CUDA device here; "
            "set it to false"
        )
    profiler = StepProfiler(config, folder, start_step, rank)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGUSR2, signal.signal(signal.SIGUSR2, profiler.ask))
        if profiler.trace is not None:
            stack.enter_context(profiler.trace)
        if config.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
            stack.callback(torch.cuda.memory._record_memory_history, enabled=None)
        try:
            yield profiler
        except torch.OutOfMemoryError:
            if config.enable_memory_snapshot:
                profiler.write_snapshot(f"step_{start_step + profiler.steps_done + 1}_out_of_memory")
            raise
    if profiler.asked or profiler.trace_asked_for is not None:
        logger.warning("SIGUSR2: no trace: the run took no further step")
    if config.enable_profiling and not profiler.last_traced:
        logger.warning(
            "profiling.enable_profiling: no trace was written: the run took %d steps, fewer than "
            "profiling.profile_freq (%d); lower it",
            profiler.steps_done, config.profile_freq,
        )  # fmt: skip
