"""A trained model: found, verified, loaded, and split over the ranks. For scripts.generate and scripts.evaluate.

What --checkpoint may name:

    outputs/debug                        a run's folder: its latest checkpoint that is committed and undamaged
    outputs/debug/checkpoint/step-200    one checkpoint of a run
    outputs/debug/hf-step-200, llama3-8b a Hugging Face folder: config.json, safetensors files, tokenizer

Nothing is written there: a damaged checkpoint stays as it is, and a run may go on meanwhile.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from checkpoint import folders
from checkpoint.manager import fault_in, first_failure, misfits_of
from checkpoint.state import unpack
from checkpoint.storage import METADATA, CheckpointReader
from data.tokenizer import Tokenizer, open_tokenizer
from ending import is_out_of_memory
from errors import ExitStatus, UserError
from hugging_face import load_hf, read_config
from models.llama.hf import shape_of
from models.llama.model import Llama, PlainLinears, TransformerBlock, precompute_freqs_cis
from models.llama.parallelize import PARTS
from models.llama.shapes import LlamaShape
from parallelisms import tp_ops
from parallelisms.linear_loss import rows_here
from parallelisms.mesh import CommConfig, init_process_group
from parallelisms.tensor_parallel import split_parameter
from scripts.convert import read_run_config

logger = logging.getLogger("rowhouse")

KEY = "--checkpoint"


@dataclass(frozen=True)
class Trained:
    """A model that was found, and verified."""

    path: str
    """The checkpoint or the Hugging Face folder."""
    shape: LlamaShape
    max_seq_len: int
    """Tokens in a sequence, as it was trained."""
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    """Tokens that end a text."""
    load: Callable[[Llama], None]
    """Fills a model that has memory, sharded or not, in its own dtype. For all ranks at once; raises UserError."""


# Finding


def find_trained(location: str) -> Trained:
    """What the location holds. For all ranks at once. Raises UserError where it holds nothing that can be used."""
    folder = Path(location)
    if (folder / "config.json").is_file():
        return of_hugging_face(folder)
    if (folder / "config.toml").is_file():
        return of_run(folder, step=None)
    if (folder / METADATA).is_file():
        run = folder.absolute().parent.parent
        if not (run / "config.toml").is_file():
            raise UserError(
                f"{KEY}: there is no {run / 'config.toml'}, which would tell the model of {folder}: give the run's "
                "folder, or make a Hugging Face folder of it first (python -m scripts.convert to_hf)"
            )
        return of_run(run, step=folder)
    raise UserError(
        f"{KEY}: {location} is neither a run's folder (config.toml), nor a checkpoint (step-N), nor a Hugging Face "
        "folder (config.json): give one of these"
    )


def of_run(run: Path, step: Path | None) -> Trained:
    """A run's latest checkpoint, or the given one."""
    config = read_run_config(str(run / "config.toml"))
    fs, root = folders.open_location(
        config.checkpoint.folder if "://" in config.checkpoint.folder else run.absolute() / config.checkpoint.folder,
        "checkpoint.folder",
    )
    if step is None:
        path = latest_undamaged(fs, root)
    else:
        fs, path = folders.open_location(step, KEY)
        if not folders.is_committed(fs, path):
            raise UserError(f"{KEY}: {step} is not finished (it has no valid {folders.MARKER}): give another")
        if fault := fault_in(fs, path):
            raise UserError(f"{KEY}: {fault}: restore it, or give another")
    shape = config.model.shape()
    tokenizer = open_tokenizer(config.model.tokenizer_path, shape.vocab_size)
    return Trained(
        path,
        shape,
        config.training.seq_len,
        tokenizer,
        frozenset() if tokenizer.eos_id is None else frozenset([tokenizer.eos_id]),
        lambda model: load_checkpoint(model, fs, path, tokenizer),
    )


def latest_undamaged(fs: fsspec.AbstractFileSystem, root: str) -> str:
    """The path of a run's latest checkpoint whose files are as they were written."""
    answer = [folders.committed_steps(fs, root)]
    dist.broadcast_object_list(answer)  # The run may save another meanwhile: all ranks take the first one's.
    for step in reversed(answer[0]):
        path = f"{root}/step-{step}"
        fault = fault_in(fs, path)
        if fault is None:
            return path
        if dist.get_rank() == 0:
            logger.warning("%s: taking the checkpoint before", fault)
    damaged = f": {len(answer[0])} are damaged" if answer[0] else ""
    raise UserError(f"{KEY}: {root} has no checkpoint to load{damaged}: train with checkpoint.enable, or give another")


def load_checkpoint(model: Llama, fs: fsspec.AbstractFileSystem, path: str, tokenizer: Tokenizer) -> None:
    """Fills the model. Raises UserError where the checkpoint holds another one, or was made with another tokenizer."""
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    try:
        reader = CheckpointReader(fs, path)
        stored = {
            name: tuple(item.size)
            for name, item in reader.read_metadata().state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata)
        }
        there = {name: size for name, size in stored.items() if name.startswith("model.")}
        if misfits := misfits_of(there, {name: tuple(weight.shape) for name, weight in weights.items()}):
            raise UserError(f"{KEY}: {path} does not fit the config.toml of its run: {'; '.join(misfits)}: restore it")
        data = {"data": torch.empty(stored["data"], dtype=torch.uint8)} if "data" in stored else {}
        dcp.load(weights | data, storage_reader=reader)
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # Damaged files fail in many ways.
        raise UserError(f"{KEY}: {path} cannot be read ({first_failure(error)}): give another") from error
    trained_with = unpack(data["data"])["tokenizer"] if data else tokenizer.fingerprint
    if trained_with != tokenizer.fingerprint:
        raise UserError(
            f"{KEY}: {path} was trained with another tokenizer (then: {trained_with}; now: {tokenizer.fingerprint}, "
            f"{tokenizer.path}): restore the file of model.tokenizer_path; where that is none, use the Python version "
            "that trained, whose standard library the tokenizer was learned from"
        )


def of_hugging_face(folder: Path) -> Trained:
    config = read_config(folder, KEY)
    try:
        shape = shape_of(config)
        max_seq_len = config.get("max_position_embeddings", 2048)  # transformers' own value for what is left out.
        if type(max_seq_len) is not int:
            raise ValueError(f"max_position_embeddings is {max_seq_len}, not an integer")
    except ValueError as error:
        raise UserError(f"{KEY}: {folder}/config.json is not of a Llama that Rowhouse trains: {error}") from error
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise UserError(f"{KEY}: {folder} has no tokenizer: copy the model's tokenizer.json or tokenizer.model to it")
    tokenizer = open_tokenizer(str(folder), shape.vocab_size)
    named = config.get("eos_token_id")  # One, several, or null.
    stop_ids = [tokenizer.eos_id, *(named if isinstance(named, list) else [named])]
    return Trained(
        str(folder),
        shape,
        max_seq_len,
        tokenizer,
        frozenset(id for id in stop_ids if id is not None),
        lambda model: load_hf(model, folder, KEY),
    )


# Building


def build(
    trained: Trained, device: torch.device, dtype: torch.dtype, seq_len: int, distribute: Callable[[Llama], object]
) -> Llama:
    """The model, its weights in `dtype`, for sequences of seq_len. `distribute` is given it on the meta device."""
    with torch.device("meta"):
        model = Llama(trained.shape, seq_len).to(dtype).eval()
    distribute(model)
    model.to_empty(device=device)
    model.freqs_cis = precompute_freqs_cis(seq_len, trained.shape).to(device)
    trained.load(model)
    return model


def build_tensor_parallel(trained: Trained, device: torch.device, dtype: torch.dtype, seq_len: int) -> Llama:
    """The model whose matmuls are split over all ranks; each gets all tokens, and all logits.

    Not as training splits them: one token a row is less than there are ranks, so that every rank holds all tokens.
    Raises UserError where the model cannot be split so.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return build(trained, device, dtype, seq_len, lambda model: None)
    check_degree(trained.shape, ranks)
    mesh = init_device_mesh(device.type, (ranks,))
    model = build(trained, device, dtype, seq_len, lambda model: split_weights(model, mesh))
    compute_split(model, mesh)
    return model


def check_degree(shape: LlamaShape, ranks: int) -> None:
    sizes = {
        "heads": shape.n_heads, "key and value heads": shape.n_kv_heads, "feed-forward columns": shape.hidden_dim,
        "vocabulary rows": shape.vocab_size,
    }  # fmt: skip
    fits = [str(n) for n in range(1, shape.n_kv_heads + 1) if not any(size % n for size in sizes.values())]
    for what, size in sizes.items():
        if size % ranks:
            raise UserError(
                f"--nproc-per-node: {size} {what} cannot be split over {ranks} ranks; this model takes "
                f"{', '.join(fits)}: start another number"
            )


def split_weights(model: Llama, mesh: DeviceMesh) -> None:
    """Makes DTensors of the weights that a rank holds a part of, as in training, so that a load fills that part."""
    for block in model.layers:
        for part, column, row in PARTS:
            for name in column.split():
                split_parameter(getattr(getattr(block, part), name), mesh, Shard(0))
            split_parameter(getattr(getattr(block, part), row), mesh, Shard(1))
    split_parameter(model.tok_embeddings, mesh, Shard(0))
    if model.output is not None:
        split_parameter(model.output, mesh, Shard(0))


class SplitLinears(PlainLinears):
    """Weights are this rank's parts: of their rows, which need nothing from others, or of their columns."""

    def __init__(self, group: str):
        self.group = group

    def row(self, layer: str, x: Tensor, linear: nn.Linear) -> Tensor:
        """x: (tokens, in / tp) -> (tokens, dim), summed over the ranks."""
        return tp_ops.all_reduce(linear(x), "sum", self.group, layer)


def compute_split(model: Llama, mesh: DeviceMesh) -> None:
    """Has a loaded model compute with its parts."""
    group, rank = mesh.get_group().group_name, mesh.get_local_rank()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, DTensor):
            module.weight = nn.Parameter(weight.to_local(), requires_grad=False)
    for block in model.layers:
        assert isinstance(block, TransformerBlock)
        block.attention.linears = block.feed_forward.linears = SplitLinears(group)
    embedding, plain_head = model.tok_embeddings, model.head

    def embed(ids: Tensor) -> Tensor:
        here, mine = rows_here(ids, rank, embedding.weight.shape[0])
        return tp_ops.all_reduce(nn.functional.embedding(here, embedding.weight) * mine[:, None], "sum", group, "embed")

    def head(x: Tensor) -> Tensor:
        # The same bits on every rank, which then choose the same tokens.
        return tp_ops.all_gather(plain_head(x).t(), group).t()

    embedding.forward = embed  # type: ignore[method-assign, assignment]
    model.head = head  # type: ignore[method-assign]


# On the command line


def default_dtype(device: torch.device) -> torch.dtype:
    """A CPU without the instructions for bf16 is many times slower in it (docs/performance.md)."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def run_on_ranks(name: str, work: Callable[[torch.device], None]) -> int:
    """Joins the ranks, does the work of the script `name`, and returns its exit status: 0, or 2 with a sentence."""
    try:
        # Ranks wait for each other while they read a large checkpoint.
        work(init_process_group(CommConfig(init_timeout_seconds=1800)))
    except Exception as error:
        if is_out_of_memory(error):
            first_line = str(error).splitlines()[0]
            error = UserError(f"out of memory ({first_line}): take shorter or fewer sequences, bfloat16, or more ranks")
        if not isinstance(error, UserError):
            raise
        if not dist.is_initialized() or dist.get_rank() == 0:  # Every rank finds the same; one tells.
            print(f"{name}: {error}", file=sys.stderr)
        return ExitStatus.USER_ERROR
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0
