"""Commits and removals that are killed at any moment, on a local disk and on an object store."""

import os
import shutil

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from checkpoint import folders
from checkpoint.folders import FileRecord


class Kill(BaseException):
    pass


def write(fs: fsspec.AbstractFileSystem, path: str, contents: dict[str, bytes]) -> None:
    """As the ranks and then the coordinator do."""
    folders.begin(fs, path)
    records = []
    for name, content in contents.items():
        with fs.open(f"{folders.place_of(fs, path)}/{name}", "wb") as file:
            stream = folders.HashingStream(file)
            stream.write(content)
        records.append(FileRecord(name, stream.bytes, stream.hash.hexdigest()))
    folders.commit(fs, path, records, {"step": 0})


def contents_of(fs: fsspec.AbstractFileSystem, path: str) -> dict[str, bytes]:
    """What a committed and verified checkpoint holds."""
    assert folders.is_committed(fs, path)
    records = folders.records_of(fs, path)
    assert not [fault for record in records if (fault := folders.fault_of(fs, path, record))]
    return {record.name: fs.cat_file(f"{path}/{record.name}") for record in records}


def kill_after(monkeypatch: pytest.MonkeyPatch, count: int, fs: fsspec.AbstractFileSystem) -> None:
    """The operations on the file system that change it: all after the first `count` raise Kill; one does half."""
    left, rm_file = [count], fs.rm_file

    def wrap(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def call(*args, **kwargs):
            if left[0] == 0:
                if name in ("rmtree", "rm"):
                    files = args[-1] if isinstance(args[-1], list) else fs.find(args[-1])
                    for half in files[:1]:
                        rm_file(half)
                raise Kill
            left[0] -= 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    wrap(folders, "put")
    if isinstance(fs, LocalFileSystem):
        wrap(os, "rename")
        wrap(os, "fsync")
        wrap(shutil, "rmtree")
    else:
        wrap(fs, "pipe_file")
        wrap(fs, "rm_file")
        wrap(fs, "rm")


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
def test_killed_at_any_moment(tmp_path, monkeypatch, remote, again):
    """step-2 is there; step-3 is written (again), then step-2 is removed."""
    before, after = {"a": b"before", "b": b"x" * 100}, {"a": b"after", "c": b"y" * 100}
    outcomes = []
    for moment in range(60):
        fs = MemoryFileSystem() if remote else LocalFileSystem()
        root = f"/{tmp_path.name}-{moment}" if remote else str(tmp_path / str(moment))
        write(fs, f"{root}/step-2", before)
        if again:
            write(fs, f"{root}/step-3", before)
        with monkeypatch.context() as patch:
            kill_after(patch, moment, fs)
            try:
                write(fs, f"{root}/step-3", after)
                folders.remove(fs, f"{root}/step-2")
                killed = False
            except Kill:
                killed = True
        folders.recover(fs, root)
        steps = folders.committed_steps(fs, root)
        found = {step: contents_of(fs, f"{root}/step-{step}") for step in steps}
        # step-2 goes only when the new step-3 is whole; the old step-3 stays until then, but on an object store.
        assert found.get(3) == after or 2 in found
        assert all(found[step] in (before, after) for step in found)
        if again and not remote:
            assert 3 in found
        names = [entry["name"].rsplit("/", 1)[-1] for entry in fs.ls(root, detail=True)]
        assert sorted(names) == [f"step-{step}" for step in steps]
        outcomes.append("after" if found.get(3) == after else "before")
        if not killed:
            break
    assert not killed and steps == [3]
    assert outcomes == sorted(outcomes, reverse=True) and set(outcomes) == {"before", "after"}


def test_somebody_elses_folder_is_not_overwritten(tmp_path):
    fs = LocalFileSystem()
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "precious").write_text("mine")
    folders.recover(fs, str(tmp_path))
    write(fs, f"{tmp_path}/step-1", {"a": b"new"})
    assert contents_of(fs, f"{tmp_path}/step-1") == {"a": b"new"}
    assert (tmp_path / "step-1.damaged" / "precious").read_text() == "mine"


def test_a_file_that_is_missing_or_short_is_not_committed(tmp_path):
    fs, path = LocalFileSystem(), f"{tmp_path}/step-1"
    folders.begin(fs, path)
    with pytest.raises(FileNotFoundError):
        folders.commit(fs, path, [FileRecord("a", 3, "0")], {})
    (tmp_path / "step-1.tmp" / "a").write_bytes(b"ab")
    with pytest.raises(OSError, match="has 2 bytes, 3 were written"):
        folders.commit(fs, path, [FileRecord("a", 3, "0")], {})
    assert folders.committed_steps(fs, str(tmp_path)) == []
