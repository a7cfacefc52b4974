"""What scripts.launch writes, submits and refuses, and what the script makes of a run's end. Without a Slurm: that has
tests/slurm."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from config import load_config
from errors import ExitStatus, UserError
from scripts.launch import TEMPLATE, array_indices, main, seconds_of

BASH = shutil.which("bash") or "bash"


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{BASH}\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def only_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing in it, until a test puts programs there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.mark.parametrize(
    ("text", "indices"),
    [("3", [3]), ("0-3", [0, 1, 2, 3]), ("0-8:4", [0, 4, 8]), ("7,1-2", [7, 1, 2]), ("0-2%2", [0, 1, 2])],
)
def test_array_indices(text, indices):
    assert array_indices(text) == indices


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,", "0-4:0", "-1", "0-3%0", "0-3%", "0%1%2"])
def test_wrong_array_indices(text):
    with pytest.raises(UserError, match="--array"):
        array_indices(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("24:00:00", 86400), ("2-00", 172800), ("1-2:30", 95400), ("0-0:0:5", 5)],
)
def test_times(text, seconds):
    assert seconds_of(text) == seconds


def test_a_dry_run_writes_and_prints_the_script(tmp_path, capsys, only_these):
    folder = tmp_path / "a run"
    flags = ["--training.steps", "77", "--training.local_batch_size", "1", "--job.dump_folder", str(folder)]
    options = ["--nodes", "4", "--gpus-per-node", "2", "--time", "1-00", "--partition", "big", "--after", "12"]
    assert main(["--config", "debug.toml", *options, "--sbatch=--account=me", "--dry-run", "--", *flags]) == 0
    (script,), (config,) = folder.glob("*.sbatch"), folder.glob("*.toml")
    text = script.read_text()
    assert text in capsys.readouterr().out
    asked = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert asked >= {
        "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=2", "--time=1-00", "--partition=big", "--account=me",
        "--dependency=afterok:12", "--requeue", "--signal=B:USR1@300", f"--output='{folder}/logs/slurm-%j.txt'",
    }  # fmt: skip
    assert (folder / "logs").is_dir()
    assert subprocess.run([BASH, "-n", script]).returncode == 0
    assert load_config(["--config", str(config)], 8) == load_config(["--config", "debug.toml", *flags], 8)


def test_an_array_has_a_folder_and_a_configuration_for_each_element(tmp_path, only_these):
    flags = ["--debug.seed", "%a", "--job.dump_folder", str(tmp_path / "sweep")]
    cpu = ["--cpu-ranks-per-node", "2"]
    assert main(["--config", "debug.toml", *cpu, "--array", "2-6:2%1", "--dry-run", "--", *flags]) == 0
    for i in (2, 4, 6):
        (config,) = (tmp_path / "sweep" / str(i)).glob("*.toml")
        read = load_config(["--config", str(config)], 2)
        assert read.debug.seed == i and read.job.dump_folder == str(tmp_path / "sweep" / str(i))
    (script,) = (tmp_path / "sweep").glob("*.sbatch")
    assert "#SBATCH --array=2-6:2%1\n" in script.read_text() and "gpus" not in script.read_text().partition("set -")[0]


@pytest.mark.parametrize(
    ("options", "flags", "says"),
    [
        ("--nodes 3", "", "training.global_batch_size: 8 is not a multiple"),
        ("", "--training.stepz 4", "did you mean"),
        ("--nodes 0", "", "--nodes 0: give 1 or more"),
        ("--time 9:59", "", "--time 9:59"),
        ("--time soon", "", "--time soon"),
        ("--after me", "", "--after me"),
        ("--array 0-3", "", "put %a"),
        ("--array 0-3", "--job.dump_folder {tmp}/run%a", "leave %a out of it"),
        ("--array 0-1", "--training.local_batch_size %a", "0 is too small"),
        ("", "--job.dump_folder /proc/nowhere", "/proc/nowhere cannot be written"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_queued(tmp_path, capsys, only_these, options, flags, says):
    program(only_these, "sbatch", f"echo called > {tmp_path}/queued")
    flags = f"--job.dump_folder {tmp_path}/run {flags.format(tmp=tmp_path)}".split()
    one = "" if "--nodes 3" in options else "--gpus-per-node 1 "
    command = f"--config debug.toml {one or '--cpu-ranks-per-node 1 '}{options}".split()
    assert main([*command, "--", *flags]) == ExitStatus.USER_ERROR
    told = capsys.readouterr()
    assert told.err.startswith("launch: ") and says in told.err and not told.out
    assert not (tmp_path / "queued").exists() and not (tmp_path / "run").exists()


def test_submitting(tmp_path, capsys, only_these):
    command = ["--config", "debug.toml", "--cpu-ranks-per-node", "2", "--", "--job.dump_folder", str(tmp_path / "run")]
    assert main(command) == ExitStatus.USER_ERROR
    assert "there is no sbatch here" in capsys.readouterr().err and not (tmp_path / "run").exists()

    program(only_these, "sbatch", 'test "$1" = --parsable && test -f "$2" && echo "4711;here"')
    assert main(command) == 0
    told = capsys.readouterr().out
    assert told.startswith("job 4711 is queued") and f"tail -F {tmp_path}/run/logs/slurm-4711.txt" in told
    assert "scancel 4711 " in told

    program(only_these, "sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1")
    assert main(command) == ExitStatus.USER_ERROR
    assert "no such partition" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("torchrun", "status", "requeued"),
    [
        ("exit 0", 0, False),
        ("echo '  exitcode  : 75 (pid: 9)'; exit 1", ExitStatus.STOPPED, True),
        ("echo '  exitcode  : 2 (pid: 75)'; exit 1", 1, False),
        ("echo 'was: exitcode  : 75'; exit 0", 0, False),
        # The wait is ended by a signal; the run is not.
        ("kill -USR1 $script; sleep 0.5; echo '  exitcode  : 75'; exit 1", ExitStatus.STOPPED, True),
        ("kill -USR1 $script; sleep 0.5; exit 0", 0, False),
        # Slurm ends the job, and knows whether to requeue it.
        ("kill -TERM $script; sleep 0.5; echo '  exitcode  : 75'; exit 1", ExitStatus.STOPPED, False),
    ],
)
def test_only_a_run_that_stopped_and_saved_is_requeued(tmp_path, torchrun, status, requeued):
    """The real script, in an array; srun runs one task, Python is a program that ends as torchrun would."""
    bin = tmp_path / "bin"
    program(bin, "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    program(bin, "scontrol", f'echo "$@" >> {tmp_path}/scontrol')
    program(bin, "scancel", f'echo "$@" >> {tmp_path}/scancel')
    program(bin, "fake", f'echo "$@" > {tmp_path}/arguments; read -r _ _ _ script _ < /proc/$PPID/stat; {torchrun}')
    job = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_NUM_NODES": "1"}
    job |= {"SLURM_JOB_NODELIST": "n1", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1", "SLURM_RESTART_COUNT": "2"}
    own = {"RUN": str(tmp_path / "run"), "PYTHON": str(bin / "fake"), "PATH": f"{bin}:{os.environ['PATH']}"}
    done = subprocess.run([BASH, TEMPLATE, "--config", "a b.toml"], env=os.environ | job | own, capture_output=True)
    assert done.returncode == status, done
    assert (tmp_path / "scontrol").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol").read_text() == "requeue 7_1\n"
    assert (tmp_path / "scancel").exists() == ("USR1" in torchrun)
    arguments = (tmp_path / "arguments").read_text()
    assert "--nproc-per-node 1 " in arguments and "--rdzv-conf is_host=1 " in arguments
    assert f"train.py --config a b.toml --job.dump_folder {tmp_path}/run/1\n" in arguments
    assert (tmp_path / "run" / "1" / "logs" / "7_1.2" / "all.txt").is_file()
