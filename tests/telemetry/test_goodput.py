import json
import random

import pytest

from telemetry.goodput import FILE, PARTS, Goodput, last_totals, summary


class Clock:
    """Unix seconds; those of a process are the same less an offset of its own. In binary fractions: sums are exact."""

    def __init__(self):
        self.unix = 1_000_000.0

    def goodput(self):
        offset = random.randrange(1000) / 4
        return Goodput(lambda: self.unix - offset, lambda: self.unix)


@pytest.fixture
def clock():
    return Clock()


def log(folder, step, goodput, clock):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1.0, **goodput.totals(), "time": clock.unix}) + "\n")


def started(folder, clock, step=0, set_up=16.0):
    goodput = clock.goodput()
    clock.unix += set_up
    goodput.begin(folder, step)
    return goodput


def run_until(folder, clock, goodput, steps, seconds=1.0):
    """Logs every 10 steps."""
    for step in steps:
        clock.unix += seconds
        if step % 10 == 0:
            log(folder, step, goodput, clock)


def save(clock, goodput, seconds):
    clock.unix += seconds
    goodput.seconds["run_save_seconds"] += seconds


def lost(totals):
    return {key: totals[key] for key in PARTS if totals[key]}


def test_a_run_that_nothing_disturbs(tmp_path, clock):
    goodput = started(tmp_path, clock)
    run_until(tmp_path, clock, goodput, range(1, 65))
    save(clock, goodput, 48.0)
    totals = goodput.totals()
    assert totals["run_seconds"] == 128.0 and totals["goodput"] == 0.5 and totals["run_restarts"] == 0
    assert lost(totals) == {"run_set_up_seconds": 16.0, "run_save_seconds": 48.0}


def test_a_killed_run_has_lost_all_since_the_step_it_resumes_at(tmp_path, clock):
    goodput = started(tmp_path, clock)
    run_until(tmp_path, clock, goodput, range(1, 21))
    save(clock, goodput, 4.0)  # Of step 20.
    run_until(tmp_path, clock, goodput, range(21, 38))  # Killed after step 37.
    clock.unix += 100.0  # In the queue.
    again = started(tmp_path, clock, step=20)
    totals = again.totals()
    # The save, 17 steps, the queue, setting up.
    assert lost(totals) == {"run_set_up_seconds": 16.0, "run_restart_seconds": 4.0 + 17.0 + 100.0 + 16.0}
    assert totals["run_seconds"] == 16.0 + 20.0 + totals["run_restart_seconds"]
    run_until(tmp_path, clock, again, range(21, 41))
    totals = again.totals()
    assert totals["run_seconds"] * totals["goodput"] == pytest.approx(40)
    assert totals["run_restarts"] == 1

    third = started(tmp_path, clock, step=40, set_up=1.0)
    assert third.totals()["run_restarts"] == 2
    assert third.totals()["run_restart_seconds"] == totals["run_restart_seconds"] + 1.0


def test_a_run_that_was_asked_to_stop_knows_its_last_save(tmp_path, clock):
    goodput = started(tmp_path, clock)
    run_until(tmp_path, clock, goodput, range(1, 31))
    save(clock, goodput, 4.0)
    goodput.end(tmp_path, 30, "SIGTERM")
    clock.unix += 100.0
    totals = started(tmp_path, clock, step=30).totals()
    assert lost(totals) == {
        "run_set_up_seconds": 16.0,
        "run_save_seconds": 4.0,
        "run_restart_seconds": 116.0,
    }


def test_the_time_after_a_run_was_done_is_not_lost(tmp_path, clock):
    goodput = started(tmp_path, clock)
    run_until(tmp_path, clock, goodput, range(1, 31))
    goodput.end(tmp_path, 30, None)
    for _ in range(2):  # Also where the first attempt to go on fails at once.
        clock.unix += 1e6
        totals = started(tmp_path, clock, step=30).totals()
        assert lost(totals) == {"run_set_up_seconds": 32.0}
        assert totals["run_seconds"] == 62.0 and totals["run_restarts"] == 0


def test_what_ended_later_than_the_resumed_step_does_not_count(tmp_path, clock):
    goodput = started(tmp_path, clock)
    run_until(tmp_path, clock, goodput, range(1, 31))
    goodput.end(tmp_path, 30, None)
    totals = started(tmp_path, clock, step=20).totals()  # The checkpoint of step 30 was damaged.
    assert lost(totals) == {"run_set_up_seconds": 16.0, "run_restart_seconds": 26.0}


def test_a_start_from_step_0_is_a_new_run(tmp_path, clock):
    run_until(tmp_path, clock, started(tmp_path, clock), range(1, 31))
    assert lost(started(tmp_path, clock, step=0).totals()) == {"run_set_up_seconds": 16.0}


@pytest.mark.parametrize("content", [None, "", '{"step": 10, "loss": 2.0, "time": 5.0}\n'])
def test_metrics_without_totals(tmp_path, clock, content):
    """None, or those of an older version: the run begins to be counted here."""
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert lost(started(tmp_path, clock, step=10).totals()) == {"run_set_up_seconds": 16.0}


def test_a_clock_that_is_behind_takes_nothing_away(tmp_path, clock):
    goodput = started(tmp_path, clock)
    run_until(tmp_path, clock, goodput, range(1, 11))
    clock.unix -= 50  # Another host.
    totals = started(tmp_path, clock, step=10).totals()
    assert totals["run_restart_seconds"] == 0 and totals["run_seconds"] == 26.0


def test_the_last_totals(tmp_path, clock):
    assert last_totals(tmp_path) is None
    goodput = started(tmp_path, clock)
    run_until(tmp_path, clock, goodput, range(1, 31))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30, "validation_loss": 1.0, "time": clock.unix}) + '\n{"step": 40, "run_rest')
    assert last_totals(tmp_path)["step"] == 30
    assert last_totals(tmp_path, 29)["step"] == 20
    clock.unix += 1
    goodput.end(tmp_path, 30, "SIGTERM")
    assert last_totals(tmp_path)["ended"] == "SIGTERM"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(FILE)] == [FILE]


def test_the_sentence(tmp_path, clock):
    goodput = started(tmp_path, clock, set_up=0.0)
    goodput.seconds |= {"run_compile_seconds": 320.0, "run_save_seconds": 0.5, "run_validation_seconds": 96.0}
    clock.unix += 8000.0
    assert goodput.end(tmp_path, 5, None) == ("goodput 94.8 % of 2:13:20: compile (first step) 4.0 %, validation 1.2 %")
    totals = goodput.totals()
    assert "1 restart 50.0 %" in summary({**totals, "run_restarts": 1, "run_restart_seconds": 4000.0})
    assert "3 restarts 50.0 %" in summary({**totals, "run_restarts": 3, "run_restart_seconds": 4000.0})
