"""Two ranks, one slow, and a step that compiles again: one launch does it all, the tests read what it kept."""

import json
import logging
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scripts.local_ranks import launch
from telemetry.goodput import PARTS
from telemetry.run_clock import RunClock

SLOW_RANK, SLOW, QUICK, WAIT = 1, 0.1, 0.01, 0.02  # Seconds.
LOGS, STEPS_A_LOG, COMPILED_AGAIN = 5, 2, 3  # At step 3, the first of a log's, and at step 5.


class Block(nn.Module):
    def forward(self, seconds: float) -> None:
        time.sleep(seconds)


def run(folder: Path) -> None:
    rank = dist.get_rank()
    log = logging.FileHandler(folder / f"log-{rank}.txt")
    logging.getLogger("rowhouse").addHandler(log)
    block = Block()
    # The compiler's front end is enough: a graph for each size of the input.
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    clock = RunClock(torch.device("cpu"))
    clock.begin(folder, 0, block, compiles=True)
    size, lines = 4, []
    for step in range(1, LOGS * STEPS_A_LOG + 1):
        with clock.waiting_for_data():
            time.sleep(WAIT * rank)
        if rank == SLOW_RANK and step >= COMPILED_AGAIN:
            size = 5 if step == COMPILED_AGAIN else 6 if step == COMPILED_AGAIN + 2 else size
        double(torch.ones(size))
        block(SLOW if rank == SLOW_RANK else QUICK)
        dist.barrier()
        clock.step(100)
        with clock.outside("run_validation_seconds"):
            block.eval()
            block(0.001)
            block.train()
            if step == 1:
                double(torch.ones(7))  # What a validation compiles is its own.
        if step == 1 or step % STEPS_A_LOG == 0:
            times, values = clock.read(step)
            lines.append({"seconds": times.seconds, "steps": times.steps, "data_seconds": times.data_seconds, **values})
    (folder / f"lines-{rank}.json").write_text(json.dumps(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    launch(run, 2, made)
    return made


def lines_of(folder: Path, rank: int) -> list[dict[str, float]]:
    return json.loads((folder / f"lines-{rank}.json").read_text())


def test_the_slow_rank_is_named(folder: Path) -> None:
    for line in lines_of(folder, 0):
        assert line["slowest_rank"] == SLOW_RANK
        assert QUICK <= line["block_seconds"] < SLOW <= line["block_seconds_max"]


def test_the_slow_rank_says_so_once(folder: Path) -> None:
    logs = [(folder / f"log-{rank}.txt").read_text() for rank in range(2)]
    assert logs[SLOW_RANK].count(f"rank {SLOW_RANK} on ") == 1 and "others wait" in logs[SLOW_RANK]
    assert "(step 4)" in logs[SLOW_RANK]  # In three logs in a row.
    assert "others wait" not in logs[0]


def test_the_longest_wait_for_data_counts(folder: Path) -> None:
    own, slow = lines_of(folder, 0), lines_of(folder, 1)
    waited = 0.0
    for mine, others in zip(own, slow, strict=True):
        assert mine["data_seconds"] < WAIT * mine["steps"] <= others["data_seconds"]
        assert mine["data_share_max"] == others["data_seconds"] / mine["seconds"]
        waited += others["data_seconds"]
        assert mine["run_data_seconds"] == pytest.approx(waited)


def test_recompilations_are_counted_and_told_once(folder: Path) -> None:
    # Steps 3 and 5 of one rank. Neither the first step's nor the validation's.
    assert [line["recompiles"] for line in lines_of(folder, 0)] == [0, 0, 1, 2, 2, 2]
    log = (folder / f"log-{SLOW_RANK}.txt").read_text()
    assert log.count("compiled") == 1 and "up to step 4 " in log and "1 time(s)" in log
    assert "size mismatch at index 0" in log  # torch's own reason.
    assert "compiled" not in (folder / "log-0.txt").read_text()


def test_the_parts_and_the_steps_are_the_run(folder: Path) -> None:
    in_steps, before = 0.0, 0.0
    for line in lines_of(folder, 0):
        assert line["run_seconds"] > before
        before = line["run_seconds"]
        in_steps += line["seconds"] - line["data_seconds"]
        assert sum(line[key] for key in PARTS) <= line["run_seconds"]  # No second is in two parts.
        assert line["step_seconds_p50"] <= line["step_seconds_p95"] <= line["step_seconds_max"]
    assert line["run_validation_seconds"] >= 0.001 * LOGS * STEPS_A_LOG
    assert line["goodput"] == pytest.approx(1 - sum(line[key] for key in PARTS) / line["run_seconds"])
    # Good is what the first rank spent in steps, less the first step's excess and what it waited for the other's data.
    good = line["goodput"] * line["run_seconds"]
    assert 0 < good <= in_steps
    assert line["run_compile_seconds"] > 0
