"""Saving and loading on two ranks (one launch), and between numbers of ranks."""

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from checkpoint.config import CheckpointConfig
from checkpoint.manager import CheckpointManager
from scripts.local_ranks import launch
from tests.checkpoint.small_run import Run, assert_same, differ, seed_ranks, steps_in

# Cases of the launch on two ranks. Each has a folder of its own, the same on both.


def resumes_bitwise(folder: Path) -> None:
    whole = Run(folder, seed=1, interval=2)
    seed_ranks()
    whole.train(2)
    whole.manager.maybe_save(2)
    at_save = whole.values()
    whole.train(1)
    whole.manager.maybe_save(3)
    whole.train(1)
    assert steps_in(folder / "checkpoint") == [2]

    resumed = Run(folder, seed=2)
    assert differ(resumed.values(), at_save)
    seed_ranks()
    assert resumed.manager.load() == 2
    assert_same(resumed.values(), at_save)
    # Goes on as if nothing had happened: weights, moments, data, random numbers of each rank.
    resumed.train(2)
    assert_same(resumed.values(), whole.values())
    assert resumed.drawn == whole.drawn[2:]


def async_is_a_snapshot(folder: Path) -> None:
    for mode in ("async", "async_with_pinned_mem"):
        saves_in_the_background(folder / mode, mode)


def saves_in_the_background(folder: Path, mode: str) -> None:
    run = Run(folder, seed=3, async_mode=mode, interval=1)
    seed_ranks()
    expected = {}
    for step in (1, 2, 3):
        run.train(1)
        expected[step] = run.values()
        run.manager.maybe_save(step)
        with torch.no_grad():
            for tensor in [*run.model.parameters(), run.counter.state["lanes"]]:
                tensor.add_(1)
        run.counter.state["losses"].append(-1.0)
    run.manager.wait()
    sync = Run(folder / "sync", seed=3, load_step=2)
    for step in (1, 2, 3):
        resumed = Run(folder, load_step=step)
        assert resumed.manager.load() == step
        assert_same(resumed.values(), expected[step])
        # The same through a save without a thread.
        sync.manager.states = resumed.states
        sync.manager.save(step)
        assert differ(sync.values(), expected[step])
    sync.manager = CheckpointManager(CheckpointConfig(enable=True, load_step=2), folder / "sync", sync.states)
    sync.manager.load()
    assert_same(sync.values(), expected[2])


def a_failed_save_is_told_and_the_next_one_is_tried(folder: Path) -> None:
    for mode in ("disabled", "async", "async_with_pinned_mem"):
        run = Run(folder / mode, async_mode=mode)
        run.train(1)
        in_the_way = folder / mode / "checkpoint" / "step-1.tmp"
        if dist.get_rank() == 0:
            in_the_way.write_text("in the way")
        dist.barrier()
        run.manager.save(1)
        run.manager.wait()
        assert run.manager.failed_steps == [1]
        assert steps_in(folder / mode / "checkpoint") == []
        run.train(1)
        run.manager.save(2)
        run.manager.wait()
        assert run.manager.failed_steps == [1]
        assert steps_in(folder / mode / "checkpoint") == [2]
        if dist.get_rank() == 0:
            in_the_way.unlink()
        dist.barrier()
        run.manager.save(1, last=True)
        assert run.manager.failed_steps == []
        resumed = Run(folder / mode, load_step=1)
        assert resumed.manager.load() == 1
        assert_same(resumed.values(), run.values())


def tied_weights(folder: Path) -> None:
    for mode in ("disabled", "async"):
        run = Run(folder / mode, tied=True, async_mode=mode)
        run.train(2)
        run.manager.save(2, last=True)
        resumed = Run(folder / mode, tied=True)
        assert differ(resumed.values(), run.values())
        resumed.manager.load()
        assert resumed.model.output.weight is resumed.model.tok_embeddings.weight
        assert_same(resumed.values(), run.values())
        run.train(1)
        resumed.manager.load()
        resumed.train(1)
        assert resumed.model.output.weight is resumed.model.tok_embeddings.weight


def random_numbers_differ_by_rank(folder: Path) -> None:
    run = Run(folder)
    seed_ranks()
    run.manager.save(1)
    drawn = [torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: NPY002
    of_all: list[Any] = [None, None]
    dist.all_gather_object(of_all, drawn)
    assert all(a != b for a, b in zip(*of_all, strict=True))
    run.manager.load()
    assert drawn == [torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: NPY002


def more_ranks_than_saved(folder: Path) -> None:
    """`folder` holds what one rank has saved, and the weights as they were."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rowhouse").addHandler(handler)
    logging.getLogger("rowhouse").setLevel(logging.INFO)
    run = Run(folder)
    seed_ranks()
    before = torch.get_rng_state()
    assert run.manager.load() == 4
    assert_same(run.full_model(), torch.load(folder / "weights.pt"))
    notes = [m for m in messages if "keep their seed" in m]
    assert len(notes) == (1 if dist.get_rank() == 0 else 0)
    assert torch.equal(before, torch.get_rng_state()) == (dist.get_rank() == 1)
    logging.getLogger("rowhouse").removeHandler(handler)


def saved_for_one_rank(folder: Path) -> None:
    run = Run(folder)
    seed_ranks()
    run.train(3)
    run.manager.save(7)
    weights = run.full_model()
    if dist.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")


def two_ranks(folder: Path) -> None:
    cases = [
        resumes_bitwise, async_is_a_snapshot, a_failed_save_is_told_and_the_next_one_is_tried, tied_weights,
        random_numbers_differ_by_rank, more_ranks_than_saved, saved_for_one_rank,
    ]  # fmt: skip
    for case in cases:
        print(f"rank {dist.get_rank()}: {case.__name__}", flush=True)
        case(folder / case.__name__)
        dist.barrier()


def test_two_ranks_and_other_numbers_of_ranks(tmp_path):
    alone = Run(tmp_path / "more_ranks_than_saved")
    alone.train(4)
    alone.manager.save(4)
    torch.save(alone.full_model(), tmp_path / "more_ranks_than_saved" / "weights.pt")

    launch(two_ranks, 2, tmp_path)

    folder = tmp_path / "saved_for_one_rank"
    run = Run(folder)
    assert run.manager.load() == 7
    assert_same(run.full_model(), torch.load(folder / "weights.pt"))
    assert run.counter.state["step"] == 3
