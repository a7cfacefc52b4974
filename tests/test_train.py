"""The command line as a user meets it: what is wrong is told in sentences, with status 2; a run leaves its files.

Each case is a process of its own, so several claims share one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from config import JobConfig, load_config
from settings import sections_of

ROOT = Path(__file__).parent.parent
SMALL = [
    "--config", "debug.toml", "--model.n_layers", "1", "--training.seq_len", "64", "--training.steps", "2",
    "--lr_scheduler.warmup_steps", "0", "--validation.enable", "false", "--metrics.enable_tensorboard", "false",
]  # fmt: skip


def train(*flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", *map(str, flags)]
    # Alone in its world, whatever this process was started by.
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env["OMP_NUM_THREADS"] = "1"
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def assert_told(done: subprocess.CompletedProcess[str], *texts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("train.py: "), done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    for text in texts:
        assert text in done.stderr, done.stderr


def test_all_that_is_wrong_is_told_before_anything_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = train("--config", "debug.toml", "--training.seq_lenn", 1, "--nonsense", "--job.dump_folder", folder)
    assert_told(
        done,
        "2 problems in the configuration:",
        'command line: --training.seq_lenn: unknown flag; did you mean "--training.seq_len"?',
        "command line: --nonsense: unknown flag;",
    )
    assert done.stdout == "" and not folder.exists()


def test_without_a_config() -> None:
    assert_told(train(), "--config is missing", "--config debug.toml")


def test_a_dump_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # Root may write everywhere but below a file.
    assert_told(train(*SMALL, "--job.dump_folder", tmp_path / "file" / "run"), "job.dump_folder: ", "choose another")


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "no tokenizer"
    done = train(*SMALL, "--job.dump_folder", tmp_path / "run", "--model.tokenizer_path", path)
    assert_told(done, "model.tokenizer_path: ", str(path))


def test_help_shows_every_key() -> None:
    done = train("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name, section in sections_of(JobConfig).items():
        assert f"[{name}]" in done.stdout
        for key in section.__dataclass_fields__:
            assert f"--{name}.{key}" in done.stdout


def test_a_run_leaves_its_files_and_is_done_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # Saves by a process of its own, which ends with this one and says nothing.
    flags = [*SMALL, "--job.dump_folder", str(folder), "--checkpoint.async_mode", "async_with_pinned_mem"]
    done = train(*flags)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    metrics = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(1 < line["loss"] < 12 and line["grad_norm"] > 0 for line in lines)

    # The configuration that it says it ran with is the one that it ran with.
    assert load_config(["--config", str(folder / "config.toml")], 1) == load_config(flags, 1)
    applied = {row["technique"]: row for row in json.loads((folder / "applied.json").read_text())}
    assert applied["FSDP2"]["applied"] == "none: one shard"
    assert applied["activation checkpointing"]["asked"] == "none"
    assert (folder / "checkpoint" / "step-2" / ".metadata").is_file()
    for told in (folder / "metrics.jsonl", folder / "checkpoint" / "step-2", folder / "config.toml"):
        assert str(told) in done.stdout

    again = train("--config", folder / "config.toml")
    assert again.returncode == 0, again.stderr
    assert "nothing to do after step 2 of 2; raise --training.steps" in again.stdout
    assert (folder / "metrics.jsonl").read_text() == metrics
    assert [path.name for path in (folder / "checkpoint").iterdir()] == ["step-2"]
