"""The last lines of a run: what it reached, where things are, how it goes on, or what to change."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from config import JobConfig


@dataclass(frozen=True)
class Ending:
    """How a run ended. Losses and entropy in nats a token."""

    first_step: int
    step: int
    loss: float | None
    unigram_entropy: float
    data_ended: bool
    stopped_by: str | None
    saved: bool


def closing_lines(config: JobConfig, ending: Ending, world_size: int) -> list[str]:
    folder, checkpoint = Path(config.job.dump_folder), config.checkpoint
    if ending.step < ending.first_step:
        raise_what = f"--training.epochs (now {config.training.epochs})" if ending.data_ended else "--training.steps"
        return [
            f"nothing to do after step {ending.step} of {config.training.steps}; raise {raise_what}, or choose another "
            "--job.dump_folder"
        ]
    lines = []
    if ending.loss is not None:
        lines.append(
            f"loss {ending.loss:.4f} at step {ending.step}; the text's unigram entropy is "
            f"{ending.unigram_entropy:.4f} (both in nats a token)"
        )
    lines.append(f"metrics: {folder / 'metrics.jsonl'}")
    if config.metrics.enable_tensorboard:
        lines.append(f"TensorBoard: tensorboard --logdir {folder / config.metrics.save_tb_folder}")
    if not checkpoint.enable:
        return lines
    if not ending.saved:
        return [*lines, f"step {ending.step} is NOT saved: see the errors above"]
    place = checkpoint.folder if "://" in checkpoint.folder else folder / checkpoint.folder
    lines.append(f"checkpoint: {place}/step-{ending.step}")
    more = f" --training.steps {config.training.steps * 2}"
    if ending.data_ended:
        more = f" --training.epochs {(config.training.epochs or 0) + 1}"
    elif ending.stopped_by is not None:
        more = ""
    how = f"torchrun --nproc-per-node {world_size} train.py" if world_size > 1 else "python train.py"
    return [*lines, f"to go on: {how} --config {shlex.quote(str(folder / 'config.toml'))}{more}"]


def memory_advice(config: JobConfig, error: Exception) -> str:
    """What to change after the memory did not suffice, the cheapest first."""
    training, mode = config.training, config.activation_checkpoint.mode
    advice = []
    if mode != "full":
        advice.append(f'activation_checkpoint.mode = "{"selective" if mode == "none" else "full"}" (now "{mode}")')
    if training.local_batch_size > 1:
        lanes = "" if training.global_batch_size != -1 else ", with training.global_batch_size as it is now"
        advice.append(f"training.local_batch_size = {training.local_batch_size // 2} or less{lanes}")
    if not config.compile.enable:
        advice.append("compile.enable = true")
    advice.append("more ranks, which share the parameters and the optimizer's state")
    if not training.enable_cpu_offload and torch.cuda.is_available():
        advice.append("training.enable_cpu_offload = true (slower)")
    advice.append(f"a training.seq_len below {training.seq_len}")
    return f"out of memory ({str(error).splitlines()[0]}). What helps, the cheapest first:\n  " + "\n  ".join(advice)


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has an exception for it; the CPU's allocator a text, and Python its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
