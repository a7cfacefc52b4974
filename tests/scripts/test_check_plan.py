"""The memory that is predicted, next to what the profiler saw allocated."""

import sys

from scripts import check_plan

SMALL = (
    "--config debug.toml --model.n_layers 2 --training.seq_len 128 --training.local_batch_size 8 "
    "--training.global_batch_size 8 --activation_checkpoint.mode"
)


def run(monkeypatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check_plan", *flags])
    return check_plan.main()


def test_a_prediction_holds(monkeypatch, capsys):
    monkeypatch.setattr(check_plan, "TOLERANCE", 0.005)  # In eager nothing has to be presumed.
    assert run(monkeypatch, "--case", f"none={SMALL} none", "--case", f"full={SMALL} full") == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith(("| none", "| full"))]
    assert len(rows) == 4  # Each as it comes, and in the table.
    assert float(rows[2][1]) > float(rows[3][1])


def test_what_fails_and_what_is_wrong_end_with_1(monkeypatch, capsys):
    monkeypatch.setattr(check_plan, "run", lambda name, flags: {"peak": 1000})
    assert run(monkeypatch, "--case", f"wrong={SMALL} none") == 1

    def fail(name, flags):
        raise RuntimeError(f"{name}: it failed with 1: no memory")

    monkeypatch.setattr(check_plan, "run", fail)
    assert run(monkeypatch, "--case", f"failing={SMALL} none") == 1
    assert "check_plan: failing: it failed with 1: no memory" in capsys.readouterr().err
