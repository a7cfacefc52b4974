"""Folders of safetensors files as Hugging Face has them: read into a model that is spread over the ranks, and written.

    model.safetensors                    all tensors; or
    model-00001-of-0000N.safetensors     some of them each, and
    model.safetensors.index.json         which tensor is in which file

Reading sends nothing: each rank maps the files into memory, and copies the parts that it holds of each parameter.
Writing takes one whole tensor after another. So nobody ever holds the model; and nothing is unpickled.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoint.folders import sync_folder
from checkpoint.manager import a_few
from errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SHARD_BYTES = 2 * 10**9

Shape = tuple[int, ...]


# Reading


class SafetensorsFolder:
    """The tensors of a folder: their shapes at once, their values when they are asked for.

    `key` is the setting that led to the folder, for messages. Raises UserError with all that is wrong: files that are
    missing or damaged, tensors that the index names and no file has, dtypes other than those of DTYPES.
    """

    def __init__(self, folder: Path, key: str):
        self.place = f"{key}: {folder}"
        self.tensors: dict[str, Any] = {}
        """Name -> a slice of safetensors, which is read where it is indexed."""
        faults = []
        for file, names in self.names_by_file(folder).items():
            try:
                opened = safe_open(folder / file, "pt")
            except FileNotFoundError:
                faults.append(f"{file} is missing")
                continue
            except (OSError, SafetensorError) as error:
                faults.append(f"{file} is damaged ({error})")
                continue
            there = set(opened.keys())
            faults += [f"{file} lacks {name}" for name in names if name not in there]
            self.tensors |= {name: opened.get_slice(name) for name in names or there if name in there}
        for name, tensor in self.tensors.items():
            if tensor.get_dtype() not in DTYPES.values():
                faults.append(f"{name} is {tensor.get_dtype()}, not one of {', '.join(DTYPES.values())}")
        if faults:
            raise UserError(f"{self.place}: {a_few(faults)}: fetch the folder again, or give another")
        self.shapes: dict[str, Shape] = {name: tuple(tensor.get_shape()) for name, tensor in self.tensors.items()}

    def names_by_file(self, folder: Path) -> dict[str, list[str]]:
        """File name -> the tensors that the index says are in it; none without an index."""
        if (folder / SINGLE).is_file():
            return {SINGLE: []}
        by_file: dict[str, list[str]] = {}
        try:
            for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
                by_file.setdefault(file, []).append(name)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{self.place} has neither {SINGLE} nor {INDEX}: give a folder with a model in safetensors files"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.place}: {INDEX} is damaged ({type(error).__name__}: {error}): fetch it again"
            ) from error
        return by_file

    def check(self, expected: Mapping[str, Shape], is_ignored: Callable[[str], bool]) -> None:
        """Raises UserError where the tensors are not those expected, apart from those that do not matter."""
        unexpected = sorted(name for name in self.shapes.keys() - expected.keys() if not is_ignored(name))
        reshaped = [
            f"{name} is {self.shapes[name]} instead of {shape}"
            for name, shape in expected.items()
            if self.shapes.get(name, shape) != shape
        ]
        faults = {
            "it lacks ": [name for name in expected if name not in self.shapes],
            "the model has no ": unexpected,
            "": reshaped,
        }
        if any(faults.values()):
            text = "; ".join(start + a_few(names) for start, names in faults.items() if names)
            raise UserError(
                f"{self.place} does not hold the model of its config.json: {text}: fetch it again, or give another"
            )

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, one slice a dimension, as a view of the file: copy it."""
        return self.tensors[name][part]


def fill(weight: Tensor, files: SafetensorsFolder, name: str, rows: Tensor | None) -> None:
    """Copies this rank's part of the tensor `name` to a weight, plain or DTensor, in the weight's dtype.

    `rows`: int64 (rows,), row i of the weight is row rows[i] of the tensor; None where they are in the same order.
    """
    local, part = local_part(weight)
    if local.numel() == 0:
        return
    if rows is None:
        local.copy_(files.read(name, part))
        return
    # What lies between the first and the last row wanted: of a permutation within heads, the heads.
    wanted = rows[part[0]]
    first, end = int(wanted.min()), int(wanted.max()) + 1
    local.copy_(files.read(name, (slice(first, end), *part[1:]))[wanted - first])


def local_part(weight: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """What this rank holds of a weight, and where in the whole one that is."""
    if not isinstance(weight, DTensor):
        return weight, tuple(slice(0, size) for size in weight.shape)
    (chunk,) = weight.__create_chunk_list__()  # As torch's own checkpoints ask.
    part = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return weight.to_local(), part


# Writing


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, which takes its name, and its place, when the block has ended.

    Whatever moment the process is killed at, what is under the name is whole. Raises OSError where the folder cannot be
    written, and where something else than an export has its name.
    """
    if folder.exists() and not (folder / INDEX).is_file():
        raise FileExistsError(f"there is a {folder} already, and it is no export")
    temporary, former = (folder.with_name(folder.name + suffix) for suffix in (".tmp", ".old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync_folder(str(temporary))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    temporary.rename(folder)
    sync_folder(str(folder.parent))
    shutil.rmtree(former, ignore_errors=True)


def write_safetensors(folder: Path, shapes: Mapping[str, Shape], tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Writes tensors, in the order of `shapes`, to files of up to SHARD_BYTES (a larger tensor has its own), and the
    index. They are taken one at a time, from any device."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    files: list[list[str]] = [[]]
    for name, size in sizes.items():
        if files[-1] and sum(sizes[n] for n in files[-1]) + size > SHARD_BYTES:
            files.append([])
        files[-1].append(name)
    weight_map: dict[str, str] = {}
    remaining = iter(tensors)
    for number, names in enumerate(files, start=1):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        with open(path, "wb") as file:
            file.write(header({name: shapes[name] for name in names}, dtype))
            for name in names:
                tensor = next(remaining).to("cpu", dtype).contiguous()
                assert tensor.shape == shapes[name], name
                file.write(tensor.view(torch.uint8).numpy().data)
        sync(path)  # Now, not all at the end: other ranks wait meanwhile, and have a timeout.
        weight_map |= dict.fromkeys(names, path.name)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def header(shapes: Mapping[str, Shape], dtype: torch.dtype) -> bytes:
    """What a safetensors file begins with: the length of a JSON text in 8 bytes, and the text. The values follow."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def sync(path: Path) -> None:
    """Has a file's content on disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
