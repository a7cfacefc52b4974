"""What a trained model answers to lm-evaluation-harness, and the harness itself where it is installed."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from errors import UserError
from models.llama.model import Llama
from scripts import harness
from scripts.harness import TaskModel, run_tasks
from scripts.trained_model import build_tensor_parallel, find_trained
from tests.models.llama.test_generate import read_anew
from tests.scripts.small_trained import NEW, SEQ_LEN, TEXTS, greedy_text, one_rank, prompts

CLOSE: Any = {"rel": 1e-5, "abs": 1e-4}  # Of sums of a few logits of some tens each, in float32.
CODE = "import os\n\n\ndef main(self):\n    for name in os.listdir(self.folder):\n        print(name, 'ünï')\n" * 4


@pytest.fixture
def model(trained: tuple[Path, Llama]) -> Iterator[TaskModel]:
    with one_rank():
        found = find_trained(str(trained[0] / "hf"))
        yield TaskModel(build_tensor_parallel(found, torch.device("cpu"), torch.float32, SEQ_LEN), found)


def requests(*args: tuple[Any, ...]) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=arg) for arg in args]


@torch.no_grad()
def expected(model: TaskModel, ids: list[int], n: int) -> tuple[float, bool]:
    """One sequence by itself, of at most the model's length."""
    logits = model.model(torch.tensor([ids[:-1]])).double().log_softmax(dim=1)[-n:]
    labels = torch.tensor(ids[-n:])
    return float(logits.gather(1, labels[:, None]).sum()), bool((logits.argmax(dim=1) == labels).all())


def obvious(model: TaskModel) -> tuple[str, str]:
    """A context, and the text of the token that is the most probable after it."""
    for i in range(1000):  # Of the rows of the model every third or so is a character by itself.
        ids = model.text.encode(f"x{i} =")
        best = read_anew(model.model, [model.start, *ids], 1)[0]
        text = model.text.decode(best)
        if not text.isspace() and model.text.encode(f"x{i} =" + text) == ids + best:
            return f"x{i} =", text
    raise AssertionError("no token is the most probable")


def test_loglikelihood(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, start = model.text.encode, model.start
    context, best = obvious(model)
    pairs = [("import os", "\n\n\ndef"), ("", "import"), (context, best), ("def ", "f("), ("x =", "")]
    together = encode("import os\n\n\ndef")
    told = [
        expected(model, [start, *together], len(together) - len(encode("import os"))),
        expected(model, [start, *encode("import")], len(encode("import"))),
        expected(model, [start, *encode(context + best)], 1),
        # The space goes with what follows.
        expected(model, [start, *encode("def f(")], len(encode("def f(")) - len(encode("def"))),
    ]
    assert told[2][1]
    for tokens_at_once in (4096, 1):  # All in one batch, and each alone.
        monkeypatch.setattr(harness, "TOKENS_AT_ONCE", tokens_at_once)
        *answers, nothing = model.loglikelihood(requests(*pairs))
        assert nothing == (0.0, True)
        assert [greedy for _, greedy in answers] == [greedy for _, greedy in told]
        assert [score for score, _ in answers] == pytest.approx([score for score, _ in told], **CLOSE)


def test_a_context_that_is_too_long_loses_its_beginning(model: TaskModel, caplog: pytest.LogCaptureFixture) -> None:
    ids = model.text.encode(CODE)
    n = len(ids) - len(model.text.encode(CODE.rstrip()))
    assert len(ids) > SEQ_LEN + 1 and n > 0
    ((score, _),) = model.loglikelihood(requests((CODE.rstrip(), "\n")))
    assert score == pytest.approx(expected(model, ids[-SEQ_LEN - 1 :], n)[0], **CLOSE)
    assert f"of 1 requests 1 are cut to their last {SEQ_LEN} tokens" in caplog.text


def test_windows_predict_every_token_once_with_all_the_context_there_is(model: TaskModel) -> None:
    for length in (0, 1, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, 3 * SEQ_LEN, 3 * SEQ_LEN + 5):
        ids = list(range(1000, 1000 + length))
        windows = list(model.windows(ids))
        assert [id for tokens, n in windows for id in tokens[-n:]] == ids
        for tokens, _ in windows:
            assert len(tokens) == min(SEQ_LEN, length) + 1
            first = tokens[1] - 1000
            assert tokens == [model.start if first == 0 else ids[first - 1], *ids[first : first + SEQ_LEN]]


def test_loglikelihood_rolling(model: TaskModel) -> None:
    start = model.start
    ids = [model.text.encode(text) for text in ("x", CODE)]
    assert len(ids[1]) > SEQ_LEN
    told = [sum(expected(model, tokens, n)[0] for tokens, n in model.windows(each)) for each in ids]
    assert told[0] == expected(model, [start, *ids[0]], len(ids[0]))[0]
    assert model.loglikelihood_rolling(requests(("x",), ("",), (CODE,))) == pytest.approx(
        [told[0], 0.0, told[1]], **CLOSE
    )


def test_generate_until_is_greedy(model: TaskModel, trained: tuple[Path, Llama]) -> None:
    expected = [greedy_text(model.text, trained[1], prompt, NEW) for prompt in prompts(model.text)]
    settings = {"until": ["no such text"], "max_gen_toks": NEW, "do_sample": False, "temperature": 0.0}
    assert model.generate_until(requests(*((text, settings) for text in TEXTS))) == expected


def test_generate_until_stops(
    model: TaskModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request where it says, although they are one batch; the batch when all have stopped."""
    code = "    return os.sep.join(paths)\n\n\ndef other(self):\n    pass\n"
    ids = model.text.encode(code)
    steps = []

    def fake(_: Llama, prompts: list[list[int]], most: int, *rest: Any) -> Iterator[list[int | None]]:
        steps.append(0)
        assert max(map(len, prompts)) + most <= SEQ_LEN
        for i, id in enumerate(ids[:most]):
            steps[-1] += 1
            yield [id if i < 30 else None for _ in prompts]

    monkeypatch.setattr(harness, "generate", fake)
    cases = [
        (("x", {"until": ["\n\n", "join"], "max_gen_toks": 40}), "    return os.sep."),
        (("def f(", {"until": ".", "max_gen_toks": 40}), "    return os"),
        ((CODE, {"until": [], "max_gen_toks": 5}), model.text.decode(ids[:5])),
        (("y", {"until": ["no such text", ""], "max_gen_toks": 12}), model.text.decode(ids[:12])),
    ]
    assert model.generate_until(requests(*(args for args, _ in cases))) == [text for _, text in cases]
    assert steps[-1] < 30
    assert "of 4 requests 1 are cut to their last 24 tokens" in caplog.text
    whole = model.generate_until(requests(("x", {"until": ["no such text"], "max_gen_toks": 40})))
    assert whole == [model.text.decode(ids[:30])] and steps[-1] == 31


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True}, "--tasks: a task asks for samples (do_sample), and generation is greedy here: leave it"),
        ({"max_gen_toks": 64}, "--tasks: a task asks for 64 tokens of a model that reads 64: leave it out"),
    ],
)
def test_what_it_does_not_do_is_a_sentence(model: TaskModel, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        model.generate_until(requests(("x", settings)))
    assert str(error.value).startswith(message)


TASK = """
task: ends
dataset_path: json
dataset_kwargs: {data_files: {validation: FILE}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{text}}"
doc_to_target: "{{label}}"
doc_to_choice: choices
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_the_harness_asks_and_counts(model: TaskModel, trained: tuple[Path, Llama], tmp_path: Path) -> None:
    """A task whose right answers are the model's own, but for one of four."""
    docs = []
    for i, text in enumerate(["import os", "def f(", "x", "class A"]):
        choices = [" y", "\n\n"]
        scores = model.loglikelihood(requests(*((text, choice) for choice in choices)))
        docs.append({"text": text, "choices": choices, "label": int((scores[0] < scores[1]) == (i > 0))})
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    (tmp_path / "ends.yaml").write_text(TASK.replace("FILE", str(tmp_path / "docs.jsonl")))
    found = find_trained(str(trained[0] / "hf"))
    assert "|acc   |↑  | 0.75|" in run_tasks([str(tmp_path / "ends.yaml")], model.model, found)
    with pytest.raises(UserError, match='--tasks: lm_eval has no "nonsense"'):
        run_tasks(["nonsense"], model.model, found)
