"""What befalls a run of two ranks, and how it ends: on all ranks, soon, with the status that docs/checkpoints.md names,
and with a checkpoint from which it goes on as if nothing had happened."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from errors import ExitStatus
from scripts.local_ranks import free_port

ROOT = Path(__file__).parent.parent.parent
STEPS = 8
FLAGS = (
    "--config debug.toml --model.n_layers 1 --training.seq_len 32 --training.local_batch_size 2 "
    "--checkpoint.interval 3 --training.global_batch_size 4 --lr_scheduler.warmup_steps 2 --metrics.log_freq 1 "
    f"--metrics.enable_tensorboard false --training.steps {STEPS} --checkpoint.keep_latest_k 1 "
    "--validation.enable false"
).split()
KILLED = -signal.SIGKILL


@dataclass
class Done:
    statuses: list[int]
    text: str
    seconds: float


def start(folder: Path, *flags: str, fault: str = "none", rank: int = 1, step: int = 5) -> list[subprocess.Popen]:
    port = str(free_port())
    command = [sys.executable, "-m", "tests.faults.faulty_train", fault, str(rank), str(step), *FLAGS, *flags]
    folder.mkdir(exist_ok=True)
    log = (folder / "log.txt").open("w")
    return [
        subprocess.Popen(
            [*command, "--job.dump_folder", str(folder)],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
        )
        for r in range(2)
    ]


def end(processes: list[subprocess.Popen], folder: Path, patience: float = 30) -> Done:
    """Waits for the ranks. When one has ended, the other has `patience` seconds: nothing may hang for longer."""
    began = time.monotonic()
    deadline = began + 120
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if any(p.poll() is not None for p in processes):
            deadline = min(deadline, time.monotonic() + patience)
        time.sleep(0.05)
    statuses = [p.poll() if p.poll() is not None else 999 for p in processes]
    for p in processes:
        p.kill()
        p.wait()
    return Done(statuses, (folder / "log.txt").read_text(), time.monotonic() - began)


def run(folder: Path, *flags: str, **fault: object) -> Done:
    return end(start(folder, *flags, **fault), folder)  # type: ignore[arg-type]


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoint").iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = run(folder)
    assert done.statuses == [0, 0], done.text
    assert saved(folder) == [f"step-{STEPS}"]
    return losses(folder)


def assert_goes_on(folder: Path, undisturbed: dict[int, float]) -> Done:
    done = run(folder)
    assert done.statuses == [0, 0], done.text
    assert losses(folder) == undisturbed
    assert saved(folder) == [f"step-{STEPS}"]
    return done


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_to_one_rank_ends_the_step_on_all_and_saves(tmp_path, undisturbed, name):
    folder = tmp_path / "run"
    done = run(folder, fault=name, step=4)
    assert done.statuses == [ExitStatus.STOPPED] * 2, done.text
    (step,) = (int(s) for s in re.findall(rf"{name}: stopping after step (\d+)", done.text))
    assert step in (4, 5) and saved(folder) == [f"step-{step}"]
    assert "to go on: torchrun" in done.text
    if name == "SIGTERM":
        assert f"resumed after step {step}" in assert_goes_on(folder, undisturbed).text


def test_a_time_limit_ends_the_run_like_a_signal(tmp_path, undisturbed):
    folder = tmp_path / "run"
    done = run(folder, "--training.max_time", "0.001")
    assert done.statuses == [ExitStatus.STOPPED] * 2, done.text
    assert "training.max_time: stopping after step 2" in done.text and saved(folder) == ["step-2"]


def test_a_second_signal_ends_the_run_at_once(tmp_path):
    done = run(tmp_path / "run", fault="two signals", rank=0)
    assert done.statuses[0] == 128 + signal.SIGTERM, done.text
    assert done.statuses[1] not in (0, 999), done.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(tmp_path, undisturbed, rank):
    folder = tmp_path / "run"
    done = run(folder, fault="SIGKILL", rank=rank)
    assert done.statuses[rank] == KILLED
    assert done.statuses[1 - rank] not in (0, 999), done.text
    assert f"rank {rank}" in done.text, done.text
    assert_goes_on(folder, undisturbed)


@pytest.mark.parametrize(
    ("fault", "left", "resumed"),
    [("killed in the commit", ["step-3", "step-6"], 6), ("killed before pruning", ["step-3", "step-6"], 6)],
)
def test_killed_in_a_save(tmp_path, undisturbed, fault, left, resumed):
    folder = tmp_path / "run"
    done = run(folder, fault=fault, rank=0)
    assert done.statuses[0] == KILLED, done.text
    assert saved(folder) == left
    assert f"resumed after step {resumed}" in assert_goes_on(folder, undisturbed).text


@pytest.mark.parametrize("fault", ["SIGSTOP", "GIL held"])
def test_a_rank_that_hangs(tmp_path, undisturbed, fault):
    folder = tmp_path / "run"
    ranks = start(folder, "--comm.train_timeout_seconds", "10", fault=fault)
    done = end(ranks, folder, patience=2 if fault == "SIGSTOP" else 30)
    assert done.statuses[0] == ExitStatus.HUNG, done.text
    stacks = (folder / "stacks" / "rank-0.txt").read_text()
    assert "train_step" in stacks
    assert "no dump from rank 1" in done.text
    if fault == "SIGSTOP":
        assert done.statuses[1] == 999  # Nothing but SIGKILL ends it: what started it does so.
        assert "T (stopped)" in done.text
    else:
        assert done.statuses[1] == 1
        assert "faulty_train.py" in (folder / "stacks" / "rank-1.txt").read_text()
        assert_goes_on(folder, undisturbed)


def test_an_exception_on_one_rank(tmp_path):
    folder = tmp_path / "run"
    done = run(folder, fault="exception")
    assert done.statuses == [ExitStatus.PEER_FAILED, ExitStatus.FAILED], done.text
    assert "rank 1 failed: ValueError: something unforeseen; this rank stops" in done.text
    assert done.text.count("Traceback") == 1


def test_nan_on_one_rank_stops_all(tmp_path, undisturbed):
    folder = tmp_path / "run"
    done = run(folder, fault="nan")
    assert done.statuses == [ExitStatus.NOT_FINITE] * 2, done.text
    assert "step 5: the loss or the gradient was NaN or infinite in 1 step in a row" in done.text
    assert saved(folder) == ["step-3"]
    assert_goes_on(folder, undisturbed)


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_the_place_of_a_nan_is_told(tmp_path, compiled):
    debug = ("--debug.detect_anomaly", "true", "--compile.enable", compiled, "--activation_checkpoint.mode", "full")
    done = run(tmp_path / "run", *debug, "--metrics.log_freq", "100", fault="nan in a block")
    assert done.statuses == [ExitStatus.NOT_FINITE] * 2, done.text
    told = "the first that is NaN or infinite is the gradient that came back to the output of layers.0: 1 values of"
    assert f"rank 1, step 5: {told}" in done.text
    assert done.text.count("the first that is NaN") == 2  # On rank 0 gradients were summed.
    assert "rank 0, step 5: the first that is NaN or infinite is the gradient of" in done.text


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_nan_on_one_rank_is_skipped_on_all(tmp_path, undisturbed, implementation):
    folder = tmp_path / "run"
    skip = ("--training.max_skipped_steps", "1", "--optimizer.implementation", implementation)
    done = run(folder, *skip, fault="nan")
    assert done.statuses == [0, 0], done.text
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped_steps"] for line in lines] == [0] * 4 + [1] * 4
    found = losses(folder)
    # The loss of step 5 is that of the weights before it.
    for step in range(1, 6):
        assert found[step] == pytest.approx(undisturbed[step], rel=1e-5)
    assert all(abs(found[step] - undisturbed[step]) < 0.5 for step in undisturbed)


@pytest.mark.parametrize(("fault", "rank"), [("disk full", 1), ("read-only", 0)])
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_that_fails(tmp_path, undisturbed, fault, rank, mode):
    folder = tmp_path / "run"
    done = run(folder, "--checkpoint.async_mode", mode, fault=fault, rank=rank)
    assert done.statuses == [ExitStatus.NOT_SAVED] * 2, done.text
    assert losses(folder) == undisturbed
    assert done.text.count("could not be saved") == 2
    assert f"step {STEPS} is NOT saved" in done.text
    assert saved(folder) == ["step-3"]
    assert_goes_on(folder, undisturbed)


def test_a_loader_that_dies(tmp_path, undisturbed):
    folder = tmp_path / "run"
    done = run(folder, fault="loader killed", step=2)
    assert done.statuses == [ExitStatus.PEER_FAILED, ExitStatus.FAILED], done.text
    assert "the thread that reads the data was ended by SystemExit; this rank stops" in done.text


def test_no_memory_at_the_first_step(tmp_path):
    done = run(tmp_path / "run", fault="out of memory", step=1)
    assert done.statuses == [ExitStatus.USER_ERROR] * 2, done.text
    assert "out of memory" in done.text and 'activation_checkpoint.mode = "selective" (now "none")' in done.text
    assert "training.local_batch_size = 1 or less" in done.text
    assert "Traceback" not in done.text


def test_a_second_start_is_refused_and_disturbs_nothing(tmp_path, undisturbed):
    folder = tmp_path / "run"
    first = start(folder, fault="SIGSTOP", rank=0)
    while not (folder / "run.lock").exists() or not (folder / "metrics.jsonl").exists():
        time.sleep(0.05)
    log = (folder / "log.txt").read_text()
    second = start(folder)
    done = end(second, folder)
    assert done.statuses == [ExitStatus.USER_ERROR] * 2
    assert f"job.dump_folder: {folder} is in use by pid {first[0].pid}" in done.text
    assert done.text.count("train.py:") == 1
    for process in first:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
    assert log
    assert_goes_on(folder, undisturbed)
