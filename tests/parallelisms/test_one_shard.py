"""Weights taken without FSDP2: the same loss and gradients as through it, bit for bit, and nothing held for longer."""

import itertools
from typing import Any

import torch
from torch import Tensor

from float8.convert import Float8Config
from models.llama.model import Llama
from models.llama.parallelize import parallelize_llama
from models.llama.shapes import LlamaShape
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.compile import CompileConfig
from parallelisms.fsdp import local
from parallelisms.mesh import ParallelismConfig, build_meshes
from scripts.local_ranks import launch

SEQ_LEN = 16


def build(
    recipe: str, reshard: Any = "default", tp: int = 1, tied: bool = False, dtype: torch.dtype = torch.bfloat16,
    compiled: bool = False, micro_batches: int = 1, any_gradient: bool = False,
) -> tuple[Llama, dict[str, str]]:  # fmt: skip
    """The model, and the table of what was applied. With "always" its weights go through FSDP2."""
    torch._dynamo.reset()
    parallelism = ParallelismConfig(tensor_parallel_degree=tp, fsdp_reshard_after_forward=reshard)
    with torch.device("meta"):
        model = Llama(LlamaShape(256, 2, 4, 2, 512, vocab_size=128, head_dim=64, tie_embeddings=tied), SEQ_LEN)
    rows = parallelize_llama(
        model,
        build_meshes(parallelism, torch.device("cpu")),
        parallelism=parallelism,
        float8=Float8Config(recipe_name=recipe, filter_fqns=[]),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
        compile=CompileConfig(enable=compiled, backend="aot_eager"),
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        cpu_offload=False,
        micro_batches=micro_batches,
        any_gradient=any_gradient,
    )
    model.to_empty(device="cpu")
    model.init_weights(0, torch.device("cpu"))
    return model, {row.technique.strip(): row.applied for row in rows}


def backward(model: Llama, micro_batches: int = 2) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(losses, the sums of the gradients)"""
    losses = []
    for seed in range(micro_batches):
        tokens = torch.randint(128, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
        loss = model(tokens[:, :-1], tokens[:, 1:], torch.tensor(4.0 * SEQ_LEN))
        loss.backward()
        losses.append(loss.detach())
    return losses, {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def as_through_fsdp(tp: int) -> None:
    for recipe, dtype, tied in itertools.product(
        ("none", "rowwise", "rowwise_with_gw_hp"), (torch.bfloat16, torch.float32), (False, True)
    ):
        if tied and recipe != "none":  # Its linears are float8 with or without.
            continue
        for micro_batches in (1, 2):
            how: dict[str, Any] = {"tp": tp, "tied": tied, "dtype": dtype}
            model, told = build(recipe, micro_batches=micro_batches, any_gradient=True, **how)
            assert told["FSDP2"] == "none: one shard"
            other, told_other = build(recipe, "always", **how)
            assert told_other["FSDP2"].endswith("units")
            (losses, grads), (expected_losses, expected) = (backward(m, micro_batches) for m in (model, other))
            case = (recipe, dtype, tied, micro_batches)
            assert all(torch.equal(a, b) for a, b in zip(losses, expected_losses, strict=True)), case
            assert grads.keys() == expected.keys() == dict(model.named_parameters()).keys(), case
            grad_dtype = dtype if micro_batches == 1 else torch.float32
            assert told["precision"].endswith(str(grad_dtype).removeprefix("torch.")), (case, told)
            for name, grad in grads.items():
                assert expected[name].dtype == torch.float32
                assert grad.dtype == grad_dtype and torch.equal(grad.float(), expected[name]), (*case, name)


def takes_weights_once_a_step() -> None:
    """A change between two micro-batches, which no optimizer makes, shows in the next step only."""
    for recipe in ("none", "rowwise"):
        model, _ = build(recipe, micro_batches=2, compiled=True)
        losses = []
        for i in range(3):
            losses += backward(model, 1)[0]
            if i == 0:
                with torch.no_grad():
                    for block in model.layers:
                        block.feed_forward.w2.weight.mul_(3)
        assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[1], losses[2]), recipe


def lets_go() -> None:
    model, _ = build("rowwise", compiled=True, micro_batches=2)
    names = [name for name, _ in model.named_parameters()]
    losses, grads = backward(model)
    assert all(loss.isfinite() for loss in losses) and grads.keys() == set(names)
    for module in model.modules():
        assert "taken_weight" not in module.__dict__ and not hasattr(module, "gathered")
    assert [name for name, _ in model.named_parameters()] == names  # What is taken is no parameter.


def test_one_rank() -> None:
    launch(as_through_fsdp, 1, 1)
    launch(takes_weights_once_a_step, 1)
    launch(lets_go, 1)


def test_two_tensor_parallel_ranks() -> None:
    launch(as_through_fsdp, 2, 2)
