"""The trainer as a whole: runs that stop and go on, that validate, that reach the end of their data, on 1 and 2 ranks.

Two launches make all the runs, in float32 on a folder of generated text; the tests then read what the runs left.
"""

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from config import load_config
from loss import IGNORE_INDEX
from models.llama.model import Llama
from parallelisms.fsdp import whole
from scripts.local_ranks import launch
from telemetry.goodput import PARTS
from trainer import Trainer

LANES, SEQ_LEN, STEPS = 4, 64, 6
WORDS = "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by"


def base(data: Path) -> list[str]:
    flags = (
        f"--model.n_layers 1 --training.seq_len {SEQ_LEN} --training.global_batch_size {LANES} "
        f"--training.local_batch_size 2 --training.steps {STEPS} --lr_scheduler.total_steps {STEPS} "
        "--training.mixed_precision_param float32 --lr_scheduler.warmup_steps 1 --activation_checkpoint.mode none "
        "--metrics.log_freq 1 --validation.local_batch_size 2 --checkpoint.enable "
        f"--training.dataset text --training.dataset_path {data}"
    )
    return flags.split()


def write_text(folder: Path) -> None:
    """40 documents of 10 to 109 words: once through takes 8 steps."""
    rng = random.Random(0)
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(" ".join(rng.choices(WORDS.split(), k=rng.randrange(10, 110))))


def run(folder: Path, flags: str = "") -> Trainer:
    """A whole run in `folder`; the data are beside its parent. The first rank's log goes to its log.txt."""
    argv = [*base(folder.parent.parent / "text"), *flags.split(), "--job.dump_folder", str(folder)]
    trainer = Trainer(load_config(argv, dist.get_world_size()), torch.device("cpu"))
    handler = logging.FileHandler(folder / "log.txt") if dist.get_rank() == 0 else logging.NullHandler()
    logging.getLogger("rowhouse").addHandler(handler)
    trainer.train()
    trainer.close()
    logging.getLogger("rowhouse").removeHandler(handler)
    return trainer


VALIDATION = "--validation.enable --validation.dataset stdlib_validation --validation.steps 2"


def runs_anywhere(folder: Path) -> None:
    """Those that 1 rank and 2 ranks make alike."""
    run(folder / "whole")
    run(folder / "stopped", "--training.steps 3")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(folder / "stopped", folder / "for others")
        shutil.copytree(folder / "stopped", folder / "for tensor parallel")
        shutil.copytree(folder / "stopped", folder / "for float8")
    run(folder / "stopped")
    run(folder / "validated", f"{VALIDATION} --validation.freq 2")
    per_rank = 4 // dist.get_world_size()
    still = f"{VALIDATION} --validation.freq 1 --validation.local_batch_size {per_rank} --training.steps 3"
    run(folder / "still", f"{still} --optimizer.lr 0")
    # Nothing would log or validate the step at which the data end, step 8, but that they end.
    seldom = f"--metrics.log_freq 5 {VALIDATION} --validation.freq 5"
    run(folder / "once", f"--training.epochs 1 --training.steps 100 {seldom}")
    run(folder / "once", "--training.epochs 2 --training.steps 12")
    run(folder / "twice", "--training.epochs 2 --training.steps 12")
    uneven_labels(folder)


def runs_on_one_rank(folder: Path) -> None:
    runs_anywhere(folder)
    run(folder / "other seed", "--debug.seed 1")
    run(folder / "for float8", "--float8.recipe_name rowwise --activation_checkpoint.mode full")
    run(folder / "all of the data once", "--training.epochs 1 --training.steps 100")
    shutil.copytree(folder / "all of the data once", folder / "and again")
    run(folder / "and again", "--training.epochs 1 --training.steps 100 --checkpoint.last_save_in_hf true")
    exported = folder.parent / "exported"  # `run` takes flags without spaces.
    exported.symlink_to(folder / "and again" / "hf-step-8")
    initial = f"--checkpoint.initial_load_in_hf true --checkpoint.initial_load_path {exported}"
    run(folder / "from export", f"{initial} --training.steps 1")
    all_once = f"--validation.steps -1 --validation.dataset text --validation.dataset_path {folder.parent / 'text'}"
    run(folder / "validates all", f"--validation.enable {all_once} --validation.freq {STEPS}")
    # With eps so far above any gradient, a step of AdamW moves the weights by lr * gradient / eps.
    for max_norm in (0, 1e9, 1e-2):
        steps = "--training.steps 1 --optimizer.eps 1e3 --optimizer.lr 1e3 --optimizer.weight_decay 0"
        trainer = run(folder / f"max_norm {max_norm:g}", f"{steps} --training.max_norm {max_norm:g}")
        torch.save(weights(trainer), folder / f"max_norm {max_norm:g}" / "weights.pt")


def runs_on_two_ranks(folder: Path) -> None:
    runs_anywhere(folder)
    run(folder.parent / "1 ranks" / "for others")
    for ranks in (1, 2):
        run(folder.parent / f"{ranks} ranks" / "for tensor parallel", "--parallelism.tensor_parallel_degree 2")


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}


def uneven_batch() -> dict[str, tuple[Tensor, Tensor]]:
    """Global batches (inputs, labels) in which rows, micro-batches and ranks have different numbers of valid labels."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randint(2048, (2, LANES, SEQ_LEN), generator=generator)
    some, none = labels.clone(), labels.clone()
    some[0, 1:] = some[1, ::2] = some[2, 50:] = IGNORE_INDEX
    none[0, 7:] = none[2:] = IGNORE_INDEX  # The second half has no valid label at all.
    return {"some": (inputs, some), "none": (inputs, none)}


def uneven_labels(folder: Path) -> None:
    rows = LANES // dist.get_world_size()
    mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    for name, (inputs, labels) in uneven_batch().items():
        flags = [*base(folder.parent / "text"), "--job.dump_folder", str(folder / name)]
        trainer = Trainer(load_config(flags, dist.get_world_size()), torch.device("cpu"))
        trainer.forward_backward(inputs[mine], labels[mine])
        grads = {n: whole(p.grad) for n, p in trainer.model.named_parameters()}
        trainer.optimizer.zero_grad()
        trainer.step = 1
        trainer.train_step(inputs[mine], labels[mine])
        if dist.get_rank() == 0:
            torch.save({"loss": trainer.last_loss, "gradients": grads}, folder / f"uneven {name}.pt")
        trainer.close()


class Runs(NamedTuple):
    folder: Path

    def lines(self, ranks: int, name: str) -> list[dict[str, Any]]:
        text = (self.folder / f"{ranks} ranks" / name / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def training(self, ranks: int, name: str) -> list[dict[str, Any]]:
        """Of each step what the weights and the data determine."""
        keys = ("step", "loss", "loss_max", "grad_norm", "lr", "tokens_seen")
        return [{key: line[key] for key in keys} for line in self.lines(ranks, name) if "loss" in line]

    def losses(self, ranks: int, name: str) -> list[float]:
        return [line["loss"] for line in self.training(ranks, name)]

    def validation(self, ranks: int, name: str) -> dict[int, float]:
        lines = self.lines(ranks, name)
        return {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}

    def log(self, ranks: int, name: str) -> str:
        return (self.folder / f"{ranks} ranks" / name / "log.txt").read_text()

    def checkpoints(self, ranks: int, name: str) -> list[str]:
        return sorted(path.name for path in (self.folder / f"{ranks} ranks" / name / "checkpoint").iterdir())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "text")
    launch(runs_on_one_rank, 1, folder / "1 ranks")
    launch(runs_on_two_ranks, 2, folder / "2 ranks")
    return Runs(folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_stopped_goes_on_bit_identically(runs: Runs, ranks: int) -> None:
    whole = runs.training(ranks, "whole")
    assert [line["step"] for line in whole] == list(range(1, STEPS + 1))
    assert len(set(runs.losses(ranks, "whole"))) == STEPS
    assert runs.training(ranks, "stopped") == whole
    assert runs.checkpoints(ranks, "stopped") == ["step-3", "step-6"]


def test_the_loss_falls(runs: Runs) -> None:
    losses = runs.losses(1, "whole")
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    ("ranks", "name"), [(2, "whole"), (1, "for others"), (1, "for tensor parallel"), (2, "for tensor parallel")]
)
def test_the_number_of_ranks_changes_no_more_than_roundings(runs: Runs, ranks: int, name: str) -> None:
    # "for ..." are of `ranks` data parallel ranks until step 3, and go on on 2: data parallel, tensor parallel.
    one, other = runs.training(1, "whole"), runs.training(ranks, name)
    assert len(other) == STEPS
    for a, b in zip(one, other, strict=True):
        assert (a["lr"], a["tokens_seen"]) == (b["lr"], b["tokens_seen"])
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-6)
        # On a CPU, torch's float32 norm of a matrix of the head's size is itself off by 5e-5.
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_a_run_goes_on_in_another_precision(runs: Runs) -> None:
    whole, other = runs.training(1, "whole"), runs.training(1, "for float8")
    assert other[:3] == whole[:3]
    for a, b in zip(whole[3:], other[3:], strict=True):
        assert (a["lr"], a["tokens_seen"]) == (b["lr"], b["tokens_seen"])
        assert a["loss"] != b["loss"] and a["loss"] == pytest.approx(b["loss"], rel=0.02)


def test_validation_does_not_disturb_the_training(runs: Runs) -> None:
    for ranks in (1, 2):
        assert runs.training(ranks, "validated") == runs.training(ranks, "whole")
        assert runs.validation(ranks, "validated").keys() == {2, 4, 6}
    assert runs.training(1, "validates all") == runs.training(1, "whole")


def test_validation_is_the_same_on_the_same_weights(runs: Runs) -> None:
    still = {ranks: runs.validation(ranks, "still") for ranks in (1, 2)}
    for ranks in (1, 2):
        assert still[ranks].keys() == {1, 2, 3}
        assert len(set(still[ranks].values())) == 1
        assert len(set(runs.validation(ranks, "validated").values())) == 3
    # Rows 0 to 3 of the held out text, whichever rank has them.
    assert still[1][1] == pytest.approx(still[2][1], rel=1e-6)
    # An untrained model knows nothing: ln(2048), and some for what its initial weights make up.
    assert 7.6 < still[1][1] < 8.5


def test_validation_on_the_training_text_sees_what_was_learnt(runs: Runs) -> None:
    ((step, loss),) = runs.validation(1, "validates all").items()
    assert step == STEPS and loss < runs.losses(1, "whole")[-1] + 0.5


def test_another_seed_is_another_run(runs: Runs) -> None:
    # That the same seed is the same run, "validated" and "stopped" show.
    other = runs.losses(1, "other seed")
    assert len(other) == STEPS and not set(other) & set(runs.losses(1, "whole"))


def test_a_run_ends_where_its_data_does(runs: Runs) -> None:
    name = "all of the data once"
    steps = len(runs.training(1, name))
    assert steps == 8
    assert f"the data ends after step {steps}" in runs.log(1, name)
    assert runs.checkpoints(1, name) == [f"step-{steps}"]
    assert runs.training(1, name)[-1]["tokens_seen"] == steps * LANES * SEQ_LEN
    # Begun again, it says so, and leaves everything as it was.
    assert f"the data ends after step {steps}" in runs.log(1, "and again").split("to go on")[-1]
    assert "nothing to do" in runs.log(1, "and again")
    assert "raise --training.epochs (now 1)" in runs.log(1, "and again")
    assert runs.lines(1, "and again") == runs.lines(1, name)
    assert runs.checkpoints(1, "and again") == runs.checkpoints(1, name)


def test_a_run_exports_at_its_end_and_another_begins_from_that(runs: Runs) -> None:
    assert not list((runs.folder / "1 ranks" / "all of the data once").glob("hf-step-*"))
    ((_, loss),) = ((line["step"], line["loss"]) for line in runs.training(1, "from export"))
    assert loss < runs.losses(1, "whole")[0] - 0.5


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_the_data_ends_is_logged_and_validated(runs: Runs, ranks: int) -> None:
    lines = [line for line in runs.lines(ranks, "once") if line["step"] <= 8]
    assert [line["step"] for line in lines if "loss" in line] == [1, 5, 8]
    assert [line["step"] for line in lines if "validation_loss" in line] == [5, 8]
    whole = {line["step"]: line["loss"] for line in runs.training(ranks, "twice")}
    assert all(line["loss"] == whole[line["step"]] for line in lines if "loss" in line)


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_epochs_go_on_as_if_asked_for_from_the_start(runs: Runs, ranks: int) -> None:
    twice = runs.training(ranks, "twice")
    assert [line["step"] for line in twice] == list(range(1, 13))
    assert [line for line in runs.training(ranks, "once") if line["step"] > 8] == twice[8:]


def plain_model(runs: Runs) -> Llama:
    """With the weights that all runs begin with, and nothing applied."""
    config = load_config(base(runs.folder / "text"), 1)
    with torch.device("meta"):
        model = Llama(config.model.shape(), SEQ_LEN)
    model.to_empty(device="cpu")
    model.init_weights(config.debug.seed, torch.device("cpu"))
    return model


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["some", "none"])
def test_the_loss_is_the_mean_over_the_valid_tokens_of_the_global_batch(runs: Runs, ranks: int, name: str) -> None:
    inputs, labels = uneven_batch()[name]
    found = torch.load(runs.folder / f"{ranks} ranks" / f"uneven {name}.pt")
    model = plain_model(runs).double()
    loss = F.cross_entropy(model(inputs), labels.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (found["gradients"][parameter_name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, (parameter_name, error)


def test_every_line_has_its_measurements(runs: Runs) -> None:
    for ranks, name in ((1, "whole"), (2, "whole"), (2, "stopped"), (1, "for others"), (1, "for tensor parallel")):
        for line in (line for line in runs.lines(ranks, name) if "loss" in line):
            assert line["tokens_per_second"] > 0 and line["step_seconds"] > 0
            assert 0 <= line["data_share"] <= 1
            # Of the global batch, also right after a resume and where ranks share their tokens.
            assert line["tokens_seen"] == line["step"] * LANES * SEQ_LEN
    # A rank's tokens a second: 2 ranks have half of the batch each, also where they share it by tensor parallelism.
    for ranks, name, sharing in ((1, "whole", 1), (2, "whole", 2), (1, "for tensor parallel", 2)):
        line = runs.lines(ranks, name)[-1]
        assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(LANES * SEQ_LEN / sharing)


def test_a_run_knows_where_its_time_went(runs: Runs) -> None:
    for ranks, name in ((1, "whole"), (2, "whole"), (2, "validated")):
        lines = [line for line in runs.lines(ranks, name) if "loss" in line]
        steps = 0.0
        for line in lines:
            lost = sum(line[key] for key in PARTS)
            assert line["goodput"] == pytest.approx(1 - lost / line["run_seconds"]) and 0 <= line["goodput"] < 1
            assert line["run_seconds"] > steps + line["step_seconds"]
            steps += line["step_seconds"]
            assert ("slowest_rank" in line) == (ranks == 2) and "recompiles" not in line
        assert (lines[-1]["run_validation_seconds"] > 0) == (name == "validated")
        assert lines[-1]["run_restarts"] == 0
    ended = json.loads((runs.folder / "2 ranks" / "validated" / "goodput.json").read_text())
    # With the last save and the last validation, which no line has seen.
    assert ended["run_save_seconds"] > lines[-1]["run_save_seconds"] == 0
    assert ended["run_validation_seconds"] > lines[-1]["run_validation_seconds"]
    assert (ended["step"], ended["ended"]) == (STEPS, "done")
    assert f"goodput {100 * ended['goodput']:.1f} % of" in runs.log(2, "validated")
    # Done after 3 steps, and on to 6: the second set-up is one, and the time between is nobody's.
    resumed = runs.lines(1, "stopped")
    assert resumed[3]["run_set_up_seconds"] > resumed[2]["run_set_up_seconds"]
    assert resumed[3]["run_restarts"] == resumed[3]["run_restart_seconds"] == 0


def test_gradients_are_clipped_to_the_norm(runs: Runs) -> None:
    start = {name: p.detach() for name, p in plain_model(runs).named_parameters()}
    moved, norms = {}, {}
    for max_norm in ("0", "1e+09", "0.01"):
        after = torch.load(runs.folder / "1 ranks" / f"max_norm {max_norm}" / "weights.pt")
        moved[max_norm] = torch.cat([(after[name] - start[name]).flatten() for name in start]).norm().item()
        norms[max_norm] = runs.training(1, f"max_norm {max_norm}")[0]["grad_norm"]
    # What is logged is the norm before clipping; without a limit, and below it, that is also how far the weights go.
    assert norms["0"] == norms["1e+09"] == norms["0.01"] > 1
    assert moved["0"] == moved["1e+09"] == pytest.approx(norms["0"], rel=0.01)
    assert moved["0.01"] == pytest.approx(0.01, rel=0.01)
