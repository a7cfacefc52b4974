"""Looks on while a step runs under fake tensors: every op, every compiled graph, every storage."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planning.costs import Sent, Work, is_view, name_of, sent_by, temporaries_of, work_of
from planning.graphs import GraphPlan, Matmul, float8_matmul
from planning.memory import MemoryTracker

FREE = {"aten::view", "aten::detach", "aten::empty", "aten::empty_strided", "aten::new_empty", "aten::as_strided"}


class StepObserver(TorchDispatchMode):
    """What a step takes (`memory`), computes (`works`, by phase), sends and multiplies in float8."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryTracker()
        self.works: list[tuple[str, Work]] = []
        self.sent: list[tuple[str, Sent]] = []
        self.matmuls: list[Matmul] = []
        self.looks_away = False

    # The compiler is to trace as if this mode were not there (names of torch 2.11, and from 2.12 on).
    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.looks_away or torch._guards.TracingContext.try_get() is not None:
            return func(*args, **kwargs)
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # It calls again, with what it is made of.
        out = func(*args, **kwargs)
        self.memory.add(tree_leaves(out))
        if not is_free(func):
            self.memory.pulse(temporaries_of(func, args, out))
            self.note([work_of(func, args, out)], sent_by(func, args), float8_matmul(func, args))
        return out

    def run_graph(self, plan: GraphPlan, graph: Callable[..., Any], args: Sequence[Any]) -> Any:
        self.memory.pulse(max(plan.inside, 0))
        out = self.unobserved(graph)(*args)
        self.memory.add(tree_leaves(out))
        backward = torch._C._current_graph_task_id() != -1
        self.note(plan.works, [dataclasses.replace(s, backward=backward) for s in plan.sent], plan.matmuls)
        return out

    def unobserved(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def unobserved(*args: Any, **kwargs: Any) -> Any:
            before, self.looks_away = self.looks_away, True
            try:
                return function(*args, **kwargs)
            finally:
                self.looks_away = before

        return unobserved

    def note(self, works: list[Work], sent: list[Sent], matmuls: list[Matmul]) -> None:
        phase = self.memory.phase
        self.works += [(phase, work) for work in works]
        self.sent += [(phase, s) for s in sent if s.nbytes]
        self.matmuls += matmuls

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """While it looks on: storages that are resized, and which block the step is in."""
        resize = torch.UntypedStorage.resize_
        memory = self.memory

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            memory.resized(storage)
            return result

        def enter(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any) -> None:
                memory.phase, memory.where = "forward", name

            return hook

        def leave(name: str) -> Callable[..., None]:
            def backward(gradient: Tensor) -> None:
                memory.phase, memory.where = "backward", name

            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                if output.requires_grad:
                    output.register_hook(backward)

            return hook

        hooks = []
        for name, module in [(f"block {name}", m) for name, m in model.layers.named_children()] + [  # type: ignore
            ("embedding", model.tok_embeddings), ("norm", model.norm), ("head", model.output),
        ]:  # fmt: skip
            if module is not None:
                hooks += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave(name))]
        # DTensor asks tensors of the whole shape, which it makes for this, what an op gives.
        asks = ShardingPropagator._propagate_tensor_meta_non_cached
        quiet = lambda propagator, *args: self.unobserved(asks)(propagator, *args)  # noqa: E731
        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resize_and_tell),
            mock.patch.object(ShardingPropagator, asks.__name__, quiet),
            self,
        ):
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()


def is_free(func: Any) -> bool:
    """Whether an op computes and moves nothing."""
    name = name_of(func)
    return "::" not in name or name in FREE or name.startswith(("prim::", "profiler::")) or is_view(func)
