"""What depends on other keys of a torchtitan file, or on its version; whole files; mistakes."""

import math
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from config import load_config
from scripts import import_torchtitan
from scripts.import_torchtitan import flatten
from tests.scripts.test_torchtitan_keys import of_key, translate

# A file of which nothing is told.
PLAIN = {
    "model.flavor": "8B",
    "model.hf_assets_path": "assets/llama",
    "training.dataset": "c4",
    "compile.enable": False,
}


@pytest.mark.parametrize(
    ("given", "ours", "matters"),
    [
        ({"model.flavor": "8B", "training.compile": True}, "8B", False),
        ({"model.flavor": "8B", "compile.enable": True}, "3.1-8B", False),
        ({"model.flavor": "70B", "model.hf_assets_path": "x"}, "3.1-70B", False),
        ({"model.flavor": "70B"}, "3.1-70B", True),
        ({"model.flavor": "70B", "training.compile": True, "validation.enable": False}, "3.1-70B", True),
        ({"model.flavor": "405B", "compile.enable": True}, "405B", False),
        ({"model.flavor": "405B", "training.compile": True}, "405B", True),
        ({"model.flavor": "8B_flex", "compile.enable": True}, "3.1-8B", True),
        ({"model.flavor": "8B_varlen", "compile.enable": True}, "3.1-8B", True),
        ({"model.flavor": "debugmodel_flex_attn", "training.compile": True}, "debugmodel", True),
        ({"model.flavor": "1B", "compile.enable": True}, "1B", True),
    ],
)
def test_a_flavor_is_the_shape_that_torchtitan_built(given: dict[str, Any], ours: str, matters: bool) -> None:
    translation = translate(given)
    assert translation.ours["model.flavor"] == ours
    assert any(told.matters for told in of_key(translation, "model.flavor")) == matters


TOKENIZER, ASSETS, CONVERTERS = "model.tokenizer_path", "model.hf_assets_path", "model.converters"
RECIPE, FILTERS = "float8.recipe_name", "float8.filter_fqns"
TP, ASYNC_TP = "parallelism.tensor_parallel_degree", "parallelism.enable_async_tensor_parallel"
WARMUP, STEPS, TOTAL = "lr_scheduler.warmup_steps", "training.steps", "lr_scheduler.total_steps"
DATA, DATA_PATH = "training.dataset", "training.dataset_path"
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
LOAD, IN_HF, STEP = "checkpoint.initial_load_path", "checkpoint.initial_load_in_hf", "checkpoint.load_step"
LAST_IN_HF, DTYPE = "checkpoint.last_save_in_hf", "checkpoint.export_dtype"
FLOAT8 = {CONVERTERS: ["quantize.linear.float8"]}
ITS_RECIPE, ITS_FILTERS = f"quantize.linear.{RECIPE}", f"quantize.linear.{FILTERS}"
IMPLEMENTATION = "optimizer.implementation"
SAVES, COMPILES, VALIDATES = {"checkpoint.enable": True}, {"compile.enable": True}, {"validation.enable": True}
C4_COPY, PILE = {DATA: "C4", DATA_PATH: "mirror/c4"}, {DATA: "pile", DATA_PATH: "me/pile"}


@pytest.mark.parametrize(
    ("given", "ours", "told", "matters"),  # On top of PLAIN; ...: is not written
    [
        ({ITS_RECIPE: "rowwise"}, {RECIPE: ...}, [ITS_RECIPE], False),
        (FLOAT8, {RECIPE: "tensorwise", FILTERS: []}, [], False),
        (FLOAT8 | {TP: 2}, {RECIPE: "rowwise"}, [CONVERTERS], True),
        (FLOAT8 | {TP: 2, ITS_RECIPE: "tensorwise"}, {RECIPE: "rowwise"}, [ITS_RECIPE], True),
        (FLOAT8 | {TP: 2, ITS_RECIPE: "rowwise"}, {RECIPE: "rowwise"}, [], False),
        (FLOAT8 | {ITS_FILTERS: ["wq", "auto_filter_small_kn"]}, {FILTERS: ["wq"]}, [ITS_FILTERS], True),
        (FLOAT8 | {ITS_FILTERS: ["router.gate", "output"]}, {FILTERS: ["output"]}, [ITS_FILTERS], False),
        ({CONVERTERS: ["quantize.linear.mx"]}, {RECIPE: ...}, [CONVERTERS], True),
        ({"optimizer.name": "Adam", "optimizer.weight_decay": 0}, {"optimizer.name": "AdamW"}, [], False),
        ({WARMUP: 50, STEPS: 20}, {WARMUP: 20}, [WARMUP], False),
        ({STEPS: 20}, {WARMUP: 20}, [WARMUP], False),
        ({STEPS: 20, TOTAL: 900}, {WARMUP: ...}, [], False),
        ({"training.max_norm": math.inf}, {"training.max_norm": 0}, [], False),
        ({"training.global_batch_size": -4}, {"training.global_batch_size": -1}, [], False),
        ({"training.enable_cpu_offload": True}, {IMPLEMENTATION: "foreach"}, [IMPLEMENTATION], False),
        (C4_COPY, {DATA: "jsonl", DATA_PATH: "mirror/c4/en/c4-train.*.json.gz"}, [DATA_PATH], True),
        ({DATA: "c4", DATA_PATH: "allenai/c4"}, {DATA: "c4", DATA_PATH: ...}, [], False),
        (PILE, {DATA: "hf", DATA_PATH: "me/pile"}, [DATA], True),
        ({DATA: "pile"}, {DATA: "hf", DATA_PATH: "pile"}, [DATA], True),
        ({DATA: "c4_test"}, {DATA: "jsonl", DATA_PATH: "tests/assets/c4_test"}, [DATA], True),
        ({TOKENIZER: "old"}, {TOKENIZER: "old"}, [ASSETS], False),
        ({TOKENIZER: "x/tokenizer.model"}, {TOKENIZER: "x/tokenizer.model"}, [ASSETS, TOKENIZER], True),
        (VALIDATES, {"validation.dataset": "c4_validation", "validation.steps": -1}, [], False),
        (VALIDATES | {"training.seq_len": 8192}, {}, ["validation.seq_len"], False),
        (VALIDATES | {"training.seq_len": 8192, "validation.seq_len": 8192}, {}, [], False),
        ({"validation.dataset": "c4_test"}, {"validation.dataset": "jsonl"}, ["validation.dataset"], False),
        ({}, {"validation.dataset": ..., "validation.steps": ...}, [], False),
        ({ASYNC_TP: True}, {ASYNC_TP: ...}, [ASYNC_TP], False),
        ({}, {OPTION: "2"}, [], False),
        ({MODE: "none"}, {OPTION: ...}, [], False),
        ({OPTION: "0"}, {MODE: "full", OPTION: ...}, [OPTION], False),
        ({MODE: "none", OPTION: "0"}, {MODE: "none", OPTION: ...}, [OPTION], False),
        ({MODE: "memory_budget"} | COMPILES, {MODE: "memory_budget"}, [], False),
        ({"compile.components": []} | COMPILES, {"compile.enable": False}, ["compile.components"], False),
        ({LOAD: "x", STEP: 0}, {LOAD: ..., STEP: ...}, [LOAD, STEP], False),
        ({IN_HF: True, LAST_IN_HF: True}, {IN_HF: ..., LAST_IN_HF: ...}, [IN_HF, LAST_IN_HF], False),
        (SAVES | {IN_HF: True}, {LOAD: "assets/llama"}, [IN_HF], False),
        (SAVES | {IN_HF: True, LOAD: "llama"}, {LOAD: "llama"}, [], False),
        (SAVES | {LOAD: "x/step-5"}, {LOAD: "x/step-5"}, [LOAD], True),
        (SAVES | {DTYPE: "bfloat16"}, {DTYPE: ...}, [DTYPE], False),
        ({"optimizer.momentum": 0.9}, {}, ["optimizer.momentum"], True),
    ],
)  # fmt: skip
def test_what_depends_on_other_keys(
    given: dict[str, Any], ours: dict[str, Any], told: list[str], matters: bool
) -> None:
    translation = translate(PLAIN | given)
    assert {key: translation.ours.get(key, ...) for key in ours} == ours
    assert sorted(entry.key for entry in translation.told) == sorted(told)
    assert any(entry.matters for entry in translation.told) == matters


# Whole files

OF_0_2 = """
[job]
dump_folder = "./outputs/llama3_8b"
description = "Llama 3 8B, c4"

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100

[metrics]
log_freq = 10
enable_tensorboard = true
save_tb_folder = "tb"

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = ["quantize.linear.float8"]

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.8
decay_type = "cosine"
min_lr_factor = 0.1

[training]
local_batch_size = 1
global_batch_size = 512
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"

[training.dataloader]
num_workers = 2

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable = true
folder = "checkpoint"
interval = 500
last_save_model_only = true
export_dtype = "float32"
async_mode = "async"

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
components = ["model", "loss"]

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
recipe_name = "rowwise"
filter_fqns = ["output"]

[validation]
enable = true
dataset = "c4_validation"
seq_len = 8192
local_batch_size = 1
freq = 500
steps = 100
"""
OF_0_1 = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"

[metrics]
log_freq = 10
enable_tensorboard = true

[model]
name = "llama3"
flavor = "8B"
tokenizer_path = "./assets/tokenizer/original/tokenizer.model"
converters = ["float8"]

[optimizer]
name = "AdamW"
lr = 3e-4

[lr_scheduler]
warmup_steps = 200
lr_min = 0.1

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
compile = true
dataset = "c4"
seed = 7

[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 1
pipeline_parallel_degree = 2

[checkpoint]
enable_checkpoint = true
interval = 500
last_save_model_weights_only = false
export_dtype = "float32"

[activation_checkpoint]
mode = "selective"

[float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in a folder of its own, with a text as its.toml: (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(text: str, *arguments: str) -> tuple[int, str, str]:
        Path("its.toml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["import_torchtitan", "its.toml", *arguments])
        status = import_torchtitan.main()
        return (status, *capsys.readouterr())

    return call


def test_a_whole_file_of_0_2(run: Any) -> None:
    status, out, err = run(OF_0_2, "--output", "ours.toml")
    assert (status, out) == (0, "")
    its, ours = (dict(flatten(tomllib.loads(Path(name).read_text()), "")) for name in ("its.toml", "ours.toml"))
    gone = [
        "training.dataloader.num_workers", "parallelism.pipeline_parallel_degree",
        "parallelism.context_parallel_degree", "checkpoint.last_save_model_only", "validation.seq_len",
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
    ]  # fmt: skip
    for key in gone:
        assert f"\n  {key} = " in err
        del its[key]
    for key in (CONVERTERS, ITS_RECIPE, ITS_FILTERS, ASSETS):
        del its[key]
    its |= {RECIPE: "rowwise", FILTERS: ["output"], TOKENIZER: "./assets/hf/Llama-3.1-8B", "model.flavor": "3.1-8B"}
    assert ours == its | {"optimizer.no_weight_decay": []}
    config = load_config(["--config", "ours.toml"], 64)
    assert config.float8.backend_of_recipe == "rowhouse" and config.parallelism.degrees(64) == (1, 32, 2)


def test_a_whole_file_of_0_1(run: Any) -> None:
    status, out, err = run(OF_0_1)
    assert status == 1
    its, ours = (dict(flatten(tomllib.loads(text), "")) for text in (OF_0_1, out))
    matters, same = err.split("Is not as there")
    assert re.findall(r"^  (\S+) =", matters, re.MULTILINE) == ["parallelism.pipeline_parallel_degree", TOKENIZER]
    assert "float8.enable_fsdp_float8_all_gather = true" in same and "tiktoken" in matters
    for key in ("parallelism.pipeline_parallel_degree", "checkpoint.last_save_model_weights_only", CONVERTERS):
        assert f"  {key} = " in err or key == CONVERTERS
        del its[key]
    del its["float8.enable_fsdp_float8_all_gather"]
    renamed = {"lr_scheduler.lr_min": "lr_scheduler.min_lr_factor", "checkpoint.enable_checkpoint": "checkpoint.enable"}
    renamed |= {"training.compile": "compile.enable", "training.seed": "debug.seed"}
    written = {RECIPE: "tensorwise", OPTION: "2", "optimizer.no_weight_decay": []}
    assert ours == {renamed.get(key, key): value for key, value in its.items()} | written
    Path("ours.toml").write_text(out)
    assert load_config(["--config", "ours.toml"], 4).model.flavor == "8B"


# Mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model\n", "its.toml: not valid TOML: "),
        ("", "its.toml: has no key of torchtitan's"),
        ('[project]\nname = "x"', "its.toml: has no key of torchtitan's"),
        ('[training]\nsteps = "many"', "its.toml: training.steps: must be integer, not 'many'"),
        ("[training]\ncompile = 1", "its.toml: training.compile: must be boolean"),
        ('[model]\nconverters = "float8"', "its.toml: model.converters: must be list of strings, not 'float8'"),
        ('[float8]\nrecipe_name = "blockwise"', "its.toml: float8.recipe_name: must be one of"),
        ('[lr_scheduler]\ntotal_steps = "none"', "its.toml: lr_scheduler.total_steps: must be integer"),
        ("[training]\nsteps = 0", "its.toml: training.steps: 0 is too small"),
        ("[training]\nmax_norm = nan", "its.toml: training.max_norm: must be number"),
        ("[training]\nlocal_batch_size = 3\nglobal_batch_size = 8", "its.toml: training.global_batch_size: 8 is not"),
        ('[model]\nname = "deepseek_v3"', 'its.toml: model.name: Rowhouse trains llama3 alone, and not "deepseek_v3"'),
        ('[model]\nflavor = "7B"', 'its.toml: model.flavor: there is no "7B"'),
        (
            "[training]\ncompile = true\n[compile]\nenable = false",
            "its.toml: compile.enable: contradicts training.compile",
        ),
        ("[float8]\nemulate = true\n[quantize.linear.float8]\nemulate = false", "contradicts float8.emulate"),
    ],
)
def test_a_mistake_is_a_sentence_and_writes_nothing(run: Any, text: str, message: str) -> None:
    status, out, err = run(text, "--output", "ours.toml")
    assert (status, out) == (2, "") and not Path("ours.toml").exists()
    assert err.startswith("import_torchtitan: ") and message in err


def test_files_that_cannot_be_read_or_written(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("ours.toml").write_text("mine")
    assert "--output: there is a ours.toml already: remove it" in run(OF_0_2, "--output", "ours.toml")[2]
    assert Path("ours.toml").read_text() == "mine"
    status, _, err = run(OF_0_2, "--output", "no/ours.toml")
    assert status == 2 and "--output: no/ours.toml cannot be written (No such file or directory)" in err
    monkeypatch.setattr(sys, "argv", ["import_torchtitan", "nothing.toml"])
    assert import_torchtitan.main() == 2
