import json
import os
import signal

import pytest
import torch

from errors import UserError
from telemetry.profiling import ProfilingConfig, maybe_profile


def train(config, folder, steps, start_step=0, rank=0):
    with maybe_profile(config, folder, start_step=start_step, rank=rank) as profiler:
        for _ in range(steps):
            torch.ones(3, 3) @ torch.ones(3, 3)
            profiler.step()


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_nothing_asked_for_writes_nothing(tmp_path):
    train(ProfilingConfig(), tmp_path, 30)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "freq, active, warmup, steps, start, expected",
    [
        (4, 1, 2, 9, 0, [4, 8]),
        (4, 2, 2, 7, 0, [4]),
        (2, 1, 0, 4, 10, [12, 14]),
        (1, 1, 0, 3, 0, [1, 2, 3]),
        (3, 1, 1, 3, 20, [23]),
    ],
)
def test_traces_at_their_steps(tmp_path, freq, active, warmup, steps, start, expected):
    config = ProfilingConfig(
        enable_profiling=True, profile_freq=freq, profiler_active=active, profiler_warmup=warmup, save_traces_folder="t"
    )
    train(config, tmp_path, steps, start_step=start, rank=3)
    written = ("summary.json", "summary.txt", "trace.json")
    assert files(tmp_path) == sorted(f"t/step_{step}/rank3_{name}" for step in expected for name in written)
    for step in expected:
        events = json.loads((tmp_path / f"t/step_{step}/rank3_trace.json").read_text())["traceEvents"]
        assert sum(event["name"] == "aten::mm" for event in events) == active


def test_a_run_too_short_for_a_trace_says_so(tmp_path, caplog):
    train(ProfilingConfig(enable_profiling=True), tmp_path, 9)
    assert files(tmp_path) == []
    assert "no trace was written: the run took 9 steps, fewer than profiling.profile_freq (10)" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_memory_snapshots_need_cuda(tmp_path):
    with pytest.raises(UserError, match=r"profiling\.enable_memory_snapshot"):
        train(ProfilingConfig(enable_memory_snapshot=True), tmp_path, 1)


def test_memory_snapshots_every_so_many_steps_and_when_out_of_memory(tmp_path, monkeypatch):
    """With CUDA's recorder replaced: when it is switched on and off, and what is written."""
    recording = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled="all", **_: recording.append(enabled)
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: open(path, "w").close())
    config = ProfilingConfig(enable_memory_snapshot=True, profile_freq=4)
    train(config, tmp_path / "run", 9, start_step=10, rank=1)
    assert files(tmp_path / "run") == [f"memory_snapshot/step_{step}/rank1_memory_snapshot.pickle" for step in (14, 18)]
    assert recording == ["all", None]

    with pytest.raises(torch.OutOfMemoryError):
        with maybe_profile(config, tmp_path / "oom", start_step=10, rank=0) as profiler:
            profiler.step()
            raise torch.OutOfMemoryError("simulated")
    assert files(tmp_path / "oom") == ["memory_snapshot/step_12_out_of_memory/rank0_memory_snapshot.pickle"]
    assert recording == ["all", None] * 2


def test_config_problems():
    def keys(**settings):
        return [key for key, _ in ProfilingConfig(**settings).problems()]

    assert keys() == keys(profile_freq=4) == keys(profile_freq=1, profiler_warmup=0) == []
    assert keys(profile_freq=3) == keys(profile_freq=0, profiler_warmup=0) == ["profile_freq"]
    assert keys(profiler_active=0) == ["profiler_active"]
    assert keys(profiler_warmup=-1) == ["profiler_warmup"]


def test_sigusr2_asks_for_a_trace_of_the_next_step(tmp_path, caplog):
    before = signal.getsignal(signal.SIGUSR2)
    with maybe_profile(ProfilingConfig(save_traces_folder="t"), tmp_path, start_step=0, rank=1) as profiler:
        for step in range(1, 6):
            torch.ones(8, 8) @ torch.ones(8, 8)
            if step == 2:
                os.kill(os.getpid(), signal.SIGUSR2)
            profiler.step()
    assert files(tmp_path) == [f"t/step_3_asked/rank1_{name}" for name in ("summary.json", "summary.txt", "trace.json")]
    events = json.loads((tmp_path / "t/step_3_asked/rank1_trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "aten::mm" for event in events) == 1
    assert "no memory snapshot: profiling.enable_memory_snapshot is off" in caplog.text
    assert signal.getsignal(signal.SIGUSR2) == before


def test_sigusr2_beside_periodic_traces_says_that_they_come(tmp_path, caplog):
    config = ProfilingConfig(enable_profiling=True, profile_freq=4, profiler_warmup=1, save_traces_folder="t")
    with maybe_profile(config, tmp_path, start_step=0, rank=0) as profiler:
        for step in range(1, 6):
            torch.ones(8, 8) @ torch.ones(8, 8)
            if step == 2:
                os.kill(os.getpid(), signal.SIGUSR2)
            profiler.step()
    assert {name.split("/")[1] for name in files(tmp_path)} == {"step_4"}
    assert "no trace of the next step: profiling.enable_profiling writes its own" in caplog.text
