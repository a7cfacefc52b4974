"""Which splits, checkpointing modes and batch sizes of a model fit, and which of them is the fastest by estimate.

    python -m scripts.plan --model 70B --gpus 256 --device-memory 80GiB --seq-len 8192
    python -m scripts.plan --config llama8b_fp8.toml --gpus 8 --tokens-per-step 1048576 --output plans

Each combination is tried as `train.py --dry-run` would, one step of the real trainer under fake tensors; of deep models
two shallow ones, from which the deep one follows. The table has those that fit, the fastest first; with --output the
best are written as TOML files that run. Exit status 1 where nothing fits.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import JobConfig, load_config
from errors import UserError
from models.llama.shapes import FLAVORS
from planning.command import add_hardware
from planning.hardware import GIB, HEADROOM, Hardware, hardware
from planning.plan import Outline, make_outline
from settings import problems_of, write_toml

AC_MODES = ("none", "matmuls", "op", "full")
BATCHES = (1, 2, 4, 8)
RECIPES = {"70B": "llama70b_fp8.toml", "405B": "llama405b_fp8.toml"}


@dataclass(frozen=True)
class Candidate:
    config: JobConfig
    outline: Outline

    def cells(self) -> list[str]:
        c = self.config
        replicate, tp = c.parallelism.data_parallel_replicate_degree, c.parallelism.tensor_parallel_degree
        shard = c.parallelism.data_parallel_shard_degree
        return [
            f"{replicate} x {shard} x {tp}", mode_of(c), str(c.training.local_batch_size),
            str(c.training.global_batch_size // (c.training.local_batch_size * replicate * shard)),
            f"{self.outline.peak / GIB:.1f}", f"{self.outline.tokens_per_second:,.0f}",
        ]  # fmt: skip


def mode_of(config: JobConfig) -> str:
    ac = config.activation_checkpoint
    return ac.selective_ac_option if ac.mode == "selective" else ac.mode


def candidates(base: JobConfig, gpus: int, tokens_per_step: int | None, gpu: Hardware) -> Iterator[JobConfig]:
    """Every combination that the configuration's own checks allow. Tensor parallel ranks share a node."""
    degrees = [tp for tp in (1, 2, 4, 8) if tp <= gpu.gpus_per_node and gpus % tp == 0]
    for tp, mode, batch in itertools.product(degrees, AC_MODES, BATCHES):
        ranks = gpus // tp
        shards = sorted({ranks, *(n for n in (8 // tp, 64 // tp) if 0 < n < ranks and ranks % n == 0)}, reverse=True)
        for shard in shards:
            lanes = batch * ranks if tokens_per_step is None else tokens_per_step // base.training.seq_len
            ac: dict[str, Any] = (
                {"mode": mode} if mode in ("none", "full") else {"mode": "selective", "selective_ac_option": mode}
            )
            split: dict[str, Any] = {
                "tensor_parallel_degree": tp, "data_parallel_shard_degree": shard,
                "data_parallel_replicate_degree": ranks // shard, "enable_async_tensor_parallel": tp > 1,
            }  # fmt: skip
            config = dataclasses.replace(
                base,
                parallelism=dataclasses.replace(base.parallelism, **split),
                activation_checkpoint=dataclasses.replace(base.activation_checkpoint, **ac),
                training=dataclasses.replace(base.training, local_batch_size=batch, global_batch_size=lanes),
            )
            if not problems_of(config, world_size=gpus):
                yield config


def search(base: JobConfig, gpus: int, tokens_per_step: int | None, gpu: Hardware) -> tuple[list[Candidate], int]:
    """(Those that fit, the fastest first; how many were tried)

    A mode or a batch that takes more memory than one that did not fit is not tried: with everything else alike, less
    checkpointing and larger batches only take more.
    """
    budget = gpu.memory * (1 - HEADROOM)
    found: list[Candidate] = []
    too_large: list[tuple[tuple[int, ...], int, int]] = []
    tried = 0
    every = sorted(
        candidates(base, gpus, tokens_per_step, gpu),
        key=lambda c: (-AC_MODES.index(mode_of(c)), c.training.local_batch_size),
    )
    for config in every:
        p = config.parallelism
        split = (p.data_parallel_replicate_degree, p.data_parallel_shard_degree, p.tensor_parallel_degree)
        mode, batch = AC_MODES.index(mode_of(config)), config.training.local_batch_size
        if any(split == s and mode <= m and batch >= b for s, m, b in too_large):
            continue
        tried += 1
        try:
            outline = make_outline(config, gpus, gpu)
        except UserError:  # The set-up refuses it.
            continue
        if outline.peak <= budget:
            found.append(Candidate(config, outline))
        else:
            too_large.append((split, mode, batch))
        if sys.stderr.isatty():
            print(f"\r{tried} tried, {len(found)} fit", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return sorted(found, key=lambda c: -c.outline.tokens_per_second), tried


def base_config(args: argparse.Namespace, flags: list[str]) -> JobConfig:
    """The configuration whose splits are sought: of a file, or of a model's name with row-wise float8."""
    named = ["--config", args.config]
    if args.config is None:
        if args.model is None:
            raise UserError("--model is missing: give a model's name, or a file with --config")
        if args.model not in FLAVORS:
            raise UserError(f'--model: "{args.model}" is not known; the models are {", ".join(FLAVORS)}')
        recipe = RECIPES.get(args.model.removeprefix("3.1-"), "llama8b_fp8.toml")
        named = ["--config", recipe, "--model.flavor", args.model]
    if args.seq_len is not None:
        named += ["--training.seq_len", str(args.seq_len)]
    # Degrees and batches are chosen here: the checks are those of the candidates.
    return load_config([*named, *flags], args.gpus)


def table(found: list[Candidate]) -> str:
    head = "| replicas x shards x TP | checkpointing | batch | micro-batches | GiB | tokens/s a GPU |"
    lines = [head, "| --- " * 6 + "|"]
    return "\n".join(lines + ["| " + " | ".join(c.cells()) + " |" for c in found])


def write(found: list[Candidate], folder: Path, gpus: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, candidate in enumerate(found, 1):
        name = f"plan-{number}"
        job = dataclasses.replace(candidate.config.job, dump_folder=f"./outputs/{name}")
        write_toml(dataclasses.replace(candidate.config, job=job), folder / f"{name}.toml")
    first = folder / "plan-1.toml"
    print(
        f"\nwritten, row by row: {first} ...; python train.py --config {first} --dry-run --world-size {gpus} shows more"
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", metavar="NAME", help=f"{', '.join(FLAVORS)}")
    parser.add_argument("--config", metavar="FILE", help="a file whose model and settings are taken instead")
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--seq-len", type=int, metavar="TOKENS")
    parser.add_argument(
        "--tokens-per-step", type=int, metavar="N", help="of the global batch (default: no accumulation)"
    )
    add_hardware(parser)
    parser.add_argument("--best", type=int, default=10, metavar="N", help="rows to show (default: 10)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where the rows are written as TOML files")
    return parser


def main() -> int:
    args, flags = make_parser().parse_known_args()
    try:
        if args.gpus < 1:
            raise UserError(f"--gpus: {args.gpus} GPUs train nothing; give 1 or more")
        gpu = hardware(args.gpu, args.device_memory, args.network_gbps)
        base = base_config(args, flags)
        if args.tokens_per_step is not None and args.tokens_per_step % base.training.seq_len:
            raise UserError(
                f"--tokens-per-step: no multiple of the sequence's {base.training.seq_len} tokens; give one"
            )
        found, tried = search(base, args.gpus, args.tokens_per_step, gpu)
    except UserError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    if not found:
        print(f"none of {tried} combinations fits {gpu.memory / GIB:.1f} GiB a GPU: more GPUs, or shorter sequences")
        return 1
    found = found[: args.best]
    shape = base.model.shape()
    print(
        f"{base.model.flavor} ({shape.n_layers} layers), {args.gpus} x {gpu.name}, {gpu.memory / GIB:.1f} GiB less "
        f"{HEADROOM:.0%}, {base.training.seq_len} tokens a sequence; the speed is an estimate\n\n{table(found)}"
    )
    if args.output is not None:
        write(found, args.output, args.gpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
