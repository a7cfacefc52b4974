"""The debug model on a GPU: compiled, in bf16 and in float8, its loss falls; and a stopped run goes on bit-identically.

Every run is `python train.py`, as a user starts it: a process, a rank, NCCL.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
STEPS = 4

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),  # A compiled run takes a minute or two.
]

PRECISIONS = {
    "bf16": "--training.mixed_precision_param bfloat16",
    "rowwise": "--training.mixed_precision_param bfloat16 --float8.recipe_name rowwise",
    "rowwise by torchao": (
        "--training.mixed_precision_param bfloat16 --float8.recipe_name rowwise --float8.backend torchao"
    ),
    "tensorwise": "--training.mixed_precision_param bfloat16 --float8.recipe_name tensorwise",
}


def train(folder: Path, flags: str) -> list[float]:
    """The losses of steps 1 to STEPS, or to where `flags` stop the run; one a line of metrics.jsonl."""
    common = (
        f"--config debug.toml --training.steps {STEPS} --lr_scheduler.warmup_steps 0 --lr_scheduler.total_steps 100 "
        "--metrics.log_freq 1 --validation.enable false --metrics.enable_tensorboard false"
    )
    command = [sys.executable, "train.py", "--job.dump_folder", str(folder), *common.split(), *flags.split()]
    # Alone in its world, whatever this process was started by.
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(command, cwd=ROOT, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def needs_float8(precision: str) -> None:
    if precision != "bf16" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8 matmul")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_of_a_compiled_run_falls(precision: str, tmp_path: Path) -> None:
    needs_float8(precision)
    losses = train(tmp_path / "run", f"{PRECISIONS[precision]} --compile.enable --checkpoint.enable false")
    assert len(losses) == STEPS and all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.5
    applied = {row["technique"]: row for row in json.loads((tmp_path / "run" / "applied.json").read_text())}
    assert applied["compile"]["applied"] == "4 blocks"
    assert applied["float8"]["applied"] == ("0 linear layers" if precision == "bf16" else "28 linear layers")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_that_was_stopped_goes_on_bit_identically(precision: str, tmp_path: Path) -> None:
    needs_float8(precision)
    flags = f"{PRECISIONS[precision]} --compile.enable --debug.deterministic"
    whole = train(tmp_path / "whole", flags)
    assert len(whole) == STEPS
    assert train(tmp_path / "stopped", f"{flags} --training.steps 2") == whole[:2]
    assert train(tmp_path / "stopped", flags) == whole
