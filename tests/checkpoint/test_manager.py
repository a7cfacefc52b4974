"""Saving and loading on one rank: what is found, kept, refused, and left by a kill at any moment."""

import resource
import shutil

import pytest
import torch

from checkpoint import folders
from checkpoint.config import CheckpointConfig
from checkpoint.manager import CheckpointManager
from checkpoint.state import ModelState
from errors import UserError
from tests.checkpoint.small_run import DIM, Run, TinyModel, assert_same, steps_in


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
    assert steps_in(tmp_path / "checkpoint") == [2, 8, 9]


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


def test_an_unwritable_folder_is_the_users_to_mend(tmp_path):
    (tmp_path / "checkpoint").write_text("a file")
    with pytest.raises(UserError, match=r"checkpoint\.folder: .*cannot be written"):
        Run(tmp_path)
    run = Run(tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "step-1.tmp").write_text("a file")
    run.manager.save(1)
    assert run.manager.failed_steps == [1]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_is_told_and_the_run_goes_on(tmp_path, mode, caplog):
    run = Run(tmp_path, async_mode=mode)
    run.manager.save(1, last=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        run.manager.save(2, last=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step-2 could not be saved" in caplog.text and "make room" in caplog.text
    assert run.manager.failed_steps == [2]
    # What was written of it does not keep the disk full.
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-1"]
    assert Run(tmp_path).manager.load() == 1
    run.manager.save(3, last=True)
    assert Run(tmp_path).manager.load() == 3


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
    assert keys(enable=True, initial_load_in_hf=True) == ["initial_load_in_hf"]
    hf = {"enable": True, "initial_load_in_hf": True, "initial_load_path": "x"}
    assert keys(**hf) == []
    assert keys(**hf, initial_load_model_only=False) == ["initial_load_in_hf"]
    assert keys(enable=True, export_dtype="bfloat16") == ["export_dtype"]
    assert keys(enable=True, export_dtype="bfloat16", last_save_in_hf=True) == []
    assert keys(last_save_in_hf=True) == ["last_save_in_hf"]


def test_a_remote_folder(tmp_path, caplog):
    """memory:// stands for an object store: no renames, no flush to a disk."""
    url = f"memory://bucket/{tmp_path.name}"
    run = Run(tmp_path, folder=url, keep_latest_k=2)
    for step in (1, 2, 3):
        run.train(1)
        run.manager.save(step)
    fs, root = folders.open_location(url, "")
    assert folders.committed_steps(fs, root) == [2, 3]
    resumed = Run(tmp_path, folder=url)
    assert resumed.manager.load() == 3
    assert_same(resumed.values(), run.values())

    initial = Run(tmp_path, initial_load_path=f"{url}/step-2")
    assert initial.manager.load() is None
    damaged = next(name for name in fs.ls(f"{root}/step-3", detail=False) if name.endswith(".distcp"))
    fs.pipe_file(damaged, fs.cat_file(damaged)[:-1] + b"?")
    assert Run(tmp_path, folder=url).manager.load() == 2
    assert "other content" in caplog.text
    assert fs.isdir(f"{root}/step-3.damaged")


def test_an_unknown_remote_says_what_to_install(tmp_path):
    with pytest.raises(UserError, match=r"checkpoint\.folder: .*install that package, or give a path"):
        Run(tmp_path, folder="nowhere://bucket/x")
