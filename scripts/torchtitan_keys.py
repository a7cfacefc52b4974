"""What becomes of torchtitan's keys, 0.1 and 0.2, in scripts.import_torchtitan: SAME, RENAMED, TRANSLATED, or GONE."""

import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from config import JobConfig
from settings import sections_of

SECTIONS = sections_of(JobConfig)

SAME_BY_SECTION = {
    "job": "dump_folder description",
    "profiling": "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
    "enable_memory_snapshot save_memory_snapshot_folder",
    "metrics": "log_freq enable_tensorboard enable_wandb disable_color_printing save_tb_folder",
    "optimizer": "lr beta1 beta2 eps weight_decay implementation",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "training": "local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload mixed_precision_param "
    "mixed_precision_reduce gc_freq",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
    "tensor_parallel_degree enable_async_tensor_parallel",
    "checkpoint": "enable folder interval initial_load_path initial_load_model_only initial_load_in_hf "
    "last_save_in_hf export_dtype async_mode keep_latest_k load_step exclude_from_loading",
    "activation_checkpoint": "mode selective_ac_option memory_budget",
    "compile": "enable components backend",
    "comm": "init_timeout_seconds train_timeout_seconds",
    "validation": "enable local_batch_size freq steps",
    "debug": "seed deterministic",
}
SAME = {f"{section}.{key}" for section, keys in SAME_BY_SECTION.items() for key in keys.split()}

RENAMED = {
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",  # Of 0.1; a factor there too.
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
}

FLOAT8 = ("float8", "quantize.linear.float8")  # Sections of 0.1 and 0.2, and what model.converters calls them.
RECIPE = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
TRANSLATED: dict[str, Any] = {  # key -> its type, as settings.check_value takes it
    "model.name": str,
    "model.flavor": str,
    "model.hf_assets_path": str,
    "model.tokenizer_path": str,
    "model.converters": list[str],
    "optimizer.name": str,
    "training.dataset": str,
    "training.dataset_path": str,
    "validation.dataset": str,
    "validation.dataset_path": str,
    "validation.seq_len": int,
    **{f"{section}.recipe_name": RECIPE for section in FLOAT8},
    **{f"{section}.filter_fqns": list[str] for section in FLOAT8},
}


@dataclass(frozen=True)
class Gone:
    """Keys that have no counterpart, for one reason."""

    idle: dict[str, Any]
    """The keys, each with the value at which it asks for nothing that Rowhouse does not do anyway."""
    why: str
    instead: str
    matters: bool = False
    """Any other value changes what is trained, or what the command does."""


DATALOADER = {"num_workers": 0, "persistent_workers": False, "pin_memory": False, "prefetch_factor": None}
GONE = [
    Gone(
        {"training.dtype": "float32"},
        "master weights, gradients and moments are float32",
        'optimizer.state_dtype = "bfloat16" saves 4 of their 16 bytes a parameter',
        matters=True,
    ),
    Gone(
        {"optimizer.early_step_in_backward": False},
        "the optimizer steps after the backward pass, and gradients are clipped, which they are not there",
        "training.max_norm = 0 does not clip either",
        matters=True,
    ),
    Gone(
        {"parallelism.pipeline_parallel_degree": 1},
        "there is no pipeline parallelism",
        "start as many times fewer ranks; as many ranks would read larger batches, where the file fixes neither "
        "data_parallel_shard_degree nor training.global_batch_size",
        matters=True,
    ),
    Gone(
        {
            "parallelism.pipeline_parallel_split_points": [],
            "parallelism.module_fqns_per_model_part": None,
            "parallelism.pipeline_parallel_first_stage_less_layers": 1,
            "parallelism.pipeline_parallel_last_stage_less_layers": 1,
            "parallelism.pipeline_parallel_layers_per_stage": None,
            "parallelism.pipeline_parallel_schedule": "1F1B",
            "parallelism.pipeline_parallel_schedule_csv": "",
            "parallelism.pipeline_parallel_microbatch_size": 1,
            "parallelism.pipeline_parallel_expert_parallel_overlap": True,
        },
        "there is no pipeline parallelism",
        "nothing to set",
    ),
    Gone(
        {"parallelism.context_parallel_degree": 1},
        "there is no context parallelism",
        "start as many times fewer ranks, as for pipeline_parallel_degree; parallelism.tensor_parallel_degree splits "
        "long sequences too",
        matters=True,
    ),
    Gone(
        {
            "parallelism.context_parallel_load_balancer": "headtail",
            "parallelism.context_parallel_rotate_method": "allgather",
        },
        "there is no context parallelism",
        "nothing to set",
    ),
    Gone(
        {
            "parallelism.expert_parallel_degree": 1,
            "parallelism.expert_tensor_parallel_degree": 1,
            "parallelism.expert_parallel_comm_backend": "standard",
            "quantize.grouped_mm.float8.fqns": [],
            "quantize.grouped_mm.mx.recipe_name": "mxfp8",
            "quantize.grouped_mm.mx.fqns": [],
            "debug.moe_force_load_balance": False,
            "training.debug_moe_force_load_balance": False,
        },
        "Llama 3 has no experts",
        "nothing to set; it has no effect there either",
    ),
    Gone(
        {
            "mx.use_fp8_dim1_cast_triton_kernel": True,
            "mx.recipe_name": "mxfp8",
            "mx.filter_fqns": ["output"],
            "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": "triton",
            "quantize.linear.mx.recipe_name": "mxfp8_cublas",
            "quantize.linear.mx.filter_fqns": ["output"],
        },
        "there are no MX formats",
        'float8.recipe_name = "rowwise"',
    ),
    Gone(
        {
            **{f"{section}.enable_fsdp_float8_all_gather": False for section in FLOAT8},
            **{f"{section}.precompute_float8_dynamic_scale_for_fsdp": False for section in FLOAT8},
        },
        "FSDP gathers parameters in bf16",
        "nothing to set; more bytes are sent",
    ),
    Gone(
        {"float8.force_recompute_fp8_weight_in_bwd": False},
        "what is kept for the backward pass, activation_checkpoint says",
        "nothing to set; results are the same",
    ),
    Gone(
        {f"{section}.emulate": False for section in FLOAT8},
        "float8 is not emulated: a CPU has torch's own float8 matmuls, a GPU needs compute capability 8.9",
        'float8.recipe_name = "none" on older GPUs',
    ),
    Gone(
        {"checkpoint.create_seed_checkpoint": False},
        "initial weights depend on debug.seed alone, not on the number of ranks; this command would train",
        "nothing to set: give the runs the same debug.seed",
        matters=True,
    ),
    Gone(
        {"checkpoint.initial_load_in_hf_quantized": False},
        "quantised safetensors are not read",
        "give a folder in float32, bfloat16 or float16",
        matters=True,
    ),
    Gone(
        {"checkpoint.last_save_model_only": False, "checkpoint.last_save_model_weights_only": False},
        "the last checkpoint is whole, and can be resumed from, like every other",
        "checkpoint.last_save_in_hf writes the weights alone beside it",
    ),
    Gone(
        {"checkpoint.enable_first_step_checkpoint": False},
        "there is no save at step 1",
        "try a short run with checkpoint.interval = 1",
    ),
    Gone(
        {"checkpoint.load_only": False},
        "checkpoint.enable loads and saves",
        "a job.dump_folder that may be removed after, and checkpoint.initial_load_path",
    ),
    Gone(
        {
            "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
            "activation_checkpoint.early_stop": False,
            "activation_checkpoint.preserve_rng_state": True,
            "activation_checkpoint.determinism_check": "default",
            "activation_checkpoint.debug": False,
            "activation_checkpoint.visualize_memory_budget_pareto": False,
        },
        "what is recomputed follows from mode and selective_ac_option alone, and nothing in it is random",
        "nothing to set; results are the same",
    ),
    Gone(
        {"parallelism.disable_loss_parallel": False, "parallelism.enable_compiled_autograd": False},
        "head and loss are computed in chunks, split over tensor parallel ranks; backward is compiled with forward",
        "nothing to set; results are the same",
    ),
    Gone(
        {
            f"{section}.dataloader.{key}": idle
            for section in ("training", "validation")
            for key, idle in DATALOADER.items()
        },
        "a thread reads and tokenises ahead; on a GPU, batches are pinned",
        "nothing to set",
    ),
    Gone(
        {"training.gc_debug": False}, "cycles are not looked for", "profiling.enable_memory_snapshot shows what grows"
    ),
    Gone(
        {"metrics.save_for_all_ranks": False},
        "the figures are of all ranks together, and the first writes them",
        "profiling.enable_profiling writes one trace a rank",
    ),
    Gone(
        {
            "job.config_file": None,
            "job.print_config": False,
            "job.print_args": False,
            "job.save_config_file": None,
            "model.print_after_conversion": False,
        },
        "every run logs what was asked for and applied, and keeps config.toml and applied.json",
        "nothing to set",
    ),
    Gone({"job.use_for_integration_test": False}, "it is of torchtitan's own tests", "nothing to set"),
    Gone(
        {"job.custom_config_module": "", "experimental.custom_import": "", "experimental.custom_args_module": ""},
        "the code is yours",
        "what it adds has to be added to Rowhouse's",
        matters=True,
    ),
    Gone(
        {
            "comm.trace_buf_size": 20000,
            "comm.save_traces_folder": "comm_traces",
            "comm.save_traces_file_prefix": "rank_",
        },
        "the flight recorder is always on, and a run that hangs writes it to stacks/ in its folder",
        "the environment variable TORCH_FR_BUFFER_SIZE sets its entries",
    ),
    Gone(
        {"comm.mode": "default"},
        "there is no dry run, and no rank that stands for others",
        "a short run with training.steps = 1 on a CPU",
        matters=True,
    ),
    Gone(
        {
            "memory_estimation.enable": False,
            "memory_estimation.enabled": False,
            "memory_estimation.disable_fake_mode": False,
        },
        "memory is measured, not estimated",
        "the log of a run of a few steps has it",
    ),
    Gone(
        {"fault_tolerance.enable": False},
        "there is no TorchFT: replicas do not come and go within a run",
        "parallelism.data_parallel_replicate_degree, and starting the same command again after a fault",
        matters=True,
    ),
    Gone(
        {
            "fault_tolerance.process_group": "gloo",
            "fault_tolerance.process_group_timeout_ms": 10000,
            "fault_tolerance.replica_id": 0,
            "fault_tolerance.group_size": 0,
            "fault_tolerance.min_replica_size": 1,
            "fault_tolerance.semi_sync_method": None,
            "fault_tolerance.sync_steps": 5,
            "fault_tolerance.should_quantize": False,
            "fault_tolerance.fragment_sync_delay": 0,
            "fault_tolerance.fragment_update_alpha": 0.0,
            "checkpoint.enable_ft_dataloader_checkpoints": True,
        },
        "there is no TorchFT",
        "nothing to set",
    ),
    Gone(
        {"debug.deterministic_warn_only": False},
        "with debug.deterministic, an operation that has no deterministic form stops the run",
        "debug.deterministic = false",
    ),
]
GONE_BY_KEY = {key: gone for gone in GONE for key in gone.idle}

KNOWN = {*SAME, *RENAMED, *TRANSLATED, *GONE_BY_KEY}
# What tells the versions apart. The seed and deterministic of [training] are in 0.2.0 too.
SIGNS_OF_0_1 = {key for key in KNOWN if key.startswith(("float8.", "mx."))}
SIGNS_OF_0_1 |= RENAMED.keys() - {"training.seed", "training.deterministic"}
SIGNS_OF_0_2 = {"model.hf_assets_path", "checkpoint.enable", "lr_scheduler.min_lr_factor"}
SIGNS_OF_0_2 |= {key for key in KNOWN if key.startswith(("compile.", "quantize.", "validation.", "debug."))}

# torchtitan's flavor -> ours of the same mathematics: 0.2 gives each the rotary scaling of Llama 3.1, 0.1 none.
SHAPES = {"0.1": {"8B": "8B", "70B": "70B", "405B": "405B"}, "0.2": {"8B": "3.1-8B", "70B": "3.1-70B", "405B": "405B"}}
# torchtitan's defaults, and where the files of its data sets are.
TOKENIZERS = {"0.1": "./torchtitan/datasets/tokenizer/tokenizer.model", "0.2": "./tests/assets/tokenizer"}
DATASETS = {"training": "c4_test", "validation": "c4_validation"}
C4_TEST = "tests/assets/c4_test"
C4_FILES = {"c4": "en/c4-train.*.json.gz", "c4_validation": "en/c4-validation.*.json.gz"}


def kind_of(key: str) -> Any:
    """The type of a key's value, ours or that of TRANSLATED; without None, which torchtitan's TOML cannot say."""
    if key in TRANSLATED:
        return TRANSLATED[key]
    section, _, name = RENAMED.get(key, key).partition(".")
    kind = typing.get_type_hints(SECTIONS[section])[name]
    return typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind
