"""The search for what fits: its table, its files, and what it says where nothing does."""

import sys

import pytest

from config import load_config
from planning.hardware import GPUS, HEADROOM
from planning.plan import make_plan
from scripts import plan

SMALL = "--config debug.toml --model.n_layers 1 --gpus 2 --tokens-per-step 1024 --seq-len 64"


def run(monkeypatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plan", *flags])
    return plan.main()


@pytest.fixture
def fewer(monkeypatch):
    monkeypatch.setattr(plan, "BATCHES", (1, 8))
    monkeypatch.setattr(plan, "AC_MODES", ("none", "full"))


def test_each_row_is_a_file_that_runs(monkeypatch, capsys, tmp_path, fewer):
    assert run(monkeypatch, *SMALL.split(), "--best", "3", "--output", str(tmp_path / "plans")) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 1 x")]
    files = sorted((tmp_path / "plans").iterdir())
    assert len(rows) == len(files) == 3
    speeds = [int(row[-1].strip(" |").replace(",", "")) for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    for row, file in zip(rows, files, strict=True):
        config = load_config(["--config", str(file)], 2)
        assert config.training.lanes(1) * config.training.seq_len == 1024
        assert f"{make_plan(config, 2, GPUS['H100']).tokens_per_second:,.0f}" == row[-1].strip(" |")


def test_what_is_larger_than_what_does_not_fit_is_not_tried(monkeypatch, capsys, fewer):
    assert run(monkeypatch, *SMALL.split(), "--device-memory", "1MiB") == 1
    # Full checkpointing, one sequence: of each split.
    assert "none of 2 combinations fits" in capsys.readouterr().out


def test_rows_fit(monkeypatch, fewer):
    base = load_config(["--config", "debug.toml", "--model.n_layers", "1"], 2)
    gpu = GPUS["H100"]
    found, _ = plan.search(base, 2, None, gpu)
    assert found and all(candidate.outline.peak <= gpu.memory * (1 - HEADROOM) for candidate in found)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "2"], "--model is missing"),
        (["--gpus", "2", "--model", "9B"], '--model: "9B" is not known; the models are '),
        (["--gpus", "0", "--model", "8B"], "--gpus: 0 GPUs train nothing"),
        (["--gpus", "2", "--model", "8B", "--tokens-per-step", "1000"], "--tokens-per-step: no multiple of"),
        (["--gpus", "2", "--model", "8B", "--frobnicate", "1"], "--frobnicate: unknown flag"),
    ],
)
def test_bad_input_gets_a_sentence(monkeypatch, capsys, flags, message):
    assert run(monkeypatch, *flags) == 2
    assert message in capsys.readouterr().err
