"""`train.py --dry-run` as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from errors import ExitStatus, UserError
from planning.command import dry_run

ROOT = Path(__file__).parent.parent.parent
DEBUG = (
    "--dry-run --config debug.toml --training.seq_len 64 --training.local_batch_size 2 --training.global_batch_size 8"
)


def test_train_py_plans_and_writes_nothing_but_the_json(tmp_path):
    file = tmp_path / "plan.json"
    flags = f"{DEBUG} --world-size 2 --json {file} --job.dump_folder {tmp_path / 'run'}".split()
    done = subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 ranks (dp_shard 2)" in done.stdout and "fits:" in done.stdout
    assert not done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    plan = json.loads(file.read_text())
    assert plan["fits"] and plan["world_size"] == 2 and sum(plan["peak_by_kind"].values()) == plan["peak"]


def test_what_does_not_fit_ends_with_1_and_advice(capsys):
    assert dry_run(f"{DEBUG} --model.n_layers 1 --device-memory 10MiB".split()) == ExitStatus.FAILED
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text and "tried:" in text and "--world-size 2" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpu H1000", '--gpu: "H1000" is not known; the GPUs are A100, H100, H200, B200'),
        ("--device-memory lots", '--device-memory: "lots" is no amount of memory; give one like 80GiB or 141GB'),
        ("--device-memory 1.2.3GB", "is no amount of memory"),
        ("--network-gbps 0", "--network-gbps: 0 moves nothing"),
        ("--network-gbps fast", "--network-gbps: invalid float value: 'fast'"),
        ("--world-size 0", "--world-size: 0 ranks train nothing; give 1 or more"),
        ("--json /nowhere/plan.json", "--json: /nowhere/plan.json cannot be written (No such file or directory)"),
        ("--world_size 2", "--world_size: unknown flag"),
        # What the cluster would have said.
        ("--world-size 3", "training.global_batch_size: 8 is not a multiple of"),
        ("--world-size 2 --parallelism.tensor_parallel_degree 3", "3 tensor parallel do not divide the 2 ranks"),
        ("--optimizer.no_weight_decay nothing", 'optimizer.no_weight_decay: "nothing" matches no parameter'),
    ],
)
def test_bad_input_gets_a_sentence(flags, message):
    with pytest.raises(UserError) as refused:
        dry_run(f"{DEBUG} --model.n_layers 1 {flags}".split())
    assert message in str(refused.value)
