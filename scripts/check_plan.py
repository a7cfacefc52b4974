"""Is the memory that `train.py --dry-run` predicts the memory that a step takes?

    python -m scripts.check_plan                              # the cases below: on a GPU, or small ones on a CPU
    python -m scripts.check_plan --case mine="--config llama1b.toml --training.local_batch_size 4"

Each case trains some steps in a process of its own, on one rank. On a GPU the peak is that of CUDA's allocator
(allocated; what it reserves is told besides); on a CPU it is summed up from the profiler's record of every allocation.
One table comes last; exit status 1 if a prediction is off by more than 5 %.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from config import load_config
from data.loader import next_batch
from errors import UserError
from parallelisms.mesh import CommConfig, init_process_group
from planning.fake_run import fake_run
from planning.hardware import GIB
from trainer import Trainer

ROOT = Path(__file__).parent.parent
TOLERANCE = 0.05
STEPS = 3

WIDE = "--config llama8b.toml --model.n_layers 8"
TWO = f"{WIDE} --training.local_batch_size 2"
ROWWISE = "--float8.recipe_name rowwise"
ON_GPU = {
    "8B, float8, full": "--config llama8b_fp8.toml",
    "8B wide, batch 2, bf16, selective": f"{TWO} --activation_checkpoint.mode selective",
    "8B wide, batch 2, rowwise, selective": f"{TWO} --activation_checkpoint.mode selective {ROWWISE}",
    "8B wide, batch 2, rowwise, matmuls": f"{TWO} --activation_checkpoint.mode selective "
    f"--activation_checkpoint.selective_ac_option matmuls {ROWWISE}",
    "8B wide, batch 2, rowwise, none": f"{TWO} --activation_checkpoint.mode none {ROWWISE}",
    "8B wide, batch 4, bf16, full": f"{WIDE} --training.local_batch_size 4 --activation_checkpoint.mode full",
    "8B wide, batch 2, tensorwise, full": f"{TWO} --activation_checkpoint.mode full --float8.recipe_name tensorwise",
    "8B wide, batch 2, rowwise_with_gw_hp, full": f"{TWO} --activation_checkpoint.mode full "
    "--float8.recipe_name rowwise_with_gw_hp",
    "8B wide, 32,768 tokens, rowwise, full": f"{WIDE} --training.local_batch_size 1 --training.seq_len 32768 "
    f"--activation_checkpoint.mode full {ROWWISE}",
    "8B wide, bf16 moments, batch 1, none": f"{WIDE} --training.local_batch_size 1 --activation_checkpoint.mode none "
    "--optimizer.state_dtype bfloat16",
    "1B, batch 2, bf16, none": "--config llama1b.toml --training.local_batch_size 2 --activation_checkpoint.mode none",
}
SMALL = (
    "--config debug.toml --model.flavor 300M --model.n_layers 4 --model.vocab_size 2048 --training.seq_len 512 "
    "--training.local_batch_size 4 --training.global_batch_size 4"
)
ON_CPU = {
    f"4 layers, {how}, {mode}": f"{SMALL} --activation_checkpoint.mode {mode} --compile.enable {compiled}"
    for how, compiled in (("eager", "false"), ("compiled", "true"))
    for mode in ("none", "selective", "full")
}


def settings(flags: str, folder: str) -> list[str]:
    more = f"--checkpoint.enable false --validation.enable false --metrics.log_freq 1000 --job.dump_folder {folder}"
    return [*flags.split(), *more.split(), "--metrics.enable_tensorboard", "false", "--lr_scheduler.warmup_steps", "2"]


def measure(flags: str) -> dict[str, int]:
    """The peak of a step after the first ones, in bytes; on a GPU also what the allocator had reserved."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(load_config(settings(flags, folder), 1), init_process_group(CommConfig()))
        step(trainer)
        step(trainer)
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            for _ in range(STEPS):
                step(trainer)
            torch.cuda.synchronize()
            peak = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        else:
            peak = {"peak": profiled_peak(trainer, Path(folder) / "trace.json")}
        trainer.close()
        dist.destroy_process_group()
    return peak


def step(trainer: Trainer) -> None:
    batch = next_batch(trainer.loader, can_end=False)
    assert batch is not None
    trainer.step += 1
    trainer.train_step(*batch)


def profiled_peak(trainer: Trainer, trace: Path) -> int:
    """What was there before the step, and the most that it allocated and had not freed yet."""
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    tensors += [t for p in trainer.model.parameters() for t in trainer.optimizer.state[p].values()]
    before = sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(trainer)
    profile.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return before + most


def run(flags: str) -> dict[str, int]:
    """`measure` in a process of its own. Raises RuntimeError with the end of its output where it fails."""
    env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scripts.check_plan", "--measure", flags]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"it failed with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, flags: str) -> tuple[str, bool]:
    """A row of the table, and whether the prediction is right."""
    with tempfile.TemporaryDirectory() as folder:
        planned = fake_run(load_config(settings(flags, folder), 1), 1)
    measured = run(flags)
    error = planned.peak.nbytes / measured["peak"] - 1
    reserved = f"{measured['reserved'] / GIB:.2f}" if "reserved" in measured else ""
    cells = [name, f"{planned.peak.nbytes / GIB:.2f}", f"{measured['peak'] / GIB:.2f}", f"{error:+.1%}", reserved]
    return "| " + " | ".join([*cells, planned.peak.where]) + " |", abs(error) <= TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--case", action="append", default=[], metavar="NAME=FLAGS", help="a case of your own")
    parser.add_argument("--measure", metavar="FLAGS", help=argparse.SUPPRESS)
    args: Any = parser.parse_args()
    if args.measure:
        logging.disable(logging.WARNING)
        print(json.dumps(measure(args.measure)))
        return 0
    own = dict(case.split("=", 1) for case in args.case)
    cases = own or (ON_GPU if torch.cuda.is_available() else ON_CPU)
    lines, right = [], True
    for name, flags in cases.items():
        try:
            line, is_right = row(name, flags)
        except (RuntimeError, UserError) as error:
            print(f"check_plan: {name}: {error}", file=sys.stderr)
            right = False
            continue
        lines.append(line)
        right = right and is_right
        print(line, flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; GiB\n")
    print("| case | predicted | measured | error | reserved | at |\n| --- | --- | --- | --- | --- | --- |")
    print("\n".join(lines))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
