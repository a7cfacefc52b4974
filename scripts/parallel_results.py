"""What scripts.bench_parallel measured: cases, their runs, the table, and the ratios that are goals."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.overlap import Communication
from telemetry.memory import GIB


@dataclass(frozen=True)
class Case:
    by: str
    """rowhouse or torchtitan."""
    recipe: str
    """bf16, tensorwise, rowwise."""
    parallel: str
    """fsdp, tp, async-tp: over all of the GPUs."""
    ac: str
    """Activation checkpointing: full, selective; none in the check."""
    gpus: int

    def __str__(self) -> str:
        return f"{self.by}/{self.recipe}/{self.parallel}/{self.ac}/{self.gpus}"


@dataclass(frozen=True)
class Run:
    tokens_per_second: float
    """Of one GPU."""
    gib: float
    """The most memory that rank 0 took."""
    loss: float
    layers: int
    communication: Communication


@dataclass
class Row:
    """A case: its runs, or a sentence why there are none."""

    case: Case
    runs: list[Run] = field(default_factory=list)
    problem: str = ""
    note: str = ""

    @property
    def speed(self) -> float | None:
        """The median run's tokens a second and GPU."""
        return statistics.median([run.tokens_per_second for run in self.runs]) if self.runs else None

    @property
    def middle(self) -> Run:
        """The run whose speed is the median, or just below."""
        return sorted(self.runs, key=lambda run: run.tokens_per_second)[(len(self.runs) - 1) // 2]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "case": str(self.case)}


@dataclass(frozen=True)
class Goal:
    what: str
    value: float | None
    goal: str
    is_met: bool

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.what}: not measured (goal: {self.goal})"
        return f"{self.what}: {self.value:.3f} (goal: {self.goal}): {'met' if self.is_met else 'missed'}"


def goals(rows: list[Row]) -> list[Goal]:
    """On the largest number of GPUs, for each kind of activation checkpointing. None where a side was not measured."""
    at = {str(row.case): row for row in rows}
    gpus = max(row.case.gpus for row in rows)

    def speed(by: str, recipe: str, parallel: str, ac: str, gpus: int = gpus) -> float | None:
        row = at.get(str(Case(by, recipe, parallel, ac, gpus)))
        return None if row is None else row.speed

    def exposed_gathers(recipe: str, ac: str) -> float | None:
        row = at.get(str(Case("rowhouse", recipe, "fsdp", ac, gpus)))
        return row.middle.communication.exposed_gathers if row is not None and row.runs else None

    found = []
    for ac in dict.fromkeys(row.case.ac for row in rows):
        ours, where = speed("rowhouse", "rowwise", "async-tp", ac), f"{ac} AC, {gpus} GPUs"
        value = ratio(ours, speed("rowhouse", "bf16", "async-tp", ac))
        found.append(at_least(f"rowwise over bf16, both async TP, speed, {where}", value, 1.3))
        value = ratio(ours, speed("torchtitan", "tensorwise", "async-tp", ac))
        found.append(at_least(f"rowwise over torchtitan's tensorwise, both async TP, speed, {where}", value, 1.0))
        value = ratio(exposed_gathers("rowwise", ac), exposed_gathers("bf16", ac))
        met = value is not None and value < 0.5
        found.append(Goal(f"float8 over bf16 FSDP gathers, exposed time, {where}", value, "below 0.5", met))
        for recipe in ("bf16", "rowwise"):
            one = speed("rowhouse", recipe, "fsdp", ac, 1)
            value = ratio(speed("rowhouse", recipe, "fsdp", ac), one) if gpus > 1 else None
            met = value is not None and value > 0.95
            found.append(
                Goal(f"FSDP of {recipe}, {gpus} GPUs over one, speed a GPU, {ac} AC", value, "above 0.95", met)
            )
    return found


def at_least(what: str, value: float | None, goal: float) -> Goal:
    return Goal(what, value, f"at least {goal}", value is not None and value >= goal)


def ratio(a: float | None, b: float | None) -> float | None:
    """None where a side was not measured, or there is nothing to be a part of."""
    return None if a is None or b is None or not b > 0 else a / b


COLUMNS = [
    "by", "recipe", "parallel", "AC", "GPUs", "tokens/s a GPU", "range", "of one GPU's, %", "communication, ms",
    "exposed, ms", "of it gathers, ms", "sent, GiB", "fused a block", "peak GiB", "loss", "",
]  # fmt: skip


def table(rows: list[Row]) -> str:
    """Markdown; what is of a step, is rank 0's."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    ones = {(r.case.by, r.case.recipe, r.case.ac): r.speed for r in rows if r.case.gpus == 1}
    for row in rows:
        case = row.case
        cells = [case.by, case.recipe, case.parallel, case.ac, str(case.gpus)]
        if row.runs:
            cells += measured(row, ones.get((case.by, case.recipe, case.ac)) if case.parallel == "fsdp" else None)
        else:
            cells += [""] * (len(COLUMNS) - len(cells) - 1)
        told = row.middle.communication.problem if row.runs else ""
        said = [text for text in (row.problem, row.note, told) if text]
        # A bar would end the cell.
        cells.append("; ".join(said).replace("|", "/"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measured(row: Row, one: float | None) -> list[str]:
    run, speeds = row.middle, [run.tokens_per_second for run in row.runs]
    told, speed = run.communication, statistics.median(speeds)
    times = (told.milliseconds, told.exposed, told.exposed_gathers)
    return [
        f"{speed:,.0f}",
        f"{min(speeds):,.0f} to {max(speeds):,.0f}" if len(speeds) > 1 else "",
        f"{100 * speed / one:.1f}" if one is not None else "",
        *("" if ms is None else f"{ms:.1f}" for ms in times),
        "" if told.sent is None else f"{sum(told.sent.values()) / GIB:.3g}",
        f"{told.fused / run.layers:g}",
        f"{run.gib:.1f}",
        f"{run.loss:.3f}",
    ]
