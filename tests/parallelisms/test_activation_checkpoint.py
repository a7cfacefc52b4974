"""Activation checkpointing recomputes what its mode says, no more and no less, counted in operations.

That the gradients stay the same to the bit, tests/test_gradients.py holds.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch.utils._python_dispatch import TorchDispatchMode

from models.llama.model import Llama
from models.llama.shapes import LlamaShape
from parallelisms.activation_checkpoint import (
    ATTENTION_OPS,
    MATMUL_OPS,
    ActivationCheckpointConfig,
    apply_activation_checkpointing,
)
from parallelisms.compile import CompileConfig, compile_blocks

LAYERS, SEQ_LEN = 3, 32
MATMULS = 7  # In a block, forward; each has two in backward.


@pytest.fixture(autouse=True)
def budget_as_before() -> Iterator[None]:
    """The memory budget is a setting of the process."""
    with torch._functorch.config.patch(activation_memory_budget=torch._functorch.config.activation_memory_budget):
        yield


class Operations(TorchDispatchMode):
    """Counts what is computed inside of it, and lists the storages of the weights whose linears are."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()
        self.multiplied: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[op] += 1
        # x @ w.T takes a transposed weight; the input's gradient, g @ w, takes it as it lies.
        if op in MATMUL_OPS and not args[1].is_contiguous():
            self.multiplied.append(args[1].untyped_storage().data_ptr())
        return op(*args, **(kwargs or {}))


def small_model(layers: int = LAYERS, **settings: Any) -> tuple[Llama, int]:
    """The model and how many of its blocks are wrapped."""
    with torch.device("meta"):
        model = Llama(LlamaShape(64, layers, 4, 2, 96, vocab_size=128, head_dim=16), SEQ_LEN)
    model.to_empty(device="cpu")
    model.init_weights(0, torch.device("cpu"))
    return model, apply_activation_checkpointing(model.layers, ActivationCheckpointConfig(**settings))


def kept_and_recomputed(**settings: Any) -> tuple[int, int, int]:
    """Bytes that autograd keeps of a forward pass; matmuls and attentions that the backward pass computes again."""
    model, _ = small_model(**settings)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        loss = model(torch.zeros((2, SEQ_LEN), dtype=torch.int64)).sum()
    with Operations() as operations:
        loss.backward()
    matmuls = sum(operations.counts[op] for op in MATMUL_OPS)
    own = 2 * (MATMULS * LAYERS + 1)  # The output head has none to recompute.
    return sum(kept), matmuls - own, sum(operations.counts[op] for op in ATTENTION_OPS)


def test_each_mode_recomputes_what_it_says() -> None:
    # The last matmul of a block, w2, is not computed again in full: backward does not need what it gives.
    full = MATMULS - 1
    expected = {
        ("none", "op"): (0, 0),
        ("full", "op"): (full * LAYERS, LAYERS),
        # Of wq wk wv wo w1 w3 w2 every second is kept, from the first on: wk, wo and w3 are computed again.
        ("selective", "op"): (3 * LAYERS, 0),
        ("selective", "matmuls"): (0, 0),
        ("selective", "1"): (full * LAYERS, LAYERS),
        ("selective", "2"): (full * 2, 2),  # the blocks 0 and 2
        ("selective", "3"): (full, 1),
        ("selective", "99"): (full, 1),
    }
    found = {case: kept_and_recomputed(mode=case[0], selective_ac_option=case[1])[1:] for case in expected}
    assert found == expected


def test_every_second_matmul_is_kept_from_the_first_on() -> None:
    # Their number alone does not tell which: backward does not need w2's output, kept or not.
    model, _ = small_model(layers=1, mode="selective")
    names = {p.untyped_storage().data_ptr(): name.split(".")[-2] for name, p in model.named_parameters()}
    with Operations() as forward:
        loss = model(torch.zeros((2, SEQ_LEN), dtype=torch.int64)).sum()
    with Operations() as backward:
        loss.backward()
    found = [[names[at] for at in operations.multiplied if at in names] for operations in (forward, backward)]
    assert found == [["wq", "wk", "wv", "wo", "w1", "w3", "w2", "output"], ["wk", "wo", "w3"]]


def test_more_recomputed_is_less_kept() -> None:
    # Every second block: what "op" keeps lies aside, where the hooks do not see it.
    kept = {mode: kept_and_recomputed(mode=mode, selective_ac_option="2")[0] for mode in ("none", "selective", "full")}
    assert kept["full"] < 0.3 * kept["none"]
    assert kept["full"] < kept["selective"] < kept["none"]


def test_the_blocks_wrapped_are_counted_and_keep_their_names() -> None:
    names = [[name for name, _ in small_model(mode=mode)[0].named_parameters()] for mode in ("none", "full")]
    assert names[0] == names[1]
    assert small_model(mode="none")[1] == 0
    assert small_model(mode="full")[1] == small_model(mode="selective")[1] == LAYERS
    assert small_model(mode="selective", selective_ac_option="2")[1] == 2


def test_the_compiler_keeps_what_the_budget_allows() -> None:
    kept = {}
    for budget in (0.0, 1.0):
        torch._dynamo.reset()
        model, blocks = small_model(layers=1, mode="memory_budget", memory_budget=budget)
        assert blocks == 1
        # The backend that partitions as inductor does, without generating code.
        compile_blocks(model.layers, CompileConfig(enable=True, backend="aot_eager_decomp_partition"))
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, n=sizes: n.append(t.nbytes) or t, lambda t: t):
            model(torch.zeros((2, SEQ_LEN), dtype=torch.int64)).sum().backward()
        kept[budget] = sum(sizes)
    assert kept[0.0] < 0.8 * kept[1.0]


def test_another_mode_takes_the_budget_back() -> None:
    small_model(layers=1, mode="memory_budget", memory_budget=0.25)
    assert torch._functorch.config.activation_memory_budget == 0.25
    small_model(layers=1, mode="none")
    assert torch._functorch.config.activation_memory_budget == 1.0


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"selective_ac_option": "0"}, "selective_ac_option"),
        ({"selective_ac_option": "-1"}, "selective_ac_option"),
        ({"selective_ac_option": "ops"}, "selective_ac_option"),
        ({"memory_budget": 1.01}, "memory_budget"),
        ({"memory_budget": -0.1}, "memory_budget"),
    ],
)
def test_problems(settings: dict[str, Any], key: str) -> None:
    assert [found for found, _ in ActivationCheckpointConfig(**settings).problems()] == [key]


def test_no_problems() -> None:
    for settings in ({}, {"selective_ac_option": "2"}, {"memory_budget": 0.0}, {"memory_budget": 1.0}):
        assert ActivationCheckpointConfig(**settings).problems() == []
