"""Loss curves: read from run folders, set against the first of them; figures, a verdict, a table and a picture.

A *gap* is a loss minus the first curve's loss at the same step, in nats a token; a relative gap is its size as a share
of the first curve's loss. scripts/compare_loss.py is the command.
"""

import json
import math
import statistics
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from errors import UserError

# What fixes initial weights and batches. Curves that differ here are those of different experiments.
SAME_START = (
    "debug.seed", "model.flavor", "model.n_layers", "model.vocab_size", "model.tokenizer_path", "training.dataset",
    "training.dataset_path", "training.seq_len",
)  # fmt: skip

VARIANT = "variant.json"  # What scripts/compare_loss.py keeps beside a run: {"finished": when, "record": what of}.

# Okabe and Ito: told apart by the colour-blind. The first is the curve that the others are compared with.
COLOURS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
DASHES: list[Any] = [(0, (8, 2)), (0, (2, 1)), (0, (7, 2, 2, 2))]


@dataclass(frozen=True)
class Curve:
    """One run, as its folder tells of it."""

    name: str
    losses: dict[int, float]
    """Step -> loss, in order; NaN where it was not finite."""
    not_finite: dict[int, str]
    """Step -> which of loss and grad_norm was NaN or infinite."""
    grad_norms: dict[int, float]
    """Of the same steps."""
    tokens_a_step: int
    tokens_per_second: float
    """Of one rank: the median of all lines but the first, whose step compiles."""
    memory_gib: float
    """The first rank's peak."""
    settings: dict[str, Any]
    """`section.key` -> value, of the resolved configuration, and "ranks"; empty where the folder does not tell."""

    @property
    def last_step(self) -> int:
        return max(self.losses)

    @property
    def ended_not_finite(self) -> bool:
        """Whether NaN or infinity ended the run: then no later steps are missing."""
        return self.last_step in self.not_finite


def read_curve(name: str, folder: Path, steps: int | None = None) -> Curve:
    """The run in `folder`, to step `steps` where that is given. Raises UserError where it has no such losses."""
    lines = [line for line in metrics_of(name, folder) if "loss" in line and (steps is None or line["step"] <= steps)]
    if not lines:
        raise UserError(f"{name}: {folder / 'metrics.jsonl'} has no loss of any step: did the run begin at all?")
    lines.sort(key=lambda line: line["step"])
    bad = {line["step"]: {"loss", "grad_norm"}.intersection(line.get("nonfinite", [])) for line in lines}
    curve = Curve(
        name,
        losses=by_step(lines, "loss"),
        not_finite={step: " and ".join(sorted(names, reverse=True)) for step, names in bad.items() if names},
        grad_norms=by_step(lines, "grad_norm"),
        tokens_a_step=lines[0]["tokens_seen"] // lines[0]["step"],
        tokens_per_second=statistics.median(line["tokens_per_second"] for line in lines[1:] or lines),
        memory_gib=max(line["memory_gib"] for line in lines),
        settings=settings_of(folder),
    )
    if steps is not None and curve.last_step < steps and not curve.ended_not_finite:
        raise UserError(f"{name}: {folder} ends at step {curve.last_step}: let it go on, or lower --steps from {steps}")
    return curve


def metrics_of(name: str, folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl. Raises UserError where it cannot be read."""
    path = folder / "metrics.jsonl"
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UserError(
            f"{name}: {path} cannot be read ({error.strerror}): give the folder of a run (its job.dump_folder)"
        ) from error
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue  # A kill has cut it off. The step that it told of is missed later on.
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def by_step(lines: list[dict[str, Any]], key: str) -> dict[int, float]:
    return {line["step"]: math.nan if line[key] is None else line[key] for line in lines}


def settings_of(folder: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads((folder / "config.toml").read_text())
    except OSError:
        return {}
    settings = {f"{section}.{key}": value for section, keys in content.items() for key, value in keys.items()}
    record = folder / VARIANT
    return settings | ({"ranks": json.loads(record.read_text())["record"]["ranks"]} if record.is_file() else {})


def check_tokens(tokens: dict[str, int]) -> None:
    """Raises UserError where the runs, by name, do not read as many tokens a step as the first."""
    first = next(iter(tokens))
    for name, number in tokens.items():
        if number != tokens[first]:
            raise UserError(
                f"{name}: {number:,} tokens a step, and {first} {tokens[first]:,}: their steps cannot be compared; "
                "give both the same training.seq_len and training.global_batch_size"
            )


def check_steps(curves: list[Curve]) -> None:
    """Raises UserError where a curve lacks steps that another has."""
    for curve in curves:
        for other in curves:
            missing = other.losses.keys() - curve.losses.keys()
            if curve.ended_not_finite:
                missing = {step for step in missing if step < curve.last_step}
            if missing and min(missing) > curve.last_step:
                raise UserError(
                    f"{curve.name} ends at step {curve.last_step}, {other.name} at step {other.last_step}: let it go "
                    f"on, or compare what both have with --steps {curve.last_step}"
                )
            if missing:
                raise UserError(
                    f"{curve.name} lacks {len(missing)} of the {len(other.losses)} steps that {other.name} has, the "
                    f"first is step {min(missing)}: train both with --metrics.log_freq 1"
                )


@dataclass(frozen=True)
class Difference:
    """How far a curve is from the first one, over the steps that both have."""

    name: str
    steps: int
    final_loss: float
    mean_gap: float
    """Of the sizes."""
    mean_relative_gap: float
    mean_signed_gap: float
    """Above 0: on the whole the loss is higher than the first curve's."""
    largest_gap: float
    """At the step whose relative gap is the largest."""
    largest_relative_gap: float
    largest_gap_step: int
    grad_norm_ratio: float
    """The median of gradient norm / the first curve's. What AdamW hides: a gradient that is wrong by a factor."""
    first_step_beyond: int | None
    steps_beyond: int
    not_finite_step: int | None
    within: bool
    tokens_per_second: float
    memory_gib: float


def difference(curve: Curve, first: Curve, tolerance: float) -> Difference:
    steps = [step for step in curve.losses if step in first.losses]
    gaps = {step: curve.losses[step] - first.losses[step] for step in steps}
    relative = {step: relative_gap(gaps[step], first.losses[step]) for step in steps}
    finite = [step for step in steps if math.isfinite(gaps[step])]
    largest = max(steps, key=lambda step: relative[step] if math.isfinite(gaps[step]) else -1)
    ratios = [curve.grad_norms[step] / first.grad_norms[step] for step in finite if first.grad_norms[step]]
    beyond = [step for step in steps if not relative[step] <= tolerance]  # NaN is beyond any tolerance.
    return Difference(
        curve.name,
        steps=len(steps),
        final_loss=curve.losses[curve.last_step],
        mean_gap=mean(abs(gaps[step]) for step in finite),
        mean_relative_gap=mean(relative[step] for step in finite),
        mean_signed_gap=mean(gaps[step] for step in finite),
        largest_gap=gaps[largest],
        largest_relative_gap=relative[largest],
        largest_gap_step=largest,
        grad_norm_ratio=statistics.median(ratios) if ratios else math.nan,
        first_step_beyond=min(beyond, default=None),
        steps_beyond=len(beyond),
        not_finite_step=min(curve.not_finite, default=None),
        within=not beyond and not curve.not_finite,
        tokens_per_second=curve.tokens_per_second,
        memory_gib=curve.memory_gib,
    )


def relative_gap(gap: float, loss: float) -> float:
    if gap == 0:
        return 0.0
    return abs(gap / loss) if loss else math.inf


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return statistics.fmean(values) if values else math.nan


def verdict(curve: Curve, first: Curve, found: Difference, tolerance: float) -> str:
    """A sentence on each curve; the first one's is about itself alone."""
    if found.not_finite_step is not None:
        bad = curve.not_finite[found.not_finite_step]
        end = "; the run ended there" if curve.ended_not_finite else ""
        return f"{curve.name} FAILS: not finite at step {found.not_finite_step}: {bad}{end}"
    if curve is first:
        return f"{curve.name} is what the others are compared with"
    if found.first_step_beyond is None:
        if tolerance == 0:
            return f"{curve.name} passes: bit-identical to {first.name} at all {found.steps} steps"
        return f"{curve.name} passes: within {percent(tolerance)} of {first.name} at all {found.steps} steps"
    if tolerance == 0:
        what = f"its losses are not {first.name}'s"
    else:
        what = f"it is more than {percent(tolerance)} from {first.name}"
    step = found.first_step_beyond
    return (
        f"{curve.name} FAILS: {what} at {found.steps_beyond} of {found.steps} steps, first at step {step}: "
        f"{curve.losses[step]:.9g}, not {first.losses[step]:.9g}"
    )


def notes(curve: Curve, first: Curve) -> list[str]:
    """What is set otherwise than in the first run; a warning where that alone makes another curve."""
    if not curve.settings or not first.settings:
        return []
    keys = [key for key in curve.settings if key in first.settings and curve.settings[key] != first.settings[key]]
    keys = [key for key in keys if not key.startswith(("job.", "metrics."))]
    changes = [f"`{key} = {json.dumps(curve.settings[key])}`" for key in keys]
    lines = [f"{curve.name}: {', '.join(changes)}"] if changes else []
    other_start = [key for key in SAME_START if key in keys]
    if other_start:
        text = f"WARNING: {curve.name} does not begin as {first.name} does, or reads something else "
        lines.append(text + f"({', '.join(other_start)}): the gap is that of two experiments")
    return lines


def limit_text(tolerance: float) -> str:
    return "bit-exact" if tolerance == 0 else f"tolerance {percent(tolerance)}"


def percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def markdown(differences: list[Difference], tolerance: float) -> str:
    beyond = "first step that differs" if tolerance == 0 else f"first step beyond {percent(tolerance)}"
    heads = ["variant", "final loss", "mean gap", "mean, signed", "largest gap", "at step", beyond]
    heads += ["grad norm, ratio", "tokens/s a rank", "GiB"]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for i, d in enumerate(differences):
        cells = [d.name, f"{d.final_loss:.4f}"]
        if i == 0:
            cells += [""] * 6
        else:
            cells += [f"{d.mean_gap:.2g} ({percent(d.mean_relative_gap)})", f"{d.mean_signed_gap:+.2g}"]
            at = "" if d.largest_gap == 0 else str(d.largest_gap_step)
            cells += [f"{d.largest_gap:+.2g} ({percent(d.largest_relative_gap)})", at]
            cells += ["none" if d.first_step_beyond is None else str(d.first_step_beyond), f"{d.grad_norm_ratio:.3f}"]
        cells += [f"{d.tokens_per_second:,.0f}", f"{d.memory_gib:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_json(path: Path, differences: list[Difference], tolerance: float) -> None:
    """The table's figures in full, as strict JSON: null where a figure is not finite."""
    variants = [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in d.items()}
        for d in map(asdict, differences)
    ]
    within = all(d.within for d in differences)
    content = {"first": differences[0].name, "tolerance": tolerance, "within": within, "variants": variants}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def plot(path: Path, curves: list[Curve], tolerance: float, title: str) -> None:
    """A PNG: the curves, and below them their relative gaps with their sign."""
    figure = Figure(figsize=(9, 7), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    first, shown = curves[0], [0.0]
    for i, curve in enumerate(curves):
        # Curves that lie on each other show all the same: each is thinner than the one below it.
        width = 1.3 + 0.5 * (len(curves) - 1 - i)
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linewidth": width}
        style |= {"linewidth": width + 2, "alpha": 0.3} if i == 0 else {"linestyle": DASHES[i % len(DASHES)]}
        bad = f" (not finite at step {min(curve.not_finite)})" if curve.not_finite else ""
        upper.plot(list(curve.losses), list(curve.losses.values()), label=curve.name + bad, **style)
        steps = [step for step in curve.losses if first.losses.get(step)]
        shares = [100 * (curve.losses[step] / first.losses[step] - 1) for step in steps]
        lower.plot(steps, shares, **style)
        shown += [share for share in shares if math.isfinite(share)]
    for edge in (-tolerance, tolerance) if tolerance > 0 else ():
        lower.axhline(100 * edge, color="#777777", linewidth=1, linestyle=":")
    lower.set_ylim(*limits(shown, 100 * tolerance))
    if not any(shown):
        lower.text(0.5, 0.75, "no difference at any step", transform=lower.transAxes, ha="center", color="#555555")
    upper.set_title(title)
    upper.set_ylabel("loss, nats a token")
    lower.set_ylabel(f"gap to {first.name}, %\n({limit_text(tolerance)})")
    lower.set_xlabel("step")
    lower.xaxis.get_major_locator().set_params(integer=True)
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    upper.legend(frameon=False)
    figure.savefig(path)


def limits(shown: list[float], tolerance: float) -> tuple[float, float]:
    """The gaps fill the picture, but one gone astray must not flatten the others."""
    if not any(shown):
        return -1.0, 1.0
    most = 20 * tolerance or math.inf
    low, high = max(min(shown), -most), min(max(shown), most)
    margin = 0.1 * (high - low)
    return low - margin, high + margin
