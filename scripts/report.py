"""One page on one or more runs: curves over one another, speed, goodput, what was applied, how they differ.

    python -m scripts.report outputs/debug                                # writes report.html
    python -m scripts.report outputs/a outputs/b --output both.html

Give the folders of runs (job.dump_folder), also of such as are still going on. The page is one file that fetches
nothing: it can be sent, and read on a phone. docs/seeing.md says what the quantities are.
"""

import argparse
import html
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from errors import UserError
from scripts.loss_curves import metrics_of, settings_of
from scripts.report_charts import COLOURS, Chart, Line, smoothed, svg
from telemetry.goodput import PARTS, last_totals

CSS = Path(__file__).with_suffix(".css")
NONE = "–"
SPACE = "\N{NO-BREAK SPACE}"
NOT_COMPARED = ("job.dump_folder", "job.description")


@dataclass(frozen=True)
class Run:
    name: str
    folder: Path
    lines: list[dict[str, Any]]
    """Of metrics.jsonl, those of training steps, in order."""
    validation: dict[int, float]
    """Step -> loss; NaN where it was not finite."""
    totals: dict[str, Any] | None
    """The latest that the run knows of its goodput."""
    settings: dict[str, Any]
    """`section.key` -> value; empty where there is no config.toml."""
    applied: list[tuple[str, list[str]]]
    """Technique -> asked for, applied."""

    def column(self, key: str) -> list[float]:
        """Of each line; NaN where it was not finite or is not there."""
        return [math.nan if line.get(key) is None else line[key] for line in self.lines]

    def known(self, key: str) -> list[float]:
        return [value for value in self.column(key) if math.isfinite(value)]

    @property
    def last(self) -> dict[str, Any]:
        return self.lines[-1]

    def starts(self) -> list[bool]:
        """Of each line, whether a start's first step, which compiles, is in it."""
        restarts = [line.get("run_restarts", 0) for line in self.lines]
        return [i == 0 or restarts[i] != restarts[i - 1] for i in range(len(restarts))]

    def restarted_after(self) -> list[int]:
        return [self.lines[i - 1]["step"] for i, start in enumerate(self.starts()) if start and i > 0]


def read_run(name: str, folder: Path) -> Run:
    """Raises UserError where the folder is not a run's, has no step of one yet, or holds something damaged."""
    lines = metrics_of(name, folder)
    training = [line for line in lines if "loss" in line]
    if not training:
        raise UserError(f"{name}: {folder / 'metrics.jsonl'} has no loss of any step: did the run begin at all?")
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    validation = {step: math.nan if loss is None else loss for step, loss in losses.items()}
    path = folder / "config.toml"
    try:
        settings = settings_of(folder)
        path = folder / "applied.json"
        rows = json.loads(path.read_text()) if path.is_file() else []
        applied = [(row["technique"], [row["asked"], row["applied"]]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{name}: {path} is not as train.py writes it ({error}): mend it, or move it away") from error
    return Run(name, folder, training, validation, last_totals(folder), settings, applied)


def read_runs(folders: list[Path]) -> list[Run]:
    """Named after their folders; those whose names are alike after more of their paths."""
    paths = [Path(os.path.abspath(folder)) for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f"{path} is given twice: name each run once")
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    return [read_run("/".join(path.parts[-parts:]), folder) for path, folder in zip(paths, folders, strict=True)]


# What the page says of a run, as text: the summary's rows.


def state(run: Run) -> str:
    totals = run.totals or {}
    if totals.get("ended") == "done":
        return "done"
    return f"stopped: {totals['ended']}" if "ended" in totals else "goes on, or was killed"


def steps(run: Run) -> str:
    asked = run.settings.get("training.steps")
    return f"{run.last['step']:,}" + ("" if asked is None else f" of {asked:,}")


def loss(run: Run) -> str:
    return number(run.column("loss")[-1], ".4f")


def validation_loss(run: Run) -> str:
    return number(list(run.validation.values())[-1], ".4f") if run.validation else NONE


def lowest_validation_loss(run: Run) -> str:
    found = {step: value for step, value in run.validation.items() if math.isfinite(value)}
    step = min(found, key=found.__getitem__, default=None)
    return NONE if step is None else f"{found[step]:.4f} at step {step:,}"


def median(key: str, form: str) -> Callable[[Run], str]:
    """Of all lines but those whose steps compile, where there are others."""

    def text(run: Run) -> str:
        starts, values = run.starts(), run.column(key)
        shown = [v for v, start in zip(values, starts, strict=True) if not start and math.isfinite(v)]
        shown = shown or run.known(key)
        return format(statistics.median(shown), form) if shown else NONE

    return text


def step_time(run: Run) -> str:
    keys = [f"process_step_seconds_{name}" for name in ("p50", "p95", "max")]
    return " / ".join(f"{run.last[key]:.3g}{SPACE}s" for key in keys) if all(key in run.last for key in keys) else NONE


def memory(run: Run) -> str:
    return number(max(run.known("memory_gib"), default=math.nan), ".2f")


def goodput(run: Run) -> str:
    return NONE if run.totals is None else f"{100 * run.totals['goodput']:.1f}{SPACE}%"


def wall_time(run: Run) -> str:
    return NONE if run.totals is None else duration(run.totals["run_seconds"])


def restarts(run: Run) -> str:
    if run.totals is None:
        return NONE
    after = ", ".join(f"{step:,}" for step in run.restarted_after())
    return f"{int(run.totals['run_restarts'])}" + (f" (after step {after})" if after else "")


def slowest_rank(run: Run) -> str:
    lines = [line for line in run.lines if line.get("block_seconds")]
    if not lines:
        return NONE
    ((rank, times),) = Counter(int(line["slowest_rank"]) for line in lines).most_common(1)
    excess = statistics.median(line["block_seconds_max"] / line["block_seconds"] - 1 for line in lines)
    return f"{rank}, in {times} of {len(lines)} logs; the slowest is {100 * excess:.0f} % above the median"


SUMMARY: list[tuple[str, Callable[[Run], str]]] = [
    ("state", state),
    ("model", lambda run: str(run.settings.get("model.flavor", NONE))),
    ("steps", steps),
    ("tokens", lambda run: number(run.last.get("tokens_seen"), ",.0f")),
    ("loss at the last step, nats a token", loss),
    ("validation loss, last", validation_loss),
    ("validation loss, lowest", lowest_validation_loss),
    ("tokens/s a rank, median", median("tokens_per_second", ",.0f")),
    ("MFU, median", median("mfu", ".1%")),
    ("step time, p50 / p95 / max since its last start", step_time),
    ("memory, peak of the first rank, GiB", memory),
    ("goodput", goodput),
    ("wall time", wall_time),
    ("restarts", restarts),
    ("recompiled after the first step", lambda run: number(run.last.get("recompiles"), ".0f")),
    ("slowest rank", slowest_rank),
    ("steps left out, not finite", lambda run: number(run.last.get("skipped_steps"), ".0f")),
]


def number(value: float | None, form: str) -> str:
    if value is None:
        return NONE
    return format(value, form) if math.isfinite(value) else "not finite"


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if seconds >= 60 else f"{seconds:.1f}{SPACE}s"


# Charts


def charts(runs: list[Run]) -> list[Chart]:
    """Those that any run has something for."""
    marks = [(i, step) for i, run in enumerate(runs) for step in run.restarted_after()]
    last_step = max(run.last["step"] for run in runs)

    def lines(key: str, style: str = "plain", compiling_sets_scale: bool = True) -> list[Line]:
        found = []
        for i, run in enumerate(runs):
            sets_scale = [] if compiling_sets_scale or all(run.starts()) else [not start for start in run.starts()]
            if run.known(key):
                found.append(Line(i, [line["step"] for line in run.lines], run.column(key), style, sets_scale))
        return found

    def chart(title: str, unit: str, lines: list[Line], note: str = "", first: int = 0, zero: bool = False) -> Chart:
        return Chart(title, unit, lines, marks, first, last_step, note, zero)

    window = max(len(run.lines) for run in runs) // 25 | 1
    loss = lines("loss", "raw" if window > 1 else "plain")
    loss += [Line(line.run, line.steps, smoothed(line.values, window)) for line in loss] if window > 1 else []
    faint = f"Faint: as logged. Strong: the mean of {window} logs around each." if window > 1 else ""
    validation = [
        Line(i, list(run.validation), list(run.validation.values()), "points")
        for i, run in enumerate(runs)
        if run.validation
    ]
    speed = lines("tokens_per_second", compiling_sets_scale=False)
    seconds = lines("step_seconds_p50", compiling_sets_scale=False)
    seconds += lines("step_seconds_p95", "upper", compiling_sets_scale=False)
    compiles = "The first log after a start, whose steps compile, may lie outside."
    percentiles = f"Strong: p50 of the steps since the log before. Thin: their p95. {compiles}"
    made = [
        chart("Loss", "loss, nats a token", loss, faint),
        chart("Loss, last half", "loss, nats a token", loss, faint, first=last_step // 2),
        chart("Validation loss", "loss, nats a token", validation),
        chart("Learning rate", "learning rate", lines("lr"), zero=True),
        chart("Gradient norm", "norm, before clipping", lines("grad_norm")),
        chart("Speed", "tokens/s of a rank", speed, compiles, zero=True),
        chart("Step time", "seconds a step", seconds, percentiles, zero=True),
        chart("Memory", "GiB, peak of the first rank", lines("memory_gib"), zero=True),
    ]
    return [chart for chart in made if chart.lines]


# The page


def page(runs: list[Run], made: str) -> str:
    names = ", ".join(run.name for run in runs)
    sections = [
        ("Summary", summary(runs)),
        ("Curves", curves(runs)),
        ("Goodput: what the wall time went into", goodput_bars(runs)),
        ("Differences of configuration", differences(runs)),
        ("Asked for and applied", applied(runs)),
    ]
    body = "\n".join(f"<section>\n<h2>{head}</h2>\n{content}\n</section>" for head, content in sections if content)
    places = "; ".join(f"{escape(run.name)}: <code>{escape(str(run.folder))}</code>" for run in runs)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Run report: {escape(names)}</title>\n<style>\n{CSS.read_text()}</style>\n</head>\n<body>\n"
        f"<h1>Run report</h1>\n<p>{made}. {places}</p>\n{body}\n</body>\n</html>\n"
    )


def table(heads: list[str], rows: list[tuple[str, list[str]]], first: str = "") -> str:
    """Columns `heads`; the first column, of the rows' heads, stays in view. All is text."""
    top = "".join(f"<th>{escape(head)}</th>" for head in [first, *heads])
    body = "\n".join(
        f"<tr><th>{escape(head)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for head, cells in rows
    )
    return f'<div class="scrolls"><table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def summary(runs: list[Run]) -> str:
    """Without the rows that no run has anything for."""
    rows = [(head, [text(run) for run in runs]) for head, text in SUMMARY]
    return table([run.name for run in runs], [row for row in rows if set(row[1]) != {NONE}])


def curves(runs: list[Run]) -> str:
    legend = "".join(
        f'<li><span class="chip run{i % COLOURS}{" again" if i >= COLOURS else ""}"></span>{escape(run.name)}</li>'
        for i, run in enumerate(runs)
    )
    marks = "<p>Dotted upright lines: restarts.</p>" if any(run.restarted_after() for run in runs) else ""
    figures = "\n".join(
        f"<figure><h3>{chart.title}</h3>{svg(chart)}<figcaption>{chart.note}</figcaption></figure>"
        for chart in charts(runs)
    )
    return f'<ul class="legend">{legend}</ul>{marks}\n<div class="charts">\n{figures}\n</div>'


def goodput_bars(runs: list[Run]) -> str:
    """A bar a run, and the same as figures."""
    known = [(run, run.totals) for run in runs if run.totals is not None]
    if not known:
        return ""
    bars, columns = [], []
    parts = {"steps": "steps", **PARTS}
    for run, totals in known:
        seconds = {"steps": totals["goodput"] * totals["run_seconds"]} | {key: totals[key] for key in PARTS}
        shares = {key: 100 * seconds[key] / totals["run_seconds"] for key in parts}
        pieces = "".join(
            f'<span class="part{i}" style="width:{shares[key]:.3f}%" title="{text}: {shares[key]:.1f} %"></span>'
            for i, (key, text) in enumerate(parts.items())
        )
        label = f"{escape(run.name)}: {100 * totals['goodput']:.1f}{SPACE}% of {duration(totals['run_seconds'])}"
        bars.append(f'<p>{label}</p><div class="bar" role="img" aria-label="{label}">{pieces}</div>')
        columns.append([f"{shares[key]:.1f}{SPACE}% ({duration(seconds[key])})" for key in parts])
    legend = "".join(f'<li><span class="chip part{i}"></span>{text}</li>' for i, text in enumerate(parts.values()))
    rows = [(text, [column[i] for column in columns]) for i, text in enumerate(parts.values())]
    return f'<ul class="legend">{legend}</ul>{"".join(bars)}\n' + table([run.name for run, _ in known], rows)


def differences(runs: list[Run]) -> str:
    known = [run for run in runs if run.settings]
    if len(known) < 2:
        return ""
    keys = dict.fromkeys(key for run in known for key in run.settings)
    rows = []
    for key in keys:
        values = [json.dumps(run.settings[key]) if key in run.settings else NONE for run in known]
        if len(set(values)) > 1 and key not in NOT_COMPARED:
            rows.append((key, values))
    if not rows:
        return "<p>None: all keys have the same values.</p>"
    return table([run.name for run in known], rows, "key")


def applied(runs: list[Run]) -> str:
    """A table a run, or one where all are alike."""
    known = [run for run in runs if run.applied]
    tables = [table(["asked for", "applied"], run.applied) for run in known]
    if len(set(tables)) == 1:
        return tables[0] if len(known) == 1 else f"<p>The same in all runs.</p>{tables[0]}"
    return "\n".join(f"<h3>{escape(run.name)}</h3>{text}" for run, text in zip(known, tables, strict=True))


def escape(text: str) -> str:
    return html.escape(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.report", description="One HTML page on one or more runs; it fetches nothing."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder (job.dump_folder)")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s")
    args = parser.parse_args()
    try:
        text = page(read_runs(args.runs), time.strftime("%Y-%m-%d %H:%M"))
        write(args.output, text)
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(f"{args.output} ({len(text.encode()) / 2**10:,.0f} KiB)")
    return 0


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written ({error.strerror}): choose another") from error


if __name__ == "__main__":
    sys.exit(main())
