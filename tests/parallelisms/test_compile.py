"""The blocks of a model share one compiled graph, whatever activation checkpointing wraps them in; no break in it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from float8.convert import Float8Config
from models.llama.model import Llama
from models.llama.parallelize import parallelize_llama
from models.llama.shapes import LlamaShape
from parallelisms.activation_checkpoint import ActivationCheckpointConfig, apply_activation_checkpointing
from parallelisms.compile import CompileConfig, compile_blocks
from parallelisms.mesh import ParallelismConfig, build_meshes

LAYERS, SEQ_LEN = 2, 32


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def small_model() -> Llama:
    with torch.device("meta"):
        model = Llama(LlamaShape(64, LAYERS, 4, 2, 96, vocab_size=128, head_dim=16), SEQ_LEN)
    model.to_empty(device="cpu")
    model.init_weights(0, torch.device("cpu"))
    return model


def tokens(batch: int) -> torch.Tensor:
    return torch.arange(batch * SEQ_LEN).view(batch, SEQ_LEN) % 128


class Backend:
    """Keeps the graphs that it is given, and counts how often they are run."""

    def __init__(self) -> None:
        self.graphs, self.runs = 0, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_all_blocks_share_one_graph(mode: str) -> None:
    model, backend = small_model(), Backend()
    plain = model(tokens(2))
    names = [name for name, _ in model.named_parameters()]
    apply_activation_checkpointing(model.layers, ActivationCheckpointConfig(mode=mode))  # type: ignore[arg-type]
    assert compile_blocks(model.layers, CompileConfig(enable=True, backend=backend)) == LAYERS  # type: ignore[arg-type]
    logits = model(tokens(2))
    logits.sum().backward()
    assert (backend.graphs, backend.runs) == (1, LAYERS)
    assert torch.allclose(logits, plain, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parallelized(recipe: str | None, compile: CompileConfig) -> Llama:
    """The small model with all that a run applies to it, FSDP too."""
    with torch.device("meta"):
        model = Llama(LlamaShape(64, LAYERS, 4, 2, 96, vocab_size=128, head_dim=16), SEQ_LEN)
    rows = parallelize_llama(
        model,
        build_meshes(ParallelismConfig(), torch.device("cpu")),
        parallelism=ParallelismConfig(),
        float8=Float8Config(recipe),  # type: ignore[arg-type]
        activation_checkpoint=ActivationCheckpointConfig(),
        compile=compile,
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        cpu_offload=False,
    )
    (compiled,) = (row.applied for row in rows if row.technique == "compile")
    assert compiled == f"{LAYERS if compile.enable else 0} blocks"
    model.to_empty(device="cpu")
    model.init_weights(0, torch.device("cpu"))
    return model


@pytest.mark.parametrize("recipe", [None, "rowwise", "rowwise_with_gw_hp"])
def test_parallelized_blocks_share_one_graph(recipe: str | None, one_rank: None) -> None:
    plain, backend = parallelized(recipe, CompileConfig()), Backend()
    model = parallelized(recipe, CompileConfig(enable=True, backend=backend))  # type: ignore[arg-type]
    logits = model(tokens(2))
    # The same operations in the same order, in float8 too: the graph is run as it was captured.
    assert torch.equal(logits, plain(tokens(2)))
    logits.sum().backward()
    model(tokens(2))
    assert (backend.graphs, backend.runs) == (1, 2 * LAYERS)


def test_batch_sizes_share_a_graph() -> None:
    # The second size costs one more, in which it is left open, and a third costs none.
    model = small_model()
    compile_blocks(model.layers, CompileConfig(enable=True, backend="eager"))
    for batch, graphs in ((2, 1), (3, 2), (4, 2)):
        model(tokens(batch)).sum().backward()
        assert counters["stats"]["unique_graphs"] == graphs


def test_only_what_is_asked_for_is_compiled() -> None:
    for config in (CompileConfig(), CompileConfig(enable=True, components=["loss"], backend="eager")):
        model = small_model()
        assert compile_blocks(model.layers, config) == 0
        model(tokens(1))
        assert counters["stats"]["unique_graphs"] == 0


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


def test_a_graph_break_is_an_error() -> None:
    blocks = nn.ModuleList([Broken()])
    assert compile_blocks(blocks, CompileConfig(enable=True, backend="eager")) == 1
    with pytest.raises(torch._dynamo.exc.Unsupported):
        blocks[0](torch.ones(2))


@pytest.mark.parametrize(
    ("config", "key", "text"),
    [
        (CompileConfig(components=["model", "optimizer"]), "components", "optimizer"),
        (CompileConfig(components=[]), "components", "the components are model, loss"),
        (CompileConfig(backend="inductr"), "backend", "inductor"),
    ],
)
def test_problems(config: CompileConfig, key: str, text: str) -> None:
    ((found, message),) = config.problems()
    assert found == key and text in message


def test_no_problems() -> None:
    assert CompileConfig(enable=True).problems() == []
    assert CompileConfig(components=["loss"], backend="aot_eager").problems() == []
