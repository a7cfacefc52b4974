"""What a save costs: seconds, stall and host memory of each checkpoint.async_mode, against plain DCP.

    python -m scripts.bench_checkpoint --config llama1b.toml --output /fast/disk/bench

Each row is a process of its own, which trains (local batch 1, full checkpointing) without a save and then with three,
of which the first is left out. "Plain DCP" is torch.distributed.checkpoint.save to the same disk: no checksums, no
reading back, no commit. The stall is what the training lost: the call, and what the steps after it took longer than
others. Host memory is the process's peak, and that of the process that writes.
"""

import argparse
import json
import logging
import multiprocessing
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from config import load_config
from data.loader import next_batch
from parallelisms.mesh import CommConfig, init_process_group
from trainer import Trainer

PLAIN = "plain DCP"
MODES = (PLAIN, "disabled", "async", "async_with_pinned_mem")
STEPS, SAVES = 6, 3


class Bench:
    """A training run on one rank whose saves are timed."""

    def __init__(self, mode: str, config: str, seq_len: int, folder: Path):
        self.mode, self.folder = mode, folder
        flags = (
            f"--config {config} --training.seq_len {seq_len} --training.local_batch_size 1 "
            "--training.global_batch_size 1 --activation_checkpoint.mode full --validation.enable false "
            "--checkpoint.enable true --checkpoint.keep_latest_k 1 --metrics.log_freq 1000 "
            f"--checkpoint.async_mode {'disabled' if mode == PLAIN else mode} --job.dump_folder {folder}"
        )
        self.trainer = Trainer(load_config(flags.split(), 1), init_process_group(CommConfig()))
        self.saves = self.trainer.checkpoints
        for _ in range(STEPS):
            self.step()
        self.step_seconds = statistics.median(self.step() for _ in range(STEPS))

    def step(self) -> float:
        """Seconds of one step, to the end of its work on the device."""
        began = time.perf_counter()
        batch = next_batch(self.trainer.loader, can_end=False)
        assert batch is not None
        self.trainer.step += 1
        self.trainer.train_step(*batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def save(self) -> tuple[float, float]:
        """(seconds until the save has ended, stall)"""
        self.step()
        began = time.perf_counter()
        if self.mode == PLAIN:
            shutil.rmtree(self.folder / "plain", ignore_errors=True)
            began = time.perf_counter()
            dcp.save(self.saves.collect(self.trainer.step), checkpoint_id=self.folder / "plain")
        else:
            self.saves.save(self.trainer.step)
        stall, ended = time.perf_counter() - began, []
        if self.saves.future is None:
            return stall, stall
        self.saves.future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        while not ended:
            stall += self.step() - self.step_seconds
        self.saves.wait()
        return ended[0] - began, stall

    def row(self) -> dict[str, float]:
        times = [self.save() for _ in range(SAVES)][1:]
        tensors = sum(t.numel() * t.element_size() for t in self.trainer.model.parameters()) * 3
        assert not self.saves.failed_steps
        return {
            "gib": tensors / 2**30,
            "step": self.step_seconds,
            "seconds": statistics.median(total for total, _ in times),
            "stall": statistics.median(stall for _, stall in times),
            "host_gib": host_gib(),
        }


def host_gib() -> float:
    """The peak of this process, and what those that it started hold besides the memory that they share with it."""
    own = kib_of(Path("/proc/self/status").read_text(), "VmHWM")
    children = [Path(f"/proc/{child.pid}/status").read_text() for child in multiprocessing.active_children()]
    return (own + sum(kib_of(text, "RssAnon") for text in children)) / 2**20


def kib_of(status: str, name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", status)
    return int(match[1]) if match else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="What a save costs, against plain DCP.")
    parser.add_argument("--config", default="llama1b.toml", metavar="FILE")
    parser.add_argument("--seq-len", type=int, default=2048, metavar="N")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_checkpoint"), metavar="DIR")
    parser.add_argument("--mode", choices=MODES, help="this one alone, as JSON")
    args = parser.parse_args()
    folder = args.output / (args.mode or "").replace(" ", "-")
    if args.mode:
        logging.disable(logging.INFO)
        print(json.dumps(Bench(args.mode, args.config, args.seq_len, folder).row()), flush=True)
        dist.destroy_process_group()
        return 0
    print("| save | written, GiB | seconds | stall, seconds | a step, seconds | host memory, GiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for mode in MODES:
        shutil.rmtree(args.output, ignore_errors=True)
        command = [sys.executable, "-m", "scripts.bench_checkpoint", "--mode", mode, "--config", args.config]
        command += ["--seq-len", str(args.seq_len), "--output", str(args.output)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
            return 1
        row = json.loads(done.stdout.splitlines()[-1])
        cells = [f"{row[key]:.2f}" for key in ("gib", "seconds", "stall", "step", "host_gib")]
        print(f"| {mode} | {' | '.join(cells)} |", flush=True)
    shutil.rmtree(args.output, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
