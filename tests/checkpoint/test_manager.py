"""Saving and loading: on two ranks (one launch), between numbers of ranks, and after a kill at any moment."""

import copy
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import checkpoint.manager
from checkpoint.manager import CheckpointConfig, CheckpointManager, complete_steps
from checkpoint.state import ModelState, OptimizerState, RngState
from errors import UserError
from tests.distributed import launch

VOCAB, DIM = 17, 6


class TinyModel(nn.Module):
    def __init__(self, tied: bool = False, dim: int = DIM, layers: int = 2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.output = nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.output(x)


class Counter:
    """Stands for the trainer's own state: changes in place, holds a list and a tensor."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"step": 0, "losses": [], "lanes": torch.zeros(3, dtype=torch.int64)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Run:
    """A small training run, sharded over the ranks. `seed` None: other weights each time."""

    def __init__(self, folder: Path, seed: int | None = None, tied: bool = False, **settings: Any):
        torch.manual_seed(random.SystemRandom().randrange(2**31) if seed is None else seed)
        self.model = TinyModel(tied)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, weight_decay=0.1)
        self.counter = Counter()
        self.drawn: list[tuple[float, float]] = []
        self.states = {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.model, self.optimizer),
            "train_state": self.counter,
            "rng": RngState(torch.device("cpu")),
        }
        self.manager = CheckpointManager(CheckpointConfig(enable=True, **settings), folder, self.states)

    def train(self, steps: int) -> None:
        """Each rank on data of its own random numbers."""
        for _ in range(steps):
            tokens = torch.randint(VOCAB, (10,))
            self.model(tokens).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.counter.state["step"] += 1
            self.counter.state["losses"].append(self.counter.state["step"] / 7)
            self.counter.state["lanes"] += 3
            self.drawn.append((random.random(), np.random.rand()))  # noqa: NPY002

    def values(self) -> dict[str, Any]:
        """All that a resume must bring back: copies, of this rank's shards."""
        tensors = {**self.states["model"].state_dict(), **self.states["optimizer"].state_dict()}
        local = {k: (v.to_local() if hasattr(v, "to_local") else v).detach().clone() for k, v in tensors.items()}
        return {**local, **copy.deepcopy(self.counter.state)}

    def full_model(self) -> dict[str, Tensor]:
        return {name: p.detach().full_tensor().clone() for name, p in self.model.named_parameters()}


def seed_ranks() -> None:
    """Fresh random numbers, others on each rank."""
    seed = [random.SystemRandom().randrange(2**31)]
    dist.broadcast_object_list(seed)
    torch.manual_seed(seed[0] + dist.get_rank())
    random.seed(seed[0] + dist.get_rank())
    np.random.seed(seed[0] + dist.get_rank())  # noqa: NPY002


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        same = torch.equal(a[key], b[key]) if isinstance(a[key], Tensor) else a[key] == b[key]
        assert same, f"{key}: {a[key]} is not {b[key]}"


def differ(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return any(not torch.equal(a[key], b[key]) for key in a if isinstance(a[key], Tensor))


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
    assert complete_steps(folder / "checkpoint") == [2]

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
    run = Run(folder, seed=3, async_mode="async", interval=1)
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


def async_failure_comes_with_the_next_call(folder: Path) -> None:
    run = Run(folder, async_mode="async")
    run.train(1)
    if dist.get_rank() == 0:
        (folder / "checkpoint" / "step-1.tmp").write_text("in the way")
    dist.barrier()
    run.manager.save(1)
    with pytest.raises(UserError, match=r"checkpoint\.folder: .*cannot be written \(FileExistsError"):
        run.manager.wait()
    assert complete_steps(folder / "checkpoint") == []


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
        resumes_bitwise, async_is_a_snapshot, async_failure_comes_with_the_next_call, tied_weights,
        random_numbers_differ_by_rank, more_ranks_than_saved, saved_for_one_rank,
    ]  # fmt: skip
    for case in cases:
        print(f"rank {dist.get_rank()}: {case.__name__}", flush=True)
        case(folder / case.__name__)
        dist.barrier()


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


# On one rank, in this process.


def test_fresh_folder_loads_nothing(tmp_path):
    run = Run(tmp_path)
    before = run.values()
    assert run.manager.load() is None
    assert_same(run.values(), before)


def test_disabled_touches_nothing(tmp_path):
    manager = CheckpointManager(CheckpointConfig(interval=1), tmp_path / "run", {})
    manager.maybe_save(1)
    manager.save(1, last=True)
    assert manager.load() is None
    manager.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("keep, kept", [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_keep_latest_k(tmp_path, keep, kept, mode):
    run = Run(tmp_path, keep_latest_k=keep, interval=1, async_mode=mode)
    for step in (1, 2, 3, 4):
        run.manager.maybe_save(step)
    run.manager.close()
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == [f"step-{n}" for n in kept]


def test_going_back_keeps_the_later_steps_and_says_so(tmp_path, caplog):
    run = Run(tmp_path)
    for step in (1, 8, 9):
        run.manager.save(step)
    back = Run(tmp_path, load_step=1, keep_latest_k=1)
    assert back.manager.load() == 1
    assert "still holds step-9" in caplog.text
    back.manager.save(2)
    assert complete_steps(tmp_path / "checkpoint") == [2, 8, 9]


def test_latest_by_number_and_only_whole_ones(tmp_path):
    run = Run(tmp_path)
    for step in (9, 10):
        run.manager.save(step)
    folder = tmp_path / "checkpoint"
    shutil.copytree(folder / "step-10", folder / "step-20.tmp")
    shutil.copytree(folder / "step-10", folder / "step-30")
    (folder / "step-30" / ".metadata").unlink()
    shutil.copytree(folder / "step-10", folder / "step-40-copy")
    resumed = Run(tmp_path)
    assert not (folder / "step-20.tmp").exists()
    assert resumed.manager.load() == 10


def test_last_save_is_not_written_twice(tmp_path):
    run = Run(tmp_path, interval=1, async_mode="async")
    run.manager.maybe_save(5)
    run.manager.wait()
    written = (tmp_path / "checkpoint" / "step-5" / ".metadata").stat().st_ino
    run.manager.save(5, last=True)
    assert (tmp_path / "checkpoint" / "step-5" / ".metadata").stat().st_ino == written


class Kill(BaseException):
    pass


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_killed_at_any_moment(tmp_path, monkeypatch, mode):
    """Saves step 3 again and prunes step 2, killed before each operation on the folder in turn."""

    def with_countdown(function, count):
        def call(*args, **kwargs):
            if count[0] == 0:
                raise Kill
            count[0] -= 1
            return function(*args, **kwargs)

        return call

    survivors = []
    for moment in range(20):
        folder = tmp_path / str(moment)
        old = Run(folder)
        old.counter.state["step"] = -3
        for step in (2, 3):
            old.manager.save(step)
        new = Run(folder, keep_latest_k=1, async_mode=mode)
        new.train(1)
        count = [moment]
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", with_countdown(Path.rename, count))
            patch.setattr(shutil, "rmtree", with_countdown(shutil.rmtree, count))
            patch.setattr(checkpoint.manager, "sync_folder", with_countdown(checkpoint.manager.sync_folder, count))
            try:
                new.manager.save(3, last=True)
                killed = False
            except BaseException as error:
                if not isinstance(error, Kill) and "Kill" not in str(error):
                    raise
                killed = True
        resumed = Run(folder)
        assert resumed.manager.load() == 3
        assert_same(resumed.values(), (new if resumed.counter.state["step"] > 0 else old).values())
        assert not [p for p in (folder / "checkpoint").iterdir() if p.suffix]
        survivors.append("new" if resumed.counter.state["step"] > 0 else "old")
        if not killed:
            break
    assert not killed
    # Some kills before the commit, some after.
    assert survivors == sorted(survivors, reverse=True) and {"old", "new"} == set(survivors)


def test_load_step(tmp_path):
    run = Run(tmp_path)
    for step in (2, 4):
        run.counter.state["step"] = step
        run.manager.save(step)
    resumed = Run(tmp_path, load_step=2)
    assert resumed.manager.load() == 2 and resumed.counter.state["step"] == 2
    with pytest.raises(UserError, match=r"checkpoint\.load_step: .*no step-3; it has step-2, step-4"):
        Run(tmp_path, load_step=3).manager.load()


def test_initial_load_path(tmp_path, caplog):
    source = Run(tmp_path / "source")
    source.train(3)
    source.manager.save(3)
    path = str(tmp_path / "source" / "checkpoint" / "step-3")

    run = Run(tmp_path / "weights", initial_load_path=path)
    assert run.manager.load() is None
    assert_same(run.full_model(), source.full_model())
    assert run.counter.state["step"] == 0
    assert not run.optimizer.state

    run = Run(tmp_path / "all", initial_load_path=path, initial_load_model_only=False)
    assert run.manager.load() == 3
    assert_same(run.values(), source.values())
    run.train(1)
    run.manager.save(4)
    resumed = Run(tmp_path / "all", initial_load_path=path)
    assert resumed.manager.load() == 4

    with pytest.raises(UserError, match=r"checkpoint\.initial_load_path: .*no checkpoint.*has step-3"):
        Run(tmp_path / "x", initial_load_path=str(tmp_path / "source" / "checkpoint")).manager.load()
    with pytest.raises(UserError, match=r"checkpoint\.initial_load_path: .*nowhere"):
        Run(tmp_path / "x", initial_load_path="nowhere").manager.load()


def test_weights_alone_suffice_for_an_initial_load(tmp_path):
    """As a converter writes them: no step, no other state."""
    model = TinyModel()
    torch.distributed.checkpoint.save(
        {f"model.{name}": p.detach() for name, p in model.named_parameters()}, checkpoint_id=tmp_path / "converted"
    )
    run = Run(tmp_path / "run", initial_load_path=str(tmp_path / "converted"))
    assert run.manager.load() is None
    assert_same(run.full_model(), dict(model.named_parameters()))


def test_exclude_from_loading(tmp_path, caplog):
    source = Run(tmp_path)
    source.train(2)
    source.manager.save(2)
    run = Run(tmp_path, exclude_from_loading=["optimizer", "train_state", "lr_scheduler"])
    assert run.manager.load() == 2
    assert_same(run.full_model(), source.full_model())
    assert not run.optimizer.state and run.counter.state["step"] == 0
    assert "this run has no state lr_scheduler" in caplog.text


def test_a_checkpoint_without_a_state_says_what_to_do(tmp_path):
    source = Run(tmp_path)
    del source.states["train_state"]
    source.manager.save(2)
    with pytest.raises(UserError, match='holds no train_state; add "train_state" to checkpoint.exclude_from_loading'):
        Run(tmp_path).manager.load()
    assert Run(tmp_path, exclude_from_loading=["train_state"]).manager.load() == 2


def test_a_model_of_other_shape_is_refused(tmp_path):
    source = Run(tmp_path)
    source.manager.save(2)
    config = CheckpointConfig(enable=True)

    wide = CheckpointManager(config, tmp_path, {"model": ModelState(TinyModel(dim=DIM + 2))})
    with pytest.raises(UserError) as caught:
        wide.load()
    assert f"checkpoint.folder: {tmp_path}/checkpoint/step-2 does not fit this run's model" in str(caught.value)
    assert f"layers.0.bias is ({DIM},) there and ({DIM + 2},) here" in str(caught.value)
    assert "and 3 more" in str(caught.value)

    deep = CheckpointManager(config, tmp_path, {"model": ModelState(TinyModel(layers=3))})
    with pytest.raises(UserError, match=r"it lacks layers\.2\.bias, layers\.2\.weight\."):
        deep.load()

    path = str(tmp_path / "checkpoint" / "step-2")
    config = CheckpointConfig(enable=True, initial_load_path=path)
    shallow = CheckpointManager(config, tmp_path / "x", {"model": ModelState(TinyModel(layers=1))})
    with pytest.raises(
        UserError, match=r"checkpoint\.initial_load_path: .*this run lacks layers\.1\.bias, layers\.1\.weight\."
    ):
        shallow.load()


@pytest.mark.parametrize("damage", ["metadata", "data", "gone"])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    run = Run(tmp_path)
    run.train(1)
    run.manager.save(2)
    folder = tmp_path / "checkpoint" / "step-2"
    victim = folder / ".metadata" if damage == "metadata" else next(folder.glob("*.distcp"))
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    with pytest.raises(UserError, match=r"checkpoint\.folder: .*step-2 cannot be read \("):
        Run(tmp_path).manager.load()


def test_an_unwritable_folder_is_the_users_to_mend(tmp_path):
    (tmp_path / "checkpoint").write_text("a file")
    with pytest.raises(UserError, match=r"checkpoint\.folder: .*cannot be written"):
        Run(tmp_path)
    run = Run(tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "step-1.tmp").write_text("a file")
    with pytest.raises(UserError, match=r"checkpoint\.folder: .*cannot be written"):
        run.manager.save(1)


def test_config_problems():
    def keys(**settings):
        return [key for key, _ in CheckpointConfig(**settings).problems()]

    assert keys() == keys(enable=True) == keys(enable=True, keep_latest_k=0, load_step=0) == []
    assert keys(interval=0) == ["interval"]
    assert keys(keep_latest_k=-1) == ["keep_latest_k"]
    assert keys(enable=True, load_step=-2) == ["load_step"]
    assert keys(load_step=3) == ["load_step"]
    assert keys(initial_load_path="x") == ["initial_load_path"]
    assert keys(enable=True, exclude_from_loading=["optimiser"]) == ["exclude_from_loading"]
    assert keys(enable=True, exclude_from_loading=["model"]) == []
    assert keys(enable=True, exclude_from_loading=["model"], initial_load_path="x") == ["exclude_from_loading"]
