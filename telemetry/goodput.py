"""Goodput: the share of a run's wall time that went into training steps, and what the rest went into.

A run is all its starts. Each line of metrics.jsonl has the totals up to there; goodput.json has those to the end of a
run that could say goodbye. A start that resumes goes on from the totals of the step that it resumes at: all that has
happened since then, the steps that a kill has undone, the time away and the set-up, is what the restart took.
"""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

FILE = "goodput.json"
PARTS = {
    "run_set_up_seconds": "set-up",
    "run_compile_seconds": "compile (first step)",
    "run_data_seconds": "waiting for data",
    "run_save_seconds": "saves",
    "run_validation_seconds": "validation",
    "run_restart_seconds": "restarts",
}
"""Key of what is no training -> how it is told."""


class Goodput:
    """Adds up `seconds`, by the keys of PARTS. Set-up begins where it is made. Times are of the first rank."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, unix: Callable[[], float] = time.time):
        self.now, self.unix = now, unix
        self.began = now()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.before = 0.0
        self.restarts = 0

    def begin(self, folder: Path, step: int) -> None:
        """Set-up is done, and training goes on after `step`; from 0 it is a new run."""
        earlier = last_totals(folder, step) if step else None
        if earlier is None:
            self.seconds["run_set_up_seconds"] = self.now() - self.began
            return
        self.before, self.restarts = earlier["run_seconds"], earlier["run_restarts"]
        self.seconds = {key: earlier[key] for key in PARTS}
        if earlier.get("ended") == "done":  # It was over, and now is to be longer: the time between is not the run's.
            self.seconds["run_set_up_seconds"] += self.now() - self.began
            return
        lost = max(self.unix() - earlier["time"], 0.0)  # Another host's clock may be behind.
        self.began = self.now() - lost
        self.seconds["run_restart_seconds"] += lost
        self.restarts += 1

    def totals(self) -> dict[str, float]:
        """All starts together, up to now: the share "goodput", the run's seconds and those of PARTS, "run_restarts"."""
        run = self.before + self.now() - self.began
        lost = sum(self.seconds.values())
        goodput = max(0.0, 1 - lost / run) if run else 0.0
        return {"goodput": goodput, "run_seconds": run, **self.seconds, "run_restarts": self.restarts}

    def end(self, folder: Path, step: int, stopped_by: str | None) -> str:
        """Keeps the totals of a run that ends after `step`, and says them in a sentence."""
        totals = self.totals()
        content = {"step": step, "ended": stopped_by or "done", **totals, "time": self.unix()}
        new = folder / f"{FILE}.tmp"
        new.write_text(json.dumps(content, indent=1) + "\n")
        new.replace(folder / FILE)
        return summary(totals)


def last_totals(folder: Path, step: int | None = None) -> dict[str, Any] | None:
    """The latest totals of the run in `folder`, up to a step where one is given; None where it has none."""
    found = []
    for name in ("metrics.jsonl", FILE):
        if (folder / name).is_file():
            text = (folder / name).read_text(errors="replace")
            found += [text] if name == FILE else text.splitlines()
    totals: dict[str, Any] | None = None
    for text in found:
        if "run_restarts" not in text:
            continue
        try:
            line = json.loads(text)
        except ValueError:
            continue  # A kill has cut it off.
        if (step is None or line["step"] <= step) and (totals is None or line["time"] >= totals["time"]):
            totals = line
    return totals


def summary(totals: dict[str, Any]) -> str:
    """goodput 93.0 % of 1:02:03: compile (first step) 4.0 %, saves 2.1 %, ...; without what is below 0.05 %."""
    run = totals["run_seconds"]
    lost = ", ".join(
        f"{text if key != 'run_restart_seconds' else restarts_text(totals)} {100 * totals[key] / run:.1f} %"
        for key, text in PARTS.items()
        if totals[key] >= 0.0005 * run
    )
    return f"goodput {100 * totals['goodput']:.1f} % of {timedelta(seconds=round(run))}" + (f": {lost}" if lost else "")


def restarts_text(totals: dict[str, Any]) -> str:
    number = int(totals["run_restarts"])
    return "1 restart" if number == 1 else f"{number} restarts"
