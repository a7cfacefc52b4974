"""The charts of scripts/report.py: SVG that goes into a page, in the page's colours, light or dark."""

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from scripts.loss_curves import DASHES

COLOURS = 6
"""Of runs, as the page has them; more runs than these have the same again, dashed."""
# Stand-ins: no others of the picture's colours are like them, and the page's take their place.
INK, FAINT = "#010101", "#020202"
SERIES = [f"#0300{i:02x}" for i in range(COLOURS)]
VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)"} | {c: f"var(--run{i})" for i, c in enumerate(SERIES)}
STYLE: Any = {
    "svg.fonttype": "none", "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT,
    "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": FAINT,
    "axes.grid": True, "grid.alpha": 0.35, "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One curve: what a run has of a quantity."""

    run: int
    steps: Sequence[int]
    values: Sequence[float]
    """NaN where there is none: the line is broken there."""
    style: str = "plain"
    """plain; raw, behind its smoothed line; upper, above the plain one of the same run; points, with dots."""
    sets_scale: Sequence[bool] = ()
    """Of each value, whether it must be in the picture. Empty: all."""


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    lines: list[Line]
    restarts: list[tuple[int, int]]
    """(run, step) of the last line before each."""
    first_step: int
    last_step: int
    """Where the axis begins and ends."""
    note: str = ""
    from_zero: bool = False


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of the `window` values around each, an odd number, and fewer towards the ends: it does not lag.

    NaN stays, and counts for none.
    """
    numbers = numpy.asarray(values, dtype=float)
    finite = numpy.isfinite(numbers)
    sums = numpy.concatenate([[0], numpy.cumsum(numpy.where(finite, numbers, 0))])
    counts = numpy.concatenate([[0], numpy.cumsum(finite)])
    at = numpy.arange(len(numbers))
    reach = numpy.minimum(window // 2, numpy.minimum(at, len(numbers) - 1 - at))
    first, end = at - reach, at + reach + 1
    means = (sums[end] - sums[first]) / numpy.maximum(counts[end] - counts[first], 1)
    return numpy.where(finite, means, numpy.nan).tolist()


def draw(chart: Chart) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.9), layout="constrained")
        axes = figure.subplots()
        for line in chart.lines:
            axes.plot(line.steps, line.values, **style_of(line))
        for run, step in chart.restarts:
            axes.axvline(step, color=SERIES[run % COLOURS], linewidth=1, linestyle=":")
        axes.set_xlabel("step")
        axes.set_ylabel(chart.unit)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        set_limits(axes, chart)
        margin = 0.02 * (chart.last_step - chart.first_step)
        axes.set_xlim(chart.first_step - margin, chart.last_step + margin)
    return figure


def style_of(line: Line) -> dict[str, Any]:
    colour, again = SERIES[line.run % COLOURS], line.run // COLOURS
    style: dict[str, Any] = {"color": colour, "linewidth": 1.5}
    if again:
        style["linestyle"] = DASHES[(again - 1) % len(DASHES)]
    if line.style == "raw":
        style |= {"linewidth": 0.8, "alpha": 0.35}
    elif line.style == "upper":
        style |= {"linewidth": 0.9, "alpha": 0.7}
    if line.style == "points" or len(line.steps) == 1:
        style |= {"marker": "o", "markersize": 3}
    return style


def set_limits(axes: Axes, chart: Chart) -> None:
    """What compiles would flatten all the rest: it sets no scale."""
    shown = [
        value
        for line in chart.lines
        for step, value, sets in zip(line.steps, line.values, line.sets_scale or repeat(True), strict=False)
        if sets and step >= chart.first_step and math.isfinite(value)
    ]
    if not shown:
        return
    if max(shown) >= 1000:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    low, high = 0.0 if chart.from_zero else min(shown), max(shown)
    if not chart.from_zero and low > 0 and high > 50 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.2, high * 1.2)
        return
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    axes.set_ylim(low if chart.from_zero else low - margin, high + margin)


def svg(chart: Chart) -> str:
    """The chart as an element of a page: no fonts, no fixed size, nothing that is fetched."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title}):
        draw(chart).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="(?:figure|axes|text|line2d|matplotlib\.axis|xtick|ytick|patch)_?\d*"', "", text)
    text = re.sub(r"(font: [\d.]+px) [^;\"]*", r"\1 sans-serif", text)
    label = f'role="img" aria-label="{html.escape(chart.title)}"'
    text = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf"<svg \1 {label}>", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return text.strip()
