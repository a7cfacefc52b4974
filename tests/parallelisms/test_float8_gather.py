"""Weights gathered as float8: the values, the gradients, the bytes, and what is freed between forward and backward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from float8.convert import Float8Config, select_linears
from float8.quantise import columns_from_rows, quantise_rows
from models.llama.model import Llama
from models.llama.parallelize import float8_gathers, parallelize_llama
from models.llama.shapes import LlamaShape
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.compile import CompileConfig
from parallelisms.float8_gather import Float8Gather
from parallelisms.fsdp import whole
from parallelisms.mesh import ParallelismConfig, build_meshes
from scripts.local_ranks import launch

SHAPE = LlamaShape(512, 2, 8, 4, 1024, vocab_size=128, head_dim=64)
SEQ_LEN = 16
NAMES = {"wq": ["wq", "wk", "wv"], "wo": ["wo"], "w1": ["w1", "w3"], "w2": ["w2"]}


class Gathers(TorchDispatchMode):
    """Counts the bytes that this rank puts into all-gathers."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.nbytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


def build(reshard: str, tp: int = 1) -> tuple[Llama, dict[str, str]]:
    """float32, so that what differs is not rounding to bf16."""
    parallelism = ParallelismConfig(tensor_parallel_degree=tp, fsdp_reshard_after_forward=reshard)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Llama(SHAPE, SEQ_LEN)
    rows = parallelize_llama(
        model,
        build_meshes(parallelism, torch.device("cpu")),
        parallelism=parallelism,
        float8=Float8Config(recipe_name="rowwise"),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
        compile=CompileConfig(),
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        cpu_offload=False,
    )
    model.to_empty(device="cpu")
    model.init_weights(0, torch.device("cpu"))
    return model, {row.technique.strip(): row.applied for row in rows}


def step(model: Llama) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss of this rank's sequence, all gradients)"""
    tokens = torch.randint(128, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = model(tokens[:, :-1], tokens[:, 1:], torch.tensor(2.0 * SEQ_LEN))
    loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), grads


def in_float8() -> None:
    never, applied = build("never")
    assert applied["gathered by FSDP2 in float8"] == "14 of 14 linear layers"
    weights = {name: whole(p) for name, p in never.named_parameters()}
    with torch.no_grad():
        never(torch.zeros(1, SEQ_LEN, dtype=torch.int64))  # Gathers, and keeps.
    for i, block in enumerate(never.layers):
        for part in (block.attention, block.feed_forward):
            for first in NAMES.keys() & dict(part.named_children()).keys():
                names = [name for name in weights if name.split(".")[-2] in NAMES[first] and f"layers.{i}." in name]
                rows = quantise_rows(torch.cat([weights[name] for name in names]))
                columns = columns_from_rows(rows)
                expected = (rows.data, rows.scale, columns.data, columns.scale)
                found = getattr(part, first).gathered
                assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))

    results = {}
    for reshard in ("never", "always"):
        model, applied = build(reshard)
        with Gathers() as gathers:
            first = step(model)
        results[reshard] = first
        # The input of an all-gather is half of two ranks' buffer, which is what a rank sends.
        told = applied["sent by a rank per micro-batch"].split(" MiB gathering")[0]
        assert float(told) == pytest.approx(gathers.nbytes / 2**20, abs=0.051)  # It has one decimal.
        again = step(model)
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(first[1][name], again[1][name]) for name in first[1])
        held = [b.feed_forward.w1.gathered[0].untyped_storage().nbytes() for b in model.layers]
        assert held == [0, 0]  # After backward, whatever was asked.
    model, _ = build("always")
    with torch.no_grad():
        model(torch.zeros(1, SEQ_LEN, dtype=torch.int64))
    assert all(b.feed_forward.w1.gathered[0].untyped_storage().nbytes() == 0 for b in model.layers)
    with Gathers() as gathers:
        step(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Float8Gather, "install", lambda self: None)
        model, _ = build("always")
        with Gathers() as plain:
            results["float32"] = step(model)
    assert gathers.nbytes < 0.3 * plain.nbytes
    assert all(torch.equal(results["never"][0], results[name][0]) for name in results)
    for name, grad in results["float32"][1].items():
        assert torch.equal(results["never"][1][name], results["always"][1][name])
        # Columns made of rows differ from columns made of weights where a value is subnormal in one of them.
        assert (results["never"][1][name] - grad).norm() < 0.01 * grad.norm(), name


def test_on_two_ranks() -> None:
    launch(in_float8, 2)


def test_rows_that_shards_do_not_divide_are_left_to_bf16() -> None:
    """FSDP2 pads them, and a padded row has no scale."""
    with torch.device("meta"):
        model = Llama(SHAPE, SEQ_LEN)
    selection = select_linears(model, Float8Config(recipe_name="rowwise"))
    assert len(float8_gathers(model, selection, shards=2)) == 8
    assert not float8_gathers(model, selection, shards=3)
