"""Statistics of layers: the same, whatever computes them, as of a plain model in float64; kept as the run goes on.

Launches of 1, 2 and 4 ranks train the debug model; the tests read what the runs left.
"""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import load_config
from models.llama.model import Llama
from scripts.local_ranks import launch
from telemetry import layer_statistics
from telemetry.layer_statistics import FILE, LayerStatistics, places_in_order, statistics, sums_of, together
from trainer import Trainer

LANES, SEQ_LEN, LAYERS = 8, 64, 3
BASE = [
    "--model.n_layers", str(LAYERS), "--training.seq_len", str(SEQ_LEN), "--training.global_batch_size", str(LANES),
    "--training.mixed_precision_param", "float32", "--training.steps", "1", "--lr_scheduler.warmup_steps", "0",
    "--activation_checkpoint.mode", "none", "--debug.layer_statistics_freq", "2",
]  # fmt: skip
TP = "--parallelism.tensor_parallel_degree"
AC = "--activation_checkpoint.mode"
CASES: dict[str, tuple[str, tuple[int, ...]]] = {  # name -> (flags, ranks it runs on)
    "plain": ("", (1, 2, 4)),
    "micro-batches": ("--training.local_batch_size 2", (1, 2)),
    "AC full": (f"{AC} full", (1, 2)),
    "AC op": (f"{AC} selective", (1,)),
    "AC matmuls": (f"{AC} selective --activation_checkpoint.selective_ac_option matmuls", (1,)),
    "AC every 2nd": (f"{AC} selective --activation_checkpoint.selective_ac_option 2", (1,)),
    "HSDP": ("--parallelism.data_parallel_replicate_degree 2", (2, 4)),
    "TP": (f"{TP} 2 --training.local_batch_size 8 {AC} full", (2,)),
    "TP x FSDP": (f"{TP} 2 --training.local_batch_size 2", (4,)),
    "TP x HSDP": (f"{TP} 2 --training.local_batch_size 4 --parallelism.data_parallel_replicate_degree 2", (4,)),
    "compiled, AC full": (f"{AC} full --compile.enable --training.steps 4 --metrics.log_freq 1", (1,)),
    "TP, compiled by aot_eager, AC full": (
        f"{TP} 2 --training.local_batch_size 8 {AC} full --compile.enable --compile.backend aot_eager", (2,)
    ),
}  # fmt: skip


def make(folder: Path, flags: str) -> Trainer:
    ranks = dist.get_world_size()
    local = [] if "local_batch_size" in flags else ["--training.local_batch_size", str(LANES // ranks)]
    argv = [*BASE, *local, *flags.split(), "--job.dump_folder", str(folder)]
    torch._dynamo.reset()
    return Trainer(load_config(argv, ranks), torch.device("cpu"))


def run(folder: Path, flags: str) -> None:
    trainer = make(folder, flags)
    trainer.train()
    trainer.close()
    dist.barrier()


def run_cases(folder: Path) -> None:
    ranks = dist.get_world_size()
    for name, (flags, worlds) in CASES.items():
        if ranks in worlds:
            run(folder / f"{name}, {ranks}", flags)
    if ranks == 1:
        (folder / "exact.json").write_text(json.dumps(exact(folder / "exact")))
        run(folder / "off", "--debug.layer_statistics_freq 0")
        resumed(folder)


def resumed(folder: Path) -> None:
    """Whole: 6 steps. Killed: the same, but that what comes after step 3 is lost, and the run goes on from there."""
    flags = "--training.steps 6 --debug.layer_statistics_freq 2 --checkpoint.enable --checkpoint.interval 3"
    run(folder / "whole", flags)
    shutil.copytree(folder / "whole", folder / "killed")
    shutil.rmtree(folder / "killed" / "checkpoint" / "step-6")
    with (folder / "killed" / FILE).open("a") as file:
        file.write('{"step": 8, "pla')
    run(folder / "killed", flags)


def exact(folder: Path) -> dict[str, dict[str, float | None]]:
    """The first step's statistics, of the plain model in float64."""
    trainer = make(folder, "")
    inputs, labels = next(trainer.loader)
    trainer.close()
    with torch.device("meta"):
        model = Llama(trainer.model.shape, SEQ_LEN)
    model.to_empty(device="cpu")
    model.init_weights(0, torch.device("cpu"))
    model.double()
    kept: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module) -> None:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.retain_grad()
            kept[name] = output

        module.register_forward_hook(hook)

    for name in ("tok_embeddings", "norm", *(f"layers.{i}" for i in range(LAYERS))):
        keep(name, model.get_submodule(name))
    loss = torch.nn.functional.cross_entropy(model(inputs), labels.flatten())
    loss.backward()
    tensors = {f"{name} output": x for name, x in kept.items()} | {"loss": loss}
    tensors |= {f"{name} output gradient": x.grad for name, x in kept.items() if x.grad is not None}
    tensors |= dict(model.named_parameters())
    tensors |= {f"{name} gradient": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name: {
            "count": x.numel(), "rms": x.square().mean().sqrt().item(), "mean": x.mean().item(),
            "largest": x.abs().max().item(), "not_finite": 0.0,
        }
        for name, x in ((name, x.detach()) for name, x in tensors.items())
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    for ranks in (1, 2, 4):
        launch(run_cases, ranks, folder)
    return folder


def lines_of(folder: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line["places"] for line in map(json.loads, (folder / FILE).read_text().splitlines())}


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name, (_, worlds) in CASES.items() for ranks in worlds])
def test_they_are_those_of_a_plain_model(runs: Path, name: str, ranks: int) -> None:
    expected, found = json.loads((runs / "exact.json").read_text()), lines_of(runs / f"{name}, {ranks}")[1]
    assert found.keys() == expected.keys()
    for place, of_place in found.items():
        wanted = expected[place]
        assert (of_place["count"], of_place["not_finite"]) == (wanted["count"], 0.0), place
        # float32, in which gradients are to 1e-5 of themselves (tests/test_gradients.py).
        assert of_place["rms"] == pytest.approx(wanted["rms"], rel=1e-5), place
        assert of_place["largest"] == pytest.approx(wanted["largest"], rel=1e-4), place
        assert of_place["mean"] == pytest.approx(wanted["mean"], abs=1e-5 * wanted["rms"]), place


def test_weights_and_what_is_recomputed_are_alike_to_the_last_bits_of_the_sums(runs: Path) -> None:
    plain = lines_of(runs / "plain, 1")[1]
    for name, (_, worlds) in CASES.items():
        for ranks in worlds:
            for place, of_place in lines_of(runs / f"{name}, {ranks}")[1].items():
                if place.endswith(".weight") or (name.startswith("AC") and ranks == 1):
                    assert of_place == pytest.approx(plain[place], rel=1e-12, abs=1e-15), (name, ranks, place)


def test_the_first_step_and_every_second_are_written(runs: Path) -> None:
    assert list(lines_of(runs / "plain, 1")) == [1]
    assert list(lines_of(runs / "compiled, AC full, 1")) == [1, 2, 4]
    assert not (runs / "off" / FILE).exists()


def test_no_graph_is_compiled_anew(runs: Path) -> None:
    metrics = (runs / "compiled, AC full, 1" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["recompiles"] for line in metrics] == [0] * 4


def test_a_resumed_run_has_each_step_once_as_if_undisturbed(runs: Path) -> None:
    text = (runs / "killed" / FILE).read_text()
    assert text == (runs / "whole" / FILE).read_text()
    assert list(lines_of(runs / "killed")) == [1, 2, 4, 6] and text.count("\n") == 4


# By themselves


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Small(nn.Module):
    """What LayerStatistics knows of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False)])
        self.norm = nn.RMSNorm(2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.layers[0](self.tok_embeddings(ids))).sum()


def test_micro_batches_are_seen_together_and_the_model_is_left_as_it_was(one_rank: None, tmp_path: Path) -> None:
    model, ids = Small(), torch.tensor([0, 1, 2, 3, 3, 3])
    looks = LayerStatistics(model, 5, tmp_path)
    for step in range(1, 6):
        model.zero_grad()
        with looks.watching(step):
            assert [bool(m._forward_hooks) for m in (model.tok_embeddings, model.norm)] == [step in (1, 5)] * 2
            for part in ids.split(2):
                model(part).backward()
        looks.write(step, torch.tensor(float(step)))
        assert not any(m._forward_hooks for m in model.modules())
    found = lines_of(tmp_path)
    assert list(found) == [1, 5]
    assert found[1]["norm output"]["count"] == 12 and found[5]["loss"]["mean"] == 5.0
    output = model.norm(model.layers[0](model.tok_embeddings(ids))).detach().double()
    assert found[5]["norm output"]["mean"] == pytest.approx(output.mean().item(), rel=1e-6)
    # Of a sum the gradient is one, everywhere.
    ones = {"count": 12, "rms": 1.0, "mean": 1.0, "largest": 1.0, "not_finite": 0.0}
    assert found[5]["norm output gradient"] == ones


def test_a_step_that_fails_leaves_no_hook(one_rank: None, tmp_path: Path) -> None:
    model = Small()
    with pytest.raises(IndexError), LayerStatistics(model, 1, tmp_path).watching(1):
        model(torch.tensor([4]))
    assert not any(m._forward_hooks for m in model.modules())


def test_later_steps_of_an_earlier_process_are_dropped(one_rank: None, tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "places": {}}) + "\n" for step in (1, 2, 3)]
    (tmp_path / FILE).write_text("".join(lines) + '{"step": 4, "pl')
    looks = LayerStatistics(Small(), 0, tmp_path)  # Also where it looks at no step any more.
    assert (tmp_path / FILE).read_text().count("\n") == 3
    looks.begin(2)
    assert (tmp_path / FILE).read_text() == "".join(lines[:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("piece", [1, 3, 2**24])
def test_sums(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece: int) -> None:
    monkeypatch.setattr(layer_statistics, "PIECE", piece)
    x = torch.tensor([[3.0, -4.0], [math.inf, 1.0], [math.nan, 0.0]], dtype=dtype)
    assert sums_of(x).tolist() == [6, 2, 0, 26, 4]
    assert sums_of(x[:, :0]).tolist() == [0] * 5
    assert together(sums_of(x), sums_of(x[:1] * 2)).tolist() == [8, 2, -2, 126, 8]
    # In float32 the square of this is infinite.
    assert sums_of(torch.tensor([3e38], dtype=dtype))[3].isfinite()


def test_statistics_are_of_what_is_finite() -> None:
    assert statistics(4, 2, 6, 20, 4) == {"count": 4, "rms": 10**0.5, "mean": 3, "largest": 4, "not_finite": 0.5}
    assert statistics(4, 4, 0, 0, 0) == {"count": 4, "rms": None, "mean": None, "largest": None, "not_finite": 1}


def test_places_are_in_the_order_of_computation() -> None:
    parameters = ["tok_embeddings.weight", "layers.0.wq.weight", "layers.1.wq.weight", "norm.weight", "output.weight"]
    assert places_in_order(["tok_embeddings", "layers.0", "layers.1", "norm"], parameters) == [
        "tok_embeddings.weight", "tok_embeddings output", "layers.0.wq.weight", "layers.0 output",
        "layers.1.wq.weight", "layers.1 output", "norm.weight", "norm output", "output.weight", "loss",
        "output.weight gradient", "norm output gradient", "norm.weight gradient", "layers.1 output gradient",
        "layers.1.wq.weight gradient", "layers.0 output gradient", "layers.0.wq.weight gradient",
        "tok_embeddings output gradient", "tok_embeddings.weight gradient",
    ]  # fmt: skip
