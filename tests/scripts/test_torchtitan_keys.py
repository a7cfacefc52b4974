"""Every key of torchtitan's two versions is carried over or told, and what a file leaves out is as it is there."""

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from config import JobConfig, load_config
from scripts import import_torchtitan
from scripts.import_torchtitan import Translation, check, flatten
from scripts.torchtitan_keys import GONE, KNOWN, SAME
from settings import sections_of

# Every key of 0.2 and 0.1: its default in each (none: TOML cannot say it; -: not there), another value, and what
# becomes of that: same; told (and what is trained stays the same); matters; or the key of ours, with its value where it
# is another.
TABLE = """
job.config_file | none | none | "x.toml" | told
job.dump_folder | "./outputs" | "./torchtitan/outputs" | "elsewhere" | same
job.description | "default job" | "default job" | "mine" | same
job.print_config | false | - | true | told
job.save_config_file | none | - | "x.json" | told
job.custom_config_module | "" | - | "my.config" | matters
job.use_for_integration_test | - | false | true | told
job.print_args | - | false | true | told
profiling.enable_profiling | false | false | true | same
profiling.save_traces_folder | "profile_traces" | "profile_traces" | "traces" | same
profiling.profile_freq | 10 | 10 | 100 | same
profiling.profiler_active | 1 | - | 2 | same
profiling.profiler_warmup | 3 | - | 5 | same
profiling.enable_memory_snapshot | false | false | true | same
profiling.save_memory_snapshot_folder | "memory_snapshot" | "memory_snapshot" | "snapshots" | same
metrics.log_freq | 10 | 10 | 1 | same
metrics.enable_tensorboard | false | false | true | same
metrics.disable_color_printing | false | false | true | same
metrics.save_tb_folder | "tb" | "tb" | "events" | same
metrics.save_for_all_ranks | false | false | true | told
metrics.enable_wandb | false | false | true | same
model.name | "llama3" | "llama3" | "llama3" | same
model.flavor | "debugmodel" | "debugmodel" | "8B" | model.flavor "3.1-8B"
model.hf_assets_path | "./tests/assets/tokenizer" | - | "assets/llama" | model.tokenizer_path
model.tokenizer_path | none | "./torchtitan/datasets/tokenizer/tokenizer.model" | "assets/t" | model.tokenizer_path
model.converters | [] | [] | ["quantize.linear.float8"] | float8.recipe_name "tensorwise"
model.print_after_conversion | false | false | true | told
optimizer.name | "AdamW" | "AdamW" | "Adam" | matters
optimizer.lr | 8e-4 | 8e-4 | 3e-4 | same
optimizer.beta1 | 0.9 | 0.9 | 0.8 | same
optimizer.beta2 | 0.95 | 0.95 | 0.99 | same
optimizer.eps | 1e-8 | 1e-8 | 1e-6 | same
optimizer.weight_decay | 0.1 | 0.1 | 0.01 | same
optimizer.implementation | "fused" | "fused" | "foreach" | same
optimizer.early_step_in_backward | false | false | true | matters
lr_scheduler.warmup_steps | 200 | 200 | 30 | same
lr_scheduler.total_steps | none | - | 2000 | same
lr_scheduler.decay_ratio | none | none | 0.2 | same
lr_scheduler.decay_type | "linear" | "linear" | "cosine" | same
lr_scheduler.min_lr_factor | 0.0 | - | 0.1 | same
lr_scheduler.lr_min | - | 0.0 | 0.1 | lr_scheduler.min_lr_factor
training.dataset | "c4_test" | "c4_test" | "c4" | same
training.dataset_path | none | none | "copy/c4_test" | same
training.local_batch_size | 8 | 8 | 2 | same
training.global_batch_size | -1 | -1 | 64 | same
training.seq_len | 2048 | 2048 | 8192 | same
training.max_norm | 1.0 | 1.0 | 2 | same
training.steps | 10000 | 10000 | 500 | same
training.enable_cpu_offload | false | false | true | same
training.dtype | "float32" | - | "bfloat16" | matters
training.mixed_precision_param | "bfloat16" | "bfloat16" | "float32" | same
training.mixed_precision_reduce | "float32" | "float32" | "float32" | same
training.gc_freq | 50 | 50 | 100 | same
training.gc_debug | false | false | true | told
training.compile | - | false | true | compile.enable
training.seed | - | none | 7 | debug.seed
training.deterministic | - | false | true | debug.deterministic
training.debug_moe_force_load_balance | false | - | true | told
training.dataloader.num_workers | 0 | - | 4 | told
training.dataloader.persistent_workers | false | - | true | told
training.dataloader.pin_memory | false | - | true | told
training.dataloader.prefetch_factor | none | - | 2 | told
parallelism.data_parallel_replicate_degree | 1 | 1 | 2 | same
parallelism.data_parallel_shard_degree | -1 | -1 | 8 | same
parallelism.fsdp_reshard_after_forward | "default" | "default" | "never" | same
parallelism.tensor_parallel_degree | 1 | 1 | 2 | same
parallelism.disable_loss_parallel | false | false | true | told
parallelism.enable_async_tensor_parallel | false | false | true | same
parallelism.enable_compiled_autograd | - | false | true | told
parallelism.pipeline_parallel_degree | 1 | 1 | 2 | matters
parallelism.pipeline_parallel_split_points | - | [] | ["layers.2"] | told
parallelism.module_fqns_per_model_part | none | - | [["layers.0"], ["layers.1"]] | told
parallelism.pipeline_parallel_first_stage_less_layers | 1 | - | 2 | told
parallelism.pipeline_parallel_last_stage_less_layers | 1 | - | 2 | told
parallelism.pipeline_parallel_layers_per_stage | none | none | 2 | told
parallelism.pipeline_parallel_schedule | "1F1B" | "1F1B" | "Interleaved1F1B" | told
parallelism.pipeline_parallel_schedule_csv | "" | "" | "x.csv" | told
parallelism.pipeline_parallel_microbatch_size | 1 | 1 | 2 | told
parallelism.pipeline_parallel_expert_parallel_overlap | true | - | false | told
parallelism.context_parallel_degree | 1 | 1 | 2 | matters
parallelism.context_parallel_load_balancer | "headtail" | - | "ptrr" | told
parallelism.context_parallel_rotate_method | "allgather" | "allgather" | "alltoall" | told
parallelism.expert_parallel_degree | 1 | - | 2 | told
parallelism.expert_tensor_parallel_degree | 1 | - | 2 | told
parallelism.expert_parallel_comm_backend | "standard" | - | "deepep" | told
checkpoint.enable | false | - | true | same
checkpoint.enable_checkpoint | - | false | true | checkpoint.enable
checkpoint.enable_ft_dataloader_checkpoints | true | - | false | told
checkpoint.folder | "checkpoint" | "checkpoint" | "saves" | same
checkpoint.interval | 500 | 500 | 50 | same
checkpoint.initial_load_path | none | none | "before/step-5" | same
checkpoint.initial_load_model_only | true | - | false | same
checkpoint.initial_load_model_weights_only | - | true | false | checkpoint.initial_load_model_only
checkpoint.initial_load_in_hf | false | - | true | same
checkpoint.initial_load_in_hf_quantized | false | - | true | matters
checkpoint.last_save_model_only | true | - | true | told
checkpoint.last_save_model_weights_only | - | false | true | told
checkpoint.last_save_in_hf | false | - | true | same
checkpoint.export_dtype | "float32" | "float32" | "bfloat16" | same
checkpoint.async_mode | "disabled" | "disabled" | "async_with_pinned_mem" | same
checkpoint.keep_latest_k | 10 | 10 | 3 | same
checkpoint.load_step | -1 | -1 | 100 | same
checkpoint.exclude_from_loading | [] | [] | ["dataloader"] | checkpoint.exclude_from_loading ["data"]
checkpoint.enable_first_step_checkpoint | false | - | true | told
checkpoint.create_seed_checkpoint | false | false | true | matters
checkpoint.load_only | false | - | true | told
activation_checkpoint.mode | "selective" | "selective" | "full" | same
activation_checkpoint.selective_ac_option | "2" | "2" | "op" | same
activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns | ["moe.router.gate"] | - | ["wq"] | told
activation_checkpoint.early_stop | false | - | true | told
activation_checkpoint.memory_budget | 0.5 | - | 0.3 | same
activation_checkpoint.visualize_memory_budget_pareto | false | - | true | told
activation_checkpoint.preserve_rng_state | true | - | false | told
activation_checkpoint.determinism_check | "default" | - | "none" | told
activation_checkpoint.debug | false | - | true | told
compile.enable | false | - | true | same
compile.components | ["model", "loss"] | - | ["loss"] | same
compile.backend | "inductor" | - | "eager" | same
float8.enable_fsdp_float8_all_gather | - | false | true | told
float8.precompute_float8_dynamic_scale_for_fsdp | - | false | true | told
float8.force_recompute_fp8_weight_in_bwd | - | false | true | told
float8.recipe_name | - | none | "rowwise_with_gw_hp" | same
float8.filter_fqns | - | [] | ["output", "attention.wk"] | same
float8.emulate | - | false | true | told
quantize.linear.float8.enable_fsdp_float8_all_gather | false | - | true | told
quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp | false | - | true | told
quantize.linear.float8.recipe_name | none | - | "rowwise" | float8.recipe_name
quantize.linear.float8.filter_fqns | [] | - | ["w2"] | float8.filter_fqns
quantize.linear.float8.emulate | false | - | true | told
quantize.linear.mx.mxfp8_dim1_cast_kernel_choice | "triton" | - | "cuda" | told
quantize.linear.mx.recipe_name | "mxfp8_cublas" | - | "mxfp8_emulated" | told
quantize.linear.mx.filter_fqns | ["output"] | - | [] | told
quantize.grouped_mm.float8.fqns | [] | - | "experts" | told
quantize.grouped_mm.mx.recipe_name | "mxfp8" | - | "other" | told
quantize.grouped_mm.mx.fqns | [] | - | ["experts"] | told
mx.use_fp8_dim1_cast_triton_kernel | - | true | false | told
mx.recipe_name | - | "mxfp8" | "mxfp4" | told
mx.filter_fqns | - | ["output"] | [] | told
comm.init_timeout_seconds | 300 | 300 | 900 | same
comm.train_timeout_seconds | 100 | 100 | 60 | same
comm.trace_buf_size | 20000 | 20000 | 0 | told
comm.save_traces_folder | "comm_traces" | - | "x" | told
comm.save_traces_file_prefix | "rank_" | - | "r" | told
comm.mode | "default" | - | "fake_backend" | matters
memory_estimation.enable | false | - | true | told
memory_estimation.enabled | - | false | true | told
memory_estimation.disable_fake_mode | false | false | true | told
fault_tolerance.enable | false | false | true | matters
fault_tolerance.process_group | "gloo" | - | "nccl" | told
fault_tolerance.process_group_timeout_ms | 10000 | - | 5 | told
fault_tolerance.replica_id | 0 | 0 | 1 | told
fault_tolerance.group_size | 0 | 0 | 2 | told
fault_tolerance.min_replica_size | 1 | 1 | 2 | told
fault_tolerance.semi_sync_method | none | none | "diloco" | told
fault_tolerance.sync_steps | - | 5 | 10 | told
fault_tolerance.should_quantize | - | false | true | told
fault_tolerance.fragment_sync_delay | - | 0 | 1 | told
fault_tolerance.fragment_update_alpha | - | 0.0 | 0.5 | told
experimental.custom_import | "" | "" | "my.model" | matters
experimental.custom_args_module | "" | "" | "my.args" | matters
validation.enable | false | - | true | same
validation.dataset | "c4_validation" | - | "c4_validation" | same
validation.dataset_path | none | - | "copy/c4_test" | same
validation.local_batch_size | 8 | - | 2 | same
validation.seq_len | 2048 | - | 1024 | told
validation.freq | 10 | - | 100 | same
validation.steps | -1 | - | 20 | same
validation.dataloader.num_workers | 0 | - | 4 | told
validation.dataloader.persistent_workers | false | - | true | told
validation.dataloader.pin_memory | false | - | true | told
validation.dataloader.prefetch_factor | none | - | 2 | told
debug.seed | none | - | 7 | same
debug.deterministic | false | - | true | same
debug.deterministic_warn_only | false | - | true | told
debug.moe_force_load_balance | false | - | true | told
"""
ROWS = {row.split(" | ")[0]: row.split(" | ")[1:] for row in TABLE.strip().splitlines()}
# What a key needs beside it to have any effect.
BESIDE: dict[str, dict[str, Any]] = {
    "training.dataset_path": {"training.dataset": "c4_test"},
    "training.enable_cpu_offload": {"optimizer.implementation": "foreach"},
    "parallelism.enable_async_tensor_parallel": {"parallelism.tensor_parallel_degree": 2},
    "checkpoint.initial_load_path": {"checkpoint.enable": True},
    "checkpoint.initial_load_in_hf": {"checkpoint.enable": True, "checkpoint.initial_load_path": "llama"},
    "checkpoint.last_save_in_hf": {"checkpoint.enable": True},
    "checkpoint.export_dtype": {"checkpoint.enable": True, "checkpoint.last_save_in_hf": True},
    "checkpoint.load_step": {"checkpoint.enable": True},
    "checkpoint.exclude_from_loading": {"checkpoint.enable": True},
    "float8.recipe_name": {"model.converters": ["float8"]},
    "float8.filter_fqns": {"model.converters": ["float8"]},
    "quantize.linear.float8.recipe_name": {"model.converters": ["quantize.linear.float8"]},
    "quantize.linear.float8.filter_fqns": {"model.converters": ["quantize.linear.float8"]},
    "validation.dataset_path": {"validation.enable": True, "validation.dataset": "c4_test"},
    "validation.seq_len": {"validation.enable": True},
}
# Carried over, and told besides.
TOLD_BESIDES = {"checkpoint.initial_load_path", "checkpoint.load_step"}


def value_of(text: str) -> Any:
    return tomllib.loads(f"x = {text}")["x"]


def defaults(column: int) -> dict[str, Any]:
    """Of 0.2 (0) or 0.1 (1), as far as TOML can say them."""
    return {key: value_of(row[column]) for key, row in ROWS.items() if row[column] not in ("none", "-")}


def translate(given: dict[str, Any]) -> Translation:
    """Also holds what is written to Rowhouse's own checks."""
    translation = Translation(Path("its.toml"), given)
    text = translation.toml()
    check(translation, text)
    assert dict(flatten(tomllib.loads(text), "")) == translation.ours
    return translation


def of_key(translation: Translation, key: str) -> list[import_torchtitan.Told]:
    return [told for told in translation.told if told.key == key]


@pytest.mark.parametrize("key", ROWS)
def test_each_key_is_carried_over_or_told(key: str) -> None:
    *_, other, becomes = ROWS[key]
    value = value_of(other)
    translation = translate(BESIDE.get(key, {}) | {key: value})
    told = of_key(translation, key)
    if becomes in ("told", "matters"):
        assert [(t.value, t.matters) for t in told] == [(value, becomes == "matters")]
        assert str(told[0]).startswith(f"{key} = ") and ": " in str(told[0])
    else:
        ours, _, another = (key if becomes == "same" else becomes).partition(" ")
        assert translation.ours[ours] == (value_of(another) if another else value)
        assert bool(told) == (key in TOLD_BESIDES or key == "model.flavor")


def test_no_key_is_forgotten() -> None:
    assert set(ROWS) == KNOWN
    ours = {f"{section}.{f.name}" for section, kind in sections_of(JobConfig).items() for f in fields(kind)}
    assert set(SAME) <= ours
    # Where Rowhouse has come to have a key, it is not gone.
    assert not ours & {key for gone in GONE for key in gone.idle}


@pytest.mark.parametrize("column", [0, 1])
def test_what_a_file_leaves_out_is_as_in_torchtitan(column: int, tmp_path: Path) -> None:
    given = {"checkpoint.enable": True, "validation.enable": True} if column == 0 else {"training.compile": True}
    translation = translate(given)
    path = tmp_path / "ours.toml"
    path.write_text(translation.toml())
    config = load_config(["--config", str(path)], 1)
    for key, value in (defaults(column) | given).items():
        becomes = ROWS[key][3]
        # Left out: what is gone; names that differ, which are below; float8 that is off; where the run is kept.
        if becomes not in ("told", "matters") and not key.endswith((".dataset", ".flavor", "fqns", "dump_folder")):
            section, _, name = (key if becomes == "same" else becomes.split(" ")[0]).partition(".")
            expected = None if name == "recipe_name" else value
            assert getattr(getattr(config, section), name) == expected, key
    assert (config.training.dataset, config.training.dataset_path) == ("jsonl", "tests/assets/c4_test")
    if column == 0:
        assert (config.validation.dataset, config.validation.dataset_path) == ("c4_validation", None)
    assert config.optimizer.no_weight_decay == []  # torchtitan decays all parameters.
    matters = {told.key for told in translation.told if told.matters}
    assert matters == {"model.flavor", "model.tokenizer_path", "training.dataset"}


@pytest.mark.parametrize("column", [0, 1])
def test_a_file_of_defaults_asks_for_nothing_that_is_gone(column: int) -> None:
    translation = translate(defaults(column))
    paths = {"model.flavor", "model.tokenizer_path", "training.dataset"}
    idle = {"float8.filter_fqns", "quantize.linear.float8.filter_fqns", "checkpoint.last_save_model_only"}
    assert paths - {"model.tokenizer_path"} <= {told.key for told in translation.told} <= paths | idle
    gone = {key for key in defaults(column) if ROWS[key][3] in ("told", "matters")}
    anyway = {line.split(" = ")[0] for line in translation.anyway}
    assert gone - anyway == {"optimizer.name"} | ({"checkpoint.last_save_model_only"} if column == 0 else set())


def test_the_page_has_all_that_is_gone() -> None:
    page = (Path(__file__).parents[2] / "docs" / "torchtitan.md").read_text()
    for gone in GONE:
        names = ", ".join(f"`{key}`" for key in gone.idle)
        assert f"| {names} | {gone.why} | {gone.instead} | {'yes' if gone.matters else ''} |" in page
