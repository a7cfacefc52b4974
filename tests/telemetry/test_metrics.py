import json
import logging
import math
import random
import sys
import time

import pytest

from errors import UserError
from telemetry.metrics import MetricsConfig, MetricsWriter, StepClock, StepTimes


class FakeTime:
    """Seconds in binary fractions, so that sums are exact."""

    def __init__(self):
        self.value = random.randrange(1000) / 4

    def __call__(self):
        return self.value

    def pass_(self, seconds):
        self.value += seconds


@pytest.fixture
def timed():
    now = FakeTime()
    now.pass_(5)
    clock = StepClock(now)
    now.pass_(7)  # setting up
    clock.start()
    return clock, now


def take_step(clock, now, *, data=0.25, compute=1.0, outside=0.0, tokens=10):
    with clock.waiting_for_data():
        now.pass_(data)
    now.pass_(compute)
    clock.step(tokens)
    with clock.outside():
        now.pass_(outside)


def test_the_first_interval_has_the_compilation_and_the_next_has_not(timed):
    clock, now = timed
    take_step(clock, now, compute=60.0)
    assert clock.read() == StepTimes(1, 10, 60.25, 0.25)
    for _ in range(9):
        take_step(clock, now)
    assert clock.read() == StepTimes(9, 90, 9 * 1.25, 9 * 0.25)


@pytest.mark.parametrize("start, steps, freq", [(0, 25, 10), (7, 30, 10), (0, 3, 10), (4, 11, 3)])
def test_intervals_of_any_length(timed, start, steps, freq):
    """Read as a trainer does, at multiples of freq and at the end: each gives the same pace, all give the whole."""
    clock, now = timed
    read = []
    for step in range(start + 1, steps + 1):
        take_step(clock, now, outside=random.randrange(20) / 4)
        if step % freq == 0 or step == steps:
            read.append(clock.read())
    assert all(times.seconds == times.steps * 1.25 for times in read)
    assert all(times.tokens == times.steps * 10 and times.data_seconds == times.steps * 0.25 for times in read)
    assert sum(times.steps for times in read) == steps - start


def test_validation_and_its_data_are_outside(timed):
    clock, now = timed
    take_step(clock, now)
    with clock.outside():
        now.pass_(2)
        with clock.waiting_for_data():
            now.pass_(4)
        now.pass_(2)
    take_step(clock, now)
    assert clock.read() == StepTimes(2, 20, 2.5, 0.5)


def read_lines(folder):
    def refuse(name):
        raise ValueError(name)

    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def write_steps(folder, steps, start_step=0, config=None, value=1.0):
    writer = MetricsWriter(config or MetricsConfig(), folder, start_step=start_step, total_steps=100)
    for step in steps:
        writer.write(step, {"loss": value * step})
    return writer


def test_jsonl(tmp_path):
    before = time.time()
    writer = MetricsWriter(MetricsConfig(), tmp_path / "new", start_step=0, total_steps=20)
    loss = random.random()
    writer.write(10, {"loss": loss, "mfu": None, "tokens_seen": 2**60})
    # Is in the file without close().
    (line,) = read_lines(tmp_path / "new")
    assert before <= line.pop("time") <= time.time()
    assert line == {"step": 10, "loss": loss, "mfu": None, "tokens_seen": 2**60}
    writer.write_validation(10, {"validation_loss": 2.5})
    line = read_lines(tmp_path / "new")[1]
    assert (line["step"], line["validation_loss"]) == (10, 2.5) and "loss" not in line
    writer.close()


def test_values_that_json_cannot_hold(tmp_path):
    writer = MetricsWriter(MetricsConfig(), tmp_path, start_step=0, total_steps=20)
    writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 1.0, "mfu": None})
    writer.close()
    (line,) = read_lines(tmp_path)
    assert line["loss"] is None and line["grad_norm"] is None and line["lr"] == 1.0
    assert line["nonfinite"] == ["loss", "grad_norm"]


def test_a_resumed_run_has_every_step_once(tmp_path):
    writer = write_steps(tmp_path, [1, 10, 20, 30])
    writer.write_validation(20, {"validation_loss": 1.0})
    writer.write_validation(30, {"validation_loss": 1.0})
    writer.close()
    write_steps(tmp_path, [30, 40], start_step=20, value=2.0).close()
    lines = read_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 10, 20, 20, 30, 40]
    assert [line["loss"] for line in lines if "loss" in line] == [1, 10, 20, 60, 80]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_fresh_start_in_a_used_folder_begins_anew(tmp_path):
    write_steps(tmp_path, [1, 2]).close()
    write_steps(tmp_path, [1], value=5.0).close()
    assert [line["loss"] for line in read_lines(tmp_path)] == [5.0]


def test_a_torn_last_line_is_dropped_and_told(tmp_path, caplog):
    write_steps(tmp_path, [1, 2, 3]).close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    write_steps(tmp_path, [3], start_step=2).close()
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3]
    assert "dropped 1 unreadable line" in caplog.text


def test_a_complete_last_line_without_its_newline_stays(tmp_path):
    write_steps(tmp_path, [1, 2]).close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    write_steps(tmp_path, [3], start_step=2).close()
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3]


VALUES = {
    "loss": 7.123449,
    "grad_norm": 1.5,
    "lr": 0.0008,
    "tokens_per_second": 123456.7,
    "tflops": 412.345,
    "mfu": 0.4167,
    "step_seconds": 2.5,
    "memory_gib": 61.256,
    "tokens_seen": 5,
}


def console(caplog, tmp_path, config=None, mfu=0.4167):
    writer = MetricsWriter(config or MetricsConfig(), tmp_path, start_step=0, total_steps=5000)
    with caplog.at_level(logging.INFO, "rowhouse"):
        writer.write(1, {**VALUES, "step_seconds": 900.0})
        writer.write(20, {**VALUES, "mfu": mfu})
        writer.write_validation(20, {"validation_loss": 6.54321})
    writer.close()
    return [record.getMessage() for record in caplog.records]


def test_console_line(caplog, tmp_path):
    first, second, validation = console(caplog, tmp_path)
    told = "loss 7.1234  grad_norm 1.5000  lr 8.00e-04  123,457 tokens/s  412.35 TFLOP/s  MFU 41.7%  61.26 GiB"
    # The first line's pace is that of compilation, and no forecast.
    assert first == f"step    1  {told}"
    assert second == f"step   20  {told}  ETA 3:27:30"
    assert validation == "step   20  validation loss 6.5432"


def test_console_leaves_out_what_is_not_known(caplog, tmp_path):
    assert "MFU" not in console(caplog, tmp_path, mfu=None)[1]


@pytest.mark.parametrize("tty, disabled, coloured", [(True, False, True), (True, True, False), (False, False, False)])
def test_colour_is_for_terminals(caplog, tmp_path, monkeypatch, tty, disabled, coloured):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    lines = console(caplog, tmp_path, MetricsConfig(disable_color_printing=disabled))
    assert all(("\033[" in line) == coloured for line in lines)


def tensorboard_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard(tmp_path):
    config = MetricsConfig(enable_tensorboard=True, save_tb_folder="events")
    writer = write_steps(tmp_path, [10, 20, 30], config=config)
    writer.write(40, {"loss": 40.0, "mfu": None})
    writer.write_validation(20, {"validation_loss": 0.5})
    writer.close()
    scalars = tensorboard_scalars(tmp_path / "events")
    assert scalars == {"loss": [(10, 10), (20, 20), (30, 30), (40, 40)], "validation_loss": [(20, 0.5)]}

    write_steps(tmp_path, [30], start_step=20, config=config, value=3.0).close()
    scalars = tensorboard_scalars(tmp_path / "events")
    assert scalars == {"loss": [(10, 10), (20, 20), (30, 90)], "validation_loss": [(20, 0.5)]}


def test_tensorboard_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"metrics\.enable_tensorboard: .*pip install tensorboard"):
        write_steps(tmp_path, [], config=MetricsConfig(enable_tensorboard=True))


def test_config_problems():
    assert MetricsConfig().problems() == []
    assert [key for key, _ in MetricsConfig(log_freq=0).problems()] == ["log_freq"]
