"""Folders of Hugging Face models: weights to begin a run from, and a run's weights for transformers."""

import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoint.safetensors_files import SafetensorsFolder, fill, new_folder, write_safetensors
from data.tokenizer import Tokenizer
from errors import UserError
from models.llama.hf import differences, facts, hf_config, hf_name, hf_rows, is_ignored, to_hf
from models.llama.model import Llama

logger = logging.getLogger("rowhouse")


def load_hf(model: Llama, folder: Path, key: str = "checkpoint.initial_load_path") -> None:
    """Fills the parameters of a model that has memory, sharded or not; each rank reads its own parts, nothing is sent.

    `key` is the setting that led to the folder. Raises UserError, the same on all ranks, where the folder cannot be
    read and where its model is another than this one.
    """
    began = time.perf_counter()
    config = read_config(folder, key)
    if differs := differences(config, model.shape):
        raise UserError(
            f"{key}: {folder} holds another model than this run's: {'; '.join(differs)}: change model.flavor, "
            "model.n_layers or model.vocab_size, or give another folder"
        )
    files = open_weights(folder, key, model)
    for name, weight in model.state_dict().items():
        fill(weight, files, hf_name(name), hf_rows(name, weight.shape[0], model.shape))
    logger.info("loaded the weights of %s (%.1f s)", folder, time.perf_counter() - began)


def read_config(folder: Path, key: str) -> dict[str, Any]:
    """The folder's config.json. Raises UserError where it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
        facts(config)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{key}: there is no {folder}/config.json: give the folder of a Hugging Face model") from error
    except (OSError, ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"{key}: {folder}/config.json is damaged ({error}): fetch it again") from error
    return config


def open_weights(folder: Path, key: str, model: Llama) -> SafetensorsFolder:
    """The folder's files. Raises UserError where they are not this model's."""
    files = SafetensorsFolder(folder, key)
    files.check(hf_shapes(model), lambda name: is_ignored(name, model.shape))
    return files


def hf_shapes(model: Llama) -> dict[str, tuple[int, ...]]:
    return {hf_name(name): tuple(weight.shape) for name, weight in model.state_dict().items()}


def export_hf(model: Llama, folder: Path, dtype: torch.dtype, tokenizer: Tokenizer | None) -> None:
    """Writes a folder that transformers.AutoModelForCausalLM.from_pretrained takes. For all ranks at once.

    `dtype` is float32, bfloat16 or float16. A former export of that name is replaced. Raises UserError on all ranks
    where the folder cannot be written.
    """
    began = time.perf_counter()
    weights = gathered(model, dtype)
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            write_hf(folder, model, weights, dtype, tokenizer)
        except OSError as error:
            failure = [str(error)]
    # The other ranks gather with rank 0 all along; and so does rank 0 with them, where it failed.
    for _ in weights:
        pass
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise UserError(
            f"checkpoint.last_save_in_hf: {folder} cannot be written ({failure[0]}): make room or give permission, or "
            "choose another job.dump_folder"
        )
    logger.info("exported %s for Hugging Face (%.1f s)", folder, time.perf_counter() - began)


def gathered(model: Llama, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each parameter with its name, whole; sharded ones in `dtype`, a collective call for each of these."""
    for name, weight in model.state_dict().items():
        if isinstance(weight, DTensor):
            # With CPU offload the shards are in host memory: they are gathered where the ranks meet.
            shards: Any = weight.to(weight.device_mesh.device_type, dtype)
            weight = shards.full_tensor()
        yield name, weight


def write_hf(
    folder: Path, model: Llama, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, tokenizer: Tokenizer | None
) -> None:
    """Writes weights, config.json, and the tokenizer where there is one. Raises OSError as `new_folder` does.

    `weights` are whole, in the order of model.state_dict(); of `model` names and shapes alone are taken.
    """
    shape = model.shape
    tensors = (tensor for name, weight in weights for tensor in to_hf({name: weight}, shape).values())
    bos_id, eos_id = (None, None) if tokenizer is None else (tokenizer.bos_id, tokenizer.eos_id)
    with new_folder(folder) as temporary:
        write_safetensors(temporary, hf_shapes(model), tensors, dtype)
        config = hf_config(shape, model.max_seq_len, dtype, bos_id, eos_id)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            copy_tokenizer(tokenizer, temporary)


def copy_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The tokenizer's file, under the name that transformers looks for, and those that describe it, if any."""
    file = Path(tokenizer.path)
    if not file.is_file():
        logger.warning("%s is no longer there: the export has no tokenizer", file)
        return
    shutil.copyfile(file, folder / ("tokenizer.json" if file.suffix == ".json" else "tokenizer.model"))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (file.parent / name).is_file():
            shutil.copyfile(file.parent / name, folder / name)
