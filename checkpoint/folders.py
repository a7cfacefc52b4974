"""Checkpoints as folders of files, local or remote (fsspec): written aside, committed, verified, removed.

A checkpoint is the folder step-N with the files of torch.distributed.checkpoint (DCP) and two of ours:

    manifest.json   every file's size and checksum (xxh3_128)
    COMMITTED       the manifest's checksum. Written last: a folder without it is no checkpoint.

On a local disk, beside them, after a kill at any moment:

    step-N.tmp      being written or removed
    step-N.old      the former step-N, while a new one takes its place
    step-N.damaged  did not match its manifest when it was to be loaded; left for you to look at

Object stores cannot rename: a remote step-N is written in place, and holds the file UNFINISHED meanwhile.
"""

import contextlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec
import torch
import xxhash
from fsspec.implementations.local import LocalFileSystem

from errors import UserError

logger = logging.getLogger("rowhouse")

MANIFEST, MARKER, UNFINISHED = "manifest.json", "COMMITTED", "UNFINISHED"
BLOCK = 16 * 2**20


@dataclass(frozen=True)
class FileRecord:
    """What a file must be, as the manifest has it."""

    name: str
    bytes: int
    xxh3_128: str


def open_location(location: str | Path, key: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """(file system, path in it) of a path or URL that the setting `key` gives. Raises UserError for an unknown one."""
    try:
        fs, path = fsspec.url_to_fs(str(location))
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{key}: {location} cannot be opened ({error}): install that package, or give a path"
        ) from error
    return fs, path.rstrip("/")


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    return isinstance(fs, LocalFileSystem)


class HashingStream:
    """A file to write to that counts and checksums what it is given, in order."""

    def __init__(self, stream: IO[bytes]):
        self.stream = stream
        self.hash = xxhash.xxh3_128()
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self.bytes += memoryview(data).nbytes
        return self.stream.write(data)

    def __getattr__(self, name: str) -> Any:
        # The rest is the file's own; it must not be told to go back (seek), and DCP does not.
        return getattr(self.stream, name)


# Writing


def begin(fs: fsspec.AbstractFileSystem, path: str) -> None:
    """An empty folder to write the checkpoint `path` to: place_of(fs, path)."""
    place = place_of(fs, path)
    remove(fs, place)
    if is_local(fs):
        os.makedirs(place, exist_ok=True)
    else:
        fs.pipe_file(f"{place}/{UNFINISHED}", b"")


def place_of(fs: fsspec.AbstractFileSystem, path: str) -> str:
    return f"{path}.tmp" if is_local(fs) else path


def commit(fs: fsspec.AbstractFileSystem, path: str, records: list[FileRecord], about: dict[str, Any]) -> None:
    """Makes what was written to place_of(path) the checkpoint `path`. All files are there and on disk already.

    Raises OSError where a file is missing or has another size than its record.
    """
    place = place_of(fs, path)
    for record in records:
        size = fs.info(f"{place}/{record.name}")["size"]
        if size != record.bytes:
            raise OSError(f"{place}/{record.name} has {size} bytes, {record.bytes} were written")
    files = {record.name: {"bytes": record.bytes, "xxh3_128": record.xxh3_128} for record in records}
    manifest = json.dumps({"format": 1, **about, "torch": torch.__version__, "files": files}, indent=1).encode()
    put(fs, f"{place}/{MANIFEST}", manifest)
    if is_local(fs):
        sync_folder(place)
        if is_committed(fs, path):
            remove(fs, f"{path}.old")
            os.rename(path, f"{path}.old")
        elif os.path.exists(path):
            set_aside(fs, path)  # Somebody else's, or damaged.
        os.rename(place, path)
        sync_folder(os.path.dirname(path))
    mark(fs, path, manifest)
    if is_local(fs):
        remove(fs, f"{path}.old")
    else:
        fs.rm_file(f"{path}/{UNFINISHED}")


def mark(fs: fsspec.AbstractFileSystem, path: str, manifest: bytes) -> None:
    put(fs, f"{path}/{MARKER}", xxhash.xxh3_128_hexdigest(manifest).encode())
    if is_local(fs):
        sync_folder(path)


def put(fs: fsspec.AbstractFileSystem, path: str, content: bytes) -> None:
    with fs.open(path, "wb") as file:
        file.write(content)
        if is_local(fs):
            file.flush()
            os.fsync(file.fileno())


def sync_folder(folder: str) -> None:
    """Has the names in a local folder on disk."""
    descriptor = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


def is_committed(fs: fsspec.AbstractFileSystem, path: str) -> bool:
    """Whether the marker is there, and belongs to the manifest that is there."""
    try:
        return fs.cat_file(f"{path}/{MARKER}").decode() == xxhash.xxh3_128_hexdigest(fs.cat_file(f"{path}/{MANIFEST}"))
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


def records_of(fs: fsspec.AbstractFileSystem, path: str) -> list[FileRecord]:
    """The manifest's files, by name. Raises FileNotFoundError without a manifest, ValueError for a broken one."""
    files = json.loads(fs.cat_file(f"{path}/{MANIFEST}"))["files"]
    return [FileRecord(name=name, **files[name]) for name in sorted(files)]


def fault_of(fs: fsspec.AbstractFileSystem, path: str, record: FileRecord) -> str | None:
    """What is wrong with a file: a phrase that names it; None where it is as it was written."""
    name = f"{path}/{record.name}"
    try:
        size = fs.info(name)["size"]
        if size != record.bytes:
            return f"{name} has {size} bytes of {record.bytes}"
        if checksum(fs, name) != record.xxh3_128:
            return f"{name} has other content than was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None


def checksum(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """xxh3_128 of a file, read from the disk and not from the memory that it was just written to, where it can be."""
    digest = xxhash.xxh3_128()
    with fs.open(path, "rb", block_size=BLOCK) as file:
        if is_local(fs) and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def step_folders(fs: fsspec.AbstractFileSystem, root: str, suffix: str = "") -> dict[int, str]:
    """N -> path of every step-N (or step-N.<suffix>) in a folder, ascending; none where the folder is not there."""
    fs.invalidate_cache(root)
    try:
        names = [entry["name"] for entry in fs.ls(root, detail=True) if entry["type"] == "directory"]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    matches = [(re.fullmatch(r"step-(\d+)" + re.escape(suffix), name.rsplit("/", 1)[-1]), name) for name in names]
    return dict(sorted((int(match[1]), name) for match, name in matches if match))


def committed_steps(fs: fsspec.AbstractFileSystem, root: str) -> list[int]:
    """The N of each checkpoint in a folder, ascending."""
    return [step for step, path in step_folders(fs, root).items() if is_committed(fs, path)]


# Removing


def remove(fs: fsspec.AbstractFileSystem, path: str) -> None:
    """Removes a folder, so that half of it never passes for a checkpoint. Nothing happens where there is none."""
    if not is_local(fs):
        if fs.exists(path):
            fs.pipe_file(f"{path}/{UNFINISHED}", b"")
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(f"{path}/{MARKER}")
            if files := [name for name in fs.find(path) if not name.endswith(f"/{UNFINISHED}")]:
                fs.rm(files)
            fs.rm(path, recursive=True)
        return
    if os.path.isdir(path) and not path.endswith((".tmp", ".old")):
        shutil.rmtree(f"{path}.tmp", ignore_errors=True)
        os.rename(path, f"{path}.tmp")
        path = f"{path}.tmp"
    if os.path.isdir(path):
        shutil.rmtree(path)


def set_aside(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """Renames a damaged checkpoint to step-N.damaged, and returns that."""
    aside = f"{path}.damaged"
    if fs.exists(aside):
        fs.rm(aside, recursive=True)
    fs.mv(path, aside, recursive=True)
    return aside


def recover(fs: fsspec.AbstractFileSystem, root: str) -> None:
    """Leaves only whole checkpoints under their names, after a kill at any moment of `commit` or `remove`.

    For one process, while nobody writes there.
    """
    for path in step_folders(fs, root).values():
        if is_committed(fs, path):
            continue
        if not is_local(fs) and fs.exists(f"{path}/{UNFINISHED}"):
            logger.info("removing %s, of a save that was cut off", path)
            remove(fs, path)
        elif is_local(fs) and matches_manifest(fs, path):
            mark(fs, path, fs.cat_file(f"{path}/{MANIFEST}"))  # Cut off between its rename and its marker.
        else:
            logger.warning("%s has no valid %s: it is not taken for a checkpoint", path, MARKER)
    if not is_local(fs):
        return
    for step, old in step_folders(fs, root, ".old").items():
        path = f"{root}/step-{step}"
        if is_committed(fs, path):
            remove(fs, old)
        else:
            if os.path.exists(path):
                set_aside(fs, path)
            os.rename(old, path)
    for cut_off in step_folders(fs, root, ".tmp").values():
        logger.info("removing %s, of a save that was cut off", cut_off)
        remove(fs, cut_off)


def matches_manifest(fs: fsspec.AbstractFileSystem, path: str) -> bool:
    try:
        return all(fault_of(fs, path, record) is None for record in records_of(fs, path))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False
