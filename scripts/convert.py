"""Between Rowhouse's checkpoints and folders of Hugging Face models, in one process that never holds the model.

    python -m scripts.convert to_hf CHECKPOINT OUT --config RUN/config.toml [--dtype bfloat16]
    python -m scripts.convert from_hf HF_FOLDER OUT [--dtype float32]

OUT of to_hf loads in transformers; OUT of from_hf is for checkpoint.initial_load_path. Exit status: 0, or 2 with a
sentence on what the user can mend; then there is no OUT.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from checkpoint import folders
from checkpoint.manager import first_failure, misfits_of
from checkpoint.safetensors_files import fill
from checkpoint.storage import METADATA, CheckpointReader, CheckpointWriter
from config import JobConfig, find_config
from data.tokenizer import load_tokenizer
from errors import ExitStatus, UserError
from hugging_face import open_weights, read_config, write_hf
from models.llama.hf import hf_name, hf_rows, shape_of
from models.llama.model import Llama
from models.llama.shapes import LlamaShape
from settings import SettingsReader

PREFIX = "model."  # Of the parameters' names in a checkpoint.


def to_hf(checkpoint: str, out: Path, config_name: str, dtype: torch.dtype) -> None:
    """Our checkpoint -> a Hugging Face folder, with the shape and the tokenizer of the run's configuration."""
    config = read_run_config(config_name)
    model = on_meta(config.model.shape(), config.training.seq_len)
    tokenizer = None if config.model.tokenizer_path is None else load_tokenizer(config.model.tokenizer_path)
    if out.exists():
        raise UserError(f"OUT: there is a {out} already: remove it, or give another name")
    reader = open_checkpoint(checkpoint)
    here = {PREFIX + name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    there = {
        name: tuple(item.size)
        for name, item in reader.metadata.state_dict_metadata.items()
        if name.startswith(PREFIX) and isinstance(item, TensorStorageMetadata)
    }
    if misfits := misfits_of(there, here):
        raise UserError(f"CHECKPOINT: {checkpoint} is not of the run of {config_name}: {'; '.join(misfits)}")

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, shape in here.items():
            state = {name: torch.empty(shape, dtype=dtype)}
            dcp.load(state, storage_reader=reader, no_dist=True)
            yield name.removeprefix(PREFIX), state[name]

    try:
        write_hf(out, model, weights(), dtype, tokenizer)
    except OSError as error:
        raise UserError(f"OUT: {out} cannot be written ({error}): make room, or give another") from error
    except CheckpointException as error:
        raise UserError(f"CHECKPOINT: {checkpoint} cannot be read ({first_failure(error)}): give another") from error


def read_run_config(name: str) -> JobConfig:
    """A run's configuration, for this one process. Raises UserError as train.py does."""
    reader = SettingsReader(JobConfig)
    reader.read_toml(find_config(name))
    reader.values["parallelism"].clear()  # How many ranks it had does not matter here.
    return reader.build(world_size=1)


def on_meta(shape: LlamaShape, max_seq_len: int) -> Llama:
    """The model's names and shapes."""
    with torch.device("meta"):
        return Llama(shape, max_seq_len)


class OneMetadataReader(CheckpointReader):
    """Reads the metadata once, although each tensor is loaded on its own."""

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str):
        super().__init__(fs, path)
        self.metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def open_checkpoint(location: str) -> OneMetadataReader:
    """Raises UserError where there is no checkpoint, and where its files are not as they were written."""
    fs, path = folders.open_location(location, "CHECKPOINT")
    if not fs.exists(f"{path}/{METADATA}"):
        raise UserError(
            f"CHECKPOINT: {location} is no checkpoint (it has no file {METADATA}): give the path of a step-N"
        )
    try:
        records = folders.records_of(fs, path) if fs.exists(f"{path}/{folders.MANIFEST}") else []
        faults = [fault for record in records if (fault := folders.fault_of(fs, path, record))]
        reader = OneMetadataReader(fs, path)
    except Exception as error:  # Damaged files fail in many ways.
        raise UserError(f"CHECKPOINT: {location} cannot be read ({first_failure(error)}): give another") from error
    if faults:
        raise UserError(f"CHECKPOINT: {faults[0]}: restore it, or give another")
    return reader


def from_hf(folder: Path, out: str, dtype: torch.dtype) -> None:
    """A Hugging Face folder -> a checkpoint of weights alone, which CheckpointManager loads."""
    config = read_config(folder, "HF_FOLDER")
    try:
        shape = shape_of(config)
    except ValueError as error:
        raise UserError(f"HF_FOLDER: {folder}/config.json is not of a Llama that Rowhouse trains: {error}") from error
    model = on_meta(shape, max_seq_len=1)
    files = open_weights(folder, "HF_FOLDER", model)

    def read(name: str) -> Tensor:
        weight = torch.empty(files.shapes[hf_name(name)], dtype=dtype)
        fill(weight, files, hf_name(name), hf_rows(name, weight.shape[0], shape))
        return weight

    fs, path = folders.open_location(out, "OUT")
    if fs.exists(path):
        raise UserError(f"OUT: there is a {out} already: remove it, or give another name")
    state = {PREFIX + name: weight.to(dtype) for name, weight in model.state_dict().items()}
    writer = CheckpointWriter(fs, path, step=0)
    writer.single_file_per_rank = False  # DCP keeps the tensors of a file until it is written: a file for each.
    planner = OneAtATime(lambda name: read(name.removeprefix(PREFIX)))
    try:
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    except (OSError, CheckpointException) as error:
        folders.remove(fs, folders.place_of(fs, path))
        raise UserError(f"OUT: {out} cannot be written ({first_failure(error)}): make room, or give another") from error


class OneAtATime(DefaultSavePlanner):
    """Asks `read` for a tensor when it is to be written. The state dict, of names and shapes, is on the meta device."""

    def __init__(self, read: Callable[[str], Tensor]):
        super().__init__()
        self.read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.read(index.fqn)


def main() -> int:
    parser = argparse.ArgumentParser(prog="convert", description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    dtypes = ["float32", "bfloat16", "float16"]
    command = commands.add_parser("to_hf", help="a checkpoint to a folder that transformers loads")
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a step-N folder, or its URL")
    command.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    command.add_argument("--config", required=True, metavar="FILE", help="the run's configuration: its config.toml")
    command.add_argument("--dtype", choices=dtypes, default="bfloat16", help="precision to write (default: bfloat16)")
    command = commands.add_parser("from_hf", help="a Hugging Face folder to a checkpoint to begin from")
    command.add_argument("folder", metavar="HF_FOLDER", type=Path, help="with config.json and safetensors files")
    command.add_argument("out", metavar="OUT", help="the checkpoint to write, or its URL")
    command.add_argument("--dtype", choices=dtypes, default="float32", help="precision to write (default: float32)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    dtype = getattr(torch, arguments.dtype)
    try:
        if arguments.command == "to_hf":
            to_hf(arguments.checkpoint, arguments.out, arguments.config, dtype)
        else:
            from_hf(arguments.folder, arguments.out, dtype)
    except UserError as error:
        print(f"convert: {error}", file=sys.stderr)
        return ExitStatus.USER_ERROR
    print(f"wrote {arguments.out} in {arguments.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
