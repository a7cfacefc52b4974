"""Loss curves of runs that should learn alike: trained from the same seed and data, then set against the first one's.

    python -m scripts.compare_loss --output outputs/loss                        # the debug model: float32 and float8
    python -m scripts.compare_loss --output outputs/loss-ac --shipped ac        # or another comparison of SHIPPED
    python -m scripts.compare_loss --output DIR --steps 50 --run plain="--config debug.toml" \\
        --run float8@2="--config debug.toml --float8.recipe_name rowwise"       # NAME[@RANKS]=FLAGS of train.py
    python -m scripts.compare_loss --output DIR --read before=outputs/a --read after=outputs/b

Each variant's run is kept in DIR/NAME, and not trained again as long as its configuration, its ranks, torch and the
code stay as they were. DIR gets a picture and a JSON file; the table and the verdict are printed. Exit status: 0 all
within the tolerance, 1 one is beyond it or not finite, 2 nothing to judge. docs/converging.md says more.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from config import JobConfig, load_config
from errors import ExitStatus, UserError
from scripts.local_ranks import free_port
from scripts.loss_curves import (
    VARIANT,
    Curve,
    check_steps,
    check_tokens,
    difference,
    limit_text,
    markdown,
    notes,
    plot,
    read_curve,
    verdict,
    write_json,
)

ROOT = Path(__file__).parent.parent
TRAINS = ("checkpoint", "data", "float8", "models", "parallelisms", "telemetry")  # Folders of the code that trains.
TOLERANCE = 0.005  # docs/converging.md, "The tolerance", says why.


@dataclass(frozen=True)
class Run:
    """A variant that is trained."""

    name: str
    flags: str
    ranks: int = 1
    interrupted: bool = False
    """Ends halfway with a checkpoint, and is started once more."""


@dataclass(frozen=True)
class Read:
    """A variant that has been trained."""

    name: str
    folder: Path


@dataclass(frozen=True)
class Shipped:
    about: str
    runs: list[Run]
    tolerance: float = TOLERANCE


BASE = "--validation.enable false --metrics.enable_tensorboard false --checkpoint.enable false"
# A quarter of the configuration's learning rate: at that, training magnifies a rounding to percents within 40 steps.
DEBUG = f"--config debug.toml {BASE} --optimizer.lr 5e-4"
FLOAT8 = f"{DEBUG} --float8.recipe_name rowwise"
TP = f"{FLOAT8} --training.steps 30 --parallelism.tensor_parallel_degree 2"
AC = f"{FLOAT8} --training.steps 12 --lr_scheduler.warmup_steps 4 --activation_checkpoint.mode"
SAVING = "--training.steps 40 --checkpoint.enable"
SPLIT = f"{DEBUG} --training.steps 50 --training.local_batch_size 2"
LARGE = (
    f"--config llama1b.toml {BASE} --model.flavor 300M --training.steps 1000 --training.seq_len 1024 "
    "--training.local_batch_size 16 --training.global_batch_size 16 --optimizer.lr 6e-4 --lr_scheduler.warmup_steps 100"
)
SHIPPED = {
    "float8": Shipped(
        "the debug model in float32 and with row-wise float8",
        [
            Run("float32", f"{DEBUG} --training.steps 50"),
            Run("rowwise", f"{FLOAT8} --training.steps 50"),
            Run("rowwise_with_gw_hp", f"{DEBUG} --training.steps 50 --float8.recipe_name rowwise_with_gw_hp"),
        ],
    ),
    "ac": Shipped(
        "modes of activation checkpointing, with float8: bit-exact",
        [
            Run("no checkpoints", f"{AC} none"),
            Run("full", f"{AC} full"),
            Run("op", f"{AC} selective --activation_checkpoint.selective_ac_option op"),
            Run("matmuls", f"{AC} selective --activation_checkpoint.selective_ac_option matmuls"),
            Run("every 2nd block", f"{AC} selective --activation_checkpoint.selective_ac_option 2"),
        ],
        tolerance=0,
    ),
    "async-tp": Shipped(
        "tensor parallel on 2 ranks, with float8, without and with async TP",
        [Run("plain", TP, 2), Run("async", f"{TP} --parallelism.enable_async_tensor_parallel", 2)],
    ),
    "ranks": Shipped(
        "the same batches on 1, 2 and 4 ranks, in float32",
        [Run("1 rank", SPLIT), Run("2 ranks", SPLIT, 2), Run("4 ranks", SPLIT, 4)],
        tolerance=1e-5,
    ),
    "resumed": Shipped(
        "a run that was stopped halfway and resumed, and one that was not: bit-exact",
        [Run("undisturbed", f"{DEBUG} {SAVING}"), Run("resumed", f"{DEBUG} {SAVING}", interrupted=True)],
        tolerance=0,
    ),
    "300M": Shipped(
        "for a GPU: 300M parameters in bf16, twice, and in row-wise float8: torchao's, Rowhouse's fast and accurate",
        [
            Run("bf16", LARGE),
            # The same but for the order of sums: what training makes of a rounding.
            Run("bf16 2 micro-batches", f"{LARGE} --training.local_batch_size 8"),
            Run("torchao rowwise", f"{LARGE} --float8.recipe_name rowwise --float8.backend torchao"),
            Run("Rowhouse rowwise", f"{LARGE} --float8.recipe_name rowwise"),
            Run("accurate", f"{LARGE} --float8.recipe_name rowwise --float8.fast_accumulation false"),
        ],
        tolerance=0.02,  # Twice what the order of sums makes there (docs/converging.md).
    ),
}


def parse_run(text: str) -> Run:
    """NAME[@RANKS]=FLAGS"""
    name, equals, flags = text.partition("=")
    name, at, ranks = name.partition("@")
    if not equals or not flags.startswith("--"):
        raise UserError(f'--run {text}: is written NAME[@RANKS]=FLAGS, for example fp8@2="--config debug_fp8.toml"')
    if at and not (ranks.isdecimal() and int(ranks) > 0):
        raise UserError(f'--run {text}: "{ranks}" is no number of ranks: write {name}@2 for two')
    return Run(name, flags, int(ranks) if at else 1)


def parse_read(text: str) -> Read:
    """NAME=FOLDER"""
    name, equals, folder = text.partition("=")
    if not equals or not folder:
        raise UserError(f"--read {text}: is written NAME=FOLDER, for example before=outputs/debug")
    return Read(name, Path(folder))


def check_names(variants: Sequence[Run | Read]) -> None:
    names = [variant.name for variant in variants]
    if len(names) < 2:
        raise UserError("one variant is compared with nothing: give two or more, with --run or --read")
    for name in names:
        if not re.fullmatch(r"\w[\w .+-]*", name):
            raise UserError(f'"{name}": a name is letters, digits, spaces and any of _ . + - (it names a folder too)')
        if names.count(name) > 1:
            raise UserError(f'"{name}" is the name of two variants: give each its own')


def resolve(run: Run, folder: Path, steps: int | None) -> tuple[list[str], JobConfig]:
    """The flags that train.py gets, and what it makes of them. Raises UserError with all that is wrong with them."""
    try:
        flags = shlex.split(run.flags)
        if any(flag.startswith("--job.dump_folder") for flag in flags):
            raise UserError(f"the run's folder is {folder}: leave --job.dump_folder out")
        flags += ["--metrics.log_freq", "1", "--job.dump_folder", str(folder.absolute())]
        flags += [] if steps is None else ["--training.steps", str(steps)]
        config = load_config(flags, run.ranks)
    except (UserError, ValueError) as error:  # ValueError: a quotation that is not closed
        raise UserError(f"{run.name}: {error}") from error
    if run.interrupted and config.training.steps < 2:
        raise UserError(f"{run.name}: one step has no middle to stop at: give --steps 2 or more")
    return flags, config


def tokens_a_step(config: JobConfig, ranks: int) -> int:
    replicate, shard, _ = config.parallelism.degrees(ranks)
    return config.training.lanes(replicate * shard) * config.training.seq_len


def record_of(run: Run, config: JobConfig) -> dict[str, Any]:
    """What a run depends on, as it is kept beside it."""
    digest = hashlib.sha256()
    for file in sorted([*ROOT.glob("*.py"), *(f for folder in TRAINS for f in (ROOT / folder).rglob("*.py"))]):
        digest.update(file.read_bytes())
    return {
        "configuration": {section: keys for section, keys in asdict(config).items() if section != "job"},
        "ranks": run.ranks,
        "interrupted": run.interrupted,
        "torch": torch.__version__,
        "code": digest.hexdigest(),
    }


def train(run: Run, folder: Path, flags: list[str], config: JobConfig) -> None:
    """Trains the variant, unless its folder has this very run. Raises UserError where the run fails."""
    path, record = folder / VARIANT, record_of(run, config)
    if path.is_file():
        kept = json.loads(path.read_text())
        changed = [key for key in record if kept["record"].get(key) != record[key]]
        if kept["finished"] is not None and not changed:
            tell(f"{run.name}: reused, since nothing has changed: {folder} (finished {kept['finished']})")
            return
        why = f"changed: {', '.join(changed)}" if changed else "it was not finished"
        tell(f"{run.name}: the run in {folder} is made anew ({why})")
        shutil.rmtree(folder)
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"{run.name}: {folder} holds something that is not of this command: choose another --output or name, or "
            f"compare what is there with --read {shlex.quote(f'{run.name}={folder}')}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_record(path, record, None)
    tell(f"{run.name}: {config.training.steps} steps, ranks: {run.ranks}, log: {folder / 'train.log'}")
    began = time.monotonic()
    if run.interrupted:
        half = ["--training.steps", str(config.training.steps // 2)]
        # The learning rate must fall as that of the whole run.
        run_ranks(run, folder, [*flags, *half, "--lr_scheduler.total_steps", str(config.schedule_steps)])
    run_ranks(run, folder, flags)
    write_record(path, record, time.strftime("%Y-%m-%d %H:%M"))
    tell(f"{run.name}: {time.monotonic() - began:.0f} s")


def write_record(path: Path, record: dict[str, Any], finished: str | None) -> None:
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps({"finished": finished, "record": record}, indent=1) + "\n")
    new.replace(path)


def run_ranks(run: Run, folder: Path, flags: list[str]) -> None:
    """train.py on each rank, once. NaN may end it: that is a result. Raises UserError where something else does."""
    path, port = folder / "train.log", str(free_port())
    processes = []
    with path.open("a") as log:
        try:
            for rank in range(run.ranks):
                env = {"OMP_NUM_THREADS": "1"} | os.environ
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run.ranks)}
                env |= {"LOCAL_WORLD_SIZE": str(run.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                command = [sys.executable, "train.py", *flags]
                processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
            statuses = {process.wait() for process in processes}
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
                process.wait()
    if not statuses <= {ExitStatus.DONE, ExitStatus.NOT_FINITE}:
        end = "".join(f"\n  {line}" for line in path.read_text(errors="replace").splitlines()[-12:])
        raise UserError(f"{run.name}: train.py ended with {sorted(map(int, statuses))}; the end of {path}:{end}")


def compare(variants: Sequence[Run | Read], folder: Path, steps: int | None, tolerance: float, title: str) -> bool:
    """Trains and reads the variants, and tells how they differ. Returns whether all are within the tolerance."""
    check_names(variants)
    # All that can be wrong is told before hours are spent on training.
    curves: dict[str, Curve] = {v.name: read_curve(v.name, v.folder, steps) for v in variants if isinstance(v, Read)}
    resolved = {v.name: resolve(v, folder / v.name, steps) for v in variants if isinstance(v, Run)}
    check_tokens({
        v.name: tokens_a_step(resolved[v.name][1], v.ranks) if isinstance(v, Run) else curves[v.name].tokens_a_step
        for v in variants
    })  # fmt: skip
    check_lengths({name: config for name, (_, config) in resolved.items()}, curves)
    make_folder(folder)
    for variant in variants:
        if isinstance(variant, Run):
            train(variant, folder / variant.name, *resolved[variant.name])
            curves[variant.name] = read_curve(variant.name, folder / variant.name, steps)
    return tell_all([curves[v.name] for v in variants], folder, tolerance, title)


def check_lengths(configs: dict[str, JobConfig], curves: dict[str, Curve]) -> None:
    """Raises UserError where a run is to be trained that will not have as many steps as the others."""
    lengths = {name: config.training.steps for name, config in configs.items()}
    if lengths:
        lengths |= {name: curve.last_step for name, curve in curves.items() if not curve.ended_not_finite}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {steps}" for name, steps in lengths.items())
        raise UserError(f"the runs differ in training.steps ({told}): give all the same, with --steps")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output: {folder} cannot be made ({error.strerror}): choose another folder") from error


def tell_all(curves: list[Curve], folder: Path, tolerance: float, title: str) -> bool:
    """Table and verdict to stdout, picture and JSON to `folder`."""
    check_steps(curves)
    first = curves[0]
    differences = [difference(curve, first, tolerance) for curve in curves]
    picture, figures = folder / f"{title}.png", folder / f"{title}.json"
    plot(picture, curves, tolerance, f"{title}: {', '.join(c.name for c in curves[1:])} against {first.name}")
    write_json(figures, differences, tolerance)
    limit = limit_text(tolerance)
    print(f"{first.last_step} steps of {first.tokens_a_step:,} tokens, gaps to {first.name}, {limit}\n")
    print(markdown(differences, tolerance) + "\n")
    if len(first.losses) < first.last_step and not first.ended_not_finite:
        print(f"- {len(first.losses)} of {first.last_step} steps were logged, and compared (metrics.log_freq)")
    for curve, found in zip(curves, differences, strict=True):
        for line in [*notes(curve, first), verdict(curve, first, found, tolerance)]:
            print(f"- {line}")
    print(f"- picture: {picture}; figures: {figures}")
    return all(found.within for found in differences)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    shipped = "".join(f"\n  {name}: {comparison.about}" for name, comparison in SHIPPED.items())
    made = argparse.ArgumentParser(
        prog="python -m scripts.compare_loss",
        description="Trains variants of a run from the same seed and data, or reads them, and compares their losses.",
        epilog=f"Shipped comparisons:{shipped}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # --run and --read share a list: the first of either is what the others are compared with.
    add = made.add_argument
    add("--run", dest="variants", action="append", default=[], type=parse_run, metavar="NAME[@RANKS]=FLAGS",
        help="train this variant with these flags of train.py, on so many ranks (1)")  # fmt: skip
    add("--read", dest="variants", action="append", type=parse_read, metavar="NAME=FOLDER", help="a run's folder")
    add("--shipped", choices=list(SHIPPED), metavar="NAME", help="a comparison of those below (default: float8)")
    add("--steps", type=int, metavar="N", help="train so many, or read so many")
    add("--output", type=Path, default=Path("outputs/compare_loss"), metavar="DIR", help="default: %(default)s")
    limit = made.add_mutually_exclusive_group()
    limit.add_argument("--tolerance", type=float, metavar="SHARE",
        help=f"largest relative gap at any step; default: the shipped comparison's own, or {TOLERANCE}")  # fmt: skip
    limit.add_argument("--exact", action="store_true", help="every loss the same to the last bit")
    return made


def chosen(args: argparse.Namespace) -> tuple[Sequence[Run | Read], float, str]:
    """What is compared, the tolerance and a title. Raises UserError where the command line does not tell."""
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps}: give 1 or more")
    if args.tolerance is not None and not 0 <= args.tolerance < math.inf:
        raise UserError(f"--tolerance {args.tolerance}: give a share of the loss, for example 0.01, or --exact")
    if args.variants and args.shipped:
        raise UserError("--shipped: has variants of its own: give either that, or --run and --read")
    title = "comparison" if args.variants else args.shipped or "float8"
    variants, tolerance = args.variants, TOLERANCE
    if not args.variants:
        variants, tolerance = SHIPPED[title].runs, SHIPPED[title].tolerance
    if args.exact:
        tolerance = 0
    return variants, tolerance if args.tolerance is None else args.tolerance, title


def main() -> int:
    try:
        args = parser().parse_args()
        variants, tolerance, title = chosen(args)
        return 0 if compare(variants, args.output, args.steps, tolerance, title) else 1
    except UserError as error:
        print(f"compare_loss: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
