"""JobConfig: what a run is. Composes the sections, each declared beside the code that it configures."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checkpoint.config import CheckpointConfig
from data.sources import DATASETS
from errors import UserError
from float8.convert import Float8Config
from models.llama.shapes import ModelConfig
from optimizer import LRSchedulerConfig, OptimizerConfig
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.compile import CompileConfig
from parallelisms.mesh import CommConfig, ParallelismConfig
from settings import SettingsReader, add_help, nearest
from telemetry.metrics import MetricsConfig
from telemetry.profiling import ProfilingConfig

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    dump_folder: str = "./outputs"
    """The run's folder: resolved config, metrics, checkpoints, traces."""
    description: str = "default job"
    """A line of your own; it is logged at the start."""


@dataclass(frozen=True)
class TrainingConfig:
    """The batch, the data and the precision."""

    dataset: str = "stdlib"
    """What is read: stdlib (the running Python's standard library); c4, fineweb_edu or hf (streamed from Hugging Face);
    text, jsonl or parquet (local)."""
    dataset_path: str | None = None
    """Where: a file, folder or pattern for text, jsonl and parquet; a hub name or local folder for hf."""
    epochs: int | None = None
    """Stop after reading the data this often; none begins again until steps are done."""
    local_batch_size: int = 8
    """Sequences a rank takes at once (one micro-batch)."""
    global_batch_size: int = -1
    """Sequences of one optimizer step, over all ranks and micro-batches; -1 is one micro-batch a rank."""
    seq_len: int = 2048
    """Tokens in one sequence."""
    max_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them as they are."""
    max_skipped_steps: int = 0
    """Steps in a row that may be skipped because the loss or the gradient is NaN or infinite; after more the run stops
    with status 4. They never change the weights."""
    steps: int = 10000
    """Optimizer steps."""
    max_time: float | None = None
    """Stop after so many seconds, with a save and status 75; none trains to the last step."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the forward and backward pass; master weights are float32."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Precision of the gradient reduction."""
    gc_freq: int = 50
    """Collect Python's garbage every so many steps, on all ranks at once."""

    def problems(self) -> list[tuple[str, str]]:
        found = dataset_problems(self.dataset, self.dataset_path)
        for key in ("local_batch_size", "seq_len", "steps", "gc_freq"):
            if getattr(self, key) < 1:
                found.append((key, f"{getattr(self, key)} is too small; give 1 or more"))
        if self.epochs is not None and self.epochs < 1:
            found.append(("epochs", f"{self.epochs} epochs train nothing; give 1 or more, or none"))
        if self.global_batch_size < 1 and self.global_batch_size != -1:
            found.append(("global_batch_size", "must be 1 or more, or -1 for one micro-batch a rank"))
        if self.max_skipped_steps < 0:
            found.append(("max_skipped_steps", f"{self.max_skipped_steps} is negative; give 0 or more"))
        if self.max_time is not None and self.max_time <= 0:
            found.append(("max_time", f"{self.max_time} seconds train nothing; give more, or none"))
        if self.max_norm < 0:
            found.append(("max_norm", f"{self.max_norm} is not a norm; give 0 or more"))
        return found

    def lanes(self, dp_degree: int) -> int:
        """Sequences of one optimizer step."""
        return self.local_batch_size * dp_degree if self.global_batch_size == -1 else self.global_batch_size


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on other data, now and then."""

    enable: bool = False
    """Validate."""
    dataset: str = "stdlib_validation"
    """As training.dataset; stdlib_validation and c4_validation are the parts held out of stdlib and c4."""
    dataset_path: str | None = None
    """As training.dataset_path."""
    local_batch_size: int = 8
    """Sequences a rank takes at once."""
    freq: int = 10
    """Every so many steps, and after the last one."""
    steps: int = 10
    """Batches of one validation, the same ones each time; -1 takes all the data once."""

    def problems(self) -> list[tuple[str, str]]:
        if not self.enable:
            return []
        found = dataset_problems(self.dataset, self.dataset_path)
        for key in ("local_batch_size", "freq"):
            if getattr(self, key) < 1:
                found.append((key, f"{getattr(self, key)} is too small; give 1 or more"))
        if self.steps < 1 and self.steps != -1:
            found.append(("steps", "must be 1 or more, or -1 for all the data"))
        return found


@dataclass(frozen=True)
class DebugConfig:
    """Reproducing a run."""

    seed: int = 0
    """Fixes the initial weights and the order of the data, whatever the number of ranks."""
    deterministic: bool = False
    """Deterministic kernels only, at some cost in speed."""
    detect_anomaly: bool = False
    """Look for NaN and infinity between the layers in every step, say where the first one is, and count it at that step
    against training.max_skipped_steps. Slow."""
    layer_statistics_freq: int = 0
    """Every so many steps, and of the first, write statistics of each layer's outputs, weights and gradients to
    layer_statistics.jsonl, for scripts.compare_layers; 0 writes none."""

    def problems(self) -> list[tuple[str, str]]:
        found = [] if 0 <= self.seed < 2**63 else [("seed", f"{self.seed} is no seed; give 0 to 2**63 - 1")]
        if self.layer_statistics_freq < 0:
            found.append(("layer_statistics_freq", f"{self.layer_statistics_freq} is negative; give 0 or more"))
        return found


def dataset_problems(dataset: str, path: str | None) -> list[tuple[str, str]]:
    if dataset not in DATASETS:
        return [("dataset", f'"{dataset}" is not a dataset; {nearest(dataset, DATASETS, "datasets")}')]
    needs_path = dataset in ("text", "jsonl", "parquet", "hf")
    if needs_path and path is None:
        return [("dataset_path", f'dataset = "{dataset}" needs it; say where the data is')]
    if not needs_path and path is not None:
        text = f'dataset = "{dataset}" takes no path; remove it, or choose text, jsonl, parquet or hf'
        return [("dataset_path", text)]
    return []


@dataclass(frozen=True)
class JobConfig:
    job: RunConfig
    model: ModelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    lr_scheduler: LRSchedulerConfig
    parallelism: ParallelismConfig
    float8: Float8Config
    activation_checkpoint: ActivationCheckpointConfig
    compile: CompileConfig
    checkpoint: CheckpointConfig
    validation: ValidationConfig
    metrics: MetricsConfig
    profiling: ProfilingConfig
    comm: CommConfig
    debug: DebugConfig

    def problems(self, world_size: int) -> list[tuple[str, str]]:
        """Combinations that cannot work with this many ranks: (section.key, what is wrong; what to do)."""
        found = []
        p = self.parallelism
        shard_is_degree = p.data_parallel_shard_degree >= 1 or p.data_parallel_shard_degree == -1
        # Where a degree is no number of ranks, the section says so, and there is no mesh to tell more of.
        if shard_is_degree and p.data_parallel_replicate_degree >= 1 and p.tensor_parallel_degree >= 1:
            found += self.mesh_problems(world_size)
        compiles_model = self.compile.enable and "model" in self.compile.components
        if self.activation_checkpoint.mode == "memory_budget" and not compiles_model:
            text = 'memory_budget is carried out by the compiler; set compile.enable with "model", or another mode'
            found.append(("activation_checkpoint.mode", text))
        if self.lr_scheduler.warmup_steps > self.schedule_steps:
            text = f"{self.lr_scheduler.warmup_steps} is more than the {self.schedule_steps} steps of the schedule"
            length = "training.steps" if self.lr_scheduler.total_steps is None else "lr_scheduler.total_steps"
            found.append(("lr_scheduler.warmup_steps", f"{text}; lower it, or raise {length}"))
        if self.training.enable_cpu_offload and self.optimizer.state_dtype == "bfloat16":
            text = "bfloat16 is for a GPU, and the parameters are in host memory (training.enable_cpu_offload); "
            found.append(("optimizer.state_dtype", text + 'take float32, and optimizer.implementation "foreach"'))
        elif self.training.enable_cpu_offload and self.optimizer.implementation == "fused":
            text = "the parameters are in host memory (training.enable_cpu_offload); take foreach"
            found.append(("optimizer.implementation", text))
        return found

    def mesh_problems(self, world_size: int) -> list[tuple[str, str]]:
        """Degrees that do not make up the ranks, and batches or models that the ranks cannot share out."""
        found = []
        replicate, shard, tp = self.parallelism.degrees(world_size)
        if replicate * shard * tp != world_size:
            found.append(self.degrees_problem(replicate, shard, tp, world_size))
        elif self.training.local_batch_size >= 1 and self.training.lanes(replicate * shard) >= 1:
            micro_batch = self.training.local_batch_size * replicate * shard
            lanes = self.training.lanes(replicate * shard)
            if lanes % micro_batch:
                nearest_lanes = max(1, round(lanes / micro_batch)) * micro_batch
                text = (
                    f"{lanes} is not a multiple of local_batch_size ({self.training.local_batch_size}) x data parallel "
                    f"ranks ({replicate * shard}) = {micro_batch}; the nearest that is: {nearest_lanes}"
                )
                found.append(("training.global_batch_size", text))
        found += self.token_problems(tp)
        if tp > 1:
            found += self.tensor_parallel_problems(tp)
        return found

    def degrees_problem(self, replicate: int, shard: int, tp: int, world_size: int) -> tuple[str, str]:
        """The degrees do not make up the ranks: told at the key that was set."""
        if self.parallelism.data_parallel_shard_degree != -1:
            key, how = "data_parallel_shard_degree", "are not the"
            product = f"{replicate} replicas x {shard} shards x {tp} tensor parallel"
        else:
            key = "tensor_parallel_degree" if tp > 1 else "data_parallel_replicate_degree"
            product, how = f"{replicate} replicas x {tp} tensor parallel", "do not divide the"
        text = f"{product} {how} {world_size} ranks that run; change a degree, or start another number of ranks"
        return f"parallelism.{key}", text

    def token_problems(self, tp: int) -> list[tuple[str, str]]:
        """Batches whose tokens the float8 matmuls, or the tensor parallel ranks, cannot take."""
        # 16: the float8 kernels' alignment, and that of the row scales' slices inside a fused gather.
        if tp == 1 and self.float8.recipe_name is None:
            return []
        batches = {"training": self.training.local_batch_size}
        if self.validation.enable:
            batches["validation"] = self.validation.local_batch_size
        split = f"split over {tp} tensor parallel ranks in multiples of 16" if tp > 1 else "multiplied in float8"
        return [
            (
                f"{section}.local_batch_size",
                f"{sequences} x training.seq_len {self.training.seq_len} tokens cannot be {split}; make the product a "
                f"multiple of {16 * tp}",
            )
            for section, sequences in batches.items()
            if sequences * self.training.seq_len % (16 * tp)
        ]

    def tensor_parallel_problems(self, tp: int) -> list[tuple[str, str]]:
        """What cannot be split over `tp` ranks, and what does not work split."""
        key, found = "parallelism.tensor_parallel_degree", []
        shape = self.model.shape()
        # Key and value heads are not copied to several ranks: a degree above their number is refused too.
        sizes = {
            "heads": shape.n_heads, "key and value heads": shape.n_kv_heads, "feed-forward columns": shape.hidden_dim,
            "vocabulary rows": shape.vocab_size,
        }  # fmt: skip
        fits = ", ".join(str(n) for n in range(1, shape.n_kv_heads + 1) if not any(s % n for s in sizes.values()))
        for what, size in sizes.items():
            if size % tp:
                text = f"{size} {what} cannot be split over {tp} ranks; this model takes the degrees {fits}"
                if what == "vocabulary rows":
                    text += f", or set model.vocab_size to {-(-size // tp) * tp}"
                found.append((key, text))
        if self.float8.recipe_name is not None and self.float8.backend_of_recipe == "torchao":
            text = f'{self.float8.recipe_name} by torchao does not work with tensor parallelism; take "rowwise" or '
            text += '"rowwise_with_gw_hp" with float8.backend "auto", or tensor_parallel_degree 1'
            found.append(("float8.recipe_name", text))
        return found

    @property
    def schedule_steps(self) -> int:
        """Steps that the learning rate's schedule spans."""
        return self.lr_scheduler.total_steps or self.training.steps


def find_config(name: str) -> Path:
    """A path as given, or the name of a file in configs/. Raises UserError where neither is there."""
    for path in (Path(name), CONFIGS / name, CONFIGS / f"{name}.toml"):
        if path.is_file():
            return path
    shipped = [path.name for path in sorted(CONFIGS.glob("*.toml"))]
    raise UserError(
        f'--config: there is no file "{name}", here or in configs/; {nearest(name, shipped, "shipped configs")}'
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage="train.py --config FILE [--section.key VALUE ...]",
        description="Pre-trains a Llama model as a TOML file says. Any key of the file can be overridden by a flag; "
        "the items of a list are parted by commas.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=4, width=110),
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a path, or the name of a file in configs/ (debug.toml)")
    text = "plan a step instead, on any machine, for any number of GPUs: train.py --dry-run --help"
    parser.add_argument("--dry-run", action="store_true", help=text)
    add_help(parser, JobConfig)
    return parser


def load_config(argv: list[str], world_size: int) -> JobConfig:
    """The command line (without the program) -> the checked configuration. Raises UserError with all that is wrong."""
    if "-h" in argv or "--help" in argv:
        make_parser().print_help()
        raise SystemExit(0)
    reader = SettingsReader(JobConfig)
    flags = [word for flag in argv for word in (flag.split("=", 1) if flag.startswith("--config=") else [flag])]
    if flags.count("--config") > 1:
        raise UserError("--config: given more than once; give one file, and override its keys with flags")
    if "--config" in flags:
        at = flags.index("--config")
        if at + 1 == len(flags):
            raise UserError("--config: takes the path of a TOML file, or its name in configs/")
        reader.read_toml(find_config(flags[at + 1]))
        del flags[at : at + 2]
    elif not flags:
        raise UserError("--config is missing: give it a TOML file, for example --config debug.toml (--help shows all)")
    reader.read_flags(flags)
    return reader.build(world_size=world_size)
