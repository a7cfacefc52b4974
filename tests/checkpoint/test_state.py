"""The states by themselves, on one rank."""

import copy
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from checkpoint.state import ModelState, OptimizerState, RngState, pack, unpack


def trained(lr: float, tied: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    if tied:
        model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=lr)
    for _ in range(3):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("tied", [False, True])
def test_optimizer_moments_return_and_the_hyperparameters_stay_the_runs_own(tied):
    model, optimizer = trained(lr=0.1, tied=tied)
    saved = copy.deepcopy(OptimizerState(model, optimizer).state_dict())
    assert {key.split(".")[0] for key in saved} == {"state"}
    other_model, other = trained(lr=0.3, tied=tied)
    OptimizerState(other_model, other).load_state_dict(copy.deepcopy(saved))
    assert other.param_groups[0]["lr"] == other.param_groups[0]["weight_decay"] == 0.3
    for param, param_of_other in zip(model.parameters(), other_model.parameters(), strict=True):
        assert optimizer.state[param].keys() == other.state[param_of_other].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, other.state[param_of_other][key])


def test_asking_a_fresh_optimizer_for_its_state_changes_no_weight():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = [p.clone() for p in model.parameters()]
    OptimizerState(model, optimizer).state_dict()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_model_names_are_those_of_the_plain_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = set(model.state_dict())
    model[0] = torch.compile(model[0])
    assert set(ModelState(model).state_dict()) == names
    assert set(ModelState(torch.compile(model)).state_dict()) == names


def test_random_numbers_go_on_where_they_were():
    state = RngState(torch.device("cpu"))
    torch.randn(3)
    np.random.randn()  # leaves half of a pair of normals behind # noqa: NPY002
    saved = unpack(pack(state.state_dict()))
    assert saved.keys() == {"rank-0"}

    def draw():
        return torch.rand(5).tolist(), np.random.randn(3).tolist(), [random.gauss(0, 1) for _ in range(3)]  # noqa: NPY002

    first = draw()
    assert draw() != first
    state.load_state_dict(saved)
    assert draw() == first


def test_an_unknown_rank_keeps_its_seed():
    state = RngState(torch.device("cpu"))
    saved = {"rank-1": state.own_state()}
    torch.rand(1)
    before = torch.get_rng_state()
    state.load_state_dict(saved)
    assert torch.equal(before, torch.get_rng_state())


def test_pack_is_a_snapshot_and_refuses_what_could_not_be_read_again():
    value = {"step": 3, "list": [1, 2.5, None, "x"], "lanes": torch.arange(3)}
    expected = copy.deepcopy(value)
    packed = pack(value)
    assert packed.dtype == torch.uint8 and packed.dim() == 1
    value["list"].append(4)
    value["lanes"] += 1
    read = unpack(packed)
    assert torch.equal(read.pop("lanes"), expected.pop("lanes"))
    assert read == expected
    with pytest.raises(pickle.UnpicklingError):
        pack({"path": Path("x")})
