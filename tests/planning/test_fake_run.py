"""A step under fake tensors against the same step on gloo ranks: what is held and what is sent."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from config import load_config
from errors import UserError
from parallelisms.fsdp import local
from planning.fake_run import FakeRun, fake_run, group_dims
from planning.observer import StepObserver
from scripts.local_ranks import launch
from trainer import Trainer

SMALL = (
    "--config debug.toml --compile.enable false --training.seq_len 64 --training.local_batch_size 2 "
    "--training.global_batch_size 8 --checkpoint.enable false --validation.enable false --metrics.log_freq 1000"
)
FP8 = SMALL.replace("debug.toml", "debug_fp8.toml")
LAUNCHES = [
    (2, {
        "FSDP": SMALL,
        "FSDP, float8 gathers": FP8,
        "FSDP, gathered again, full checkpointing": f"{SMALL} --parallelism.fsdp_reshard_after_forward always "
        "--activation_checkpoint.mode full",
        "replicas": f"{SMALL} --parallelism.data_parallel_replicate_degree 2",
        "TP": f"{SMALL} --parallelism.tensor_parallel_degree 2 --activation_checkpoint.mode none",
        "TP, float8, full checkpointing": f"{FP8} --parallelism.tensor_parallel_degree 2 "
        "--activation_checkpoint.mode full",
        "bf16 moments": f"{SMALL} --optimizer.state_dtype bfloat16",
    }),
    # One a launch: DTensor may reduce a norm over both dimensions at once on the second mesh of a process.
    (4, {"2-D, float8": f"{FP8} --parallelism.tensor_parallel_degree 2 --activation_checkpoint.mode selective"}),
    (4, {
        "HSDP and TP, float8": f"{FP8} --parallelism.tensor_parallel_degree 2 "
        "--parallelism.data_parallel_replicate_degree 2",
    }),
]  # fmt: skip


def traffic(sent: list, dims: dict[str, str]) -> dict[str, list[int]]:
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for _, s in sent:
        key = f"{dims.get(s.group, 'all')} {s.kind} {s.op} {s.layer} {s.backward}"
        calls[key] += 1
        nbytes[key] += s.nbytes
    return {key: [calls[key], nbytes[key]] for key in sorted(calls)}


def held(trainer: Trainer) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients and optimizer states."""

    def nbytes(tensors: list[Tensor]) -> int:
        return sum(local(t).nbytes for t in tensors)

    parameters = list(trainer.model.parameters())
    states = [t for p in parameters for t in trainer.optimizer.state[p].values()]
    return {"parameters": nbytes(parameters), "optimizer": nbytes(states)}


def on_gloo(cases: dict[str, str], folder: Path) -> None:
    rank = torch.distributed.get_rank()
    found = {}
    for name, flags in cases.items():
        torch.manual_seed(0)
        config = load_config(
            [*flags.split(), "--job.dump_folder", str(folder / name)], torch.distributed.get_world_size()
        )
        trainer = Trainer(config, torch.device("cpu"))
        rows = trainer.micro_batches * config.training.local_batch_size
        batch = torch.randint(config.model.shape().vocab_size, (rows, config.training.seq_len))
        observer = StepObserver()
        trainer.step = 2  # The first one logs, which sends too.
        with observer.watching(trainer.model):
            trainer.train_step(batch, batch)
        found[name] = {"traffic": traffic(observer.sent, group_dims(trainer.meshes)), **held(trainer)}
        trainer.close()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.parametrize(("ranks", "cases"), LAUNCHES)
def test_what_gloo_ranks_hold_and_send(tmp_path, ranks, cases):
    launch(on_gloo, ranks, cases, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    for name, flags in cases.items():
        run = fake_run(load_config(flags.split(), ranks), ranks)
        planned = {
            "traffic": traffic(run.sent, run.dims),
            "parameters": run.parameter_bytes,
            "optimizer": run.optimizer_bytes,
        }
        assert planned == found[name], name
        assert planned["traffic"], name


@pytest.mark.parametrize("flags", [FP8, SMALL])
def test_compiled_steps_send_and_compute_the_same(flags):
    # Without checkpointing: the compiler leaves out of a recomputation what nobody needs.
    flags += " --parallelism.tensor_parallel_degree 2 --activation_checkpoint.mode none"
    compiled = flags.replace("--compile.enable false", "--compile.enable true")
    eager, graphs = (fake_run(load_config(f.split(), 4), 4) for f in (flags, compiled))
    assert traffic(eager.sent, eager.dims) == traffic(graphs.sent, graphs.dims)
    assert Counter(eager.matmuls) == Counter(graphs.matmuls)
    assert matmul_flops(eager) == matmul_flops(graphs)
    # What a compiled block fuses, an eager one writes to memory.
    assert graphs.peak.nbytes <= eager.peak.nbytes


def matmul_flops(run: FakeRun) -> float:
    return sum(work.flops for _, work in run.works)


@pytest.mark.parametrize(
    ("recipe", "compiled"), [("none", "false"), ("none", "true"), ("rowwise", "true"), ("rowwise_with_gw_hp", "true")]
)
def test_the_flops_are_those_of_the_model_and_of_what_is_computed_again(recipe, compiled):
    # Compiled too: torch 2.11's compiler can leave a recomputation out without a word (docs/architecture.md).
    how = f"--float8.recipe_name {recipe} --compile.enable {compiled}"
    whole = f"{SMALL} {how} --training.local_batch_size 8 --activation_checkpoint.mode"
    none, full = (fake_run(load_config([*f"{whole} {mode}".split()], 1), 1) for mode in ("none", "full"))
    # Both count a causal query half of the keys. The model's count takes the norms' weights for matmuls, and attention
    # backward for twice its forward; that computes the scores again: 5 products, not 4.
    shape = load_config(SMALL.split(), 1).model.shape()
    attention = shape.n_layers * shape.n_heads * shape.head_dim * 64
    norms = (2 * shape.n_layers + 1) * shape.dim
    assert matmul_flops(none) / none.tokens == none.model_flops_per_token - 6 * norms + attention
    # What w2 gives, backward does not need.
    again = 2 * (none.num_params - 2 * shape.vocab_size * shape.dim - norms) + 2 * attention
    again -= 2 * shape.n_layers * shape.dim * shape.hidden_dim
    assert matmul_flops(full) / full.tokens == matmul_flops(none) / none.tokens + again


def test_cpu_offload_is_refused():
    config = load_config([*SMALL.split(), "--optimizer.implementation", "foreach", "--training.enable_cpu_offload"], 1)
    with pytest.raises(UserError, match="training.enable_cpu_offload: a dry run follows the GPU's memory only"):
        fake_run(config, 1)


def test_one_run_leaves_nothing_to_the_next():
    """DTensor keeps what it found for a mesh, with its process groups."""
    splits = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 2), (1, 1)]
    sent: dict[tuple[int, int], dict[str, list[int]]] = {}
    for replicate, tp in splits:
        degrees = f"--parallelism.data_parallel_replicate_degree {replicate} --parallelism.tensor_parallel_degree {tp}"
        run = fake_run(load_config([*f"{SMALL} --training.global_batch_size 16 {degrees}".split()], 8), 8)
        found = traffic(run.sent, run.dims)
        assert sent.setdefault((replicate, tp), found) == found
