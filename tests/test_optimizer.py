"""AdamW and its learning rate: the schedule against its closed forms, the two groups, the implementations alike."""

import math
from typing import Any

import pytest
import torch

from errors import UserError
from models.llama.model import Llama
from models.llama.shapes import LlamaShape
from optimizer import (
    FiniteSteps,
    LRSchedulerConfig,
    NotFinite,
    OptimizerConfig,
    build_optimizer,
    global_norm,
    lr_factor,
    set_lr,
)

SHAPE = LlamaShape(32, 2, 2, 1, 48, vocab_size=64, head_dim=16)


def factors(total: int, **settings: object) -> list[float]:
    """Of the steps 1 to `total`."""
    config = LRSchedulerConfig(**settings)  # type: ignore[arg-type]
    return [lr_factor(step, config, total) for step in range(1, total + 1)]


def small_model(seed: int = 0) -> Llama:
    with torch.device("meta"):
        model = Llama(SHAPE, 16)
    model.to_empty(device="cpu")
    model.init_weights(seed, torch.device("cpu"))
    return model


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert factors(10, warmup_steps=4, decay_ratio=0.0) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1])
    assert factors(3, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1])


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert factors(4, warmup_steps=0) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert factors(4, warmup_steps=0, decay_ratio=0.0) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("form", "closed"),
    [
        ("linear", lambda x: 1 - x),
        ("sqrt", lambda x: 1 - x**0.5),
        ("cosine", lambda x: math.cos(math.pi * x / 2) ** 2),
    ],
)
@pytest.mark.parametrize("least", [0.0, 0.1])
def test_the_decay_has_its_closed_form(form: str, closed: object, least: float) -> None:
    # 20 steps follow the warm-up of 5; the first of them is still at the peak, and the least comes after the last.
    found = factors(25, warmup_steps=5, decay_type=form, min_lr_factor=least)
    expected = [least + (1 - least) * closed(i / 20) for i in range(20)]  # type: ignore[operator]
    assert found[5:] == pytest.approx(expected)
    assert least < found[-1] < 0.5 and found[4] == found[5] == 1
    config = LRSchedulerConfig(warmup_steps=5, decay_type=form, min_lr_factor=least)  # type: ignore[arg-type]
    assert lr_factor(26, config, 25) == pytest.approx(least)


def test_warm_up_stable_decay() -> None:
    found = factors(20, warmup_steps=4, decay_ratio=0.25)
    assert found[3:15] == [1.0] * 12
    assert found[15:] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    # A share that reaches into the warm-up decays all that follows it.
    assert factors(20, warmup_steps=4, decay_ratio=0.9) == factors(20, warmup_steps=4, decay_ratio=1.0)
    assert factors(20, warmup_steps=4, decay_ratio=1.0) == factors(20, warmup_steps=4)


def test_the_schedule_may_span_other_steps_than_the_run() -> None:
    # total_steps is what lr_factor is given: a run that stops early is on the same curve, one that goes on stays low.
    config = LRSchedulerConfig(warmup_steps=2, total_steps=10, min_lr_factor=0.1)
    assert [lr_factor(step, config, 10) for step in (11, 12, 500)] == pytest.approx([0.1] * 3)
    assert lr_factor(6, config, 10) == pytest.approx(0.1 + 0.9 * (1 - 3 / 8))


def test_the_last_step_of_any_schedule_still_trains() -> None:
    for form in ("linear", "sqrt", "cosine"):
        for total in (2, 3, 100):
            assert factors(total, warmup_steps=1, decay_type=form)[-1] > 0


def test_norms_and_the_embedding_are_not_decayed() -> None:
    model = small_model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    decayed = {names[id(p)] for group in groups if group["weight_decay"] == 0.3 for p in group["params"]}
    spared = {names[id(p)] for group in groups if group["weight_decay"] == 0.0 for p in group["params"]}
    assert spared == {
        "tok_embeddings.weight", "norm.weight", *(f"layers.{i}.{n}.weight" for i in (0, 1)
        for n in ("attention_norm", "ffn_norm")),
    }  # fmt: skip
    assert decayed == set(names.values()) - spared
    assert sum(len(group["params"]) for group in groups) == len(names)


@pytest.mark.parametrize(("patterns", "groups"), [([], 1), (["weight"], 1), (["wq", "output"], 2)])
def test_every_parameter_is_in_one_group(patterns: list[str], groups: int) -> None:
    model = small_model()
    optimizer = build_optimizer(model, OptimizerConfig(no_weight_decay=patterns))
    assert len(optimizer.param_groups) == groups
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(UserError, match=r'optimizer.no_weight_decay: "biass" matches no parameter: correct or remove'):
        build_optimizer(small_model(), OptimizerConfig(no_weight_decay=["norm", "biass"]))


def test_the_implementations_take_the_same_steps() -> None:
    results = {}
    for name in ("for-loop", "foreach", "fused", "bfloat16"):
        model = small_model()
        how: Any = {"state_dtype": name} if name == "bfloat16" else {"implementation": name}
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.5, **how))
        generator = torch.Generator().manual_seed(1)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            set_lr(optimizer, 1e-2 / (step + 1))
            optimizer.step()
        results[name] = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = torch.cat([p.detach().flatten() for p in small_model().parameters()])
    moved = (results["for-loop"] - start).norm()
    assert moved > 0.1 * start.norm()
    # The same arithmetic in another order: a few roundings of float32 a step. Moments in bfloat16: some of 2**-8.
    for name, bound in (("foreach", 1e-6), ("fused", 1e-6), ("bfloat16", 5e-3)):
        assert (results[name] - results["for-loop"]).norm() < bound * moved, name


def test_a_step_is_that_of_the_paper() -> None:
    model = small_model()
    weight = model.layers[0].attention.wq.weight
    config = OptimizerConfig(lr=0.1, beta1=0.8, beta2=0.9, eps=0.01, weight_decay=0.5, implementation="for-loop")
    optimizer = build_optimizer(model, config)
    theta, mean, square = weight.detach().double(), 0.0, 0.0
    for step, size in ((1, 1.0), (2, -3.0)):
        g = torch.linspace(-size, size, weight.numel(), dtype=torch.float64).view_as(weight)
        weight.grad = g.float()
        lr = 0.1 / step
        set_lr(optimizer, lr)
        optimizer.step()
        mean, square = 0.8 * mean + 0.2 * g, 0.9 * square + 0.1 * g**2
        update = (mean / (1 - 0.8**step)) / ((square / (1 - 0.9**step)) ** 0.5 + 0.01)
        theta = theta - lr * 0.5 * theta - lr * update
    assert torch.allclose(weight.detach().double(), theta, rtol=1e-5, atol=1e-7)


def test_the_norm_of_gradients_in_bfloat16_is_not_rounded_to_it() -> None:
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (70, 1000, 3)]
    norm = global_norm(grads)
    assert norm.dtype == torch.float32
    exact = torch.cat(grads).double().norm()
    assert abs(norm / exact - 1) < 1e-6 < abs(exact.bfloat16() / exact - 1)


IMPLEMENTATIONS = [("for-loop", "float32"), ("foreach", "float32"), ("fused", "float32"), ("fused", "bfloat16")]


@pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("max_norm", [0, 0.5, 1e9])
def test_gradients_are_clipped(implementation: str, dtype: str, max_norm: float) -> None:
    """A large eps makes a step as long as its gradient."""
    moved = {}
    for clipping in ("torch", "FiniteSteps"):
        model = small_model()
        before = [p.detach().clone() for p in model.parameters()]
        config = OptimizerConfig(implementation=implementation, state_dtype=dtype, eps=1e3)  # type: ignore[arg-type]
        optimizer = build_optimizer(model, config)
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])  # type: ignore[misc]
        steps = FiniteSteps(optimizer, 0, torch.device("cpu"), max_norm if clipping == "FiniteSteps" else 0)
        if clipping == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
        steps.step(torch.tensor(1.0), norm)
        moved[clipping] = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
    for a, b in zip(*moved.values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf)])
def test_a_step_that_is_not_finite_changes_nothing(implementation: str, dtype: str, loss: float, norm: float) -> None:
    model = small_model()
    config = OptimizerConfig(implementation=implementation, state_dtype=dtype)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, config)
    steps = FiniteSteps(optimizer, max_in_a_row=2, device=torch.device("cpu"))
    assert steps.on_device == (implementation == "fused")

    def step(loss: float, norm: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, norm)
        steps.step(torch.tensor(loss), torch.tensor(norm))

    def state() -> list[torch.Tensor]:
        moments = [t for values in optimizer.state.values() for t in values.values()]
        return [t.detach().clone() for t in [*model.parameters(), *moments]]

    step(1.0, 1.0)
    before = state()
    step(loss, norm)
    step(loss, norm)
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert steps.check() == 2
    step(1.0, 1.0)
    assert not any(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    for _ in range(3):
        step(loss, norm)
    step(1.0, 1.0)  # A good one after them does not hide them.
    with pytest.raises(NotFinite, match="in 3 steps in a row, and training.max_skipped_steps allows 2"):
        steps.check()
