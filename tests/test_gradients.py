"""The gradients of one global batch do not depend on how it is computed.

One batch, one set of initial weights: activation checkpointing modes, 1 / 2 / 4 ranks, HSDP, tensor parallelism,
accumulation in 1 / 2 / 4 micro-batches, reshard modes, compile, and float8. The reference is one process, one
micro-batch, nothing applied, in float32; a second one in float64 gives the floor: what float32's own rounding costs.
"""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from config import load_config
from loss import cross_entropy_sum
from models.llama.model import Llama
from parallelisms.fsdp import whole
from scripts.local_ranks import launch
from trainer import Trainer

LANES, SEQ_LEN = 8, 64
BASE = [
    "--model.n_layers", "3", "--training.seq_len", str(SEQ_LEN), "--training.global_batch_size", str(LANES),
    "--training.mixed_precision_param", "float32", "--training.steps", "1", "--lr_scheduler.warmup_steps", "0",
    "--optimizer.implementation", "foreach",
]  # fmt: skip

# name -> (flags, ranks it runs on)
CASES: dict[str, tuple[str, tuple[int, ...]]] = {
    "nothing": ("--activation_checkpoint.mode none", (1, 2, 4)),
    "AC full": ("--activation_checkpoint.mode full", (1, 2)),
    "AC selective op": ("--activation_checkpoint.mode selective", (1, 2)),
    "AC selective matmuls": ("--activation_checkpoint.selective_ac_option matmuls", (1, 2)),
    "AC selective every 2nd": ("--activation_checkpoint.selective_ac_option 2", (1,)),
    "accumulation 2": ("--training.local_batch_size 4", (1,)),
    "accumulation 4": ("--training.local_batch_size 2", (1, 2)),
    "accumulation 2 on 4 ranks": ("--training.local_batch_size 1", (4,)),
    "reshard always": ("--parallelism.fsdp_reshard_after_forward always", (2,)),
    "reshard never": ("--parallelism.fsdp_reshard_after_forward never", (2,)),
    "HSDP 2 x 2": ("--parallelism.data_parallel_replicate_degree 2", (4,)),
    "HSDP 4 x 1": ("--parallelism.data_parallel_replicate_degree 4", (4,)),
    "TP 2": ("--parallelism.tensor_parallel_degree 2 --training.local_batch_size 8", (2,)),
    "TP 2 x FSDP 2": ("--parallelism.tensor_parallel_degree 2 --training.local_batch_size 4", (4,)),
    "HSDP 2 x TP 2": (
        "--parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_replicate_degree 2 "
        "--training.local_batch_size 4", (4,)
    ),
    "TP 4, AC full": (
        "--parallelism.tensor_parallel_degree 4 --training.local_batch_size 8 --activation_checkpoint.mode full", (4,)
    ),
    "AC selective op, compiled": ("--activation_checkpoint.mode selective --compile.enable", (1,)),
    "AC memory budget, compiled": ("--activation_checkpoint.mode memory_budget --compile.enable", (1,)),
}  # fmt: skip
FLOAT8 = "--training.mixed_precision_param bfloat16 --float8.recipe_name rowwise --activation_checkpoint.mode "
FLOAT8_CASES = {
    "float8 none": (FLOAT8 + "none", (1,)),
    "float8 full": (FLOAT8 + "full", (1, 2)),
    "float8 selective op": (FLOAT8 + "selective", (1,)),
    "float8 selective matmuls": (FLOAT8 + "selective --activation_checkpoint.selective_ac_option matmuls", (1,)),
}


def gradients(name: str, flags: str, folder: Path) -> dict[str, torch.Tensor]:
    """Full gradients of the first global batch, as the flags say. On all ranks of the process group."""
    ranks = dist.get_world_size()
    local = [] if "local_batch_size" in flags else ["--training.local_batch_size", str(LANES // ranks)]
    argv = [*BASE, *local, *flags.split(), "--job.dump_folder", str(folder / f"{name} on {ranks}")]
    torch._dynamo.reset()
    trainer = Trainer(load_config(argv, ranks), torch.device("cpu"))
    trainer.forward_backward(*next(trainer.loader))
    grads = {n: whole(p.grad).cpu() for n, p in trainer.model.named_parameters()}
    trainer.close()
    return grads


def run_cases(cases: dict[str, tuple[str, tuple[int, ...]]], folder: Path) -> None:
    ranks = dist.get_world_size()
    for name, (flags, worlds) in cases.items():
        if ranks in worlds:
            grads = gradients(name, flags, folder)
            if dist.get_rank() == 0:
                torch.save(grads, folder / f"{name}, {ranks} ranks.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("gradients")
    for ranks in (1, 2, 4):
        launch(run_cases, ranks, CASES | FLOAT8_CASES, folder)
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


def distance(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a parameter's gradient; NaN where any is NaN."""
    errors = [(grads[n].double() - reference[n].double()).norm() / reference[n].double().norm() for n in reference]
    return torch.stack(errors).max().item()


def float64_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """The same batch through the plain model in float64: no FSDP, no micro-batches, no trainer arithmetic."""
    argv = [*BASE, "--training.local_batch_size", str(LANES), "--job.dump_folder", str(folder)]
    argv += ["--activation_checkpoint.mode", "none"]
    trainer = Trainer(load_config(argv, 1), torch.device("cpu"))
    inputs, labels = next(trainer.loader)
    with torch.device("meta"):
        model = Llama(copy.copy(trainer.model.shape), SEQ_LEN)
    model.to_empty(device="cpu")
    model.init_weights(0, torch.device("cpu"))
    model.double()
    logits = model(inputs)
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
    loss.backward()
    trainer.close()
    return {n: p.grad for n, p in model.named_parameters()}


def save_float64(folder: Path) -> None:
    torch.save(float64_gradients(folder / "float64"), folder / "float64.pt")


def test_every_way_gives_the_same_gradients(results: dict[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    launch(save_float64, 1, tmp_path)
    exact = torch.load(tmp_path / "float64.pt")
    floor = distance(results["nothing, 1 ranks"], exact)
    assert floor < 1e-5  # float32: 24 bits, a few hundred summands deep
    rows = {name: distance(grads, exact) for name, grads in results.items() if not name.startswith("float8")}
    expected = [f"{name}, {ranks} ranks" for name, (_, worlds) in CASES.items() for ranks in worlds]
    assert sorted(rows) == sorted(expected)
    for name, error in sorted(rows.items(), key=lambda row: row[1]):
        print(f"{error:.2e}  {name}")
    # Another order of summation rounds differently, but not more: twice the floor covers it.
    wrong = {name: error for name, error in rows.items() if not error <= 2 * floor}
    assert not wrong, f"floor {floor:.2e}: {wrong}"


def test_recomputation_is_bit_identical(results: dict[str, dict[str, torch.Tensor]]) -> None:
    for plain, modes in {
        "nothing, 1 ranks": [
            "AC full, 1 ranks", "AC selective op, 1 ranks", "AC selective matmuls, 1 ranks",
            "AC selective every 2nd, 1 ranks",
        ],
        "nothing, 2 ranks": ["AC full, 2 ranks", "AC selective op, 2 ranks", "reshard always, 2 ranks"],
        "reshard always, 2 ranks": ["reshard never, 2 ranks"],
        "float8 none, 1 ranks": [
            "float8 full, 1 ranks", "float8 selective op, 1 ranks", "float8 selective matmuls, 1 ranks",
        ],
    }.items():  # fmt: skip
        for mode in modes:
            for name, grad in results[plain].items():
                assert torch.equal(grad, results[mode][name]), (mode, name)


def test_float8_on_two_ranks_agrees(results: dict[str, dict[str, torch.Tensor]]) -> None:
    # A row's scale depends on its row alone, so splitting the batch changes no activation. Each rank quantises the
    # gradients of its own tokens by columns, so weight gradients differ within float8's own error against bf16.
    one, two = results["float8 full, 1 ranks"], results["float8 full, 2 ranks"]
    floor = distance(one, results["nothing, 1 ranks"])
    assert distance(two, one) < floor


def test_the_loss_is_summed_in_float32() -> None:
    logits = torch.randn(64, 100, dtype=torch.bfloat16)
    labels = torch.randint(100, (64,))
    labels[::5] = -100
    exact = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="sum")
    assert abs(cross_entropy_sum(logits, labels) - exact) < 1e-5 * exact
