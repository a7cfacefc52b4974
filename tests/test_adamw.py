"""AdamW: against torch's in float64, the rounding of its moments, what is resumed, ranks, the kernel, a run.

The rounding draws the same bits each time, so nothing here is left to chance; statistical bounds are six deviations.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import adamw
from adamw import (
    AdamW,
    Place,
    Settings,
    element_numbers,
    local,
    place_of,
    random_bits,
    round_stochastically,
    update_torch,
)
from checkpoint.state import ModelState, OptimizerState
from config import load_config
from errors import UserError
from optimizer import set_lr
from scripts.local_ranks import launch
from trainer import Trainer

# Saving and loading without ranks is meant here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ULP = 2.0**-7  # Between two neighbours in bfloat16, in parts of the lower one, at the most.
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WORDS = "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by"


def moments(optimizer: torch.optim.Optimizer, p: Tensor) -> tuple[Tensor, Tensor]:
    return optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]


# The mathematics


def test_steps_are_adamws_within_the_rounding_of_its_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 96, generator=generator))
    start = weight.detach().double()
    exact = nn.Parameter(start.clone())
    optimizer, reference = AdamW([weight], **SETTINGS), torch.optim.AdamW([exact], **SETTINGS)
    beta1, beta2 = SETTINGS["betas"]
    # Bounds of the errors: a rounding moves a moment by less than ULP, later steps shrink that as they shrink moments.
    of_weight, of_mean, of_square = torch.zeros(3, *weight.shape, dtype=torch.float64)
    for step in range(1, 13):
        lr = 1e-2 / step
        for opt in (optimizer, reference):
            set_lr(opt, lr)
        exact.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 10.0 ** (step % 3)
        weight.grad = exact.grad.float()
        optimizer.step()
        reference.step()
        mean, square = moments(reference, exact)
        of_mean, of_square = beta1 * of_mean, beta2 * of_square
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        root, least = (square / correction2).sqrt(), ((square - of_square).clamp(min=0) / correction2).sqrt()
        update = mean.abs() / correction1 / (root + 1e-8)
        of_weight += lr * (of_mean / correction1 + update * (root - least)) / (least + 1e-8) + 1e-6  # 1e-6: float32
        assert ((weight - exact).abs() <= of_weight).all(), step
        if step == 1:
            assert torch.allclose(weight.double(), exact, rtol=1e-6, atol=1e-6)  # Took moments that are not rounded.
        of_mean, of_square = of_mean + ULP * (mean.abs() + of_mean), of_square + ULP * (square + of_square)
        for found, true, error in zip(moments(optimizer, weight), (mean, square), (of_mean, of_square), strict=True):
            assert found.dtype == torch.bfloat16 and ((found - true).abs() <= error * (1 + 1e-5)).all(), step
    assert optimizer.state[weight]["step"] == 12 and optimizer.state[weight]["step"].dtype == torch.float32
    assert (weight - exact).norm() < 0.01 * (exact - start).norm()


def test_steps_with_float32_moments_are_adamws() -> None:
    ours, theirs = small_model(), small_model()
    optimizer = AdamW(groups_of(ours), **SETTINGS, state_dtype=torch.float32)
    reference = optimizer_of(theirs, "float32")
    take_steps(ours, optimizer, 1, 5)
    take_steps(theirs, reference, 1, 5)
    mine, its = snapshot(ours, optimizer), snapshot(theirs, reference)
    assert mine.keys() == its.keys()
    for key in mine:  # The same arithmetic in another order: a few roundings of float32 a step.
        assert mine[key].dtype == torch.float32 and torch.allclose(mine[key], its[key], rtol=1e-5, atol=1e-7), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_bfloat16_are_as_good_as_the_same_in_float32(dtype: torch.dtype) -> None:
    results = []
    for grad_dtype in (torch.bfloat16, torch.float32):
        model = small_model()
        optimizer = AdamW(groups_of(model), **SETTINGS, state_dtype=dtype)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad_dtype = grad_dtype
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(grad_dtype)
            optimizer.step()
            optimizer.zero_grad()
        results.append(snapshot(model, optimizer))
    assert equal(*results)


def test_parameters_without_a_gradient_and_closures() -> None:
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = AdamW([{"params": [unused]}, {"params": [used, unused.detach().clone()]}], **SETTINGS)

    def closure() -> Tensor:
        loss = used.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert (unused == 1).all() and unused not in optimizer.state and (used < 1).all()
    with pytest.raises(ValueError, match=r"a parameter of shape \(3, 2\) is not contiguous"):
        place_of(torch.ones(2, 3).t())


# The rounding


def test_the_mean_over_all_noises_is_the_value_itself() -> None:
    for value in (1.0, 1.2345678, -3.3333333e-5, 1.9999999, 2.0**-130 * 1.37, -0.0, 1e30):
        x = torch.full((2**16,), value)
        rounded = round_stochastically(x, torch.arange(2**16))
        assert rounded.double().mean() == x[0].double()
        assert len(rounded.unique()) <= 2


def test_the_bits_are_uniform_and_independent() -> None:
    n = 2**18
    words = {(step, key): random_bits(torch.arange(n), step, key) for step in (1, 2, 3, 1000) for key in (0, 1, 77)}
    noise = [bits & 0xFFFF for bits in words.values()] + [bits >> 16 for bits in words.values()]
    uniform = torch.stack([(half.double() + 0.5) / 2**16 - 0.5 for half in noise]) * 12**0.5  # Mean 0, variance 1.
    assert uniform.mean(dim=1).abs().max() < 6 / n**0.5
    assert (uniform.square().mean(dim=1) - 1).abs().max() < 6 * 0.8**0.5 / n**0.5
    between = uniform @ uniform.T / n - torch.eye(len(noise))  # Steps, parameters, and the two moments.
    assert between.fill_diagonal_(0).abs().max() < 6 / n**0.5
    for lag in (1, 2, 64, 4096):
        assert (uniform[:, lag:] * uniform[:, :-lag]).mean(dim=1).abs().max() < 6 / (n - lag) ** 0.5
    for low_bits in (noise[0] % 16, noise[0] // 4096):
        assert (torch.bincount(low_bits) - n / 16).abs().max() < 6 * (n / 16) ** 0.5


def test_parameters_and_moments_are_rounded_independently() -> None:
    n = 2**14
    weights = [nn.Parameter(torch.zeros(n)) for _ in range(3)]
    optimizer = AdamW([{"params": weights[:1]}, {"params": weights[1:]}], **SETTINGS)
    for weight in weights:
        weight.grad = torch.full((n,), 0.3)
    optimizer.step()
    went_up = torch.stack([t == t.max() for weight in weights for t in moments(optimizer, weight)]).double()
    assert torch.corrcoef(went_up).fill_diagonal_(0).abs().max() < 6 / n**0.5


def test_moments_are_right_on_average() -> None:
    """They depend on gradients linearly, so that unbiased roundings leave their expectation as it is without any."""
    n = 2**14
    weight, exact = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer, reference = AdamW([weight], **SETTINGS), torch.optim.AdamW([exact], **SETTINGS)
    for step in range(30):
        exact.grad = torch.full((1,), float(torch.tensor(0.3 + step % 7)), dtype=torch.float64)
        weight.grad = exact.grad.float().expand(n)
        optimizer.step()
        reference.step()
        for found, true in zip(moments(optimizer, weight), moments(reference, exact), strict=True):
            deviation = found.double().std() / n**0.5
            assert (found.double().mean() - true).abs() < 6 * deviation + 1e-6 * true, step
    assert all(len(found.unique()) > 2 for found in moments(optimizer, weight))


def test_small_changes_are_not_lost() -> None:
    """A second moment whose gradient ends: 0.999**1000 is 0.37. Rounded to the nearest it would stay as it is."""
    weight = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([weight], lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    weight.grad = torch.ones(4096)
    optimizer.step()
    square = moments(optimizer, weight)[1]
    began, nearest = square.double().mean(), square.clone()
    weight.grad = torch.zeros(4096)
    for _ in range(1000):
        optimizer.step()
        nearest = (nearest.float() * 0.999).bfloat16()
    assert nearest.double().mean() > 0.99 * began
    assert square.double().mean() / began == pytest.approx(0.999**1000, rel=0.02)


# Steps that are left out, and resuming


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 7))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """The first group's parameters are not the model's first."""
    parameters = list(model.parameters())
    return [{"params": parameters[1:3], "weight_decay": 0.0}, {"params": [parameters[0], *parameters[3:]]}]


def optimizer_of(model: nn.Module, dtype: str = "bfloat16", seed: int = 3) -> torch.optim.Optimizer:
    if dtype == "float32":
        return torch.optim.AdamW(groups_of(model), **SETTINGS, fused=True)
    return AdamW(groups_of(model), **SETTINGS, seed=seed)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=generator)
            whole = not isinstance(p, DTensor)
            p.grad = grad if whole else distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        set_lr(optimizer, 1e-2 / step)
        optimizer.step()
        optimizer.zero_grad()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {**ModelState(model).state_dict(), **OptimizerState(model, optimizer).state_dict()}
    return {key: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for key, t in state.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys() and all(a[key].dtype == b[key].dtype for key in a)
    return all(torch.equal(a[key], b[key]) for key in a)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {"model": ModelState(model).state_dict(), "optimizer": OptimizerState(model, optimizer).state_dict()}
    dcp.save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As CheckpointManager does."""
    states: dict[str, Any] = {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}
    wanted = {name: state.state_dict() for name, state in states.items()}
    dcp.load(wanted, checkpoint_id=folder, no_dist=not dist.is_initialized())
    for name, state in states.items():
        state.load_state_dict(wanted[name])


@pytest.fixture
def trained() -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    model = small_model()
    optimizer = optimizer_of(model)
    take_steps(model, optimizer, 1, 3)
    yield model, optimizer


def test_a_step_that_is_left_out_changes_no_bit(trained: tuple[nn.Module, Any]) -> None:
    model, optimizer = trained
    before = snapshot(model, optimizer)
    optimizer.found_inf = torch.ones(())
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    optimizer.zero_grad()
    assert equal(snapshot(model, optimizer), before)
    # The next one is the one that would have come, random bits and all.
    optimizer.found_inf = torch.zeros(())
    take_steps(model, optimizer, 4, 5)
    other = small_model()
    never_skipped = optimizer_of(other)
    take_steps(other, never_skipped, 1, 5)
    assert equal(snapshot(model, optimizer), snapshot(other, never_skipped))


def test_the_seed_fixes_the_rounding(trained: tuple[nn.Module, Any]) -> None:
    other = small_model()
    optimizer = optimizer_of(other, seed=4)
    take_steps(other, optimizer, 1, 3)
    assert not equal(snapshot(*trained), snapshot(other, optimizer))


def test_a_resumed_run_goes_on_bit_identically(tmp_path: Path, trained: tuple[nn.Module, Any]) -> None:
    save(tmp_path, *trained)
    model = small_model()
    optimizer = optimizer_of(model)
    load(tmp_path, model, optimizer)
    assert {t.dtype for p in model.parameters() for t in moments(optimizer, p)} == {torch.bfloat16}
    assert equal(snapshot(model, optimizer), snapshot(*trained))
    for run in (trained, (model, optimizer)):
        take_steps(*run, 4, 6)
    assert equal(snapshot(model, optimizer), snapshot(*trained))


@pytest.mark.parametrize(("saved", "resumed"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_moments_are_resumed_in_another_precision(tmp_path: Path, saved: str, resumed: str) -> None:
    model, other = small_model(), small_model()
    optimizer, other_optimizer = optimizer_of(model, saved), optimizer_of(other, resumed)
    take_steps(model, optimizer, 1, 3)
    save(tmp_path, model, optimizer)
    load(tmp_path, other, other_optimizer)
    for p, p_of_other in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, p_of_other)
        assert other_optimizer.state[p_of_other]["step"] == 3
        for a, b in zip(moments(optimizer, p), moments(other_optimizer, p_of_other), strict=True):
            assert b.dtype == getattr(torch, resumed) and torch.equal(a.to(b.dtype), b)
    take_steps(other, other_optimizer, 4, 4)


# Ranks


@pytest.mark.parametrize("rank", range(4))
def test_a_shard_knows_the_numbers_of_its_elements(rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        # Names of its own, or DTensor's caches answer with the mesh of a rank that came before in this process.
        dp, tp = f"dp of {rank}", f"tp of {rank}"
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(dp, tp))
        cases = [((8, 6), Shard(0)), ((7, 6), Shard(1)), ((7, 5), Shard(1)), ((5,), Replicate()), ((1, 3), Replicate())]
        for shape, placement in cases:
            numbers = torch.arange(float(torch.Size(shape).numel())).view(shape)
            for sharded in (False, True):
                layer = nn.Module()
                layer.weight = nn.Parameter(distribute_tensor(numbers, mesh[tp], [placement], src_data_rank=None))
                if sharded:
                    fully_shard(layer, mesh=mesh[dp])
                part = local(layer.weight.detach())
                if part.numel():
                    found = element_numbers(part.numel(), place_of(layer.weight))
                    assert torch.equal(found, part.flatten().long()), (shape, placement, sharded)
    finally:
        dist.destroy_process_group()


def on_two_ranks(folder: Path) -> None:
    model = small_model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = optimizer_of(model)
    take_steps(model, optimizer, 1, 3)
    save(folder / "of two ranks", model, optimizer)
    take_steps(model, optimizer, 4, 5)
    whole = snapshot(model, optimizer)
    load(folder / "of one rank", model, optimizer)
    take_steps(model, optimizer, 4, 5)
    assert equal(snapshot(model, optimizer), whole)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")


def test_two_ranks_do_as_one_bit_for_bit(tmp_path: Path, trained: tuple[nn.Module, Any]) -> None:
    save(tmp_path / "of one rank", *trained)
    launch(on_two_ranks, 2, tmp_path)
    model = small_model()
    optimizer = optimizer_of(model)
    load(tmp_path / "of two ranks", model, optimizer)
    assert equal(snapshot(model, optimizer), snapshot(*trained))
    take_steps(model, optimizer, 4, 5)
    assert equal(snapshot(model, optimizer), torch.load(tmp_path / "whole.pt"))


# The kernel


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """The kernel's launcher and its device. On the CPU it is interpreted, as the variable says where it is defined."""
    if request.param == "cuda":
        return adamw.update_triton, "cuda"
    pytest.importorskip("triton", reason="Triton is not installed: requirements-dev.txt has it")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location("adamw_interpreted", adamw.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.update_triton, "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("n", "place", "step"),
    [(2048, Place(0, 1, 1), 1), (3000, Place(2**31 - 7, 9, 9), 7), (2100, Place(2**32 - 70, 30, 100), 100_000)],
)
def test_the_kernel_does_as_pytorch(
    kernel: tuple[Any, str], n: int, place: Place, step: int, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    update_triton, device = kernel
    generator = torch.Generator().manual_seed(n)
    p, g = torch.randn(2, n, generator=generator)
    g = g.to(grad_dtype)
    m, v = (torch.randn(n, generator=generator) * 0.1).to(dtype), torch.rand(n, generator=generator).to(dtype)
    settings = Settings(1 - 1e-3, 1 - 0.9, 0.95, 1 - 0.95, 1e-8)
    for good in (0.0, 1.0):
        factors = torch.tensor([1e-2 / (1 - 0.9**step), (1 - 0.95**step) ** 0.5, step, good, 1.7])
        expected, found = [t.clone() for t in (p, g, m, v)], [t.to(device, copy=True) for t in (p, g, m, v)]
        update_torch(*expected, factors, 2**31 - 5, place, settings)
        update_triton(*found, factors.to(device), 2**31 - 5, place, settings)
        found = [t.cpu() for t in found]
        assert torch.equal(found[0], p) == torch.equal(found[2], m) == torch.equal(found[3], v) == (not good)
        assert torch.allclose(found[0], expected[0], rtol=1e-6, atol=1e-7)
        assert torch.equal(found[1], expected[1])
        for a, b in zip(found[2:], expected[2:], strict=True):
            if dtype == torch.float32:
                assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)
            else:  # Where another order of the arithmetic crosses a random threshold, neighbours.
                assert (a != b).float().mean() < 1e-3 and torch.allclose(a.float(), b.float(), rtol=ULP)


@GPU
def test_on_a_gpu_the_host_waits_for_nothing() -> None:
    model, on_gpu = small_model(), small_model().cuda()
    optimizer, its = optimizer_of(model), optimizer_of(on_gpu)
    its.found_inf = torch.zeros((), device="cuda")  # type: ignore[attr-defined]
    for step in range(1, 5):
        for p, q in zip(model.parameters(), on_gpu.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.cuda()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")  # The first one compiles.
        try:
            its.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for p, q in zip(model.parameters(), on_gpu.parameters(), strict=True):
        assert torch.allclose(p, q.cpu(), atol=1e-3)  # A rounding may differ, by ULP of a step.


# A run


def runs(folder: Path) -> None:
    flags = (
        "--config debug.toml --model.n_layers 1 --training.seq_len 64 --training.local_batch_size 4 "
        f"--training.global_batch_size 4 --training.dataset text --training.dataset_path {folder / 'text'} "
        "--lr_scheduler.warmup_steps 10 --lr_scheduler.total_steps 60 --validation.enable false --metrics.log_freq 1 "
        "--metrics.enable_tensorboard false --checkpoint.interval 1000"
    )
    for name, dtype, steps in (
        ("float32", "float32", 60), ("bfloat16", "bfloat16", 60), ("stopped", "bfloat16", 10),
        ("stopped", "bfloat16", 14), ("bfloat16", "float32", 62), ("float32", "bfloat16", 62),
    ):  # fmt: skip
        argv = f"{flags} --training.steps {steps} --optimizer.state_dtype {dtype} --job.dump_folder {folder / name}"
        trainer = Trainer(load_config(argv.split(), 1), torch.device("cpu"))
        trainer.train()
        trainer.close()


def test_a_run_learns_as_with_float32_moments(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    generator = torch.Generator().manual_seed(0)
    words = WORDS.split()
    for i in range(40):
        chosen = torch.randint(len(words), (200,), generator=generator).tolist()
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(words[j] for j in chosen))
    launch(runs, 1, tmp_path)
    losses = {}
    for name in ("float32", "bfloat16", "stopped"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert losses["float32"][60] < losses["float32"][1] - 2
    for step in range(1, 61):
        assert losses["bfloat16"][step] == pytest.approx(losses["float32"][step], rel=5e-3), step
    assert losses["stopped"] == {step: losses["bfloat16"][step] for step in range(1, 15)}  # To the bit.
    # These went on in the other precision.
    assert losses["bfloat16"][62] == pytest.approx(losses["float32"][62], rel=5e-3)


@pytest.mark.parametrize("flags", ["--optimizer.implementation foreach", "--training.enable_cpu_offload"])
def test_what_does_not_go_together_is_told(flags: str) -> None:
    argv = f"--config debug.toml --optimizer.state_dtype bfloat16 {flags}".split()
    with pytest.raises(UserError, match=r"optimizer.state_dtype: bfloat16 .*take float32"):
        load_config(argv, 1)
