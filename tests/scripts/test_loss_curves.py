"""The arithmetic of a comparison and all that it says, on run folders made by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from errors import UserError
from scripts import loss_curves
from scripts.loss_curves import Curve, Difference, check_steps, difference, read_curve
from telemetry.metrics import json_line


def write_run(folder: Path, losses: dict[int, float], grad_norms: dict[int, float] | None = None) -> Path:
    """A run of 8 tokens a step, 100 * step tokens/s."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step, loss in losses.items():
        values: dict[str, float | None] = {
            "loss": loss, "grad_norm": (grad_norms or {}).get(step, 1.0), "tokens_seen": 8 * step,
            "tokens_per_second": 100 * step, "memory_gib": 0.5 if step == 2 else 0.25,
        }  # fmt: skip
        lines.append(json_line(step, values) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def curve(tmp_path):
    def make(name: str, *losses: float, **more: Any) -> Curve:
        return read_curve(name, write_run(tmp_path / name, dict(enumerate(losses, start=1)), **more))

    return make


def told(first: Curve, other: Curve, tolerance: float) -> tuple[Difference, str]:
    found = difference(other, first, tolerance)
    return found, loss_curves.verdict(other, first, found, tolerance)


# Reading


def test_a_folder_is_read(tmp_path):
    folder = write_run(tmp_path, {1: 4.0, 2: 3.0, 3: math.nan, 4: 2.0}, {4: math.inf})
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "validation_loss": 9.0}\n{"step": 5, "lo')
    (folder / "config.toml").write_text('[float8]\nrecipe_name = "rowwise"\n')
    curve = read_curve("a", folder)
    assert list(curve.losses) == [1, 2, 3, 4] and curve.losses[2] == 3.0 and math.isnan(curve.losses[3])
    assert curve.not_finite == {3: "loss", 4: "grad_norm"} and curve.ended_not_finite
    assert (curve.tokens_a_step, curve.tokens_per_second, curve.memory_gib) == (8, 300, 0.5)
    assert curve.settings == {"float8.recipe_name": "rowwise"}


def test_a_folder_is_read_to_a_step(curve, tmp_path):
    curve("a", 4.0, 3.0, 2.0)
    assert list(read_curve("a", tmp_path / "a", steps=2).losses) == [1, 2]
    with pytest.raises(UserError, match=r"a: .*/a ends at step 3: let it go on, or lower --steps from 4"):
        read_curve("a", tmp_path / "a", steps=4)


def test_a_folder_that_has_no_losses_is_told(tmp_path):
    with pytest.raises(UserError, match=r"a: .*metrics.jsonl cannot be read \(No such file.*give the folder of a run"):
        read_curve("a", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="a: .*has no loss of any step: did the run begin at all"):
        read_curve("a", tmp_path)


def test_other_tokens_are_told():
    loss_curves.check_tokens({"a": 2048, "b": 2048})
    with pytest.raises(UserError, match="b: 1,024 tokens a step, and a 2,048: .* the same training.seq_len and"):
        loss_curves.check_tokens({"a": 2048, "b": 1024})


def test_other_steps_are_told(tmp_path):
    def steps(name: str, *there: int) -> Curve:
        return read_curve(name, write_run(tmp_path / name, dict.fromkeys(there, 4.0)))

    check_steps([steps("a", 1, 10, 20), steps("b", 1, 10, 20)])
    with pytest.raises(UserError, match="b ends at step 2, a at step 3: let it go on, or .* both have with --steps 2"):
        check_steps([steps("a", 1, 2, 3), steps("b", 1, 2)])
    with pytest.raises(UserError, match="a ends at step 2, b at step 3"):
        check_steps([steps("a", 1, 2), steps("b", 1, 2, 3)])
    with pytest.raises(UserError, match="b lacks 2 of the 4 steps that a has, the first is step 2: .*log_freq 1"):
        check_steps([steps("a", 1, 2, 3, 4), steps("b", 1, 4)])


def test_what_nan_has_ended_lacks_no_later_steps(curve):
    a, ended = curve("a", 4.0, 3.0, 2.0), curve("b", 4.0, math.nan)
    check_steps([a, ended])
    check_steps([ended, a])
    with pytest.raises(UserError, match="c ends at step 1"):
        check_steps([a, ended, curve("c", 4.0)])


# Judging


def test_figures(curve):
    first = curve("a", 4.0, 2.0, 5.0, 1.0)
    found, text = told(first, curve("b", 4.0, 2.5, 4.5, 1.125, grad_norms={1: 1.5, 2: 1.5, 3: 0.5, 4: 2.0}), 0.11)
    assert found.final_loss == 1.125 and found.steps == 4
    assert found.mean_gap == pytest.approx((0.5 + 0.5 + 0.125) / 4)
    assert found.mean_relative_gap == pytest.approx((0.25 + 0.1 + 0.125) / 4)
    assert found.mean_signed_gap == pytest.approx((0.5 - 0.5 + 0.125) / 4)
    assert (found.largest_gap, found.largest_relative_gap, found.largest_gap_step) == (0.5, 0.25, 2)
    assert (found.first_step_beyond, found.steps_beyond, found.within) == (2, 2, False)
    assert found.grad_norm_ratio == 1.5
    assert text == "b FAILS: it is more than 11 % from a at 2 of 4 steps, first at step 2: 2.5, not 2"


def test_the_tolerance_itself_is_within(curve):
    first, other = curve("a", 4.0, 2.0), curve("b", 4.0, 2.5)
    found, text = told(first, other, 0.25)
    assert found.within and found.first_step_beyond is None
    assert text == "b passes: within 25 % of a at all 2 steps"
    assert not told(first, other, 0.2499)[0].within


def test_exact(curve):
    first = curve("a", 4.0, 0.0)
    found, text = told(first, curve("b", 4.0, 0.0), 0)
    assert found.within and text == "b passes: bit-identical to a at all 2 steps"
    found, text = told(first, curve("c", 4.000000476837158, 0.0), 0)  # The next float32.
    assert not found.within
    assert text == "c FAILS: its losses are not a's at 1 of 2 steps, first at step 1: 4.00000048, not 4"
    assert told(first, curve("d", 4.0, 1e-9), 1e9)[0].largest_relative_gap == math.inf


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 1e300])
def test_nan_never_passes(curve, tolerance):
    good, bad = curve("a", 4.0, 3.0, 2.0), curve("b", 4.0, math.nan, 2.0)
    found, text = told(good, bad, tolerance)
    assert (found.within, found.first_step_beyond, found.not_finite_step) == (False, 2, 2)
    assert (found.mean_gap, found.largest_gap_step) == (0, 1)
    assert text == "b FAILS: not finite at step 2: loss"
    assert not told(bad, good, tolerance)[0].within, "nor does what is compared with it"
    found, text = told(bad, bad, tolerance)
    assert not found.within and text.startswith("b FAILS"), "nor the first itself"
    assert not told(bad, curve("c", 4.0, math.nan, 2.0), tolerance)[0].within, "nor NaN beside NaN"
    found, text = told(good, curve("d", 4.0, 3.0, grad_norms={2: math.inf}), tolerance)
    assert not found.within and text == "d FAILS: not finite at step 2: grad_norm; the run ended there"
    assert not told(curve("e", math.nan), curve("f", math.nan), tolerance)[0].within


def test_what_is_set_otherwise_is_told(curve, tmp_path):
    def configured(name: str, seed: int, recipe: str) -> Curve:
        text = f'[job]\ndump_folder = "{name}"\n[debug]\nseed = {seed}\n[float8]\nrecipe_name = "{recipe}"\n'
        write_run(tmp_path / name, {1: 4.0})
        (tmp_path / name / "config.toml").write_text(text)
        return read_curve(name, tmp_path / name)

    first = configured("a", 0, "none")
    assert loss_curves.notes(first, first) == []
    assert loss_curves.notes(configured("b", 0, "rowwise"), first) == ['b: `float8.recipe_name = "rowwise"`']
    assert loss_curves.notes(configured("c", 1, "none"), first) == [
        "c: `debug.seed = 1`",
        "WARNING: c does not begin as a does, or reads something else (debug.seed): the gap is that of two experiments",
    ]
    assert loss_curves.notes(curve("d", 4.0), first) == []


# Showing


def test_table_and_json(curve, tmp_path):
    first = curve("a", 4.0, 2.0)
    differences = [difference(c, first, 0.01) for c in (first, curve("b", 4.0, 2.5), curve("c", math.nan, math.nan))]
    lines = loss_curves.markdown(differences, 0.01).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and "first step beyond 1 %" in lines[0]
    assert lines[2] == "| a | 2.0000 |  |  |  |  |  |  | 200 | 0.50 |"
    assert lines[3] == "| b | 2.5000 | 0.25 (12 %) | +0.25 | +0.5 (25 %) | 2 | 2 | 1.000 | 200 | 0.50 |"
    assert lines[4].startswith("| c | nan | nan (nan %)")
    loss_curves.write_json(tmp_path / "x.json", differences, 0.01)
    content = json.loads((tmp_path / "x.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (content["first"], content["tolerance"], content["within"]) == ("a", 0.01, False)
    assert content["variants"][1]["largest_gap"] == 0.5
    assert content["variants"][2]["final_loss"] is None and content["variants"][2]["first_step_beyond"] == 1


@pytest.mark.parametrize("losses", [(4.0, 3.0), (4.0, 3.3), (4.0, 3e9), (4.0, math.nan), (math.nan, math.nan), (4.0,)])
@pytest.mark.parametrize("tolerance", [0, 0.01])
def test_a_picture_is_made_of_any_curves(curve, tmp_path, losses, tolerance):
    loss_curves.plot(tmp_path / "x.png", [curve("a", 4.0, 3.0), curve("b", *losses)], tolerance, "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "x.png").stat().st_size > 10_000
