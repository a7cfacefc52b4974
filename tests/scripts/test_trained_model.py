"""A trained model is found in a run, in a step or in a Hugging Face folder, on one rank or split over two."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint.folders import MARKER
from data.tokenizer import stdlib_tokenizer
from errors import UserError
from models.llama.generate import choose_token, generate
from models.llama.model import Llama
from scripts.evaluate import Text, build_sharded, summed_loss
from scripts.harness import TaskModel
from scripts.local_ranks import launch
from scripts.trained_model import build_tensor_parallel, check_degree, find_trained
from tests.models.llama.test_model import rowhouse_model
from tests.scripts.small_trained import NEW, SEQ_LEN, SHAPE, flip_a_bit, one_rank, prompts, save_run

CPU = torch.device("cpu")


@pytest.fixture
def folder(trained: tuple[Path, Llama], tmp_path: Path) -> Iterator[Path]:
    """A copy, to be changed; this process is a rank."""
    for name in ("run", "hf"):
        shutil.copytree(trained[0] / name, tmp_path / name)
    with one_rank():
        yield tmp_path


def load(location: Path) -> Llama:
    return build_tensor_parallel(find_trained(str(location)), CPU, torch.float32, SEQ_LEN)


def same_weights(one: Llama, other: Llama) -> bool:
    weights = dict(other.named_parameters())
    return all(torch.equal(weight, weights[name]) for name, weight in one.named_parameters())


# Finding


def test_every_kind_of_folder_gives_the_model(trained: tuple[Path, Llama], folder: Path) -> None:
    for location in (folder / "run", folder / "run" / "checkpoint" / "step-9", folder / "hf"):
        found = find_trained(str(location))
        assert (found.shape, found.max_seq_len) == (SHAPE, SEQ_LEN)
        assert found.stop_ids == {found.tokenizer.eos_id}
        model = load(location)
        assert same_weights(model, trained[1])
        # The same bits as the training model's, positions beyond the prompt included.
        tokens = torch.randint(320, (2, SEQ_LEN))
        with torch.no_grad():
            assert torch.equal(model(tokens), trained[1](tokens))
    assert not same_weights(load(folder / "run" / "checkpoint" / "step-8"), trained[1])


def test_a_hugging_face_model_may_have_several_ends(folder: Path) -> None:
    file = folder / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [7, 8]}))
    assert find_trained(str(folder / "hf")).stop_ids == {1, 7, 8}


def test_a_damaged_latest_is_passed_over_and_left(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = folder / "run" / "checkpoint"
    flip_a_bit(checkpoints / "step-9")
    (checkpoints / "step-8" / MARKER).unlink()
    before = sorted(folder.rglob("*"))
    assert find_trained(str(folder / "run")).path == str(checkpoints / "step-5")
    assert "has other content than was written: taking the checkpoint before" in caplog.text
    assert sorted(folder.rglob("*")) == before


def test_what_cannot_be_loaded_is_a_sentence(folder: Path) -> None:
    checkpoints = folder / "run" / "checkpoint"

    def told(location: Path, message: str) -> None:
        with pytest.raises(UserError) as error:
            load(location)
        assert str(error.value).startswith("--checkpoint: ") and message in str(error.value)

    told(folder / "nothing", "nothing is neither a run's folder (config.toml), nor a checkpoint (step-N), nor a")
    told(checkpoints, "checkpoint is neither")
    flip_a_bit(checkpoints / "step-9")
    told(checkpoints / "step-9", "__0_0.distcp has other content than was written: restore it, or give another")
    (checkpoints / "step-8" / MARKER).unlink()
    told(checkpoints / "step-8", f"step-8 is not finished (it has no valid {MARKER}): give another")
    flip_a_bit(checkpoints / "step-5")
    told(folder / "run", "checkpoint has no checkpoint to load: 2 are damaged: train with checkpoint.enable, or give")
    shutil.rmtree(checkpoints)
    told(folder / "run", "checkpoint has no checkpoint to load: train with checkpoint.enable, or give another")
    other = stdlib_tokenizer(300, folder / "other")
    save_run(folder / "run", rowhouse_model(SHAPE), [1], other.path, "sha256 of another")
    told(folder / "run", "step-1 was trained with another tokenizer (then: sha256 of another; now: sha256 ")
    config = (folder / "run" / "config.toml").read_text()
    (folder / "run" / "config.toml").write_text(config.replace("n_layers = 2", "n_layers = 3"))
    told(folder / "run", "step-1 does not fit the config.toml of its run: it lacks model.layers.2.attention.wk.weight")
    (folder / "run" / "config.toml").unlink()
    told(checkpoints / "step-1", "run/config.toml, which would tell the model of ")
    (folder / "hf" / "tokenizer.json").unlink()
    told(folder / "hf", "hf has no tokenizer: copy the model's tokenizer.json or tokenizer.model to it")
    for key, value, message in [
        ("model_type", "mistral", "config.json is not of a Llama that Rowhouse trains: model_type"),
        ("max_position_embeddings", "64", "max_position_embeddings is 64, not an integer"),
    ]:
        file = folder / "hf" / "config.json"
        content = file.read_text()
        file.write_text(json.dumps(json.loads(content) | {key: value}))
        told(folder / "hf", message)
        file.write_text(content)


def test_degrees_that_the_model_does_not_have_are_a_sentence() -> None:
    check_degree(SHAPE, 4)
    for ranks, message in {
        3: "--nproc-per-node: 8 heads cannot be split over 3 ranks; this model takes 1, 2, 4: start another number",
        8: "--nproc-per-node: 4 key and value heads cannot be split over 8 ranks; this model takes 1, 2, 4: start",
    }.items():
        with pytest.raises(UserError) as error:
            check_degree(SHAPE, ranks)
        assert str(error.value).startswith(message)


# On two ranks


class Documents:
    """A source of a few documents."""

    fingerprint = "a few documents"

    def documents(self, start: int, epoch: int = 0) -> Iterator[tuple[int, str]]:
        yield from enumerate(["import os\n" * 30, "ünï\n", "", "def f(self):\n    return 3\n" * 20, "x = 1\n"])


def answers(folder: Path, *kinds: str) -> dict[str, Any]:
    """What the models say, on the ranks that there are."""
    said: dict[str, Any] = {}
    for kind in kinds:
        found = find_trained(str(folder / kind))
        model = build_tensor_parallel(found, CPU, torch.float32, SEQ_LEN)
        logits: list[torch.Tensor] = []

        def choose(x: torch.Tensor, logits: list[torch.Tensor] = logits) -> torch.Tensor:
            logits.append(x)
            return choose_token(x, temperature=0)

        steps = list(generate(model, prompts(found.tokenizer), NEW, (), choose))
        generator = torch.Generator().manual_seed(3)
        draw = lambda logits, generator=generator: choose_token(logits, 1.0, 5, generator)  # noqa: E731
        drawn = list(generate(model, [[1]], NEW, (), draw))
        ((score, _),) = TaskModel(model, found).loglikelihood([SimpleNamespace(args=("import os", " import sys"))])
        text = Text(Documents(), found.tokenizer, seq_len=32)
        nats = summed_loss(build_sharded(found, CPU, torch.float32, 32), text, CPU)
        said[kind] = {
            "logits": torch.stack(logits), "greedy": steps, "drawn": drawn, "score": score, "nats": nats,
            "counts": (text.documents, text.bytes, text.labels),
        }  # fmt: skip
    return said


def on_a_rank(folder: Path) -> None:
    torch.save(answers(folder, "run", "tied"), folder / f"rank-{torch.distributed.get_rank()}.pt")
    # Each rank reads its share of the files: both hear of the one that is damaged.
    assert find_trained(str(folder / "damaged")).path == str(folder / "damaged" / "checkpoint" / "step-8")


def test_two_ranks_say_what_one_does(trained: tuple[Path, Llama], tmp_path: Path) -> None:
    folder = tmp_path / "both"
    shutil.copytree(trained[0], folder)
    shutil.copytree(folder / "run", folder / "damaged")
    flip_a_bit(folder / "damaged" / "checkpoint" / "step-9")
    with one_rank():
        alone = answers(folder, "run", "tied", "hf")
    launch(on_a_rank, 2, folder)
    ranks = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]
    for kind, one in list(alone.items())[:2]:
        for said in (rank[kind] for rank in ranks):
            # Sums of a few hundred terms, in another order.
            assert (said["logits"] - one["logits"]).norm() < 1e-5 * one["logits"].norm()
            assert said["score"] == pytest.approx(one["score"], rel=1e-5, abs=1e-4)
            assert said["nats"] == pytest.approx(one["nats"], rel=1e-6)
            assert said["greedy"] == one["greedy"] and said["counts"] == one["counts"]
        # Of the same bits every rank draws the same tokens.
        assert torch.equal(ranks[0][kind]["logits"], ranks[1][kind]["logits"])
        assert ranks[0][kind]["drawn"] == ranks[1][kind]["drawn"]
    assert torch.equal(alone["run"].pop("logits"), alone["hf"].pop("logits"))
    assert alone["run"] == alone["hf"]
