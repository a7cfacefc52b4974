"""Metrics: what a step took, and where the numbers go (console, metrics.jsonl, TensorBoard, Weights & Biases)."""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from errors import UserError
from telemetry.weights_and_biases import open_wandb

logger = logging.getLogger("rowhouse")


@dataclass(frozen=True)
class MetricsConfig:
    """What is told of the training, and where."""

    log_freq: int = 10
    """Log every so many steps; the first and the last are logged in any case."""
    enable_tensorboard: bool = False
    """Write TensorBoard events as well as metrics.jsonl."""
    save_tb_folder: str = "tb"
    """Where TensorBoard's events go, in the run's folder."""
    enable_wandb: bool = False
    """Send the metrics to Weights & Biases as well; its own environment variables say where (docs/seeing.md)."""
    disable_color_printing: bool = False
    """No colours on the console (a file or pipe gets none anyway)."""

    def problems(self) -> list[tuple[str, str]]:
        if self.log_freq < 1:
            return [("log_freq", f"{self.log_freq} is too small; give 1 or more")]
        return []


@dataclass(frozen=True)
class StepTimes:
    """One interval between two logs."""

    steps: int
    """Training steps in it."""
    tokens: int
    """Tokens of these steps, as given to `StepClock.step`."""
    seconds: float
    """Wall time of these steps, with the waits for data, without what was `outside`."""
    data_seconds: float
    """The part of `seconds` spent waiting for data."""


class StepClock:
    """Times the steps between two logs. The intervals follow from the calls alone, whatever their length.

    The first interval contains compilation: log step 1 by itself to keep it out of the ones that follow. On CUDA, work
    that is still queued when `outside` is entered is timed there, if something waits for it; synchronise before.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self.start()

    def start(self) -> None:
        """Begins an interval here."""
        self.began = self.now()
        self.steps = self.tokens = 0
        self.data_seconds = self.outside_seconds = 0.0
        self.is_outside = False

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around the call that fetches a batch. Inside `outside` it counts as that."""
        began = self.now()
        yield
        if not self.is_outside:
            self.data_seconds += self.now() - began

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Around what is no training step: validation, checkpoint, profiling."""
        began = self.now()
        self.is_outside = True
        yield
        self.is_outside = False
        self.outside_seconds += self.now() - began

    def step(self, tokens: int) -> None:
        """A step has ended that trained on this many tokens."""
        self.steps += 1
        self.tokens += tokens

    def read(self) -> StepTimes:
        """The interval up to here; begins the next."""
        seconds = self.now() - self.began - self.outside_seconds
        times = StepTimes(self.steps, self.tokens, seconds, self.data_seconds)
        self.start()
        return times


# What the console shows of the values, in this order: key, format, ANSI colour.
CONSOLE: list[tuple[str, str, int]] = [
    ("loss", "loss {:.4f}", 32),
    ("validation_loss", "validation loss {:.4f}", 35),
    ("grad_norm", "grad_norm {:.4f}", 33),
    ("lr", "lr {:.2e}", 39),
    ("tokens_per_second", "{:,.0f} tokens/s", 34),
    ("tflops", "{:,.2f} TFLOP/s", 36),
    ("mfu", "MFU {:.1%}", 36),
    ("memory_gib", "{:.2f} GiB", 39),
]


class MetricsWriter:
    """Writes the values of a step to the console, to `folder`/metrics.jsonl, to TensorBoard and to Weights & Biases.

    For one rank. A run that resumes at `start_step` drops the lines of later steps that an earlier process has left,
    and TensorBoard hides them, so that every step appears once. Raises UserError where something is asked for that is
    not installed, or cannot be begun.
    """

    def __init__(self, config: MetricsConfig, folder: Path, *, start_step: int, total_steps: int):
        self.total_steps = total_steps
        self.coloured = sys.stdout.isatty() and not config.disable_color_printing
        self.knows_pace = False
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        drop_later_lines(path, start_step)
        self.file = path.open("a", encoding="utf-8")
        self.tensorboard: Any = None
        if config.enable_tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise UserError(
                    "metrics.enable_tensorboard: TensorBoard is not installed; run pip install tensorboard, or set "
                    "it to false"
                ) from error
            self.tensorboard = SummaryWriter(str(folder / config.save_tb_folder), purge_step=start_step + 1)
        self.wandb = open_wandb(folder) if config.enable_wandb else None

    def write(self, step: int, values: dict[str, float | None]) -> None:
        """The metrics of a training step. None stands for what is not known (MFU of an unknown device).

        "step_seconds" gives the time to the end; not on the first line, whose steps contain compilation.
        """
        parts = []
        pace = values.get("step_seconds")
        if pace is not None and self.knows_pace:
            parts.append(f"ETA {timedelta(seconds=round(pace * max(0, self.total_steps - step)))}")
        self.knows_pace = True
        self.record(step, values, parts)

    def write_validation(self, step: int, values: dict[str, float | None]) -> None:
        """The metrics of a validation after training step `step`: "validation_loss"."""
        self.record(step, values, [])

    def record(self, step: int, values: dict[str, float | None], more: list[str]) -> None:
        shown = [
            self.colour(form.format(values[key]), code) for key, form, code in CONSOLE if values.get(key) is not None
        ]
        logger.info("%s", "  ".join([self.colour(f"step {step:>{len(str(self.total_steps))}}", 31), *shown, *more]))
        self.file.write(json_line(step, values) + "\n")
        self.file.flush()
        if self.tensorboard is not None:
            for name, value in values.items():
                if value is not None:
                    self.tensorboard.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log({"step": step, **{name: value for name, value in values.items() if value is not None}})

    def colour(self, text: str, code: int) -> str:
        return f"\033[{code}m{text}\033[0m" if self.coloured else text

    def close(self) -> None:
        self.file.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


def json_line(step: int, values: dict[str, float | None]) -> str:
    """One object of strict JSON: "step", the values, "time" (unix seconds).

    JSON has no NaN and no infinity: such a value is null, and its name is in the list "nonfinite".
    """
    nonfinite = [name for name, value in values.items() if value is not None and not math.isfinite(value)]
    line: dict[str, Any] = {"step": step, **values, **dict.fromkeys(nonfinite), "time": time.time()}
    if nonfinite:
        line["nonfinite"] = nonfinite
    return json.dumps(line, allow_nan=False)


def drop_later_lines(path: Path, start_step: int) -> None:
    """Rewrites a metrics.jsonl without the steps after `start_step`, and without lines that a kill has left torn."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    kept, torn = [], 0
    for line in text.splitlines():
        try:
            if json.loads(line)["step"] <= start_step:
                kept.append(line)
        except (ValueError, TypeError, KeyError):
            torn += 1
    if torn:
        logger.warning("%s: dropped %d unreadable line(s), left by a run that was cut off", path, torn)
    new_text = "".join(line + "\n" for line in kept)
    if new_text == text:
        return
    new_path = path.with_name(path.name + ".tmp")
    with new_path.open("w", encoding="utf-8") as file:
        file.write(new_text)
        file.flush()
        os.fsync(file.fileno())
    new_path.replace(path)
