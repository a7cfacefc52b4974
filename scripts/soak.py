"""Kills a training run again and again, and shows that nothing is lost.

    python -m scripts.soak --kills 50 --output outputs/soak

First a run of two ranks that nothing disturbs. Then the same run, killed with SIGKILL at random moments, half of them
while a checkpoint is being written, and started again until it ends: the loss of every step must be the same to the
last bit. Then once more, on 2, 4 and 1 ranks in turn, split in other ways: losses must agree to rounding. A ledger of
what each step has read must be the same in all: no token twice, none left out. Exit status 1 where it is not.
"""

import argparse
import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from errors import leave
from scripts.local_ranks import free_port
from train import main as train_main
from trainer import Trainer

ROOT = Path(__file__).parent.parent
STEPS, INTERVAL, LANES = 60, 3, 4
MOMENTS = ["a save", "a save", "a step", "any time"]
FLAGS = (
    "--config debug.toml --model.n_layers 2 --training.seq_len 128 --training.local_batch_size 1 "
    f"--training.global_batch_size {LANES} --lr_scheduler.total_steps {STEPS} --lr_scheduler.warmup_steps 5 "
    f"--checkpoint.interval {INTERVAL} --checkpoint.keep_latest_k 2 --metrics.log_freq 1 "
    "--metrics.enable_tensorboard false --validation.enable false"
).split()


class LedgerTrainer(Trainer):
    """Writes down what each step reads: a checksum of each row of the global batch."""

    def train_step(self, inputs: Tensor, labels: Tensor) -> None:
        rows = len(inputs)
        folder = self.folder / "ledger"
        folder.mkdir(exist_ok=True)
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            for i in range(rows):
                digest = xxhash.xxh3_64_hexdigest(inputs[i].numpy().tobytes() + labels[i].numpy().tobytes())
                file.write(json.dumps([self.step, self.dp_rank * rows + i, digest]) + "\n")
        super().train_step(inputs, labels)


class Ranks:
    """The processes of one start of the run: `python -m scripts.soak rank FLAGS` for each rank."""

    def __init__(self, world_size: int, folder: Path, flags: list[str]):
        folder.mkdir(parents=True, exist_ok=True)
        self.log = (folder / "soak.log").open("a")
        port = str(free_port())
        command = [sys.executable, "-m", "scripts.soak", "rank", *FLAGS, *flags, "--job.dump_folder", str(folder)]
        self.processes = []
        for rank in range(world_size):
            env = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": port,
                "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            self.processes.append(
                subprocess.Popen(command, cwd=ROOT, env=env, stdout=self.log, stderr=subprocess.STDOUT)
            )

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def wait(self) -> None:
        statuses = [process.wait() for process in self.processes]
        self.log.close()
        if any(statuses):
            sys.exit(f"soak: the ranks ended with {statuses}: see {self.log.name}")

    def kill(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.log.close()


def run_undisturbed(folder: Path, flags: list[str], world_size: int = 2) -> None:
    Ranks(world_size, folder, flags).wait()


def run_killed(folder: Path, flags: list[str], kills: int, rng: random.Random) -> Counter[str]:
    """Starts the run until it ends, and kills it `kills` times. Returns how often in what."""
    done: Counter[str] = Counter()
    while done.total() < kills:
        ranks = Ranks(2, folder, flags)
        moment = rng.choice(MOMENTS)
        if moment == "any time":
            time.sleep(rng.random() * 10)
        elif moment == "a step":
            await_lines(folder, lines_of(folder) + rng.randrange(1, 2 * INTERVAL), ranks)
            time.sleep(rng.random() * 0.1)
        else:
            while not is_saving(folder) and not ranks.ended():
                time.sleep(0.001)
            time.sleep(rng.random() * 0.05)
        caught = "a save" if is_saving(folder) else "a step" if moment == "a step" else "between"
        if ranks.ended():
            ranks.wait()
            shutil.rmtree(folder / "checkpoint")  # It has reached its end before its time: once more from the start.
            continue
        ranks.kill()
        done[caught] += 1
        print(f"  kill {done.total()} of {kills}, in {caught}, after step {lines_of(folder)}", flush=True)
    run_undisturbed(folder, flags)
    return done


def is_saving(folder: Path) -> bool:
    return any((folder / "checkpoint").glob("*.tmp"))


def await_lines(folder: Path, lines: int, ranks: Ranks) -> None:
    while lines_of(folder) < lines and not ranks.ended():
        time.sleep(0.005)


def lines_of(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


def run_on_other_ranks(folder: Path) -> None:
    """A quarter of the steps each: on 2 ranks, on 4 as HSDP 2 x 2, on 4 as FSDP 2 x TP 2, on 1 in micro-batches."""
    parts = [
        (2, ""),
        (4, "--parallelism.data_parallel_replicate_degree 2 --activation_checkpoint.mode full"),
        (4, "--parallelism.tensor_parallel_degree 2 --training.local_batch_size 2"),
        (1, "--training.local_batch_size 2 --activation_checkpoint.mode selective"),
    ]
    for part, (world_size, flags) in enumerate(parts, start=1):
        steps = ["--training.steps", str(STEPS * part // len(parts))]
        run_undisturbed(folder, steps + flags.split(), world_size)


def losses_of(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def ledger_of(folder: Path) -> dict[tuple[int, int], set[str]]:
    """(step, row of the global batch) -> checksums of what was read for it: one, where nothing went wrong."""
    ledger: dict[tuple[int, int], set[str]] = {}
    for file in (folder / "ledger").glob("*.jsonl"):
        lines = file.read_text().splitlines()
        for line in lines:
            try:
                step, row, digest = json.loads(line)
            except ValueError:
                continue  # A kill cut the line off.
            ledger.setdefault((step, row), set()).add(digest)
    return ledger


def compare(name: str, folder: Path, reference: Path, tolerance: float) -> list[str]:
    """Prints how a run's losses and ledger differ from the undisturbed run's. Returns what must not be."""
    expected, losses = losses_of(reference), losses_of(folder)
    faults = []
    if losses.keys() != expected.keys():
        faults.append(f"{name}: it logged the steps {sorted(losses)}")
    gaps = {step: abs(losses[step] - expected[step]) / expected[step] for step in losses.keys() & expected.keys()}
    worst = max(gaps, key=lambda step: math.inf if math.isnan(gaps[step]) else gaps[step])
    same = sum(losses[step] == expected[step] for step in gaps)
    print(f"{name}: {same} of {len(expected)} losses bit-identical, the largest gap {gaps[worst]:.1e} at step {worst}")
    if not gaps[worst] <= tolerance:
        faults.append(f"{name}: the loss of step {worst} is {losses[worst]}, undisturbed {expected[worst]}")
    ledger, ledger_there = ledger_of(folder), ledger_of(reference)
    wrong = [key for key in ledger_there if ledger.get(key) != ledger_there[key]]
    read = [digest for digests in ledger_there.values() for digest in digests]
    print(f"{name}: {len(ledger_there) - len(wrong)} of {len(ledger_there)} rows read as in the undisturbed run")
    if wrong or ledger.keys() != ledger_there.keys() or len(set(read)) != STEPS * LANES:
        faults.append(f"{name}: other rows were read, the first at (step, row) {min(wrong, default=None)}")
    return faults


def soak(folder: Path, kills: int, seed: int, async_mode: str) -> list[str]:
    """Runs everything below `folder`. Returns what went wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--training.steps", str(STEPS), "--checkpoint.async_mode", async_mode]
    began = time.monotonic()
    print(f"undisturbed, {STEPS} steps, a save every {INTERVAL}", flush=True)
    run_undisturbed(folder / "undisturbed", flags)
    print(f"killed {kills} times (seed {seed})", flush=True)
    done = run_killed(folder / "killed", flags, kills, random.Random(seed))
    print("killed in " + ", in ".join(f"{moment} {times} times" for moment, times in done.items()), flush=True)
    print("on 2, 4, 4 and 1 ranks in turn", flush=True)
    run_on_other_ranks(folder / "other ranks")
    faults = compare("killed", folder / "killed", folder / "undisturbed", tolerance=0)
    # Another number of ranks sums in another order: a rounding a step, magnified by the training since.
    faults += compare("other ranks", folder / "other ranks", folder / "undisturbed", tolerance=1e-5)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills a training run again and again; nothing must be lost.")
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="how often (default: 50)")
    parser.add_argument("--output", type=Path, default=Path("outputs/soak"), metavar="DIR", help="is emptied first")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--async-mode", default="async", help="checkpoint.async_mode (default: async)")
    args: Any = parser.parse_args()
    faults = soak(args.output, args.kills, args.seed, args.async_mode)
    for fault in faults:
        print(f"WRONG: {fault}")
    print("nothing was lost" if not faults else f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        logging.getLogger("rowhouse").setLevel(logging.INFO)
        leave(train_main(sys.argv[2:], LedgerTrainer))
    sys.exit(main())
