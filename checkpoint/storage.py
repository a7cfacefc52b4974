"""How torch.distributed.checkpoint (DCP) writes and reads our checkpoint folders (checkpoint/folders.py).

DCP loads flipped bytes without a word, and unpickles a checkpoint's metadata without restriction. The writer here keeps
a checksum of every byte that it writes, reads it back, and commits; the reader unpickles nothing but DCP's own classes.
"""

import os
import pickle
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import fsspec
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from checkpoint import folders
from checkpoint.folders import FileRecord, HashingStream

METADATA = ".metadata"


class RecordingFiles(FileSystem):
    """DCP's view of an fsspec file system, whose new files are recorded as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, FileRecord] = {}
        """Path -> what was written there."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            hashing = HashingStream(cast(IO[bytes], stream))
            yield hashing
        name = os.path.basename(path)
        self.records[str(path)] = FileRecord(name, hashing.bytes, hashing.hash.hexdigest())

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        record = self.records.pop(str(path))
        self.records[str(new_path)] = FileRecord(os.path.basename(new_path), record.bytes, record.xxh3_128)


class CheckpointWriter(FileSystemWriter):
    """A storage writer for dcp.save and dcp.async_save that commits the checkpoint when all ranks have written.

    `path` is the checkpoint's name in the file system `fs`: see folders.open_location. When dcp.save returns, it is
    committed: whole, on disk, read back and verified; or dcp.save raises on all ranks, and what was there under that
    name is as it was.
    """

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str, step: int):
        self.file_system, self.final_path, self.step = fs, path, step
        self.process = os.getpid()
        super().__init__(folders.place_of(fs, path), sync_files=folders.is_local(fs))
        self.path: Any = folders.place_of(fs, path)
        self.fs: Any = RecordingFiles()
        self.fs.fs = fs

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """DCP resets the writer before a save, to the path that it was given: ours stays."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if os.getpid() != self.process:
            end_with_parent()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before any rank writes."""
        folders.begin(self.file_system, self.final_path)
        self.num_ranks = len(plans)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, reads them back, and sends their records with DCP's results."""
        results: list[Any] = super().write_data(plan, planner).value()
        for path, record in self.fs.records.items():
            if folders.checksum(self.file_system, path) != record.xxh3_128:
                raise OSError(f"{path} reads back differently from what was written")
        future: Future[list[WriteResult]] = Future()
        future.set_result(results + list(self.fs.records.values()))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: metadata, manifest, commit."""
        of_all: list[Any] = [result for of_rank in results for result in of_rank]
        records = [result for result in of_all if isinstance(result, FileRecord)]
        self.fs.records = {}
        super().finish(metadata, [[result for result in of_all if isinstance(result, WriteResult)]])
        records += self.fs.records.values()
        folders.commit(self.file_system, self.final_path, records, {"step": self.step, "ranks": self.num_ranks})


def end_with_parent() -> None:
    """A process that writes for a run which was killed must not go on: the next run may write there too.

    (Not the kernel's PR_SET_PDEATHSIG: it takes the end of the thread that started the process for its parent's.)
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    if not any(thread.name == "parent" for thread in threading.enumerate()):
        threading.Thread(target=watch, name="parent", daemon=True).start()


class CheckpointReader(FileSystemReader):
    """A storage reader for dcp.load that executes nothing which the files bring.

    `path` is the checkpoint's in the file system `fs`: see folders.open_location. Raises pickle.UnpicklingError where
    the metadata holds anything but DCP's own classes, or names a file outside of the folder.
    """

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str):
        super().__init__(path)
        self.path: Any = path
        self.fs: Any = FileSystem()
        self.fs.fs = fs

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """DCP resets the reader before a load, to the path that it was given: ours stays."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(f"{self.path}/{METADATA}", "rb") as file:
            metadata = MetadataUnpickler(file).load()
        for info in metadata.storage_data.values():
            if "/" in info.relative_path:
                raise pickle.UnpicklingError(f"its metadata names a file outside of it: {info.relative_path}")
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata: plain data of its own classes."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            found = getattr(torch, name, None)
            if found is torch.Size or isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                return found
        if module == "torch.serialization" and name == "_get_layout":
            return torch.serialization._get_layout
        if module == "torch.distributed.checkpoint.filesystem" and name == "_StorageInfo":
            return _StorageInfo
        if module == "torch.distributed.checkpoint.metadata" and name in METADATA_CLASSES:
            return getattr(dcp_metadata, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath"):
            return Path
        raise pickle.UnpicklingError(f"its metadata holds a {module}.{name}, which no checkpoint needs")


METADATA_CLASSES = {
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
    "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
}  # fmt: skip
