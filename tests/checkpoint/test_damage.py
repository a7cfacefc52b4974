"""Checkpoints whose files are not as they were written: found, named, and not loaded."""

import os
import pickle
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from errors import UserError
from tests.checkpoint.small_run import Run, assert_same, steps_in


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "flipped": (flip, "has other content than was written"),
    "truncated": (truncate, "bytes of"),
    "missing": (Path.unlink, "is missing"),
    "unreadable": (unreadable, ""),
}


@pytest.mark.parametrize("file", ["*.distcp", ".metadata"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_loaded(tmp_path, kind, file, caplog):
    damage, phrase = DAMAGE[kind]
    run = Run(tmp_path)
    run.train(1)
    run.manager.save(2)
    at_two = run.values()
    run.train(1)
    run.manager.save(4)
    folder = tmp_path / "checkpoint"
    victim = next((folder / "step-4").glob(file))
    damage(victim)

    with pytest.raises(UserError) as caught:
        Run(tmp_path, on_damage="stop").manager.load()
    assert str(caught.value).startswith(f"checkpoint.folder: {victim} ") and phrase in str(caught.value)
    with pytest.raises(UserError, match="step-4"):
        Run(tmp_path, load_step=4).manager.load()
    assert steps_in(folder) == [2, 4]

    resumed = Run(tmp_path, keep_latest_k=2)
    assert resumed.manager.load() == 2
    assert_same(resumed.values(), at_two)
    assert str(victim) in caplog.text and "step-4.damaged" in caplog.text
    # It stays for a look, and takes nobody's place among those that are kept.
    resumed.manager.save(4)
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4", "step-4.damaged"]
    assert Run(tmp_path).manager.load() == 4


def test_a_checkpoint_without_its_marker_is_none(tmp_path, caplog):
    run = Run(tmp_path)
    for step in (2, 4, 6, 8):
        run.manager.save(step)
    folder = tmp_path / "checkpoint"
    (folder / "step-6" / "COMMITTED").write_text("0" * 32)
    flip(next((folder / "step-6").glob("*.distcp")))
    (folder / "step-8" / "COMMITTED").unlink()
    truncate(folder / "step-8" / "manifest.json")
    assert steps_in(folder) == [2, 4]
    # A kill between the rename and the marker leaves a whole one: the next start finishes it.
    (folder / "step-4" / "COMMITTED").unlink()
    resumed = Run(tmp_path)
    assert resumed.manager.load() == 4
    for step in (6, 8):
        assert f"step-{step} has no valid COMMITTED" in caplog.text
        assert (folder / f"step-{step}").is_dir()


def test_no_checkpoint_left_is_not_a_fresh_start(tmp_path):
    run = Run(tmp_path)
    run.manager.save(2)
    flip(next((tmp_path / "checkpoint" / "step-2").glob("*.distcp")))
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged \(step-2\)"):
        Run(tmp_path).manager.load()


def test_a_damaged_initial_checkpoint_is_refused(tmp_path):
    run = Run(tmp_path / "source")
    run.manager.save(2)
    path = tmp_path / "source" / "checkpoint" / "step-2"
    flip(next(path.glob("*.distcp")))
    with pytest.raises(UserError, match=r"checkpoint\.initial_load_path: .*has other content"):
        Run(tmp_path / "run", initial_load_path=str(path)).manager.load()


class Trap:
    """What a hostile file may hold: unpickled without restriction, it runs a command."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_loading_executes_nothing(tmp_path):
    model = {f"model.{name}": p.detach() for name, p in Run(tmp_path / "x").model.named_parameters()}
    dcp.save(model, checkpoint_id=tmp_path / "foreign")
    run = Run(tmp_path / "run", initial_load_path=str(tmp_path / "foreign"))
    assert run.manager.load() is None
    metadata = pickle.loads((tmp_path / "foreign" / ".metadata").read_bytes())
    metadata.planner_data = Trap(tmp_path / "sprung")
    (tmp_path / "foreign" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"cannot be read \(UnpicklingError: its metadata holds a posix.system"):
        Run(tmp_path / "run", initial_load_path=str(tmp_path / "foreign")).manager.load()
    assert not (tmp_path / "sprung").exists()
