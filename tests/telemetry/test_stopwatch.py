import random
import time

import numpy
import pytest
import torch

from telemetry.stopwatch import MOST_STEPS, RATIO, StepSeconds, Stopwatch

CPU = torch.device("cpu")


class FakeTime:
    value = 0.0

    def __call__(self):
        return self.value


@pytest.fixture
def timed():
    now = FakeTime()
    steps = StepSeconds(CPU, now)
    steps.watch.begin()
    return steps, now


def take(steps, now, seconds):
    for one in seconds:
        now.value += one
        steps.watch.end()


def random_seconds(number):
    return [random.lognormvariate(0, 2) for _ in range(number)]


def test_an_interval_has_its_own_percentiles(timed):
    steps, now = timed
    for number in (1, 9, 10):
        seconds = random_seconds(number)
        take(steps, now, seconds)
        found = steps.read()
        # Differences of a growing sum.
        for name, percent in (("p50", 50), ("p95", 95), ("max", 100)):
            assert found[f"step_seconds_{name}"] == pytest.approx(numpy.percentile(seconds, percent), rel=1e-9)
    assert steps.read() == {}


def test_all_steps_but_the_first_are_in_the_process_percentiles(timed):
    steps, now = timed
    take(steps, now, [1000.0])
    assert "process_step_seconds_max" not in steps.read()
    everything = random_seconds(2000)
    for start in range(0, 2000, 10):
        take(steps, now, everything[start : start + 10])
        found = steps.read()
    ranked = sorted(everything)
    # A bin is 2 % wide, and its middle is told.
    assert found["process_step_seconds_p50"] == pytest.approx(ranked[999], rel=RATIO - 1)
    assert found["process_step_seconds_p95"] == pytest.approx(ranked[1899], rel=RATIO - 1)
    assert found["process_step_seconds_max"] == pytest.approx(max(everything), rel=1e-9)
    assert steps.first == 1000.0


@pytest.mark.parametrize("seconds", [1e-7, 1e7])
def test_times_beyond_the_histogram(timed, seconds):
    steps, now = timed
    take(steps, now, [1.0, seconds])
    found = steps.read()
    assert found["process_step_seconds_p95"] <= found["process_step_seconds_max"] == pytest.approx(seconds, rel=1e-2)


def test_what_is_between_steps_is_not_timed(timed):
    steps, now = timed
    take(steps, now, [1.0, 1.0])
    now.value += 100  # A save.
    steps.watch.begin()
    take(steps, now, [1.0])
    assert steps.read()["step_seconds_max"] == 1.0


def test_nothing_grows(timed):
    steps, now = timed
    bins = len(steps.counts)
    take(steps, now, [1.0] * (3 * MOST_STEPS))
    assert len(steps.watch.pieces) == MOST_STEPS
    steps.read()
    assert len(steps.counts) == bins and sum(steps.counts) == MOST_STEPS - 1


def test_an_end_without_a_beginning_is_no_piece():
    watch = Stopwatch(CPU, 4)
    watch.end()
    assert watch.read() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_device_is_timed_and_not_waited_for():
    watch = Stopwatch(torch.device("cuda"), 4)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    began = time.perf_counter()
    watch.begin()
    for _ in range(2):
        torch.cuda._sleep(200_000_000)  # Cycles: 0.1 s and more at 2 GHz and less.
        watch.end()
    assert time.perf_counter() - began < 0.05
    torch.cuda.synchronize()
    assert all(0.05 < seconds < 1 for seconds in watch.read())
