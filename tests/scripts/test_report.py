"""The page says what the runs' files say, and a browser shows it, narrow and wide, light and dark."""

import json
import math
import random
import re
import shutil
import statistics
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy
import pytest

from config import load_config
from scripts import report
from scripts.report import charts, page, read_runs
from scripts.report_charts import draw, smoothed
from settings import write_toml
from telemetry.goodput import PARTS
from telemetry.metrics import MetricsConfig, MetricsWriter

APPLIED = [
    {"technique": "float8", "asked": "rowwise", "applied": "12 linear layers"},
    {"technique": "  left out", "asked": "<filter>", "applied": "1: output"},
]


TIMES = ("step_seconds", "process_step_seconds")


def totals(step: int, restarts: int) -> dict[str, float]:
    lost = {key: random.uniform(0, step) for key in PARTS}
    return {
        "goodput": 1 - sum(lost.values()) / (12 * step),
        "run_seconds": 12.0 * step,
        **lost,
        "run_restarts": restarts,
    }


def values(step: int, restarts: int) -> dict[str, float | None]:
    return {
        "loss": random.uniform(1, 9),
        "grad_norm": random.uniform(0.1, 3),
        "lr": random.uniform(1e-5, 1e-3),
        "skipped_steps": 0,
        "tokens_seen": step * 4096,
        "tokens_per_second": random.uniform(3000, 4000),
        "mfu": random.uniform(0.3, 0.5),
        "memory_gib": random.uniform(10, 60),
        **{
            f"{of}step_seconds_{name}": random.uniform(1, 2)
            for of in ("", "process_")
            for name in ("p50", "p95", "max")
        },
        "block_seconds": 1.0,
        "block_seconds_max": 1.25,
        "slowest_rank": 5,
        "recompiles": 2,
        **totals(step, restarts),
    }


def write_run(folder: Path, steps: int = 60, restart_after: int | None = None, flags: str = "") -> Path:
    """A log every 10 steps and at the first, a validation every 20; written as a run writes it."""
    writer = MetricsWriter(MetricsConfig(), folder, start_step=0, total_steps=steps)
    for step in (1, *range(10, steps + 1, 10)):
        writer.write(step, values(step, int(restart_after is not None and step > restart_after)))
        if step % 20 == 0:
            writer.write_validation(step, {"validation_loss": random.uniform(1, 9)})
    writer.close()
    argv = f"--config debug.toml --lr_scheduler.warmup_steps 0 --training.steps {steps} {flags}".split()
    write_toml(load_config([*argv, "--job.dump_folder", str(folder)], 1), folder / "config.toml")
    (folder / "applied.json").write_text(json.dumps(APPLIED))
    return folder


def lines_of(folder: Path, key: str = "loss") -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


class Reader(HTMLParser):
    """Section -> row's head -> cells, of the tables; and all text."""

    def __init__(self, text: str):
        super().__init__()
        self.tables: dict[str, dict[str, list[str]]] = {}
        self.tag, self.section, self.row, self.text = "", "", [], ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tag = tag
        if tag == "tr":
            self.row = []
        elif tag in ("th", "td"):
            self.row.append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tag == "h2":
            self.section = data
        elif self.tag in ("th", "td"):
            self.row[-1] += data.replace("\N{NO-BREAK SPACE}", " ")

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr":
            self.tables.setdefault(self.section, {})[self.row[0]] = self.row[1:]
        self.tag = ""


def read(*folders: Path) -> Reader:
    return Reader(page(read_runs(list(folders)), "now"))


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / "a", 60, restart_after=30),
        write_run(tmp_path / "b", 40, flags="--optimizer.lr 1e-3 --float8.recipe_name rowwise"),
    ]


def test_the_summary_has_the_numbers_of_the_files(two: list[Path]) -> None:
    summary = read(*two).tables["Summary"]
    assert summary[""] == ["a", "b"]
    for i, folder in enumerate(two):
        lines, validation = lines_of(folder), lines_of(folder, "validation_loss")
        last, cells = lines[-1], {head: row[i] for head, row in summary.items()}
        # The lines whose steps compile: the first, and in "a" the one after the restart.
        steady = [line for line in lines if line["step"] not in ((1, 40) if i == 0 else (1,))]
        speed = statistics.median(line["tokens_per_second"] for line in steady)
        times = " / ".join(f"{last[f'process_step_seconds_{name}']:.3g} s" for name in ("p50", "p95", "max"))
        lowest = min(validation, key=lambda line: line["validation_loss"])
        assert cells["steps"] == ("60 of 60" if i == 0 else "40 of 40")
        assert cells["tokens"] == f"{last['tokens_seen']:,}"
        assert cells["loss at the last step, nats a token"] == f"{last['loss']:.4f}"
        assert cells["validation loss, last"] == f"{validation[-1]['validation_loss']:.4f}"
        assert cells["validation loss, lowest"] == f"{lowest['validation_loss']:.4f} at step {lowest['step']}"
        assert cells["tokens/s a rank, median"] == f"{speed:,.0f}"
        assert cells["MFU, median"] == f"{statistics.median(line['mfu'] for line in steady):.1%}"
        assert cells["step time, p50 / p95 / max since its last start"] == times
        assert cells["memory, peak of the first rank, GiB"] == f"{max(line['memory_gib'] for line in lines):.2f}"
        assert cells["goodput"] == f"{100 * last['goodput']:.1f} %"
        assert cells["restarts"] == ("1 (after step 30)" if i == 0 else "0")
        assert (
            cells["slowest rank"].startswith(f"5, in {len(lines)} of {len(lines)} logs")
            and "25 %" in cells["slowest rank"]
        )
        assert cells["state"] == "goes on, or was killed"


@pytest.mark.parametrize("ended", ["done", "SIGTERM"])
def test_a_run_that_has_ended(tmp_path: Path, ended: str) -> None:
    folder = write_run(tmp_path / "a")
    end = {"step": 60, "ended": ended, **totals(60, 0), "time": 1e12}
    (folder / "goodput.json").write_text(json.dumps(end))
    reader = read(folder)
    assert reader.tables["Summary"]["state"] == ["done" if ended == "done" else "stopped: SIGTERM"]
    # With its last save, which no line of metrics.jsonl has seen.
    assert reader.tables["Summary"]["goodput"] == [f"{100 * end['goodput']:.1f} %"]


def test_the_charts_have_the_points_of_the_files(two: list[Path]) -> None:
    runs = read_runs(two)
    made = {chart.title: chart for chart in charts(runs)}
    keys = {
        "Loss": ["loss"], "Loss, last half": ["loss"], "Learning rate": ["lr"], "Gradient norm": ["grad_norm"],
        "Speed": ["tokens_per_second"], "Memory": ["memory_gib"], "Step time": ["step_seconds_p50", "step_seconds_p95"],
        "Validation loss": ["validation_loss"],
    }  # fmt: skip
    assert made.keys() == keys.keys()
    for title, chart in made.items():
        (axes,) = draw(chart).axes
        assert axes.get_xlabel() == "step" and axes.get_ylabel() == chart.unit != ""
        expected = [
            [(line["step"], line[key]) for line in lines_of(folder, key)] for key in keys[title] for folder in two
        ]
        drawn = [[tuple(point) for point in line.get_xydata()] for line in axes.lines]
        assert drawn[: len(expected)] == expected
        ((x, _), (again, _)) = drawn[-1]
        assert x == again == 30 and len(drawn) == len(expected) + 1  # The restart of "a".
        shown = [y for line in expected for x, y in line if x not in (1, 40) and x >= axes.get_xlim()[0]]
        assert axes.get_ylim()[0] <= min(shown) and max(shown) <= axes.get_ylim()[1]


def test_many_logs_are_smoothed_beside_the_raw_ones(tmp_path: Path) -> None:
    loss, last_half = charts(read_runs([write_run(tmp_path / "a", 1000)]))[:2]
    raw, smooth = loss.lines
    assert (raw.style, smooth.style) == ("raw", "plain") and "mean of 5 logs" in loss.note
    assert list(smooth.values) == smoothed(raw.values, 5)
    (axes,) = draw(last_half).axes
    assert axes.get_xlim()[0] == pytest.approx(500, abs=20)


def test_smoothing() -> None:
    noise = numpy.random.default_rng().normal(size=200).tolist()
    expected = [statistics.fmean(noise[i - r : i + r + 1]) for i in range(200) for r in [min(4, i, 199 - i)]]
    assert smoothed(noise, 9) == pytest.approx(expected, abs=1e-12)
    slope = [3.0 * i for i in range(50)]
    assert smoothed(slope, 9) == pytest.approx(slope)  # It does not lag.
    broken = smoothed([1.0, math.nan, 3.0, 5.0, 1.0], 3)
    assert broken[0] == 1 and math.isnan(broken[1]) and broken[2:] == [4, 3, 1]


def test_goodput(two: list[Path]) -> None:
    text = page(read_runs(two), "now")
    rows = Reader(text).tables["Goodput: what the wall time went into"]
    widths = [[float(w) for w in re.findall(r"width:([\d.]+)%", bar)] for bar in text.split('class="bar"')[1:]]
    for i, folder in enumerate(two):
        last = lines_of(folder)[-1]
        shares = [100 * last["goodput"], *(100 * last[key] / last["run_seconds"] for key in PARTS)]
        assert widths[i] == pytest.approx(shares, abs=1e-3) and sum(widths[i]) == pytest.approx(100, abs=0.01)
        assert [rows[text][i].split(" (")[0] for text in ("steps", *PARTS.values())] == [f"{s:.1f} %" for s in shares]


def test_differences_and_what_was_applied(two: list[Path]) -> None:
    reader = read(*two)
    differences = reader.tables["Differences of configuration"]
    del differences["key"]
    assert differences == {
        "training.steps": ["60", "40"],
        "optimizer.lr": ["0.002", "0.001"],
        "float8.recipe_name": ['"none"', '"rowwise"'],
    }
    applied = reader.tables["Asked for and applied"]
    assert applied["float8"] == ["rowwise", "12 linear layers"] and applied["  left out"] == ["<filter>", "1: output"]
    assert "The same in all runs." in reader.text
    assert "Differences of configuration" not in read(two[0]).tables


def test_metrics_of_an_older_version(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0 / step} for step in (1, 2)] + [{"step": 3, "loss": None, "nonfinite": ["loss"]}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo')
    summary = read(tmp_path).tables["Summary"]
    assert summary["loss at the last step, nats a token"] == ["not finite"] and summary["steps"] == ["3"]
    assert "goodput" not in summary and [chart.title for chart in charts(read_runs([tmp_path]))][0] == "Loss"


def test_runs_of_the_same_name(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / part / "run", 10) for part in ("x", "y")]
    assert [run.name for run in read_runs(folders)] == ["x/run", "y/run"]


def run_main(monkeypatch: pytest.MonkeyPatch, *argv: object) -> int:
    monkeypatch.setattr("sys.argv", ["report", *map(str, argv)])
    return report.main()


def test_the_command(two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    output = tmp_path / "page.html"
    assert run_main(monkeypatch, *two, "--output", output) == 0
    assert str(output) in capsys.readouterr().out
    text = output.read_text()
    assert len(text) < 300_000
    body = text[text.index("<body>") :]
    assert not re.findall(r"#[0-9a-fA-F]{6}", body)  # All colours are the page's, which knows light from dark.
    fetched = re.findall(r'(?:src|href)="(?!#)[^"]*|url\((?!#)[^)]*|@import', text)
    assert not fetched


def spoil(folder: Path, name: str, text: str) -> Path:
    write_run(folder, 10)
    (folder / name).write_text(text)
    return folder


def test_what_is_wrong_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    good = write_run(tmp_path / "good", 10)
    cases = {
        "nowhere: ": [tmp_path / "nowhere"],
        "did the run begin": [spoil(tmp_path / "empty", "metrics.jsonl", "5\n[]\n")],
        "applied.json is not as": [spoil(tmp_path / "b", "applied.json", '[{"technique": 1}]')],
        "config.toml is not as": [spoil(tmp_path / "c", "config.toml", "[")],
        "given twice": [good, tmp_path / "x" / ".." / "good"],
        "--output: ": [good, "--output", tmp_path],
    }
    for said, argv in cases.items():
        assert run_main(monkeypatch, *argv) == 2
        err = capsys.readouterr().err
        assert said in err and err.startswith("report: ") and err.count("\n") == 1


# In a browser

MEASURE = """
<body><script>
const source = %s;
async function measure(width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 800px; border: 0`;
  const loaded = new Promise(done => frame.onload = done);
  frame.srcdoc = source;
  document.body.append(frame);
  await loaded;
  const page = frame.contentDocument, style = element => frame.contentWindow.getComputedStyle(element);
  const box = element => element.getBoundingClientRect();
  const charts = [...page.querySelectorAll("svg")].map(svg => {
    const texts = [...svg.querySelectorAll("text")].map(box), outer = box(svg);
    const touching = texts.flatMap((a, i) => texts.slice(i + 1).filter(b =>
      a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1));
    const outside = texts.filter(t => t.left < outer.left - 1 || t.right > outer.right + 1);
    return {width: outer.width, height: outer.height, left: outer.left, texts: texts.length,
            touching: touching.length, outside: outside.length, smallest: Math.min(...texts.map(t => t.height))};
  });
  return {width, page: page.documentElement.scrollWidth, charts,
          tables: [...page.querySelectorAll(".scrolls")].map(t => box(t).right),
          background: style(page.body).backgroundColor, text: style(page.body).color,
          label: style(page.querySelector("svg text")).fill,
          fetched: frame.contentWindow.performance.getEntriesByType("resource").length};
}
(async () => {
  const found = [];
  for (const width of [360, 1400]) found.push(await measure(width));
  document.title = JSON.stringify(found);
})();
</script></body>
"""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def brightness(colour: str) -> float:
    return statistics.fmean(float(part) for part in re.findall(r"[\d.]+", colour)[:3])


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here (Debian: apt-get install chromium)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(two: list[Path], tmp_path: Path, scheme: str) -> None:
    harness = tmp_path / "harness.html"
    harness.write_text(MEASURE % json.dumps(page(read_runs(two), "now")).replace("</", "<\\/"))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", "--virtual-time-budget=20000",
        "--dump-dom", harness.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stdout[-500:] + done.stderr[-2000:]
    narrow, wide = json.loads(title[1])
    for found in (narrow, wide):
        assert found["page"] <= found["width"] and found["fetched"] == 0
        assert max(found["tables"]) <= found["width"]  # They scroll by themselves.
        assert len(found["charts"]) == 8
        for chart in found["charts"]:
            assert chart["width"] > 300 and chart["height"] > 150 and chart["texts"] > 6
            assert chart["touching"] == chart["outside"] == 0 and chart["smallest"] > 7
        assert (brightness(found["background"]) < 60) == (brightness(found["text"]) > 180) == (scheme == "dark")
        assert found["label"] == found["text"]
    assert len({chart["left"] for chart in narrow["charts"]}) == 1  # One below the other,
    assert len({chart["left"] for chart in wide["charts"]}) == 3  # and three beside one another.
