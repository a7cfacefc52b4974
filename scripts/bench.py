"""Tokens a second, memory and time by kind of kernel, of Rowhouse and of torchtitan where it is installed.

    python -m scripts.bench                                  # the cases below, each once
    python -m scripts.bench --cases 8b-rowwise --repeats 3   # in turn; the table gives the median of the runs
    python -m scripts.bench --case mine="--config llama1b.toml --training.local_batch_size 4"

Each run is a process of its own: some steps to compile and warm up, then three timed intervals of four steps, then
two steps in torch's profiler. The range is that of the intervals of all runs.
One table comes last; --json FILE keeps all of it. torchtitan (0.2.2, its last release with TOML files) gets the same
shapes, text and techniques: scripts/bench_torchtitan.py.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from config import load_config
from data.loader import next_batch
from parallelisms.mesh import CommConfig, init_process_group
from scripts.bench_torchtitan import LOG_FREQ, STEPS
from telemetry.kernel_kinds import kind_of
from telemetry.memory import peak_memory
from trainer import Trainer

ROOT = Path(__file__).parent.parent
WARM, PROFILED = 6, 2
# As many intervals as torchtitan's log gives, as long: within one no step waits for the one before.
INTERVALS = STEPS // LOG_FREQ - 1

WIDE = "--config llama8b.toml --model.n_layers 16 --training.local_batch_size 2 --activation_checkpoint.mode selective"
WHOLE = "--config llama8b.toml --training.local_batch_size 1 --activation_checkpoint.mode full"
OURS = {
    "wide-bf16": WIDE,
    "wide-rowwise": f"{WIDE} --float8.recipe_name rowwise",
    "wide-rowwise-torchao": f"{WIDE} --float8.recipe_name rowwise --float8.backend torchao",
    "wide-tensorwise-torchao": f"{WIDE} --float8.recipe_name tensorwise",
    "8b-rowwise": f"{WHOLE} --float8.recipe_name rowwise",
    "wide-rowwise-none": f"{WIDE} --float8.recipe_name rowwise --activation_checkpoint.mode none",
    # What fits an H200 and is the fastest by the estimate of train.py --dry-run.
    "wide-rowwise-best": f"{WIDE} --float8.recipe_name rowwise --activation_checkpoint.mode none "
    "--optimizer.state_dtype bfloat16",
    "8b-rowwise-best": f"{WHOLE} --float8.recipe_name rowwise --activation_checkpoint.mode selective "
    "--activation_checkpoint.selective_ac_option matmuls --training.local_batch_size 2 "
    "--optimizer.state_dtype bfloat16",
}
TITAN_FLOAT8 = "--model.converters quantize.linear.float8 --quantize.linear.float8.filter_fqns output"
TITAN_ROWWISE = f"{TITAN_FLOAT8} --quantize.linear.float8.recipe_name rowwise"
TITAN_WHOLE = "--activation_checkpoint.mode full --training.local_batch_size 1"
# name -> (layers, flags)
TITAN = {
    "torchtitan-wide-bf16": (16, ""),
    "torchtitan-wide-rowwise": (16, TITAN_ROWWISE),
    "torchtitan-wide-tensorwise": (16, TITAN_FLOAT8),
    "torchtitan-wide-tensorwise-none": (16, f"{TITAN_FLOAT8} --activation_checkpoint.mode none"),
    "torchtitan-8b-rowwise": (32, f"{TITAN_ROWWISE} {TITAN_WHOLE}"),
}


@contextmanager
def training(flags: str) -> Iterator[Trainer]:
    """A trainer for this rank of those that were started (else for the only one). It saves and validates nothing."""
    with tempfile.TemporaryDirectory() as folder:
        more = f"--checkpoint.enable false --validation.enable false --metrics.log_freq 1000 --job.dump_folder {folder}"
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        config = load_config([*flags.split(), *more.split(), "--lr_scheduler.warmup_steps", "2"], ranks)
        trainer = Trainer(config, init_process_group(CommConfig()))
        yield trainer
        trainer.close()
        dist.destroy_process_group()


def timed(trainer: Trainer) -> tuple[float, list[float]]:
    """Seconds of the first step, which compiles, and after some more of a step of each interval."""
    first_step = run_steps(trainer, 1)
    run_steps(trainer, WARM)
    return first_step, [run_steps(trainer, LOG_FREQ) / LOG_FREQ for _ in range(INTERVALS)]


def last_loss(trainer: Trainer) -> float:
    assert trainer.unlogged is not None
    return trainer.unlogged[0].item()


def measure(flags: str) -> dict[str, Any]:
    """Trains in this process and measures: tokens/s, milliseconds of a step by kind of kernel, GiB, loss."""
    with training(flags) as trainer:
        first_step, seconds = timed(trainer)
        memory = peak_memory(trainer.device)
        kinds, kernels = profiled(trainer) if trainer.device.type == "cuda" else ({}, {})
        tokens = trainer.config.training.seq_len * trainer.config.training.lanes(1)
        loss = last_loss(trainer)
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "range": [tokens / max(seconds), tokens / min(seconds)],
        "gib": memory.gib,
        "allocated_gib": memory.allocated_gib,
        "first_step_seconds": first_step,
        "loss": loss,
        "milliseconds": kinds,
        "kernels": kernels,
    }


def run_steps(trainer: Trainer, steps: int) -> float:
    """Seconds, to the end of the work on the device."""
    began = time.perf_counter()
    for _ in range(steps):
        batch = next_batch(trainer.loader, can_end=False)
        assert batch is not None
        trainer.step += 1
        trainer.train_step(*batch)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def profiled(trainer: Trainer) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """(Milliseconds of a step by kind of kernel, and what was left of it; kernel -> (milliseconds, calls) of a step)"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = run_steps(trainer, PROFILED)
    kernels = {
        event.key: (event.self_device_time_total / 1000 / PROFILED, event.count / PROFILED)
        for event in sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        if event.self_device_time_total
    }
    kinds: Counter[str] = Counter()
    for name, (milliseconds, _) in kernels.items():
        kinds[kind_of(name)] += milliseconds
    return {**kinds, "idle": seconds * 1000 / PROFILED - sum(kinds.values())}, kernels


def run(name: str, cases: dict[str, str]) -> dict[str, Any]:
    """One run in a process of its own, as `result_of`."""
    if name in TITAN:
        layers, flags = TITAN[name]
        command = [sys.executable, "-m", "scripts.bench_torchtitan", str(layers), *flags.split()]
    else:
        command = [sys.executable, "-m", "scripts.bench", "--measure", cases[name]]
    return result_of(command, name)


def result_of(command: list[str], name: str) -> dict[str, Any]:
    """The JSON in the last line that a command prints. Raises RuntimeError, with the end of its output, if it fails."""
    env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    kinds = list(dict.fromkeys(kind for runs in results.values() for kind in runs[0].get("milliseconds", {})))
    lines = ["| case | tokens/s | range | GiB | first step, s | loss |" + "".join(f" {kind}, ms |" for kind in kinds)]
    lines.append("| --- " * (6 + len(kinds)) + "|")
    for name, runs in results.items():
        speeds = [r["tokens_per_second"] for r in runs]
        middle = runs[speeds.index(statistics.median_low(speeds))]
        slowest, fastest = min(r["range"][0] for r in runs), max(r["range"][1] for r in runs)
        cells = [name, f"{statistics.median(speeds):,.0f}", f"{slowest:,.0f} to {fastest:,.0f}"]
        cells += [f"{middle['gib']:.1f}", f"{middle['first_step_seconds']:.0f}", f"{middle['loss']:.3f}"]
        cells += [f"{middle['milliseconds'].get(kind, 0):.1f}" for kind in kinds] if "milliseconds" in middle else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokens a second, memory, and time by kind of kernel.")
    parser.add_argument("--cases", nargs="*", metavar="NAME", help=f"of {', '.join([*OURS, *TITAN])} (default: all)")
    parser.add_argument("--case", action="append", default=[], metavar="NAME=FLAGS", help="a case of your own")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of all cases in turn (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all results")
    parser.add_argument("--measure", metavar="FLAGS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        logging.disable(logging.INFO)
        print(json.dumps(measure(args.measure)))
        return 0
    own = dict(case.split("=", 1) for case in args.case)
    names = [*(args.cases if args.cases is not None else [] if own else [*OURS, *TITAN]), *own]
    unknown = [name for name in names if name not in {**OURS, **TITAN, **own}]
    if unknown:
        print(f"bench: there is no case {', '.join(unknown)}; there are {', '.join([*OURS, *TITAN])}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available() and not own:
        print(
            "There is no GPU here, which these models need: nothing can be measured. Give a small --case of your own."
        )
        return 0
    if any(name in TITAN for name in names) and find_spec("torchtitan") is None:
        print("torchtitan is not installed: its cases are left out (pip install torchtitan==0.2.2)")
        names = [name for name in names if name not in TITAN]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repeat in range(args.repeats):
        for name in names:
            try:
                results[name].append(run(name, {**OURS, **own}))
            except RuntimeError as error:
                print(f"bench: {error}", file=sys.stderr)
                return 1
            print(f"{repeat + 1}: {name}: {results[name][-1]['tokens_per_second']:,.0f} tokens/s", flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n\n{table(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
