"""Text from a trained model, on the command line."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from data.tokenizer import load_tokenizer
from models.llama.model import Llama
from scripts import generate
from tests.scripts.small_trained import NEW, SEQ_LEN, TEXTS, greedy_text, own_environment, prompts

Run: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    trained: tuple[Path, Llama], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Runs the script, in the folder with run and hf: arguments -> (exit status, standard output, standard error)."""
    monkeypatch.chdir(trained[0])

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["generate", *arguments])
        status = generate.main()
        return status, *capsys.readouterr()

    with own_environment():
        yield call


def test_the_text_is_the_training_models(run: Run, trained: tuple[Path, Llama]) -> None:
    tokenizer = load_tokenizer("hf")
    more = [greedy_text(tokenizer, trained[1], prompt, NEW) for prompt in prompts(tokenizer)]
    expected = [text + end for text, end in zip(TEXTS, more, strict=True)]
    greedy = ["--temperature", "0", "--max-new-tokens", str(NEW)]
    for location in ("run", "run/checkpoint/step-9", "hf"):
        for text, result in zip(TEXTS, expected, strict=True):
            status, out, err = run("--checkpoint", location, "--prompt", text, *greedy)
            assert (status, out) == (0, result + "\n")
            assert " tokens in " in err and location in err and "in float32 on 1 x cpu" in err
    several = [flag for text in TEXTS for flag in ("--prompt", text)]
    status, out, _ = run("--checkpoint", "run", *several, *greedy)
    assert (status, out) == (0, "".join(f"--- {i} of 3\n{text}\n" for i, text in enumerate(expected, start=1)))


def test_what_is_drawn_follows_the_seed(run: Run) -> None:
    flags = [
        "--checkpoint",
        "run",
        "--prompt",
        "import",
        "--max-new-tokens",
        "12",
        "--top-k",
        "50",
        "--temperature",
        "20",
    ]
    texts = [run(*flags, *seed)[1] for seed in ([], ["--seed", "0"], ["--seed", "1"])]
    assert texts[0] == texts[1] != texts[2]


def test_new_tokens_end_where_the_model_does() -> None:
    """Unless more are asked for: then it is an error."""
    assert generate.room(60, None, SEQ_LEN) == 4
    assert generate.room(60, 4, SEQ_LEN) == 4
    assert generate.room(60, None, 8192) == generate.NEW_TOKENS
    assert generate.room(60, 5000, 8192) == 5000


def test_a_character_is_shown_when_it_is_whole(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    shown = ""
    for text in ("a", "a\ufffd", "a\ufffd", "aü", "aüb"):
        shown = generate.show_more(text, shown)
    assert (shown, capsys.readouterr().out) == ("aüb", "aüb")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--checkpoint nothing --prompt x", "--checkpoint: nothing is neither a run's folder (config.toml), nor a"),
        ("--checkpoint run --prompt=", "--prompt: it is empty: give the text to go on from"),
        ("--checkpoint run --prompt x --prompt=", "--prompt: it is empty"),
        ("--checkpoint run --prompt " + "x=" * 64, "tokens, and the model reads 64 with the new ones: shorten it"),
        ("--checkpoint run --prompt xy --max-new-tokens 64", "64 after a prompt of 3 are more than the 64 tokens that"),
        ("--checkpoint run --prompt x --max-new-tokens 0", "--max-new-tokens: 0 make no text: give 1 or more"),
        ("--checkpoint run --prompt x --temperature -1", "--temperature: -1.0 is none: give 0"),
        ("--checkpoint run --prompt x --temperature nan", "--temperature: nan is none: give 0"),
        ("--checkpoint run --prompt x --top-k 0", "--top-k: 0 leaves nothing to choose from: give 1 or more"),
        ("--checkpoint run --prompt x --seed -1", "--seed: -1 is no seed: give 0 to 2**63 - 1"),
        (
            "--checkpoint run --prompt x --temperature 0 --top-k 5",
            "--top-k: nothing is drawn at --temperature 0: raise",
        ),
        ("--checkpoint run --prompt x --temperature 0 --seed 5", "--seed: nothing is drawn at --temperature 0: raise"),
    ],
)
def test_a_mistake_is_a_sentence(run: Run, arguments: str, message: str) -> None:
    status, out, err = run(*arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith("generate: --") and message in err and err.count("\n") == 1
