"""Checks a configuration, writes the Slurm script for it into the run's folder, and submits that.

    python -m scripts.launch --config llama8b_fp8.toml --nodes 4 --time 24:00:00 --partition gpu
    python -m scripts.launch --config llama8b_fp8.toml --nodes 4 --dry-run -- --training.steps 500
    python -m scripts.launch --config llama1b.toml --array 0-3 -- --debug.seed %a        # a run each, in RUN/0 to RUN/3
    python -m scripts.launch --config llama8b_fp8.toml --nodes 4 --after 1234 --sbatch=--account=me

What follows `--` are flags of train.py. The job trains what has been checked, whatever becomes of the TOML file later.
Exit status: 0, or 2 with a sentence on what to do, and nothing queued. docs/slurm.md says more.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from config import JobConfig, load_config
from errors import ExitStatus, UserError
from settings import write_toml

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "scripts" / "slurm" / "train.sbatch"
BODY = "# ---- scripts.launch writes lines of its own in place of those above. ----\n"
STOP_SECONDS = 300  # Before the time limit: for the step and the save.


@dataclass(frozen=True)
class Job:
    """What is written and submitted."""

    folder: Path
    """The run's, or of an array's the one that holds its elements' folders."""
    configs: dict[int | None, JobConfig]
    """Index in the array, or None -> its configuration, whose dump folder is absolute."""
    name: str
    """Of this launch: the stem of the script and of each configuration."""
    script: str


def array_indices(text: str) -> list[int]:
    """What --array takes, 0-3,7 or 0-8:2 or 0-99%4 -> the indices. Raises UserError."""
    found: list[int] = []
    for part in text.split("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", part)
        if match is not None:
            first, last, step = (int(number) if number else None for number in match.groups())
            assert first is not None
            found += range(first, (first if last is None else last) + 1, step or 1)
        if match is None or not found or not re.fullmatch(r"[^%]*(%[1-9]\d*)?", text):
            raise UserError(f"--array {text}: is no list of indices; write 0-3, 0-8:2, 1,5,7, or 0-99%4 for 4 at once")
    return found


def seconds_of(text: str) -> int:
    """sbatch's times: minutes, minutes:seconds, h:m:s, days-h, days-h:m, days-h:m:s. Raises UserError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise UserError(f"--time {text}: is no time; write 24:00:00 for hours, 2-00 for days, or a number of minutes")
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = (numbers + [0, 0])[:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def check_configs(
    config: str, overrides: list[str], indices: Sequence[int | None], ranks: int
) -> dict[int | None, JobConfig]:
    """Index -> configuration, with an absolute dump folder; %a in an override is the index. Raises UserError."""
    if indices != [None] and not any("%a" in word for word in overrides):
        raise UserError("--array: all elements would be the same run; put %a, the index, into a flag after --")
    found = {}
    for i in indices:
        flags = overrides if i is None else [word.replace("%a", str(i)) for word in overrides]
        found[i] = load_config(["--config", config, *flags], ranks)
    folders = {c.job.dump_folder for c in found.values()}
    if len(folders) > 1:
        raise UserError("--job.dump_folder: each element has a folder of its own below it anyway: leave %a out of it")
    folder = Path(folders.pop()).absolute()
    return {
        i: replace(c, job=replace(c.job, dump_folder=str(folder if i is None else folder / str(i))))
        for i, c in found.items()
    }


def make_job(args: argparse.Namespace, overrides: list[str]) -> Job:
    """Raises UserError for all that can be known to be wrong before the job is queued."""
    for name in ("nodes", "gpus_per_node", "cpu_ranks_per_node"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    if args.after is not None and not re.fullmatch(r"\d+(_\d+)?", args.after):
        raise UserError(f"--after {args.after}: is no job's id; squeue shows them")
    if args.time is not None and seconds_of(args.time) < 2 * STOP_SECONDS:
        raise UserError(
            f"--time {args.time}: the run is asked to stop {STOP_SECONDS} s before the limit, and would hardly train; "
            f"give {2 * STOP_SECONDS // 60} minutes or more"
        )
    indices: Sequence[int | None] = [None] if args.array is None else array_indices(args.array)
    ranks = args.cpu_ranks_per_node or args.gpus_per_node
    configs = check_configs(args.config, overrides, indices, args.nodes * ranks)
    any_folder = Path(next(iter(configs.values())).job.dump_folder)
    folder = any_folder if args.array is None else any_folder.parent
    name = f"launch-{datetime.now():%Y%m%d-%H%M%S-%f}"
    lines = [f"#SBATCH {option}" for option in sbatch_options(args, folder)]
    lines += [
        f"RUN={shlex.quote(str(folder))} CONFIG={name}.toml RANKS_PER_NODE={ranks}",
        f"PYTHON={shlex.quote(sys.executable)} TRAIN={shlex.quote(str(ROOT / 'train.py'))}",
    ]
    _, body, rest = TEMPLATE.read_text().partition(BODY)
    assert body, f"{TEMPLATE} has lost its marker"
    return Job(folder, configs, name, "#!/bin/bash\n" + "\n".join(lines) + "\n" + rest)


def sbatch_options(args: argparse.Namespace, folder: Path) -> list[str]:
    output = f"{str(folder).replace('%', '%%')}/logs/slurm-%j.txt"
    if args.array is not None:
        output = f"{str(folder).replace('%', '%%')}/%a/logs/slurm-%A_%a.txt"
    options = [f"--job-name={shlex.quote(Path(args.config).stem)}", f"--nodes={args.nodes}", "--ntasks-per-node=1"]
    if args.cpu_ranks_per_node is None:
        options += [f"--gpus-per-node={args.gpus_per_node}", "--exclusive", "--mem=0"]
    else:
        options += [f"--cpus-per-task={args.cpu_ranks_per_node}"]
    options += ["--requeue", "--open-mode=append", f"--signal=B:USR1@{STOP_SECONDS}"]
    options += [f"--chdir={shlex.quote(str(Path.cwd()))}", f"--output={shlex.quote(output)}"]
    options += [f"--{name}={getattr(args, name)}" for name in ("time", "partition", "array") if getattr(args, name)]
    if args.after is not None:
        options += [f"--dependency=afterok:{args.after}", "--kill-on-invalid-dep=yes"]
    return options + args.sbatch  # Last: sbatch takes the last of two.


def write(job: Job) -> Path:
    """The script, and each element's configuration. Raises UserError where the folder cannot be written."""
    script = job.folder / f"{job.name}.sbatch"
    try:
        for config in job.configs.values():
            folder = Path(config.job.dump_folder)
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            write_toml(config, folder / f"{job.name}.toml")
        script.write_text(job.script)
    except OSError as error:
        raise UserError(
            f"job.dump_folder: {job.folder} cannot be written ({error.strerror}): choose another"
        ) from error
    return script


def submit(script: Path) -> str:
    """The job's id. Raises UserError with sbatch's own words where it refuses."""
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"sbatch has refused {script}: {' '.join(done.stderr.split())}")
    return done.stdout.strip().split(";")[0]  # A cluster's name may follow.


def advice(job: Job, number: str) -> str:
    log = f"{shlex.quote(str(job.folder))}/logs/slurm-{number}.txt"
    if None not in job.configs:
        log = f"{shlex.quote(str(job.folder))}/*/logs/slurm-{number}_*.txt"
    return (
        f"job {number} is queued, by {job.folder / job.name}.sbatch\n"
        f"  logs:    {log}\n"
        f"  follow:  squeue --jobs {number}; tail -F {log}\n"
        f"  pause:   scancel --batch --signal=USR1 {number}   (saves, and goes back to the queue)\n"
        f"  stop:    scontrol update JobId={number} Requeue=0; scancel --batch --signal=USR1 {number}   (saves)\n"
        f"  cancel:  scancel {number}   (saves if the cluster's KillWait is long enough)"
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="launch",
        usage="python -m scripts.launch --config FILE [--nodes N] [...] [-- flags of train.py]",
        description=(__doc__ or "").split("\n\n")[0],
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--config", required=True, metavar="FILE", help="a path, or the name of a file in configs/")
    add("--nodes", type=int, default=1, metavar="N", help="default: %(default)s")
    ranks = made.add_mutually_exclusive_group()
    ranks.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="one rank each; default: %(default)s")
    ranks.add_argument("--cpu-ranks-per-node", type=int, metavar="N", help="train on CPUs, ask for no GPU")
    add("--time", metavar="LIMIT", help="of one start, as sbatch takes it: 24:00:00 (default: the partition's)")
    add("--partition", metavar="NAME", help="default: the cluster's")
    add("--array", metavar="INDICES", help="a run for each, 0-3 or 0-99%%4; %%a in a flag after -- is its index")
    add("--after", metavar="JOBID", help="begin when that job has ended with status 0; never, if it fails")
    add("--sbatch", action="append", default=[], metavar="OPTION",
        help="more of sbatch's options, which win over the others: --sbatch=--account=me; may be repeated")  # fmt: skip
    add("--dry-run", action="store_true", help="write the script and print it, submit nothing")
    return made


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    args = parser().parse_args(argv[:at])
    try:
        if not args.dry_run and shutil.which("sbatch") is None:
            raise UserError("there is no sbatch here: start it on a machine of the cluster, or add --dry-run")
        job = make_job(args, argv[at + 1 :])
        script = write(job)
        print(f"{script}:\n\n{job.script}" if args.dry_run else advice(job, submit(script)))
    except UserError as error:
        print(f"launch: {error}", file=sys.stderr)
        return ExitStatus.USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
