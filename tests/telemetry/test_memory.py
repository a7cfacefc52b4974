import gc
import os
import weakref

import pytest
import torch

from telemetry.memory import GIB, GarbageCollector, peak_memory


def test_cpu_peak_is_the_resident_set():
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(int((before.gib + 0.1) * GIB) // 4)
    after = peak_memory(torch.device("cpu"))
    assert before.gib + 0.05 < after.gib < 3 * before.gib + 0.5
    assert after.allocated_gib == after.gib
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    assert after.percent == pytest.approx(100 * after.gib / total)
    del block
    assert peak_memory(torch.device("cpu")).gib >= after.gib


class Cycle:
    def __init__(self):
        self.me = self


def test_garbage_is_collected_at_the_steps_and_not_between():
    try:
        collector = GarbageCollector(freq=3)
        alive = weakref.ref(Cycle())
        junk = [[[] for _ in range(10)] for _ in range(10_000)]  # would set an automatic collection off
        assert alive() is not None
        for step in (1, 2):
            collector.step(step)
            assert alive() is not None
        collector.step(3)
        assert alive() is None
        del junk
    finally:
        gc.enable()
