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
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from config import load_config
from errors import UserError
from parallelisms.fsdp import local
from planning.fake_run import fake_run
from planning.hardware import GIB
from scripts.bench import result_of, run_steps, training
from trainer import Trainer

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


def measure(flags: str) -> dict[str, int]:
    """The peak of a step after the first ones, in bytes; on a GPU also what the allocator had reserved."""
    with training(flags) as trainer:
        run_steps(trainer, 2)
        if trainer.device.type == "cpu":
            return {"peak": profiled_peak(trainer)}
        torch.cuda.reset_peak_memory_stats()
        run_steps(trainer, STEPS)
        return {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def profiled_peak(trainer: Trainer) -> int:
    """What was there before the step, and the most that it allocated and had not freed yet."""
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    tensors += [t for p in trainer.model.parameters() for t in trainer.optimizer.state[p].values()]
    before = sum(local(t).nbytes for t in tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run_steps(trainer, 1)
    trace = trainer.folder / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return before + most


def run(name: str, flags: str) -> dict[str, int]:
    """`measure` in a process of its own. Raises RuntimeError with the end of its output where it fails."""
    return result_of([sys.executable, "-m", "scripts.check_plan", "--measure", flags], name)


def row(name: str, flags: str) -> tuple[str, bool]:
    """A row of the table, and whether the prediction is right."""
    with ThreadPoolExecutor(1) as pool:
        measuring = pool.submit(run, name, flags)
        planned = fake_run(load_config([*flags.split(), "--lr_scheduler.warmup_steps", "2"], 1), 1)
        measured = measuring.result()
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
            print(f"check_plan: {error}", file=sys.stderr)
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
