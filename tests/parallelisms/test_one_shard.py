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
    compiled: bool = False,
) -> tuple[Llama, str]:  # fmt: skip
    """The model, and what the table of techniques says of FSDP2. With "always" its weights go through that."""
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
    )
    model.to_empty(device="cpu")
    model.init_weights(0, torch.device("cpu"))
    return model, next(row.applied for row in rows if row.technique == "FSDP2")


def two_micro_batches(model: Llama) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(losses, the sums of the gradients)"""
    losses = []
    for seed in range(2):
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
        model, told = build(recipe, tp=tp, tied=tied, dtype=dtype)
        assert told == "none: one shard"
        other, told = build(recipe, "always", tp=tp, tied=tied, dtype=dtype)
        assert told.endswith("units")
        (losses, grads), (expected_losses, expected) = two_micro_batches(model), two_micro_batches(other)
        case = (recipe, dtype, tied)
        assert all(torch.equal(a, b) for a, b in zip(losses, expected_losses, strict=True)), case
        assert grads.keys() == expected.keys() == dict(model.named_parameters()).keys(), case
        for name, grad in grads.items():
            assert grad.dtype == torch.float32 and torch.equal(grad, expected[name]), (*case, name)


def lets_go() -> None:
    model, _ = build("rowwise", compiled=True)
    names = [name for name, _ in model.named_parameters()]
    losses, grads = two_micro_batches(model)
    assert all(loss.isfinite() for loss in losses) and grads.keys() == set(names)
    for module in model.modules():
        assert "taken_weight" not in module.__dict__ and not hasattr(module, "gathered")
    assert [name for name, _ in model.named_parameters()] == names  # What is taken is no parameter.


def test_one_rank() -> None:
    launch(as_through_fsdp, 1, 1)
    launch(lets_go, 1)


def test_two_tensor_parallel_ranks() -> None:
    launch(as_through_fsdp, 2, 2)
