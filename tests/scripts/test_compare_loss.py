"""The command: what it is told, what it trains and what it reuses; and one real comparison, of two variants."""

import json
import math
import sys
from pathlib import Path

import pytest

from errors import UserError
from scripts import compare_loss
from scripts.compare_loss import SHIPPED, Run
from tests.scripts.test_loss_curves import write_run

TINY = (
    "--config debug.toml --model.n_layers 1 --training.seq_len 32 --training.global_batch_size 4 --training.steps 3 "
    "--lr_scheduler.warmup_steps 1 --validation.enable false --metrics.enable_tensorboard false "
    "--checkpoint.enable false"
)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs it with --output `tmp_path`/out: exit status, stdout, stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compare_loss", "--output", str(tmp_path / "out"), *map(str, argv)])
        status = compare_loss.main()
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def trained(monkeypatch):
    """Stands in for training: each run has these losses. Returns (name, flags) of what was trained."""
    losses, started = {1: 4.0, 2: 3.0, 3: 2.0}, []

    def run_ranks(run: Run, folder: Path, flags: list[str]) -> None:
        started.append((run.name, flags))
        write_run(folder, losses)

    monkeypatch.setattr(compare_loss, "run_ranks", run_ranks)
    return started


# What is wrong


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--run", "a"], "--run a: is written NAME[@RANKS]=FLAGS, for example"),
        (["--run", "a=debug.toml"], "--run a=debug.toml: is written NAME[@RANKS]=FLAGS"),
        (["--run", "a@two=--config x"], '"two" is no number of ranks: write a@2 for two'),
        (["--run", "a@0=--config x"], '"0" is no number of ranks'),
        (["--read", "a"], "--read a: is written NAME=FOLDER"),
        (["--run", f"a={TINY}"], "one variant is compared with nothing: give two or more"),
        (["--run", f"a/b={TINY}", "--run", f"c={TINY}"], '"a/b": a name is letters, digits'),
        (["--run", f"..={TINY}", "--run", f"c={TINY}"], '"..": a name is letters, digits'),
        (["--run", f"a={TINY}", "--run", f"a={TINY}"], '"a" is the name of two variants'),
        (["--run", f"a={TINY}", "--shipped", "ac"], "--shipped: has variants of its own"),
        (["--steps", "0"], "--steps 0: give 1 or more"),
        (["--tolerance", "nan"], "--tolerance nan: give a share of the loss"),
        (["--tolerance", "-1"], "--tolerance -1.0: give a share of the loss"),
        (["--shipped", "resumed", "--steps", "1"], "undisturbed: 1 problem in the configuration"),
        (["--run", f"a={TINY}", "--run", "b=--config nothing.toml"], 'b: --config: there is no file "nothing.toml"'),
        (["--run", f"a={TINY}", "--run", f"b={TINY} --float8.recipe_nam x"], 'b: 1 problem in the configuration:\n'),
        (["--run", f"a={TINY}", "--run", f"b={TINY} 'x"], "b: No closing quotation"),
        (["--run", f"a={TINY}", "--run", f"b={TINY} --job.dump_folder x"], "leave --job.dump_folder out"),
        (["--run", f"a={TINY}", "--run", f"b={TINY} --training.seq_len 64"], "b: 256 tokens a step, and a 128"),
        (["--run", f"a={TINY}", "--run", f"b={TINY} --training.steps 4"], "training.steps (a 3, b 4): give all the"),
        (["--run", f"a={TINY}", "--read", "b=nowhere"], "b: nowhere/metrics.jsonl cannot be read"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_before_anything_is_trained(command, trained, tmp_path, argv, text):
    status, out, err = command(*argv)
    assert (status, out) == (2, "")
    assert err.startswith("compare_loss: ") and text in err
    assert not trained and not (tmp_path / "out").exists()


def test_nothing_is_trained_to_another_length_than_what_is_read(command, trained, tmp_path):
    path = write_run(tmp_path / "b", {1: 4.0, 2: 3.0}) / "metrics.jsonl"
    path.write_text(path.read_text().replace('"tokens_seen": 8', '"tokens_seen": 128'))
    variants = ["--run", f"a={TINY}", "--read", f"b={path.parent}"]
    status, _, err = command(*variants)
    assert status == 2 and "training.steps (a 3, b 2): give all the same, with --steps" in err and not trained


def test_one_step_has_no_middle(tmp_path):
    run = Run("a", f"{TINY} --training.steps 1", interrupted=True)
    with pytest.raises(UserError, match="a: one step has no middle to stop at: give --steps 2"):
        compare_loss.resolve(run, tmp_path, None)


def test_a_folder_that_cannot_be_made(command, trained, tmp_path):
    (tmp_path / "out").write_text("")
    status, _, err = command("--run", f"a={TINY}", "--run", f"b={TINY}")
    assert status == 2 and "--output: " in err and "choose another folder" in err


def test_what_is_in_the_way_is_not_removed(command, trained, tmp_path):
    write_run(tmp_path / "out" / "a", {1: 4.0})
    status, _, err = command("--run", f"a={TINY}", "--run", f"b={TINY}")
    assert status == 2 and "holds something that is not of this command: choose another" in err and not trained
    assert (tmp_path / "out" / "a" / "metrics.jsonl").is_file()


# What is trained, and what is not


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_comparisons_are_right(name, tmp_path):
    runs = SHIPPED[name].runs
    compare_loss.check_names(runs)
    for steps in (None, 200):
        configs = {run.name: compare_loss.resolve(run, tmp_path / run.name, steps)[1] for run in runs}
        assert len({compare_loss.tokens_a_step(configs[run.name], run.ranks) for run in runs}) == 1
        assert len({config.training.steps for config in configs.values()}) == 1
        assert all(config.metrics.log_freq == 1 for config in configs.values())
    assert steps == configs[runs[0].name].training.steps


def test_a_finished_run_is_reused_as_long_as_nothing_changes(command, trained, tmp_path, monkeypatch):
    two = ["--run", f"a={TINY}", "--run", f"b@2={TINY} --training.local_batch_size 2 --activation_checkpoint.mode full"]
    status, out, _ = command(*two)
    assert status == 0 and [name for name, _ in trained] == ["a", "b"]
    assert "b passes: within" in out and (tmp_path / "out" / "comparison.png").is_file()
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["within"]

    def trained_anew(*argv: object) -> tuple[list[str], str]:
        trained.clear()
        err = command(*argv)[2]
        return [name for name, _ in trained], err

    names, err = trained_anew(*two)
    assert names == [] and f"a: reused, since nothing has changed: {tmp_path / 'out' / 'a'} (finished 2" in err
    names, err = trained_anew(*two[:2], "--run", two[3].replace("b@2", "b@1"))
    assert names == ["b"] and "is made anew (changed: ranks)" in err
    names, err = trained_anew(*two, "--steps", 2)
    assert names == ["a", "b"] and "a: the run in" in err and "(changed: configuration)" in err
    path = tmp_path / "out" / "a" / "variant.json"
    compare_loss.write_record(path, json.loads(path.read_text())["record"], None)
    names, err = trained_anew(*two, "--steps", 2)
    assert names == ["a"] and "(it was not finished)" in err
    monkeypatch.setattr(compare_loss, "TRAINS", ())
    names, err = trained_anew(*two, "--steps", 2)
    assert names == ["a", "b"] and "(changed: code)" in err


def test_an_interrupted_run_is_trained_twice(trained, tmp_path):
    run = Run("a", f"{TINY} --training.steps 7 --checkpoint.enable true", interrupted=True)
    compare_loss.train(run, tmp_path / "a", *compare_loss.resolve(run, tmp_path / "a", None))
    (_, first), (_, second) = trained
    assert first == [*second, "--training.steps", "3", "--lr_scheduler.total_steps", "7"]


def test_nan_and_a_gap_end_with_1_and_folders_are_compared(command, tmp_path):
    write_run(tmp_path / "a", {1: 4.0, 2: 3.0})
    write_run(tmp_path / "b", {1: 4.0, 2: 3.006})
    write_run(tmp_path / "c", {1: math.nan})
    write_run(tmp_path / "d", {1: 4.0, 10: 3.0})
    read = {name: f"--read={name}={tmp_path / name}" for name in "abcd"}
    assert command(read["a"], read["b"])[0] == 0
    assert command(read["a"], read["b"], "--tolerance", "0.001")[0] == 1
    status, out, _ = command(read["a"], read["b"], "--exact")
    assert status == 1 and "b FAILS: its losses are not a's at 1 of 2 steps" in out
    status, out, _ = command(read["a"], read["c"], "--tolerance", "1e9")
    assert status == 1 and "c FAILS: not finite at step 1: loss; the run ended there" in out
    status, _, err = command(read["a"], read["d"])
    assert status == 2 and "a ends at step 2, d at step 10" in err
    assert command(read["a"], read["d"], "--steps", "1")[0] == 0
    status, out, _ = command(read["d"], read["d"].replace("=d=", "=e="))
    assert status == 0 and "2 of 10 steps were logged, and compared" in out


def test_help_names_the_shipped_comparisons(command, capsys):
    with pytest.raises(SystemExit):
        command("--help")
    out = capsys.readouterr().out
    assert all(f"{name}: {shipped.about}" in out for name, shipped in SHIPPED.items())


# For real


def test_variants_are_trained_and_compared(command, tmp_path):
    plain = ["--run", f"plain={TINY}"]
    status, out, err = command(*plain, "--run", f"full={TINY} --activation_checkpoint.mode full", "--exact")
    assert status == 0, err
    assert out.startswith("3 steps of 128 tokens, gaps to plain, bit-exact\n")
    assert '- full: `activation_checkpoint.mode = "full"`\n- full passes: bit-identical to plain at all 3 steps' in out
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert all(4 < variant["final_loss"] < 9 and variant["tokens_per_second"] > 0 for variant in content["variants"])

    # The learning rate shows in the loss of the second step.
    faster = f"{TINY} --training.local_batch_size 2 --optimizer.lr 4e-3"
    status, out, err = command(*plain, "--run", f"faster@2={faster}", "--exact")
    assert status == 1 and "plain: reused" in err and "faster FAILS: its losses are not plain's" in out
    assert "`optimizer.lr = 0.004`" in out and "`ranks = 2`" in out

    status, out, err = command(*plain, "--run", f"lost={TINY} --model.tokenizer_path nowhere")
    assert (status, out) == (2, "")
    assert "lost: train.py ended with [2]; the end of" in err
    assert "train.py: model.tokenizer_path: there is no nowhere" in err
