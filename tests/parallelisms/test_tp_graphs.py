"""The compiled graphs of a tensor parallel block hold the collectives that the plan promises: all fused, none twice.

The shapes are those of torchtitan issue 864, on 256 ranks in one process: the process group is fake and the tensors are
on the meta device, so nothing is sent or computed, but the compiler sees the real thing.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal.distributed.fake_pg import FakeStore

from float8.convert import Selection
from models.llama.model import Llama
from models.llama.parallelize import replace_linears
from models.llama.shapes import LlamaShape
from parallelisms.activation_checkpoint import ActivationCheckpointConfig, apply_activation_checkpointing
from parallelisms.async_tp import PLAN
from parallelisms.mesh import ParallelismConfig, build_meshes

WORLD = 256
SHAPES = {
    2048: LlamaShape(2048, 1, 16, 8, 5632, vocab_size=128256),
    4096: LlamaShape(4096, 1, 32, 8, 14336, vocab_size=128256),
}
FORWARD = Counter(PLAN["forward"])
BACKWARD = Counter(PLAN["backward"])
# What a backward pass computes again before its own collectives: w2's output is not needed by anything.
RECOMPUTED = {
    "none": Counter(),
    "full": FORWARD - Counter(["w2"]),
    "selective": Counter(["w1 w3"]),
}


@pytest.fixture(scope="module", autouse=True)
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def collectives(graph: fx.Graph) -> tuple[Counter[str], Counter[str]]:
    """Layers of the fused collectives in a graph, and of the others. Each one's result must be used."""
    fused: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("rowhouse."):
            assert node.users, f"{node.target} is dangling"
            arguments = {a.name: value for a, value in zip(node.target._schema.arguments, node.args, strict=True)}
            if "layer" not in arguments:  # A matmul alone.
                continue
            (fused if arguments.get("fused") else plain)[arguments["layer"]] += 1
        else:
            assert "c10d" not in str(node.target), f"a collective of someone else's: {node.target}"
    return fused, plain


def graphs_of_block(
    dim: int, batch: int, seq_len: int, tp: int, recipe: str | None, ac: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, fx.Graph]:
    # As on a machine whose probe found the fused ops to be right.
    monkeypatch.setattr("models.llama.parallelize.why_not_fused", lambda *args, **kwargs: "")
    torch._dynamo.reset()
    parallelism = ParallelismConfig(tensor_parallel_degree=tp, enable_async_tensor_parallel=True)
    meshes = build_meshes(parallelism, torch.device("cpu"))
    with torch.device("meta"):
        model = Llama(SHAPES[dim], seq_len)
    names = [f"layers.0.{n}" for n in ("attention.wq", "attention.wk", "attention.wv", "attention.wo")]
    names += [f"layers.0.feed_forward.{n}" for n in ("w1", "w2", "w3")]
    replace_linears(model, meshes, parallelism, recipe, Selection(names if recipe else [], {}))
    model.bfloat16()
    apply_activation_checkpointing(model.layers, ActivationCheckpointConfig(mode=ac))  # type: ignore[arg-type]
    graphs: dict[str, fx.Graph] = {}

    def keep(name: str) -> Any:
        def compiler(module: fx.GraphModule, inputs: Any) -> Any:
            assert name not in graphs
            graphs[name] = module.graph
            return module.forward

        return compiler

    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    block = torch.compile(model.layers[0].forward, backend=backend, fullgraph=True)
    x = torch.empty(batch * seq_len // tp, dim, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = block(x, model.freqs_cis, seq_len)
    assert out.shape == x.shape
    out.sum().backward()
    return graphs


@pytest.mark.parametrize(
    "dim, batch, tp, recipe, ac",
    [
        (2048, 1, 2, "rowwise", "full"),  # issue 864
        (4096, 5, 2, "rowwise", "full"),
        (4096, 5, 4, "rowwise", "full"),
        (4096, 5, 8, "rowwise", "full"),
        (4096, 2, 8, "rowwise", "none"),
        (4096, 2, 2, "rowwise", "selective"),
        (4096, 2, 2, "rowwise_with_gw_hp", "full"),
        (4096, 5, 4, None, "full"),
        (4096, 2, 2, None, "selective"),
    ],
)
def test_every_planned_collective_is_there_fused_and_once(
    dim: int, batch: int, tp: int, recipe: str | None, ac: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = graphs_of_block(dim, batch, 8192, tp, recipe, ac, monkeypatch)
    fused, plain = collectives(graphs["forward"])
    assert fused == FORWARD
    assert not plain  # Nothing of the backward pass was hoisted here.
    fused, plain = collectives(graphs["backward"])
    assert fused == BACKWARD + RECOMPUTED[ac]
    # The activations for the weight gradients: two column groups gather theirs, data and scales; with the weight
    # gradient in high precision the row linears gather the unquantised gradient besides. And two norms' gradients.
    gathers = {"rowwise": 2, "rowwise_with_gw_hp": 1, None: 1}[recipe]
    expected = Counter({"wq wk wv backward": gathers, "w1 w3 backward": gathers, "norm backward": 2})
    if recipe == "rowwise_with_gw_hp":
        expected += Counter(["wo backward", "w2 backward"])
    assert plain == expected


def test_float8_is_what_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of_block(4096, 5, 8192, 2, "rowwise", "none", monkeypatch)
    for graph in graphs.values():
        for node in graph.nodes:
            if str(node.target).startswith("rowhouse.gather_scaled_matmul"):
                data, scale = (argument.meta["val"] for argument in node.args[:2])
                assert data.dtype == torch.float8_e4m3fn
                assert scale.shape == (data.shape[0], 1)
            elif str(node.target).startswith("rowhouse.gather."):
                assert node.args[0].meta["val"].dtype in (torch.float8_e4m3fn, torch.float32)
