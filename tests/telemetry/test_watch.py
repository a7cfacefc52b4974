"""Worlds of two ranks that end in every way there is, all at once: most of the time they wait for their patience."""

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch._dynamo  # The flight recorder imports it; so has train.py, but in a hang here it would take long.
import torch.distributed as dist

from errors import ExitStatus, UserError
from scripts.local_ranks import free_port
from telemetry.watch import Promise, Watch, record_collectives

PATIENCE = 4.0
LONG = 120.0
"""More than any of this takes."""


# What the ranks do


def step(watch: Watch, number: int, seconds: float) -> None:
    watch.expect(f"step {number}", seconds)
    dist.all_reduce(torch.ones(3))


def well(watch: Watch, rank: int) -> None:
    until = time.monotonic() + 8
    number = 0
    go_on = torch.ones(1)
    while go_on.item() == 2 or number == 0:
        number += 1
        step(watch, number, 6 if number % 2 else 20)
        time.sleep(0.01)
        go_on.fill_(time.monotonic() < until)
        dist.all_reduce(go_on)


def stopped(watch: Watch, rank: int) -> None:
    step(watch, 1, PATIENCE)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    step(watch, 2, PATIENCE)


def host_stopped(watch: Watch, rank: int) -> None:
    stopped(watch, 1 - rank)


def lock_held(watch: Watch, rank: int) -> None:
    step(watch, 1, PATIENCE)
    if rank == 1:
        ctypes.PyDLL(None).sleep(60)
    step(watch, 2, PATIENCE)


def deadlock(watch: Watch, rank: int) -> None:
    step(watch, 1, PATIENCE)
    dist.recv(torch.ones(3), src=1 - rank)


def different_patience(watch: Watch, rank: int) -> None:
    watch.expect("step 1", LONG if rank == 0 else PATIENCE)
    dist.recv(torch.ones(3), src=1 - rank)


def exception(watch: Watch, rank: int) -> None:
    step(watch, 1, LONG)
    if rank == 1:
        raise ValueError("the loss is green\nand blue")
    step(watch, 2, LONG)


def exception_on_host(watch: Watch, rank: int) -> None:
    exception(watch, 1 - rank)


def exception_and_consequence(watch: Watch, rank: int) -> None:
    if rank == 0:
        time.sleep(1)
        raise ConnectionError("reset by peer")
    raise ValueError("the loss is green")


def killed(watch: Watch, rank: int) -> None:
    step(watch, 1, LONG)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(watch, 2, LONG)


def host_killed(watch: Watch, rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def user_error(watch: Watch, rank: int) -> None:
    raise UserError("training.steps: no")


def user_error_on_one_rank(watch: Watch, rank: int) -> None:
    if rank == 1:
        raise UserError("training.dataset_path: not here")
    step(watch, 1, LONG)


CASES = (
    well, stopped, host_stopped, lock_held, deadlock, different_patience, exception, exception_on_host,
    exception_and_consequence, killed, host_killed, user_error, user_error_on_one_rank,
)  # fmt: skip


def run_rank(name: str, folder: Path) -> None:
    """As train.py does it."""
    record_collectives(folder)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LONG))
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    watch = Watch(folder, rank, dist.get_world_size(), store, LONG)
    dist.barrier()
    try:
        globals()[name](watch, rank)
        dist.barrier()
        watch.close()
    except Exception as error:
        os._exit(watch.fail(error))
    dist.destroy_process_group()


def start_rank(name: str, folder: Path, rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    run_rank(name, folder)


if __name__ == "__main__":  # Started by torchrun.
    run_rank(sys.argv[1], Path(sys.argv[2]))


# What becomes of them

# What torch says of a connection that is lost.
TORCHS_OWN = re.compile(r"(\[rank\d\]:)?\[[WE]\d+ |frame #|Exception raised from|<omitting|$")


@dataclass
class Ended:
    folder: Path
    codes: list[int | None]

    def stderr(self, rank: int) -> str:
        lines = (self.folder / f"stderr-{rank}").read_text().splitlines()
        return "\n".join(line for line in lines if not TORCHS_OWN.match(line))

    def stacks(self, rank: int) -> str:
        return (self.folder / "stacks" / f"rank-{rank}.txt").read_text()


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, Ended]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once.
    ports: set[int] = set()
    while len(ports) < len(CASES):
        ports.add(free_port())
    worlds = {}
    for case, port in zip(CASES, ports, strict=True):
        folder = tmp_path_factory.mktemp(case.__name__)
        ranks = [context.Process(target=start_rank, args=(case.__name__, folder, rank, port)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        worlds[case.__name__] = folder, ranks
    ended = {}
    until = time.monotonic() + 100
    for name, (folder, ranks) in worlds.items():
        left_behind = {"stopped": 1, "host_stopped": 0}.get(name)
        for rank, process in enumerate(ranks):
            if rank != left_behind:
                process.join(max(0, until - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        ended[name] = Ended(folder, codes)
    return ended


def test_nothing_happens_while_all_is_well(ended):
    world = ended["well"]
    assert world.codes == [0, 0]
    assert world.stderr(0) == world.stderr(1) == ""
    assert not (world.folder / "stacks").exists()


def test_a_stopped_rank_is_named(ended):
    world = ended["stopped"]
    assert world.codes == [ExitStatus.HUNG, None]
    assert re.search(r"rank 0: gives no sign of life: \d s in step 2; stacks: .*rank-0.txt", world.stderr(0))
    assert re.search(r"rank 0: no dump from rank 1 \(pid \d+: T \(stopped\)\)$", world.stderr(0))
    assert "in all_reduce" in world.stacks(0)


def test_a_stopped_rank_that_hosts_the_store(ended):
    world = ended["host_stopped"]
    assert world.codes == [None, ExitStatus.HUNG]
    assert "rank 1: the store does not tell who dumped: the process" in world.stderr(1)
    assert "in all_reduce" in world.stacks(1)


def test_a_rank_that_holds_the_interpreter_lock(ended):
    world = ended["lock_held"]
    assert world.codes == [ExitStatus.HUNG, 1]
    assert re.search(r"no dump from rank 1 \(pid \d+: S", world.stderr(0))
    assert world.stacks(1).startswith("Timeout") and "in lock_held" in world.stacks(1)


def test_a_deadlock_is_dumped_on_all_ranks(ended):
    world = ended["deadlock"]
    assert world.codes == [ExitStatus.HUNG, ExitStatus.HUNG]
    for rank in (0, 1):
        assert "in deadlock" in world.stacks(rank) and "in recv" in world.stacks(rank)
        assert "no dump from" not in world.stderr(rank)
        flight = world.folder / "stacks" / f"flight-recorder-rank-{rank}"
        assert "entries" in pickle.loads(flight.read_bytes())


def test_one_rank_with_less_patience_is_enough(ended):
    world = ended["different_patience"]
    assert world.codes == [ExitStatus.HUNG, ExitStatus.HUNG]
    assert "rank 0: stops because rank 1 hangs in step 1" in world.stderr(0)
    assert "in different_patience" in world.stacks(0)


@pytest.mark.parametrize(("case", "failed"), [("exception", 1), ("exception_on_host", 0)])
def test_when_a_rank_fails_the_others_say_why(ended, case, failed):
    world = ended[case]
    other = 1 - failed
    assert world.codes[failed] == ExitStatus.FAILED
    assert world.codes[other] == ExitStatus.PEER_FAILED
    assert "Traceback" in world.stderr(failed) and "and blue" in world.stderr(failed)
    assert world.stderr(other) == f"rank {other}: rank {failed} failed: ValueError: the loss is green; this rank stops"


def test_an_error_that_follows_from_anothers_is_not_traced(ended):
    world = ended["exception_and_consequence"]
    assert world.codes == [ExitStatus.PEER_FAILED, ExitStatus.FAILED]
    assert world.stderr(0) == "rank 0: rank 1 failed: ValueError: the loss is green; this rank stops"


def test_a_killed_rank_is_named(ended):
    world = ended["killed"]
    assert world.codes == [ExitStatus.FAILED, -signal.SIGKILL]
    assert re.search(r"rank 0: rank 1 \(pid \d+\) is gone: was it killed", world.stderr(0))


def test_without_a_store_the_ranks_stop(ended):
    world = ended["host_killed"]
    assert world.codes == [-signal.SIGKILL, ExitStatus.PEER_FAILED]
    assert world.stderr(1).startswith("rank 1: the store is gone")


def test_a_user_error_is_told_once(ended):
    world = ended["user_error"]
    assert world.codes == [ExitStatus.USER_ERROR] * 2
    assert (world.stderr(0), world.stderr(1)) == ("train.py: training.steps: no", "")
    world = ended["user_error_on_one_rank"]
    assert world.codes == [ExitStatus.USER_ERROR] * 2
    assert (world.stderr(0), world.stderr(1)) == ("train.py: training.dataset_path: not here", "")


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("user_error_on_one_rank", "train.py: training.dataset_path: not here"),
        ("exception", "rank 0: rank 1 failed: ValueError: the loss is green; this rank stops"),
    ],
)
def test_under_torchrun(tmp_path, case, told):
    """Its agent hosts the store, and ends all ranks as soon as one leaves."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run([*command, "-m", __name__, case, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.stderr.count(told) == 1, done.stderr[-3000:]
    if case == "exception":
        assert "(local_rank: 1)" in done.stderr.partition("Root Cause")[2], done.stderr[-3000:]


# One process


def test_the_backstop_moves_with_the_patience(tmp_path, monkeypatch):
    armed: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: armed.append(seconds))
    watch = Watch(tmp_path, 0, 1, dist.HashStore(), 1000)
    start = time.monotonic()
    for second, seconds in ((0, 100), (1, 100), (6, 100), (7, 300), (8, 300), (9, 100), (10, 100)):
        watch.arm_backstop(Promise("step", seconds, start + second))
    assert armed == pytest.approx([950, 95, 95, 285, 95])
    watch.close()


def test_dumps_of_an_earlier_run_are_removed(tmp_path):
    stacks = tmp_path / "stacks"
    stacks.mkdir()
    for name in ("rank-0.txt", "rank-1.txt", "flight-recorder-rank-0"):
        (stacks / name).write_text("old")
    watch = Watch(tmp_path, 0, 1, dist.HashStore(), LONG)
    assert {path.name: path.read_text() for path in stacks.iterdir()} == {"rank-0.txt": "", "rank-1.txt": "old"}
    watch.close()
    assert [path.name for path in stacks.iterdir()] == ["rank-1.txt"]
    assert not any(thread.is_alive() for thread in watch.threads)
