"""torchtitan 0.2.2 on one GPU, with the shapes of scripts.bench: its last release that takes TOML files.

    python -m scripts.bench_torchtitan LAYERS [torchtitan's flags]

It gets the 8B model's width with LAYERS layers, sequences of 8192, local batch 2, selective-op checkpointing, AdamW,
compiled model and loss, and the standard library as text. The last line is JSON, as scripts.bench reads it.
"""

import dataclasses
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

STEPS, LOG_FREQ = 16, 4
BATCH, BATCH_FLAG = 2, "--training.local_batch_size"
CONFIG = f"""
[job]
dump_folder = "outputs"
[metrics]
log_freq = {LOG_FREQ}
disable_color_printing = true
[model]
name = "llama3"
flavor = "8B_bench"
hf_assets_path = "./tokenizer"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 2
[training]
local_batch_size = {BATCH}
seq_len = 8192
steps = {STEPS}
dataset = "c4_test"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
components = ["model", "loss"]
"""
LINE = re.compile(r"step:\s*(\d+).*?loss:\s*(\S+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)")


def prepare(folder: Path) -> None:
    """What torchtitan reads in its working folder: a configuration, a tokenizer, and its test data set's file."""
    from data.tokenizer import stdlib_tokenizer

    (folder / "bench.toml").write_text(CONFIG)
    (folder / "tokenizer").mkdir()
    shutil.copy(stdlib_tokenizer(16384).path, folder / "tokenizer" / "tokenizer.json")
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    data = folder / "tests" / "assets" / "c4_test"
    data.mkdir(parents=True)
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [module.read_text(errors="ignore") for module in modules]
    (data / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def train(layers: int) -> None:
    """The rank: torchtitan's own trainer, with a flavor of as many layers."""
    import torchtitan.models.llama3 as llama3

    enable_symmetric_memory()
    shape = dataclasses.replace(llama3.llama3_args["8B"], n_layers=layers, vocab_size=128256)
    llama3.llama3_args["8B_bench"] = shape
    from torchtitan.train import Trainer, main

    main(Trainer)


def enable_symmetric_memory() -> None:
    """Has torchtitan's async TP do something: torch's pass fuses nothing, and says nothing, for a group without
    symmetric memory, and torchtitan leaves it to torch to set that up."""
    import torchtitan.models.llama3.infra.parallelize as titan
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    before = titan.maybe_enable_async_tp

    def enable(config: Any, mesh: Any) -> None:
        before(config, mesh)
        if config.parallelism.enable_async_tensor_parallel:
            enable_symm_mem_for_group(mesh.get_group().group_name)

    titan.maybe_enable_async_tp = enable


def result_of(output: str, batch: int = BATCH) -> dict[str, Any]:
    """The median of the logged intervals after the first two, which hold compilation and warm-up.

    Steps after STEPS are there to be profiled, and slower. batch: sequences of a step.
    """
    lines = [LINE.search(line) for line in output.splitlines()]
    steps = [(int(m[1]), float(m[2]), float(m[3]), float(m[4].replace(",", ""))) for m in lines if m]
    steps = [step for step in steps if step[0] <= STEPS]
    steady = [tokens_per_second for step, _, _, tokens_per_second in steps if step > LOG_FREQ]
    return {
        "tokens_per_second": statistics.median(steady),
        "range": [min(steady), max(steady)],
        "gib": max(gib for _, _, gib, _ in steps),
        "first_step_seconds": 8192 * batch / steps[0][3],
        "loss": steps[-1][1],
    }


def main() -> int:
    layers, flags = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", __file__]
        command += ["--job.config_file", "bench.toml", *flags]
        env = os.environ | {"BENCH_LAYERS": layers}
        done = subprocess.run(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
        return 1
    batch = int(flags[flags.index(BATCH_FLAG) + 1]) if BATCH_FLAG in flags else BATCH
    print(json.dumps(result_of(done.stdout, batch)))
    return 0


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["BENCH_LAYERS"]))
    else:
        sys.exit(main())
