"""Perplexity on a data set: every token once, whatever the batches. (On two ranks: test_trained_model.py.)"""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from data.loader import BatchLoader
from data.local import TextFiles
from data.tokenizer import load_tokenizer
from loss import cross_entropy_sum
from models.llama.model import Llama
from scripts import evaluate
from scripts.evaluate import Text
from tests.scripts.small_trained import DOCUMENTS, own_environment, write_documents

Run: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    trained: tuple[Path, Llama], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Run]:
    """Runs the script beside run, hf and texts: arguments -> (exit status, standard output, standard error)."""
    for name in ("run", "hf"):
        (tmp_path / name).symlink_to(trained[0] / name)
    write_documents(tmp_path)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
        status = evaluate.main()
        return status, *capsys.readouterr()

    with own_environment():
        yield call


def source() -> TextFiles:
    return TextFiles("text", [Path(f"texts/{i}.txt") for i in range(len(DOCUMENTS))], evaluate.SEED)


def told(out: str) -> tuple[float, float, float]:
    """nats/token, perplexity, bits/byte"""
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    return tuple(float(lines[key]) for key in ("nats/token", "perplexity", "bits/byte"))  # type: ignore[return-value]


@torch.no_grad()
def test_the_loss_is_that_of_every_token(
    run: Run, trained: tuple[Path, Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, nats, size = load_tokenizer("hf"), 0.0, len("".join(DOCUMENTS).encode())
    rows = list(Text(source(), tokenizer, 32).rows())
    for row in rows:  # Each by itself; the last one is shorter.
        logits = trained[1](torch.tensor([row[:-1]])).double()
        nats += float(torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum"))
    count = sum(len(tokenizer.encode(text)) + 2 for text in DOCUMENTS) - 1
    flags = ["--dataset", "text", "--dataset_path", "texts", "--seq-len", "32"]
    expected = (nats / count, math.exp(nats / count), nats / math.log(2) / size)
    for location, at_once in [("run", 16384), ("hf", 96), ("run/checkpoint/step-9", 1)]:
        monkeypatch.setattr(evaluate, "TOKENS_AT_ONCE", at_once)
        status, out, _ = run("--checkpoint", location, *flags)
        assert status == 0
        assert f"text: {len(DOCUMENTS)} documents, {size:,} bytes, {count:,} tokens\n" in out
        assert told(out) == pytest.approx(expected, rel=1e-4)
        assert told(out)[0] == pytest.approx(expected[0], abs=1e-5)


def test_rows_are_those_of_training(run: Run) -> None:
    tokenizer = load_tokenizer("hf")
    rows = list(Text(source(), tokenizer, 32).rows())
    with BatchLoader(source(), tokenizer, seq_len=32, lanes=1, first_lane=0, num_lanes=1, epochs=1) as loader:
        packed = [[*inputs[0].tolist(), int(labels[0, -1])] for inputs, labels in loader]
    assert len(packed) > 5 and packed == rows[: len(packed)]
    assert len(rows) == len(packed) + 1 and len(rows[-1]) < 33  # What training keeps for the next epoch.


def test_a_text_ends_with_the_document_that_reaches_the_tokens(run: Run) -> None:
    tokenizer = load_tokenizer("hf")
    documents = [text for _, text in source().documents(0)]
    ends = torch.tensor([len(tokenizer.encode(text)) + 2 for text in documents]).cumsum(0).sub(1).tolist()
    for tokens, count in [(1, 1), (ends[0], 1), (ends[0] + 1, 2), (ends[2], 3), (10**9, 5)]:
        text = Text(source(), tokenizer, 32, tokens)
        labels = sum(len(row) - 1 for row in text.rows())
        assert (text.documents, text.labels, labels) == (count, ends[count - 1], ends[count - 1])
        assert text.bytes == len("".join(documents[:count]).encode())
    status, out, _ = run(
        "--checkpoint", "run", "--dataset", "text", "--dataset_path", "texts", "--tokens", str(ends[1])
    )
    assert status == 0 and f" 2 documents, {len(''.join(documents[:2]).encode()):,} bytes, {ends[1]:,} tokens\n" in out


def test_what_is_not_there_is_not_predicted() -> None:
    inputs, labels = evaluate.inputs_and_labels([[5, 6, 7], [], [1, 2, 3, 4]], 3)
    assert inputs.tolist() == [[5, 6, 0], [0, 0, 0], [1, 2, 3]]
    assert labels.tolist() == [[6, 7, -100], [-100, -100, -100], [2, 3, 4]]
    assert cross_entropy_sum(torch.randn(9, 8), labels.flatten()).isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--checkpoint nothing", "--checkpoint: nothing is neither a run's folder (config.toml), nor a checkpoint"),
        ("--checkpoint run --dataset tex", '--dataset: "tex" is not a dataset; did you mean "text"?'),
        ("--checkpoint run --dataset text", '--dataset_path: dataset = "text" needs it; say where the data is'),
        (
            "--checkpoint run --dataset_path texts",
            '--dataset_path: dataset = "stdlib_validation" takes no path; remove',
        ),
        ("--checkpoint run --dataset text --dataset_path no", "validation.dataset_path): there is no no; give a file"),
        ("--checkpoint run --seq-len 65", "--seq-len: the model does not read 65 tokens: give 1 to 64"),
        ("--checkpoint run --seq-len 0", "--seq-len: the model does not read 0 tokens: give 1 to 64"),
        ("--checkpoint run --tokens 0", "--tokens: 0 are no text: give 1 or more"),
        (
            "--checkpoint run --tasks x --tokens 5",
            "--tokens: tasks bring their own text: leave --tokens out, or --tasks",
        ),
    ],
)
def test_a_mistake_is_a_sentence(run: Run, arguments: str, message: str) -> None:
    status, out, err = run(*arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith("evaluate: ") and message in err and err.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_tasks_need_a_package(run: Run) -> None:
    message = "evaluate: --tasks: the package lm_eval is not installed: pip install lm_eval\n"
    assert run("--checkpoint", "run", "--tasks", "hellaswag") == (2, "", message)
