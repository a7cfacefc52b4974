"""Shares and noise of float8: of tensors whose shares are known, of torchao's own tensors, and of a trained model."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.local import TextFiles
from data.tokenizer import load_tokenizer
from float8.quantise import columns_from_rows, dequantise, quantise_rows
from float8.scaled import FLOAT8, Float8Rows
from models.llama.model import Llama
from scripts import float8_health
from scripts.evaluate import SEED, Text
from scripts.float8_health import (
    RECIPES,
    Found,
    Health,
    by_rows_and_columns,
    by_tensor,
    found_of,
    keys_of,
    sums_of,
    verdict,
)
from scripts.local_ranks import launch
from tests.scripts.small_trained import DOCUMENTS, SEQ_LEN, one_rank, own_environment, write_documents

E5M2 = torch.float8_e5m2
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_values() -> None:
    torch.manual_seed(seed := torch.seed() % 2**31)
    print("the values of this test are of seed", seed)


def shares(sums: Tensor) -> Found:
    return found_of((0, "w2", "input", "rows"), sums.tolist())


# Known shares


def test_a_row_whose_shares_are_known() -> None:
    # The largest makes the scale 1. Of float8, 2**-9 is the smallest and 2**-6 the smallest of full precision.
    row = [448.0, -1.5, 2**-6, 0.9 * 2**-6, -(2**-9), 0.51 * 2**-9, 0.49 * 2**-9, -(2**-30), 0.0, 0.0]
    for power in (0, 20, -20):
        x = torch.tensor([row]) * 2.0**power
        rows = quantise_rows(x)
        found = shares(sums_of(x, rows.data, rows.scale))
        assert (found.values, found.flushed, found.subnormal) == (8, 2 / 8, 3 / 8)
        assert (found.saturated, found.not_finite) == (0, 0)


def test_only_what_is_beyond_rounding_is_saturated() -> None:
    for dtype, largest, half_step in ((FLOAT8, 448.0, 16.0), (E5M2, 57344.0, 4096.0)):
        x = (
            torch.tensor([0.5, 1.0, 1.001, -(largest + half_step) / largest, -1.04 - half_step / largest, 30.0])
            * largest
        )
        for scale in (1.0, 2.0**-5):
            data = x.clamp(-largest, largest).to(dtype)
            found = shares(sums_of(x[None] * scale, data[None], torch.tensor(scale)))
            assert (found.values, found.saturated) == (6, 2 / 6)


def test_noise_is_what_values_are_off_by() -> None:
    x = torch.tensor([[17.0, 448.0]])  # In steps of 2 above 16.
    rows = quantise_rows(x)
    assert shares(sums_of(x, rows.data, rows.scale)).db == pytest.approx(10 * math.log10(17**2 + 448**2))
    exact = quantise_rows(x[:, 1:])
    assert shares(sums_of(x[:, 1:], exact.data, exact.scale)).db is None


def test_what_is_not_finite_is_counted_and_can_be_written() -> None:
    x = torch.randn(4, 8)
    x[1, 2], x[2, 3] = math.nan, math.inf
    rows = quantise_rows(x)
    found = shares(sums_of(x, rows.data, rows.scale))
    assert (found.not_finite, found.db) == (2 / 32, None)
    zeros = shares(torch.zeros(7))
    assert (zeros.values, zeros.flushed, zeros.db) == (0, 0, None)


@pytest.mark.parametrize(("operand", "by", "dtype"), [("input", "rows", FLOAT8), ("gradient", "tensor", E5M2)])
def test_the_limits_are_those_of_rounding(operand: str, by: str, dtype: torch.dtype) -> None:
    x = torch.exp2(torch.rand(1_000_000, dtype=torch.float64) * 8)  # Spread evenly on a logarithm.
    error = (x.to(dtype).double() / x - 1).abs()
    found = found_of((0, "w2", operand, by), [1, 0, 0, 0, 0, 1, 1])
    # Within a step, of which there are 4 or 8 from one power of two to the next, errors are not quite even.
    assert error.mean() == pytest.approx(found.limit, rel=0.02)
    assert -10 * math.log10(error.square().mean()) == pytest.approx(found.own_db, abs=0.1)


# As each recipe quantises


@pytest.mark.parametrize("piece", [1, 100, 2**21])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pieces_are_of_the_whole(monkeypatch: pytest.MonkeyPatch, piece: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(float8_health, "PIECE", piece)
    x = (torch.randn(48, 32) * torch.randn(48, 32).mul(4).exp()).to(dtype)
    rows = quantise_rows(x)
    columns = columns_from_rows(rows)
    pieces: dict[str, list[tuple[Tensor, Float8Rows]]] = {"rows": [], "columns": []}
    for way, part, quantised in by_rows_and_columns(x):
        pieces[way].append((part, quantised))
    for way, whole, original in (("rows", rows, x), ("columns", columns, x.t())):
        assert torch.equal(torch.cat([part for part, _ in pieces[way]]), original)
        assert torch.equal(torch.cat([dequantise(q) for _, q in pieces[way]]), dequantise(whole))


@pytest.mark.parametrize("piece", [64, 2**21])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_is_quantised_as_torchao_does(monkeypatch: pytest.MonkeyPatch, piece: int, dtype: torch.dtype) -> None:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    monkeypatch.setattr(float8_health, "PIECE", piece)
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    assert config.cast_config_input.target_dtype == config.cast_config_weight.target_dtype == FLOAT8
    assert config.cast_config_grad_output.target_dtype == float8_health.GRADIENT_OF_TENSORWISE
    for target in (FLOAT8, E5M2):
        x = (torch.randn(48, 32) * torch.randn(48, 32).mul(4).exp()).to(dtype)
        theirs: Any = hp_tensor_to_float8_dynamic(x, target, LinearMMConfig())
        pieces = list(by_tensor(x, target))
        assert torch.equal(torch.cat([data for _, data, _ in pieces]).float(), theirs._data.float())
        assert all(torch.equal(scale, theirs._scale.reciprocal()) for *_, scale in pieces)


def test_linears_that_share_an_input_share_its_gradients_scales() -> None:
    """Rowhouse quantises their gradients and weights side by side; torchao each by itself."""
    health, x = Health(), torch.randn(16, 16)
    linears = [nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False)]
    small, large = 2.0**-20, 2.0**12
    outs = [linear(x) for linear in linears]
    with one_rank():
        health.see_linears(3, "w13", x, [linear.weight for linear in linears], outs)
    (outs[0].sum() * small + outs[1].sum() * large).backward()
    found = {key: found_of(key, sums.tolist()) for key, sums in health.sums.items()}
    assert {key[:3] for key in found} == {(3, "w13", operand) for operand in ("input", "weight", "gradient")}
    # A third of the columns are 2**-32 of the others, in the same rows; as columns they have scales of their own.
    gradient = {way: found[3, "w13", "gradient", way] for way in ("rows", "columns", "tensor")}
    assert {way: one.values for way, one in gradient.items()} == dict.fromkeys(gradient, 16 * 48)
    assert gradient["rows"].flushed == pytest.approx(1 / 3) == gradient["columns"].flushed
    assert gradient["tensor"].flushed == 0
    assert found[3, "w13", "input", "tensor"].values == 256 and found[3, "w13", "weight", "tensor"].values == 16 * 48


@pytest.mark.parametrize(
    ("recipe", "operand", "by", "flushed", "text"),
    [
        ("rowwise", "gradient", "columns", 0.5, "MORE than the 2.3 % at which zeros lose as much, value for value, as "
         "rounding does: rowwise_with_gw_hp does not quantise it"),
        ("rowwise", "weight", "columns", 0.5, "does: float8.filter_fqns leaves it out"),
        ("rowwise_with_gw_hp", "input", "rows", 0.023, "does: float8.filter_fqns leaves it out"),
        ("tensorwise", "gradient", "tensor", 0.046, "MORE than the 4.5 % at which zeros lose as much, value for value, "
         "as rounding does: rowwise gives each row a scale of its own"),
        ("tensorwise", "gradient", "tensor", 0.044, "4.4 % flushed to zero, 30.0 dB (rounding alone: 25.5); less than"),
        ("rowwise", "input", "rows", 0.022, "rowwise: worst is block 1 w2, input by rows: 2.2 % flushed to zero, "
         "30.0 dB (rounding alone: 31.5); less than the 2.3 % at which zeros lose as much, value for value, as"),
    ],
)  # fmt: skip
def test_what_the_worst_means(recipe: str, operand: str, by: str, flushed: float, text: str) -> None:
    found = [found_of(key, [1000, 0, 0, 0, 0, 1e3, 1]) for key in keys_of(3)]
    bad = found_of((1, "w2", operand, by), [1000, 1000 * flushed, 0, 0, 0, 1e3, 1])
    found = [bad if (one.block, one.group, one.operand, one.by) == (1, "w2", operand, by) else one for one in found]
    assert float8_health.worst(found, recipe) is bad
    assert text in verdict(bad, recipe)
    for other, quantised in RECIPES.items():
        if (operand, by) not in quantised:
            assert float8_health.worst(found, other) is not bad


# A trained model

Run: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    trained: tuple[Path, Llama], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Run]:
    """Runs the script beside run, hf, tied and texts: arguments -> (exit status, standard output, standard error)."""
    for name in ("run", "hf", "tied"):
        (tmp_path / name).symlink_to(trained[0] / name)
    write_documents(tmp_path)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["float8_health", *arguments])
        status = float8_health.main()
        return status, *capsys.readouterr()

    with own_environment():
        yield call


def source() -> TextFiles:
    return TextFiles("text", [Path(f"texts/{i}.txt") for i in range(len(DOCUMENTS))], SEED)


def operands_of(model: Llama, rows: Tensor) -> dict[tuple[int | None, str], dict[str, Tensor]]:
    """Of the plain model, by torch alone: input, weight and gradient of each group of linears."""
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            output.retain_grad()
            kept[name] = (inputs[0].detach(), output)

        return keep

    linears: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    hooks = [linear.register_forward_hook(hook(name)) for name, linear in linears.items()]
    nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, 1:].flatten()).backward()
    for one in hooks:
        one.remove()
    model.zero_grad()
    groups: dict[tuple[int | None, str], list[str]] = {(None, "output"): ["output"]}
    for i in range(len(model.layers)):
        for part, names in (
            ("attention", "wq wk wv"),
            ("attention", "wo"),
            ("feed_forward", "w1 w3"),
            ("feed_forward", "w2"),
        ):
            groups[i, float8_health.GROUPS[names]] = [f"layers.{i}.{part}.{name}" for name in names.split()]
    return {
        key: {
            "input": kept[names[0]][0],
            "weight": torch.cat([linears[name].weight.detach() for name in names]),
            "gradient": torch.cat([gradient(kept[name][1]) for name in names], dim=1),
        }
        for key, names in groups.items()
    }


def gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def test_a_models_operands_are_those_of_plain_torch(run: Run, trained: tuple[Path, Llama]) -> None:
    rows = [row for row in Text(source(), load_tokenizer("hf"), 32).rows() if len(row) == 33]
    expected = operands_of(trained[1], torch.tensor(rows))
    flags = ["--dataset", "text", "--dataset_path", "texts", "--seq-len", "32", "--json", "health.json"]
    outs = []
    for location in ("run", "hf", "run/checkpoint/step-9"):
        status, out, _ = run("--checkpoint", location, *flags)
        assert status == 0
        outs.append(out.split("\n", 1)[1])
    assert outs[0] == outs[1] == outs[2]
    content = json.loads(Path("health.json").read_text())
    assert (content["tokens"], content["seq_len"], content["dtype"]) == (32 * len(rows), 32, "float32")
    found = {(one["block"], one["group"], one["operand"], one["by"]): one for one in content["operands"]}
    assert list(found) == keys_of(2)
    for (block, group), operands in expected.items():
        for operand, x in operands.items():
            by_rows = quantise_rows(x)
            by_columns = columns_from_rows(by_rows)
            for way, before, after in (("rows", x, by_rows), ("columns", x.t(), by_columns)):
                one, values = found[block, group, operand, way], int((before != 0).sum())
                # Other orders of summation may move a few values past an edge.
                few = 5 / values
                assert one["values"] == pytest.approx(values, abs=5)
                flushed, subnormal = (after.data.float() == 0) & (before != 0), after.data.float().abs()
                subnormal = (subnormal > 0) & (subnormal < 2**-6)
                assert one["flushed"] == pytest.approx(flushed.sum().item() / values, abs=few)
                assert one["subnormal"] == pytest.approx(subnormal.sum().item() / values, abs=few)
                noise = (dequantise(after) - before).double().square().sum() / before.double().square().sum()
                assert one["db"] == pytest.approx(-10 * math.log10(noise), abs=0.01)
                assert (one["saturated"], one["not_finite"]) == (0, 0)
    # The table has a row of each, and the last line is on the worst of the blocks in the recipe rowwise.
    lines = outs[0].splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + len(found) // 3
    most = content["worst"]["rowwise"]
    assert lines[-1].startswith(
        f"rowwise: worst is block {most['block']} {most['group']}, {most['operand']} by {most['by']}: "
    )
    in_rowwise = [one for one in found.values() if one["block"] is not None and one["by"] != "tensor"]
    assert most["flushed"] == max(one["flushed"] for one in in_rowwise)


def test_a_tied_head_is_the_embedding(run: Run) -> None:
    flags = ["--dataset", "text", "--dataset_path", "texts", "--json", "health.json", "--dtype", "bfloat16"]
    status, out, _ = run("--checkpoint", "tied", *flags)
    assert status == 0 and "bfloat16: " in out
    head = [one for one in json.loads(Path("health.json").read_text())["operands"] if one["block"] is None]
    assert [one["operand"] for one in head[::3]] == ["input", "weight", "gradient"]
    assert head[3]["values"] == 320 * 256 and all(one["values"] for one in head)


def on_ranks(folder: Path, batches: str) -> None:
    for kind in ("run", "tied"):
        name = f"{kind}-{dist.get_world_size()}.json"
        # Two sequences a batch.
        float8_health.TOKENS_AT_ONCE = 2 * SEQ_LEN
        argv = ["--checkpoint", str(folder / kind), "--dataset", "text", "--dataset_path", str(folder / "texts")]
        arguments = float8_health.parser().parse_args([*argv, "--batches", batches, "--json", str(folder / name)])
        float8_health.examine(arguments, CPU)


def test_two_ranks_share_the_batches(trained: tuple[Path, Llama], tmp_path: Path) -> None:
    for name in ("run", "tied"):
        (tmp_path / name).symlink_to(trained[0] / name)
    write_documents(tmp_path)
    launch(on_ranks, 2, tmp_path, "1")
    with one_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8_health, "TOKENS_AT_ONCE", 2 * SEQ_LEN)
        on_ranks(tmp_path, "2")
    for kind in ("run", "tied"):
        one, two = (json.loads((tmp_path / f"{kind}-{ranks}.json").read_text()) for ranks in (1, 2))
        assert one["tokens"] == two["tokens"] == 4 * SEQ_LEN
        for a, b in zip(one["operands"], two["operands"], strict=True):
            numbers = [key for key, value in a.items() if isinstance(value, float)]
            assert [a[key] for key in numbers] == pytest.approx([b[key] for key in numbers], rel=1e-9), a
            assert all(a[key] == b[key] for key in a if key not in numbers), a


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--checkpoint nothing", "--checkpoint: nothing is neither a run's folder (config.toml), nor a checkpoint"),
        ("--checkpoint run --dataset tex", '--dataset: "tex" is not a dataset; did you mean "text"?'),
        ("--checkpoint run --dataset text", '--dataset_path: dataset = "text" needs it; say where the data is'),
        ("--checkpoint run --seq-len 65", "--seq-len: the model does not read 65 tokens: give 1 to 64"),
        ("--checkpoint run --batches 0", "--batches: 0 show nothing: give 1 or more"),
        ("--checkpoint run --json no/health.json", "--json: there is no folder no: make it, or give another"),
        (
            "--checkpoint run --dataset text --dataset_path texts/3.txt",
            "--dataset: text has 0 whole rows of 64 tokens, and 1 rank takes one at least: give more text, or",
        ),
        (
            "--checkpoint run --dataset text --dataset_path texts --seq-len 16 --json texts",
            "--json: texts cannot be written (Is a directory): give another",
        ),
    ],
)
def test_a_mistake_is_a_sentence(run: Run, arguments: str, message: str) -> None:
    status, out, err = run(*arguments.split())
    assert status == 2 and (not out or "--json texts" in arguments)
    assert err.startswith("float8_health: ") and message in err and err.count("\n") == 1
