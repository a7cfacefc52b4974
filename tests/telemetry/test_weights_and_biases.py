import sys
import types

import pytest

from errors import UserError
from telemetry.metrics import MetricsConfig, MetricsWriter


class FakeRun:
    def __init__(self, **arguments):
        self.arguments = arguments
        self.logged, self.metrics, self.finished = [], [], False

    def define_metric(self, name, step_metric):
        self.metrics.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A module that stands in for wandb, and keeps its runs."""
    module = types.ModuleType("wandb")
    module.Error = type("Error", (Exception,), {})
    module.Settings = lambda **settings: settings
    module.runs = []

    def init(**arguments):
        module.runs.append(FakeRun(**arguments))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return module


def write(folder, steps, start_step=0):
    writer = MetricsWriter(MetricsConfig(enable_wandb=True), folder, start_step=start_step, total_steps=100)
    for step in steps:
        writer.write(step, {"loss": 1.0 / step, "mfu": None})
    writer.write_validation(steps[-1], {"validation_loss": 2.0})
    writer.close()


def test_all_values_go_there_by_their_step(tmp_path, wandb):
    (tmp_path / "config.toml").write_text('[training]\nsteps = 7\n[job]\ndescription = "a"\n')
    write(tmp_path, [1, 10])
    (run,) = wandb.runs
    assert run.logged == [{"step": 1, "loss": 1.0}, {"step": 10, "loss": 0.1}, {"step": 10, "validation_loss": 2.0}]
    assert run.metrics == [("*", "step")] and run.finished
    assert run.arguments["config"] == {"training": {"steps": 7}, "job": {"description": "a"}}
    assert (run.arguments["project"], run.arguments["name"]) == ("rowhouse", tmp_path.name)
    assert run.arguments["dir"] == tmp_path


def test_a_resumed_run_is_the_same_run_there(tmp_path, wandb, monkeypatch):
    write(tmp_path / "a", [10])
    write(tmp_path / "a", [20], start_step=10)
    write(tmp_path / "b", [10])
    first, resumed, other = (run.arguments["id"] for run in wandb.runs)
    assert first == resumed != other
    assert wandb.runs[1].arguments["resume"] == "allow"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_NAME", "this")
    write(tmp_path / "c", [10])
    assert (wandb.runs[-1].arguments["project"], wandb.runs[-1].arguments["name"]) == ("mine", "this")


def test_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"metrics\.enable_wandb: .* not installed; run pip install wandb"):
        write(tmp_path, [1])


def test_it_cannot_begin(tmp_path, wandb):
    def init(**arguments):
        raise wandb.Error("No API key configured.\nUse `wandb login`")

    wandb.init = init
    with pytest.raises(UserError, match=r"metrics\.enable_wandb: .*No API key.*WANDB_MODE=offline") as caught:
        write(tmp_path, [1])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "wandb_id").exists()


def test_not_asked_for(tmp_path, wandb):
    MetricsWriter(MetricsConfig(), tmp_path, start_step=0, total_steps=1).close()
    assert wandb.runs == []


def test_offline_with_wandb_itself(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path, [1])
    write(tmp_path, [2], start_step=1)
    id = (tmp_path / "wandb_id").read_text().strip()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{id}/*.wandb"))) == 2
