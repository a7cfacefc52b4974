"""What a compiled graph takes, computes and sends, without compiling it.

torch.compile and AOTAutograd trace and split a block as they do for Inductor: what is kept for backward is what they
decide. Instead of Inductor's code, whoever runs the graph gets its results as fake tensors, and a GraphPlan: the most
memory that it takes, if elementwise operations are fused as Inductor fuses them, and its ops' work and collectives.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_leaves, tree_map

from float8.scaled import ALIGNMENT
from planning.costs import ATTENTION, Sent, Work, is_view, name_of, nbytes_of, sent_by, temporaries_of, work_of
from planning.memory import rounded

Buffers = frozenset[int]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Matmul:
    """A float8 matmul as it is called: shapes of data and scales of its left side and of its right sides."""

    op: str
    left: tuple[Shape, Shape]
    right: tuple[tuple[Shape, Shape], ...]

    @property
    def scaling(self) -> str:
        """row-wise, tensor-wise, or what breaks the contract of docs/scale-shapes.md."""
        sides = [self.left, *self.right]
        if any(size % ALIGNMENT for data, _ in sides for size in data):
            return f"not aligned to {ALIGNMENT}"
        if all(len(data) == 2 and scale == (data[0], 1) for data, scale in sides):
            return "row-wise"
        return "tensor-wise" if all(scale in ((), (1,)) for _, scale in sides) else "of shapes that do not match"


@dataclass(frozen=True)
class GraphPlan:
    inside: int
    """The most bytes that live at once beyond those when the graph is entered."""
    works: list[Work]
    sent: list[Sent]
    matmuls: list[Matmul]


class Observer(Protocol):
    def run_graph(self, plan: GraphPlan, graph: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Carries a graph out, and takes note of its plan."""


def planning_backend(observer: Observer) -> Callable[..., Any]:
    """A backend for torch.compile whose graphs go through `observer`."""

    def compiler(frees_inputs: bool) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compile(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            plan = plan_graph(graph, frees_inputs)
            return make_boxed_func(lambda *args: observer.run_graph(plan, graph, args))

        return compile

    return aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def plan_graph(module: fx.GraphModule, frees_inputs: bool) -> GraphPlan:
    """`frees_inputs`: of a backward graph, which lets go of what was kept for it as it goes; parameters stay."""
    simulation = Simulation(module.graph, frees_inputs)
    works, sent, matmuls = [], [], []
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or is_view(node.target):
            continue
        func, args = called(node)
        if is_extern(node):
            works.append(work_of(func, args, node.meta.get("val")))
            sent += sent_by(func, args)
            matmuls += float8_matmul(func, args)
        elif node in simulation.real:
            nbytes = nbytes_of(node.meta.get("val")) + sum(simulation.sizes[i] for i in simulation.read_by[node])
            works.append(Work("memory", 0.0, nbytes))
    return GraphPlan(simulation.peak(), works, sent, matmuls)


class Simulation:
    """The buffers of a graph: when each is made and last read, as Inductor would lay its kernels out.

    Matmuls, attention and our own ops read and write memory. Elementwise operations are fused into whatever reads
    them: they make a buffer only where such an op or the caller reads it. A reduction makes one too. Elementwise
    results of one size that read the same buffer come from one kernel, which runs when all that it reads is there.
    """

    def __init__(self, graph: fx.Graph, frees_inputs: bool):
        self.sizes: list[int] = []
        self.maker: list[fx.Node | None] = []
        """Of each buffer; None for an input."""
        self.freed_inputs: set[int] = set()
        self.returned: Buffers = frozenset()
        self.read_by: dict[fx.Node, Buffers] = {}
        """Of each node that makes buffers."""
        self.real = {node for node in graph.nodes if node.op == "call_function" and makes_buffer(node)}
        # Of each node: for each tensor of its value the buffers that reading it reads.
        results: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            read = all_read(results, node)
            if node.op == "placeholder":
                results[node] = self.made(node, None)
                if frees_inputs and not node.name.startswith(("primals", "tangents")):
                    self.freed_inputs |= all_buffers(results[node])
            elif node.op == "output":
                self.returned = read
            elif node.op != "call_function":
                results[node] = frozenset()
            elif node.target is operator.getitem:
                whole = results[node.args[0]]
                # A wrapped op has no value of its own: its results are told by those who take them.
                results[node] = self.made(node, whole) if isinstance(whole, fx.Node) else whole[node.args[1]]
            elif node in self.real:
                self.read_by[node] = read
                results[node] = self.made(node, node)
            else:  # A view, or computed where it is read.
                results[node] = tree_map(lambda _, read=read: read, node.meta.get("val"))

    def made(self, node: fx.Node, maker: fx.Node | None) -> Any:
        """The buffers of a value; its maker where it has none of its own."""
        return tree_map(lambda t: self.buffer(t, maker), node.meta["val"]) if "val" in node.meta else maker

    def buffer(self, value: Any, maker: fx.Node | None) -> Buffers:
        if not isinstance(value, Tensor):
            return frozenset()
        self.sizes.append(rounded(nbytes_of(value)))
        self.maker.append(maker)
        return frozenset((len(self.sizes) - 1,))

    def kernels(self) -> list[list[fx.Node]]:
        """The nodes that make buffers, those together that one kernel makes, in the order in which they can run."""
        before: dict[fx.Node, set[fx.Node]] = {}  # All that must have run.
        groups: list[list[fx.Node]] = []
        for node, read in self.read_by.items():
            makers = {maker for i in read if (maker := self.maker[i]) is not None}
            before[node] = makers.union(*(before[maker] for maker in makers))
            group = None if is_extern(node) else next((g for g in groups if self.together(g, node, before)), None)
            if group is None:
                groups.append([node])
            else:
                group.append(node)
        order: list[list[fx.Node]] = []
        done: set[fx.Node] = set()
        waiting = groups
        while waiting:
            ready = next((g for g in waiting if all(before[node] <= done.union(g) for node in g)), None)
            if ready is None:  # Two kernels that wait for each other: one is taken apart.
                apart = next(g for g in waiting if len(g) > 1)
                waiting = [part for g in waiting for part in ([[node] for node in g] if g is apart else [g])]
                continue
            waiting = [g for g in waiting if g is not ready]
            order.append(ready)
            done.update(ready)
        return order

    def together(self, group: list[fx.Node], node: fx.Node, before: dict[fx.Node, set[fx.Node]]) -> bool:
        """Whether an elementwise node joins these: nothing between them has to run first."""
        if is_extern(group[0]) or nbytes_of(group[0].meta["val"]) != nbytes_of(node.meta["val"]):
            return False
        if not any(self.read_by[other] & self.read_by[node] for other in group):
            return False
        between = {n for n in before[node] if n not in group}
        return not any(before[n].intersection(group) for n in between)

    def peak(self) -> int:
        """Results are made before what is read for the last time is freed, but for a single elementwise one: that may
        take the place of what it reads."""
        order = self.kernels()
        born = {node: time for time, kernel in enumerate(order) for node in kernel}
        last = {i: (-1 if maker is None else born[maker]) for i, maker in enumerate(self.maker)}
        for node, read in self.read_by.items():
            for i in read:
                last[i] = max(last[i], born[node])
        kept = {i for i, maker in enumerate(self.maker) if maker is None and i not in self.freed_inputs} | self.returned
        now = most = 0
        for time, kernel in enumerate(order):
            new = [self.sizes[i] for i, maker in enumerate(self.maker) if maker in kernel]
            gone = [self.sizes[i] for i, when in last.items() if when == time and i not in kept]
            in_place = len(kernel) == 1 and not is_extern(kernel[0]) and new[0] in gone
            inside = sum(temporaries_of(*called(node), node.meta.get("val")) for node in kernel if is_extern(node))
            most = max(most, now + (0 if in_place else sum(new)) + inside)
            now += sum(new) - sum(gone)
        return most


def all_read(results: dict[fx.Node, Any], node: fx.Node) -> Buffers:
    return frozenset().union(*(all_buffers(results[read]) for read in node.all_input_nodes))


def all_buffers(result: Any) -> Buffers:
    leaves = tree_leaves(result, is_leaf=lambda x: isinstance(x, frozenset))
    return frozenset().union(*(leaf for leaf in leaves if isinstance(leaf, frozenset)))


REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "var", "var_mean", "linalg_vector_norm",
}  # fmt: skip
OWN_KERNELS = {"index_put", "sort", "topk", "convolution", "embedding_dense_backward", "scatter_add"}


def called(node: fx.Node) -> tuple[Any, list[Any]]:
    """(op, its arguments with values in the place of nodes). Attention may come wrapped, with a generator's state."""
    func: Any = node.target
    args = [tree_map(lambda a: a.meta.get("val") if isinstance(a, fx.Node) else a, arg) for arg in node.args]
    if isinstance(func, torch._ops.HigherOrderOperator):
        ops = [i for i, arg in enumerate(args) if isinstance(arg, torch._ops.OpOverload)]
        if not ops:
            raise RuntimeError(f"a compiled graph calls {func.name()}, whose memory is not known")
        return args[ops[0]], args[ops[0] + 1 :]
    return func, args


def is_extern(node: fx.Node) -> bool:
    """Whether Inductor calls a kernel that is not its own."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    namespace, _, name = name_of(node.target).partition("::")
    return (
        namespace in ("rowhouse", "c10d", "_c10d_functional")
        or name in OWN_KERNELS
        or name_of(node.target) in ATTENTION
        or name in ("mm", "bmm", "addmm", "_scaled_mm")
    )


def makes_buffer(node: fx.Node) -> bool:
    if node.target is operator.getitem or is_view(node.target):
        return False
    return is_extern(node) or name_of(node.target).partition("::")[2] in REDUCTIONS or is_read_from_memory(node)


def is_read_from_memory(node: fx.Node) -> bool:
    for user in node.users:
        if user.op == "output" or is_extern(user):
            return True
        if (user.target is operator.getitem or is_view(user.target)) and is_read_from_memory(user):
            return True
    return False


def float8_matmul(func: Any, args: Sequence[Any]) -> list[Matmul]:
    name = name_of(func).partition("::")[2]
    shape = lambda t: tuple(t.shape)  # noqa: E731
    if name in ("scaled_mm", "scaled_matmul_scatter"):
        a, a_scale, b, b_scale = args[:4]
        return [Matmul(name, (shape(a), shape(a_scale)), ((shape(b), shape(b_scale)),))]
    if name == "gather_scaled_matmul":
        a, a_scale, bs, b_scales = args[:4]
        right = tuple((shape(b), shape(scale)) for b, scale in zip(bs, b_scales, strict=True))
        return [Matmul(name, (shape(a), shape(a_scale)), right)]
    if name == "_scaled_mm":  # torchao's: the right side comes transposed.
        a, b, a_scale, b_scale = args[:4]
        return [Matmul(name, (shape(a), shape(a_scale)), ((shape(b)[::-1], shape(b_scale)[::-1]),))]
    return []
