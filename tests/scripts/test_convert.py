"""Checkpoints to Hugging Face folders and back, on the command line."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM

from checkpoint import safetensors_files
from checkpoint.config import CheckpointConfig
from checkpoint.manager import CheckpointManager
from checkpoint.state import ModelState
from data.tokenizer import stdlib_tokenizer
from hugging_face import export_hf, load_hf
from models.llama.model import Llama
from models.llama.shapes import FLAVORS, LlamaShape
from scripts import convert
from tests.models.llama.test_model import SHAPES, rowhouse_model
from tests.test_hugging_face import assert_equal, assert_same_files, values

TIED = SHAPES["tied"]
# A run on 16 ranks: the script is one process all the same.
RUN_CONFIG = """
[model]
flavor = "debugmodel"
n_layers = 1
vocab_size = 512

[training]
seq_len = 64

[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 4
enable_async_tensor_parallel = true
"""
SHAPE = replace(FLAVORS["debugmodel"], n_layers=1, vocab_size=512)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the script: arguments -> (exit status, standard error). A relative path is one in the test's folder."""
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(RUN_CONFIG)

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["convert", *arguments])
        return convert.main(), capsys.readouterr().err

    return call


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save_checkpoint(model: Llama, step: int) -> str:
    """The path of a checkpoint in the run's folder."""
    manager = CheckpointManager(CheckpointConfig(enable=True), Path("run"), {"model": ModelState(model)})
    manager.save(step, last=True)
    manager.close()
    return f"run/checkpoint/step-{step}"


def load_checkpoint(model: Llama, path: str) -> None:
    config = CheckpointConfig(enable=True, initial_load_path=path)
    manager = CheckpointManager(config, Path("new run"), {"model": ModelState(model)})
    assert manager.load() is None
    manager.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_becomes_the_export(run: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "SHARD_BYTES", 10**6)
    model = rowhouse_model(SHAPE, seq_len=64)
    export_hf(model, Path("export"), dtype, None)
    arguments = [] if dtype == torch.bfloat16 else ["--dtype", "float32"]
    assert run("to_hf", save_checkpoint(model, 3), "hf", "--config", "config.toml", *arguments) == (0, "")
    assert_same_files(Path("export"), Path("hf"))
    assert AutoModelForCausalLM.from_pretrained("hf").dtype == dtype


@pytest.mark.parametrize("shape", [SHAPE, TIED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_keeps_every_bit(run: Any, shape: LlamaShape, dtype: torch.dtype, tmp_path: Path) -> None:
    model = rowhouse_model(shape, seed=1).to(dtype).float()
    export_hf(model, Path("hf"), dtype, None)
    assert run("from_hf", "hf", "step-0") == (0, "")
    assert run("from_hf", "hf", "smaller", "--dtype", "bfloat16") == (0, "")
    for path in ["step-0"] if dtype == torch.float32 else ["step-0", "smaller"]:
        back = rowhouse_model(shape, seed=2)
        load_checkpoint(back, str(tmp_path / path))
        assert_equal(values(back), values(model))
    if shape == SHAPE:
        assert run("to_hf", "step-0", "again", "--config", "config.toml", "--dtype", str(dtype)[6:]) == (0, "")
        again = rowhouse_model(shape, seed=3)
        load_hf(again, Path("again"))
        assert_equal(values(again), values(model))


def test_one_tensor_at_a_time_is_in_memory(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    export_hf(rowhouse_model(SHAPE), Path("hf"), torch.float32, None)
    filled: list[StorageWeakRef] = []
    fill = convert.fill

    def counted(weight: torch.Tensor, *arguments: Any) -> None:
        filled.append(StorageWeakRef(weight.untyped_storage()))
        assert sum(not storage.expired() for storage in filled) <= 2  # This one, and the one before.
        fill(weight, *arguments)

    monkeypatch.setattr(convert, "fill", counted)
    assert run("from_hf", "hf", "step-0") == (0, "")
    assert len(filled) == 12


def test_the_tokenizer_of_the_configuration_goes_with_it(run: Any) -> None:
    tokenizer = stdlib_tokenizer(300, Path("tokenizers"))
    Path("config.toml").write_text(RUN_CONFIG.replace("[model]", f'[model]\ntokenizer_path = "{tokenizer.path}"'))
    checkpoint = save_checkpoint(rowhouse_model(SHAPE), 1)
    assert run("to_hf", checkpoint, "hf", "--config", "config.toml") == (0, "")
    assert Path("hf/tokenizer.json").read_bytes() == Path(tokenizer.path).read_bytes()
    assert json.loads(Path("hf/config.json").read_text())["eos_token_id"] == tokenizer.eos_id


# What goes wrong


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("to_hf run/checkpoint/step-1 OUT --config no.toml", '--config: there is no file "no.toml"'),
        ("to_hf run/checkpoint/step-1 OUT --config debug.toml", "CHECKPOINT: run/checkpoint/step-1 is not of the run"),
        ("to_hf run/checkpoint OUT --config config.toml", "CHECKPOINT: run/checkpoint is no checkpoint (it has"),
        ("to_hf run/checkpoint/step-1 config.toml --config config.toml", "OUT: there is a config.toml already: remove"),
        ("to_hf run/checkpoint/step-1 config.toml/x --config config.toml", "OUT: config.toml/x cannot be written ("),
        ("to_hf run/checkpoint/step-2 OUT --config config.toml", "__0_0.distcp has other content than was written"),
        ("from_hf nothing OUT", "HF_FOLDER: there is no nothing/config.json: give the folder of a Hugging Face model"),
        ("from_hf mistral OUT", "HF_FOLDER: mistral/config.json is not of a Llama that Rowhouse trains: model_type"),
        ("from_hf cut OUT", "model-00001-of-00001.safetensors is damaged ("),
        ("from_hf other OUT", "HF_FOLDER: other does not hold the model of its config.json: it lacks model.layers.1."),
        ("from_hf hf run", "OUT: there is a run already: remove it, or give another name"),
        ("from_hf hf config.toml/x", "OUT: config.toml/x cannot be written ("),
    ],
)  # fmt: skip
def test_a_mistake_is_a_sentence_and_writes_nothing(run: Any, arguments: str, message: str, tmp_path: Path) -> None:
    model = rowhouse_model(SHAPE)
    for step in (1, 2):
        save_checkpoint(model, step)
    flip(next((tmp_path / "run" / "checkpoint" / "step-2").glob("*.distcp")))
    for folder in ("hf", "mistral", "cut", "other"):
        export_hf(model, Path(folder), torch.float32, None)
    config = json.loads(Path("hf/config.json").read_text())
    Path("mistral/config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    Path("other/config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    os.truncate("cut/model-00001-of-00001.safetensors", 10_000)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    status, error = run(*arguments.split())
    assert status == 2
    assert error.startswith("convert: ") and message in error
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_missing_argument_is_told(run: Any) -> None:
    with pytest.raises(SystemExit) as error:
        run("to_hf", "step-1", "out")
    assert error.value.code == 2
