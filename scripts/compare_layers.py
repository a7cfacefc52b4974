"""Where two runs first differ: by step, and within a step by place, in the order of computation.

    python train.py --config debug.toml --debug.layer_statistics_freq 1 --job.dump_folder outputs/a     # and outputs/b
    python -m scripts.compare_layers outputs/a outputs/b
    python -m scripts.compare_layers outputs/a outputs/b --tolerance 0      # where do they cease to be alike?

A place is a layer's output, the gradient that arrives there, a weight, its gradient, or the loss. A step goes through
them forward, to the loss and back (telemetry/layer_statistics.py). Both runs have to read the same batches, on any
number of ranks. Exit status: 0 all within the tolerance, 1 not, or something is not finite, 2 nothing to judge.

The default tolerance is what rounding alone makes (docs/converging.md, "Layer by layer").
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from errors import UserError
from scripts.loss_curves import percent, settings_of
from telemetry.layer_statistics import FILE

Statistics: TypeAlias = dict[str, Any]
"""Of a place: count, rms, mean, largest, not_finite."""
Steps: TypeAlias = dict[int, dict[str, Statistics]]

UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float8": 2.0**-4}
"""What one rounding moves a value by, at the most: a share of it."""
DEVIATION = 0.42
"""Its root mean square, in these units: sqrt(mean of 1 / m**2 / 3) over mantissas m spread evenly on a logarithm."""
DEVIATIONS = 5
"""None of thousands of statistics is further off by chance."""
ROUNDINGS = 12
"""Of a block: norm, q k v, rotation, attention, wo, residual; norm, w1 and w3, SiLU, product, w2, residual."""
KINDS = ["output", "gradient there", "weights", "their gradients"]


@dataclass(frozen=True)
class Run:
    folder: Path
    steps: Steps
    settings: dict[str, Any]
    """`section.key` -> value; empty where there is no config.toml."""


def read_run(folder: Path) -> Run:
    """Raises UserError where the folder holds no such statistics."""
    path = folder / FILE
    how = "train the run with --debug.layer_statistics_freq 1, and give its job.dump_folder"
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {how}") from error
    steps: Steps = {}
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue  # A kill has cut it off.
        try:
            steps[content["step"]] = {place: check(of_place) for place, of_place in content["places"].items()}
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not as train.py writes it ({error!r}): {how}") from error
    if not steps:
        raise UserError(f"{path} has no step yet: {how}")
    return Run(folder, steps, settings_of(folder))


def check(statistics: Statistics) -> Statistics:
    """As it is, or KeyError."""
    return {key: statistics[key] for key in ("count", "rms", "mean", "largest", "not_finite")}


def common_steps(first: Run, other: Run) -> list[int]:
    """The steps that both have. Raises UserError where there is none, or where they are of other models or batches."""
    steps = sorted(first.steps.keys() & other.steps.keys())
    if not steps:
        told = " and ".join(f"{min(run.steps)} to {max(run.steps)} in {run.folder}" for run in (first, other))
        raise UserError(f"no step is in both (steps {told}): give both the same debug.layer_statistics_freq")
    for step in steps:
        a, b = first.steps[step], other.steps[step]
        if list(a) != list(b):
            odd = min(a.keys() ^ b.keys(), default="their order")
            raise UserError(f"step {step} does not have the same places in both ({odd}): these are two models")
        for place in a:
            if a[place]["count"] != b[place]["count"]:
                raise UserError(
                    f"step {step}, {place}: {a[place]['count']:,} values in {first.folder} and "
                    f"{b[place]['count']:,} in {other.folder}: give both the same model, training.seq_len and "
                    "training.global_batch_size"
                )
    return steps


# What rounding explains


def precision_of(run: Run) -> str:
    keys = ("training.mixed_precision_param", "float8.recipe_name")
    if not all(key in run.settings for key in keys):
        raise UserError(f"{run.folder / 'config.toml'} does not tell the run's precision: give --tolerance")
    compute, recipe = (run.settings[key] for key in keys)
    return compute if recipe == "none" else "float8"


class Rounding:
    """How far two runs may be apart at a place if they differ by rounding alone, that of the more precise of them.

    A value that has come through n roundings is off by sqrt(n) times one's deviation; what is averaged over m rows,
    whose errors are independent, by 1 / sqrt(m) of that. A step's errors go on in the weights, so that they add up over
    the steps. In float32 sums are rounded as well, in as many additions as the model is wide.
    """

    def __init__(self, precision: str, places: dict[str, Statistics], first_step: int):
        self.first_step = first_step
        self.blocks = sum(place.startswith("layers.") and place.endswith(" output") for place in places)
        self.dim = places["norm.weight"]["count"]
        self.tokens = places["norm output"]["count"] // self.dim
        unit = UNIT_ROUNDOFF[precision] * (math.sqrt(self.dim) if precision == "float32" else 1)
        self.one_rounding = DEVIATIONS * DEVIATION * unit

    def roundings(self, place: str) -> int:
        """Before a value is there."""
        layer, kind = layer_and_kind(place)
        end = -1 if layer == "tok_embeddings" else self.blocks - 1  # What is no block stands before or behind them.
        block = int(layer.split(".")[1]) if layer.startswith("layers.") else end
        is_back = kind in ("gradient there", "their gradients")
        return 1 + ROUNDINGS * (2 * self.blocks - 1 - block if is_back else block + 1)

    def rows(self, place: str, count: int) -> int:
        """That a mean of the place's values is over."""
        if place == "loss":
            return self.tokens
        if place in ("tok_embeddings.weight gradient", "output.weight gradient"):
            return 1  # A few frequent tokens make most of it.
        return max(count // self.dim, 1)

    def allowed(self, step: int, place: str, statistic: str, count: int) -> float:
        if step == 1 and is_weight(place):
            return 0.0  # As they were initialised.
        error = self.one_rounding * math.sqrt(self.roundings(place)) * (step - self.first_step + 1)
        return error if statistic == "largest" else error / math.sqrt(self.rows(place, count))


def exact(count: int) -> float:
    """How far sums of so many values in float64 may be apart if the values are the same: their order may be another."""
    return 2.0**-52 * math.sqrt(count)


def is_weight(place: str) -> bool:
    return place.endswith(".weight")


# Differences


@dataclass(frozen=True)
class Difference:
    """Of a statistic, at a step and a place."""

    step: int
    place: str
    statistic: str
    values: tuple[float | None, float | None]
    share: float
    """Of the first run's: rms and largest of themselves, mean of rms."""
    allowed: float
    count: int

    @property
    def is_beyond(self) -> bool:
        return not self.share <= self.allowed  # NaN is beyond anything.

    @property
    def is_exact(self) -> bool:
        return self.share <= exact(self.count)

    @property
    def size(self) -> float:
        """In multiples of what is allowed."""
        if self.share == 0:
            return 0.0
        return self.share / self.allowed if self.allowed else math.inf

    def told(self) -> str:
        where = f"step {self.step}, {self.place}"
        if self.statistic == "not_finite":
            return f"{where}: NaN or infinite is {' and '.join(percent(value or 0.0) for value in self.values)} of it"
        one, other = self.values
        return f"{where}: {self.statistic} {one:.6g} and {other:.6g}, {percent(self.share)} apart"


def differences(first: Run, other: Run, steps: list[int], tolerance: float | Rounding) -> Iterator[Difference]:
    """All, in the order of computation."""
    for step in steps:
        for place, a in first.steps[step].items():
            b, count = other.steps[step][place], a["count"]
            if a["not_finite"] or b["not_finite"]:
                yield Difference(step, place, "not_finite", (a["not_finite"], b["not_finite"]), math.nan, 0.0, count)
                continue
            for name in ("rms", "mean", "largest"):
                unit = a["rms"] if name == "mean" else a[name]
                gap = abs(a[name] - b[name])
                share = 0.0 if gap == 0 else gap / unit if unit else math.inf
                given = tolerance if isinstance(tolerance, float) else tolerance.allowed(step, place, name, count)
                allowed = max(given, exact(count))
                yield Difference(step, place, name, (a[name], b[name]), share, allowed, count)


def layer_and_kind(place: str) -> tuple[str, str]:
    """Row and column of the table."""
    if place == "loss":
        return "loss", "output"
    for ending, kind in ((" output gradient", "gradient there"), (" output", "output")):
        if place.endswith(ending):
            return place.removesuffix(ending), kind
    parts = place.split(".")
    layer = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
    return layer, "their gradients" if place.endswith(" gradient") else "weights"


def table(found: list[Difference]) -> str:
    """Of each layer, in the order of the forward pass, and each kind of place: what is furthest from the tolerance."""
    cells: dict[str, dict[str, Difference]] = {}
    for one in found:
        layer, kind = layer_and_kind(one.place)
        of_layer = cells.setdefault(layer, {})
        if kind not in of_layer or rank(one) > rank(of_layer[kind]):
            of_layer[kind] = one
    lines = ["| layer | " + " | ".join(KINDS) + " |", "| --- " * (1 + len(KINDS)) + "|"]
    for layer, of_layer in cells.items():
        lines.append(f"| {layer} | " + " | ".join(cell(of_layer.get(kind)) for kind in KINDS) + " |")
    return "\n".join(lines)


def rank(one: Difference) -> tuple[float, float]:
    """Not finite comes before all."""
    return (math.inf, math.inf) if math.isnan(one.share) else (one.size, one.share)


def cell(one: Difference | None) -> str:
    if one is None:
        return ""
    if one.statistic == "not_finite":
        return f"**not finite, step {one.step}**"
    if one.is_exact and not one.is_beyond:
        return "none"
    text = f"{percent(one.share)} ({one.statistic}, step {one.step})"
    return f"**{text}**" if one.is_beyond else text


# The command


def compare(folders: list[Path], given: float | None) -> bool:
    """Prints the table and what was found. Returns whether the runs agree."""
    first, other = (read_run(folder) for folder in folders)
    steps = common_steps(first, other)
    places = first.steps[steps[0]]
    tolerance: float | Rounding
    if given is None:
        precision = min((precision_of(run) for run in (first, other)), key=UNIT_ROUNDOFF.__getitem__)
        tolerance, what = Rounding(precision, places, steps[0]), f"the rounding of {precision}"
    else:
        tolerance, what = given, percent(given)
    found = list(differences(first, other, steps, tolerance))
    span = f"steps {steps[0]} to {steps[-1]}, {len(steps)} of them in both, {len(places)} places each"
    print(f"{first.folder} and {other.folder}: {span}")
    print(f"the largest differences; in bold what is beyond the tolerance, {what}\n\n{table(found)}\n")
    for line in [*settings_that_differ(first, other), *(f"- {line}" for line in verdict(found))]:
        print(line)
    return not any(one.is_beyond for one in found)


def verdict(found: list[Difference]) -> list[str]:
    unlike = next((one for one in found if not one.is_exact), None)
    if unlike is None:
        return ["AGREE: alike at all places, to the last bits of the sums"]
    lines = [f"alike to the last bits before {unlike.told()}"]
    beyond = next((one for one in found if one.is_beyond), None)
    if beyond is None:
        return [*lines, f"AGREE: nothing is beyond the tolerance; closest to it: {max(found, key=rank).told()}"]
    number = len({(one.step, one.place) for one in found if one.is_beyond})
    return [
        *lines,
        f"DIFFER: beyond the tolerance first at {beyond.told()}, allowed {percent(beyond.allowed)}; {number} of "
        f"{len({(one.step, one.place) for one in found})} places in all",
    ]


def settings_that_differ(first: Run, other: Run) -> list[str]:
    return [
        f"- `{key}`: {json.dumps(value)} and {json.dumps(other.settings[key])}"
        for key, value in first.settings.items()
        if not key.startswith(("job.", "metrics.")) and other.settings.get(key, value) != value
    ]


def main() -> int:
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m scripts.compare_layers", description=about)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="a run's folder")
    text = "largest difference of a statistic, as a share, at any step (default: what rounding makes)"
    parser.add_argument("--tolerance", type=float, metavar="SHARE", help=text)
    arguments = parser.parse_args()
    try:
        if arguments.tolerance is not None and not 0 <= arguments.tolerance < math.inf:
            raise UserError(f"--tolerance {arguments.tolerance}: give a share, for example 0.001, or 0")
        return 0 if compare(arguments.runs, arguments.tolerance) else 1
    except UserError as error:
        print(f"compare_layers: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
