"""A run's numbers: timed right, and written to the console, metrics.jsonl and TensorBoard."""

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("rowhouse")

# Console columns: key, colour, how it reads.
COLUMNS: list[tuple[str, str, Callable[[float], str]]] = [
    ("loss", "32", lambda v: f"loss {v:.4f}"),
    ("validation_loss", "36", lambda v: f"validation loss {v:.4f}"),
    ("grad_norm", "33", lambda v: f"grad norm {v:.3f}"),
    ("lr", "0", lambda v: f"lr {v:.2e}"),
    ("tokens_per_second", "34", lambda v: f"{v:,.0f} tokens/s"),
    ("tflops", "36", lambda v: f"{v:,.2f} TFLOP/s"),
    ("mfu", "35", lambda v: f"MFU {v:.1%}"),
    ("memory_gib", "0", lambda v: f"{v:.2f} GiB"),
]


@dataclass(frozen=True)
class MetricsConfig:
    """Console, metrics.jsonl and TensorBoard."""

    log_freq: int = 10
    """Write the metrics every so many steps; the first and the last step are always written."""
    enable_tensorboard: bool = False
    """Write TensorBoard files too."""
    save_tb_folder: str = "tb"
    """Where, within the run's folder."""
    disable_color_printing: bool = False
    """No colours on a terminal."""

    def problems(self) -> list[tuple[str, str]]:
        return [("log_freq", f"{self.log_freq} is too small; give 1 or more")] if self.log_freq < 1 else []


@dataclass(frozen=True)
class StepTimes:
    """An interval between two logs: its steps and this rank's tokens, its seconds, and those spent waiting for data."""

    steps: int
    tokens: int
    seconds: float
    data_seconds: float


class StepClock:
    """Times the steps since the last `read`, however many they are, without what happens `outside` of them."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self.begin_interval()

    def begin_interval(self) -> None:
        self.steps = self.tokens = 0
        self.data_seconds = self.outside_seconds = 0.0
        self.began = self.now()

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        began = self.now()
        yield
        self.data_seconds += self.now() - began

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Validation, checkpoints and the like; what it waits for within does not count either."""
        began, data_seconds = self.now(), self.data_seconds
        yield
        self.outside_seconds += self.now() - began
        self.data_seconds = data_seconds

    def step(self, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens

    def read(self) -> StepTimes:
        """The interval up to now; a new one begins. Call it when the device has finished the steps."""
        seconds = self.now() - self.began - self.outside_seconds
        times = StepTimes(self.steps, self.tokens, seconds, self.data_seconds)
        self.begin_interval()
        return times


class MetricsWriter:
    """Writes one rank's metrics. Only rank 0 makes one."""

    def __init__(self, config: MetricsConfig, folder: Path, *, start_step: int, total_steps: int):
        self.total_steps = total_steps
        self.colored = sys.stdout.isatty() and not config.disable_color_printing
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        keep_until(path, start_step)
        self.file = path.open("a")
        self.board: Any = None
        if config.enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / config.save_tb_folder), purge_step=start_step + 1)
        # The first interval compiles and warms up: it says little about the steps to come.
        self.recent_seconds: deque[float] = deque(maxlen=20)
        self.written_intervals = 0

    def write(self, step: int, values: dict[str, float | None]) -> None:
        """One console line, one line of metrics.jsonl, and the TensorBoard scalars. None is not shown."""
        self.written_intervals += 1
        seconds = values.get("step_seconds")
        if seconds is not None and (self.written_intervals > 1 or not self.recent_seconds):
            if self.written_intervals == 2:
                self.recent_seconds.clear()
            self.recent_seconds.append(seconds)
        self.write_line(step, values, self.eta(step))

    def write_validation(self, step: int, values: dict[str, float | None]) -> None:
        self.write_line(step, values, "")

    def write_line(self, step: int, values: dict[str, float | None], ending: str) -> None:
        shown = [
            (color, text(value)) for key, color, text in COLUMNS if (value := values.get(key)) is not None
        ]
        parts = [f"\033[{color}m{text}\033[0m" if self.colored else text for color, text in shown]
        logger.info("%s", "  ".join(filter(None, [f"step {step}/{self.total_steps}", *parts, ending])))
        # JSON has neither NaN nor infinity: they are null, and named.
        nonfinite = [key for key, value in values.items() if value is not None and not math.isfinite(value)]
        record: dict[str, Any] = {"step": step, "time": time.time()}
        record |= {key: None if key in nonfinite else value for key, value in values.items()}
        if nonfinite:
            record["nonfinite"] = nonfinite
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        self.file.flush()
        if self.board is not None:
            for key, value in values.items():
                if value is not None:
                    self.board.add_scalar(key, value, step)
            self.board.flush()

    def eta(self, step: int) -> str:
        """Time left at the pace of the last intervals: "ETA 1:02:03"."""
        if not self.recent_seconds:
            return ""
        left = round(sum(self.recent_seconds) / len(self.recent_seconds) * (self.total_steps - step))
        return f"ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def keep_until(path: Path, step: int) -> None:
    """Drops the lines of metrics.jsonl after `step`, which a resumed run writes again, and a torn last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
