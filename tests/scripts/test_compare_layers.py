"""The first difference of two runs is found, at its place and step: made by hand, and planted in real runs."""

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from config import load_config
from parallelisms.fsdp import local
from scripts import compare_layers
from scripts.compare_layers import Rounding, exact
from scripts.local_ranks import launch
from telemetry.layer_statistics import FILE, places_in_order
from trainer import Trainer

Command: TypeAlias = Callable[..., tuple[int, str, str]]
DIM, TOKENS = 4, 16
LAYERS = ["tok_embeddings", "layers.0", "layers.1", "norm"]
COUNTS = {
    "tok_embeddings.weight": 32, "layers.0.wq.weight": 16, "layers.1.wq.weight": 16, "norm.weight": DIM,
    "output.weight": 32,
}  # fmt: skip


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs it: exit status, stdout, stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()  # What the test has printed itself.
        monkeypatch.setattr(sys, "argv", ["compare_layers", *map(str, argv)])
        status = compare_layers.main()
        return status, *capsys.readouterr()

    return run


Places: TypeAlias = dict[str, dict[str, Any]]


def write(folder: Path, steps: dict[int, Places], precision: str = "bfloat16", recipe: str = "none") -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": step, "places": places}) + "\n" for step, places in steps.items()]
    (folder / FILE).write_text("".join(lines))
    config = f'[training]\nmixed_precision_param = "{precision}"\n[float8]\nrecipe_name = "{recipe}"\n'
    (folder / "config.toml").write_text(config)
    return folder


def step_of(generator: torch.Generator) -> Places:
    found = {}
    for place in places_in_order(LAYERS, list(COUNTS)):
        rms, mean = torch.rand(2, generator=generator).add(0.5).tolist()
        count = COUNTS.get(place.removesuffix(" gradient"), 1 if place == "loss" else TOKENS * DIM)
        found[place] = {"count": count, "rms": rms, "mean": mean / 8, "largest": 4 * rms, "not_finite": 0.0}
    return found


@pytest.fixture
def steps() -> dict[int, Places]:
    """Of a model of two blocks."""
    generator = torch.Generator()
    print("the statistics of this test are of seed", generator.seed())
    return {step: step_of(generator) for step in (1, 2, 3)}


def changed(steps: dict[int, Places], step: int, place: str, statistic: str, share: float) -> dict[int, Places]:
    steps = copy.deepcopy(steps)
    of_place = steps[step][place]
    of_place[statistic] += share * of_place["rms" if statistic == "mean" else statistic]
    return steps


# By hand


def test_runs_that_are_alike_agree(command: Command, tmp_path: Path, steps: dict[int, Places]) -> None:
    one, other = write(tmp_path / "a", steps), write(tmp_path / "b", steps)
    for flags in ([], ["--tolerance", "0"]):
        status, out, _ = command(one, other, *flags)
        assert status == 0 and "- AGREE: alike at all places, to the last bits of the sums\n" in out
        assert "| layers.1 | none | none | none | none |" in out and "| loss | none |  |  |  |" in out


@pytest.mark.parametrize("place", [*places_in_order(LAYERS, list(COUNTS))])
@pytest.mark.parametrize("statistic", ["rms", "mean", "largest"])
def test_every_place_and_statistic_is_judged(
    command: Command, tmp_path: Path, steps: dict[int, Places], place: str, statistic: str
) -> None:
    folders = write(tmp_path / "a", steps), write(tmp_path / "b", changed(steps, 2, place, statistic, -1.5e-3))
    status, out, _ = command(*folders, "--tolerance", "0.0014")
    assert status == 1 and f"- DIFFER: beyond the tolerance first at step 2, {place}: {statistic} " in out
    assert "0.15 % apart, allowed 0.14 %; 1 of 57 places in all\n" in out
    assert f"- alike to the last bits before step 2, {place}: {statistic} " in out
    status, out, _ = command(*folders, "--tolerance", "0.0016")
    assert status == 0 and f"- AGREE: nothing is beyond the tolerance; closest to it: step 2, {place}: " in out
    assert f"{statistic}, step 2)" in out and "**" not in out


def test_the_first_in_the_order_of_computation_is_told(
    command: Command, tmp_path: Path, steps: dict[int, Places]
) -> None:
    other = steps
    for step, place in [(3, "tok_embeddings output"), (2, "layers.1 output gradient"), (2, "layers.1 output")]:
        other = changed(other, step, place, "rms", 0.5)
    other = changed(other, 2, "layers.0 output", "rms", 1e-7)
    status, out, _ = command(write(tmp_path / "a", steps), write(tmp_path / "b", other))
    assert status == 1 and "DIFFER: beyond the tolerance first at step 2, layers.1 output: rms" in out
    assert "alike to the last bits before step 2, layers.0 output: rms" in out and "3 of 57 places in all" in out
    rows = {row.split(" |")[0][2:]: row.split(" | ")[1:] for row in out.splitlines() if row.startswith("| ")}
    assert list(rows) == ["layer", "---", *LAYERS, "output", "loss"]
    assert rows["layers.1"][:2] == ["**50 % (rms, step 2)**"] * 2 and rows["layers.0"][0] == "1e-05 % (rms, step 2)"
    assert rows["tok_embeddings"][0] == "**50 % (rms, step 3)**"


def test_what_is_not_finite_never_agrees(command: Command, tmp_path: Path, steps: dict[int, Places]) -> None:
    other = copy.deepcopy(steps)
    other[2]["layers.0 output"]["not_finite"] = 0.25
    none = {"rms": None, "mean": None, "largest": None, "not_finite": 1.0}
    other[2]["layers.1 output"] |= none
    a, b = write(tmp_path / "a", steps), write(tmp_path / "b", other)
    for pair in ((a, b), (b, b)):
        status, out, _ = command(*pair, "--tolerance", "1e9")
        assert status == 1 and "first at step 2, layers.0 output: NaN or infinite is " in out and "25 % of it" in out
        assert "| layers.1 | **not finite, step 2** |" in out


def test_a_zero_that_is_none_in_the_other_run_differs(
    command: Command, tmp_path: Path, steps: dict[int, Places]
) -> None:
    one, both = copy.deepcopy(steps), copy.deepcopy(steps)
    for places in (one, both):
        places[1]["norm.weight gradient"] |= {"rms": 0.0, "mean": 0.0, "largest": 0.0}
    a, b, c = write(tmp_path / "a", one), write(tmp_path / "b", steps), write(tmp_path / "c", both)
    assert command(a, b, "--tolerance", "1e9")[0] == 1
    assert command(a, c, "--tolerance", "0")[0] == 0


def test_only_steps_that_both_have_are_compared(command: Command, tmp_path: Path, steps: dict[int, Places]) -> None:
    a, b = write(tmp_path / "a", {1: steps[1], 3: steps[3]}), write(tmp_path / "b", {2: steps[1], 3: steps[3]})
    with (b / FILE).open("a") as file:
        file.write('{"step": 4, "pla')  # The run goes on.
    status, out, _ = command(a, b)
    assert status == 0 and "steps 3 to 3, 1 of them in both, 19 places each\n" in out


def test_settings_that_differ_are_told(command: Command, tmp_path: Path, steps: dict[int, Places]) -> None:
    out = command(write(tmp_path / "a", steps), write(tmp_path / "b", steps, "float32", "rowwise"))[1]
    assert '- `training.mixed_precision_param`: "bfloat16" and "float32"\n' in out
    assert '- `float8.recipe_name`: "none" and "rowwise"\n' in out
    assert "the rounding of bfloat16\n" in out  # The more precise of the two.


# What is allowed


def test_what_rounding_makes() -> None:
    """Against the sums themselves: values that go through as many roundings, averaged over rows."""
    torch.manual_seed(seed := torch.seed() % 2**31)
    print("the values of this test are of seed", seed)
    places = {f"layers.{i} output": {"count": 64 * 256} for i in range(2)}
    places |= {"norm output": {"count": 64 * 256}, "norm.weight": {"count": 256}}
    rounding = Rounding("bfloat16", places, first_step=1)
    assert [rounding.roundings(place) for place in ("tok_embeddings output", "layers.0 output", "loss")] == [1, 13, 25]
    back = ["norm output", "layers.1 output", "layers.0.wq.weight", "tok_embeddings output"]
    assert [rounding.roundings(f"{place} gradient") for place in back] == [25, 25, 37, 49]
    # 200 times, of 64 rows: thirteen roundings, whatever the values then are, that the values of a row share.
    x, shares = torch.randn(64, 256).double(), torch.ones(200, 64, 1).double()
    for _ in range(13):
        values = torch.rand(200, 64, 1).double() + 1
        shares *= values.bfloat16().double() / values
    moved = ((x * shares).square().mean(dim=(1, 2)).sqrt() / x.square().mean().sqrt() - 1).abs()
    allowed = rounding.allowed(1, "layers.0 output", "rms", 64 * 256)
    assert moved.max() < allowed
    assert 4 < allowed / moved.mean() < 10  # The mean of sizes is 0.8 of a deviation, and five deviations are allowed.
    assert rounding.allowed(3, "layers.0 output", "rms", 64 * 256) == 3 * allowed
    assert rounding.allowed(1, "layers.0 output", "largest", 64 * 256) == pytest.approx(8 * allowed)
    assert rounding.allowed(1, "layers.0.wq.weight", "rms", 64) == 0 < rounding.allowed(2, "norm.weight", "rms", 64)
    assert rounding.allowed(1, "loss", "mean", 1) == pytest.approx(allowed * math.sqrt(25 / 13))
    ratio = Rounding("float32", places, 1).allowed(1, "loss", "mean", 1) / rounding.allowed(1, "loss", "mean", 1)
    assert ratio == pytest.approx(16 * 2**-24 / 2**-8)  # Sums of 256.


# What is wrong


def test_a_mistake_is_a_sentence(command: Command, tmp_path: Path, steps: dict[int, Places]) -> None:
    good = write(tmp_path / "good", steps)

    def told(message: str, *argv: object) -> None:
        status, out, err = command(*argv)
        assert (status, out) == (2, "") and err.startswith("compare_layers: ") and err.count("\n") == 1
        assert message in err

    told("nowhere/layer_statistics.jsonl cannot be read (No such file or directory): train the run", good, "nowhere")
    told("has no step yet: train the run with --debug.layer_statistics_freq 1", good, write(tmp_path / "none", {}))
    told("is not as train.py writes it (KeyError('rms'))", write(tmp_path / "odd", {1: {"loss": {"count": 1}}}), good)
    other = write(tmp_path / "other", {7: steps[1]})
    told("no step is in both (steps 1 to 3 in ", good, other)
    fewer = {place: of_place for place, of_place in steps[1].items() if not place.startswith("layers.1")}
    told("(layers.1 output): these are two models", good, write(tmp_path / "fewer", {1: fewer}))
    longer = copy.deepcopy(steps)
    longer[1]["layers.0 output"]["count"] = 72
    told("step 1, layers.0 output: 64 values in ", good, write(tmp_path / "longer", longer))
    for tolerance in ("nan", "-1", "inf"):
        told(": give a share, for example 0.001, or 0", good, good, "--tolerance", tolerance)
    (good / "config.toml").unlink()
    told("config.toml does not tell the run's precision: give --tolerance", good, good)
    assert command(good, good, "--tolerance", "0")[0] == 0


# In real runs

BASE = (
    "--config debug.toml --model.n_layers 3 --training.seq_len 64 --training.global_batch_size 8 --training.steps 2 "
    "--lr_scheduler.warmup_steps 2 --validation.enable false --metrics.enable_tensorboard false "
    "--checkpoint.enable false --debug.layer_statistics_freq 1"
)
FLOAT8 = "--float8.recipe_name rowwise"
PLANTED = {
    "bf16": "--training.mixed_precision_param bfloat16",
    "bf16 and float8": f"--training.mixed_precision_param bfloat16 {FLOAT8}",
    "float8": FLOAT8,
    "float8 but block 1": f"{FLOAT8} --float8.filter_fqns output,layers.1.",
}


def train(folder: Path, flags: str, change: str | None = None) -> None:
    """With one value of the weight `change` changed, in its last place."""
    ranks = dist.get_world_size()
    batch = f"--training.local_batch_size {8 // ranks} --job.dump_folder".split()
    trainer = Trainer(load_config([*BASE.split(), *flags.split(), *batch, str(folder)], ranks), torch.device("cpu"))
    if change is not None:
        weight: Any = trainer.model.get_parameter(change)
        local_weight = local(weight.detach())
        local_weight[3, 5] = torch.nextafter(local_weight[3, 5], local_weight.new_tensor(math.inf))
    trainer.train()
    trainer.close()


def runs(folder: Path) -> None:
    ranks = dist.get_world_size()
    train(folder / f"float32 on {ranks}", "")
    if ranks == 2:
        train(folder / "bf16 on 2", PLANTED["bf16"])
        return
    for name, flags in PLANTED.items():
        train(folder / name, flags)
    train(folder / "changed", "", "layers.1.feed_forward.w3.weight")


def test_planted_differences_are_found_where_they_are(command: Command, tmp_path: Path) -> None:
    for ranks in (1, 2):
        launch(runs, ranks, tmp_path)

    def compared(one: str, other: str, *flags: str) -> tuple[int, str]:
        return command(tmp_path / one, tmp_path / other, *flags)[:2]

    for pair in (("float32 on 1", "float32 on 2"), ("bf16", "bf16 on 2")):
        status, out = compared(*pair)
        assert status == 0 and "AGREE: nothing is beyond the tolerance" in out
    status, out = compared("bf16", "bf16 and float8")
    assert status == 1 and "DIFFER: beyond the tolerance first at step 1, layers.0 output: " in out
    status, out = compared("float32 on 1", "changed")
    assert status == 1 and "DIFFER: beyond the tolerance first at step 1, layers.1.feed_forward.w3.weight: " in out
    status, out = compared("float8", "float8 but block 1", "--tolerance", "0")
    assert status == 1 and "DIFFER: beyond the tolerance first at step 1, layers.1 output: " in out
    # Two runs in float8 may differ by as much as float8's own rounding; where they begin to is told all the same.
    status, out = compared("float8", "float8 but block 1")
    assert status == 0 and "alike to the last bits before step 1, layers.1 output: " in out


def test_sums_in_another_order_are_alike() -> None:
    torch.manual_seed(seed := torch.seed() % 2**31)
    print("the values of this test are of seed", seed)
    x = torch.randn(2**16, dtype=torch.float64)
    means = [x[torch.randperm(len(x))].mean().item() for _ in range(10)]
    assert max(means) - min(means) <= exact(len(x))
