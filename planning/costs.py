"""What an operation computes, moves and sends, by its name and the shapes that it is given."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parallelisms.tp_ops import ranks_of


@dataclass(frozen=True)
class Work:
    """`kind`: "float8 matmul", "bf16 matmul", "float32 matmul", "attention" or "memory"."""

    kind: str
    flops: float
    nbytes: int
    """Read and written."""


@dataclass(frozen=True)
class Sent:
    """A collective, as it leaves one rank."""

    kind: str
    """all_gather, reduce_scatter or all_reduce."""
    group: str
    """The process group's name."""
    nbytes: int
    """What this rank sends in a ring: (n - 1) / n of the whole, for an all-reduce twice that."""
    layer: str = ""
    """Of a tensor parallel one, as parallelisms/tp_ops.py calls it."""
    op: str = ""
    """The op that it is part of."""
    fused: bool = False
    backward: bool = False


ATTENTION = {
    "aten::_scaled_dot_product_cudnn_attention": 2,
    "aten::_scaled_dot_product_flash_attention": 2,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 2,
    "aten::_scaled_dot_product_efficient_attention": 2,
    # Scores again, and four products more.
    "aten::_scaled_dot_product_cudnn_attention_backward": 5,
    "aten::_scaled_dot_product_flash_attention_backward": 5,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 5,
    "aten::_scaled_dot_product_efficient_attention_backward": 5,
}
"""Op -> matmuls of (queries x keys x head_dim), of which a causal one needs half."""


def is_view(func: Any) -> bool:
    """Whether what an op gives lies in the memory of what it takes."""
    schema = getattr(func, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def name_of(func: Any) -> str:
    return func._schema.name if hasattr(func, "_schema") else str(func)


def matmul_shape(func: Any, args: Sequence[Any]) -> tuple[int, int, int, torch.dtype] | None:
    """(M, K, N, dtype) of a matmul, tensor parallel ones included; None for anything else.

    Ops that multiply one A by several Bs count them as one, as wide as all.
    """
    name = name_of(func)
    if name in ("aten::mm", "aten::_scaled_mm", "aten::addmm"):
        a, b = args[1:3] if name == "aten::addmm" else args[:2]
        return a.shape[0], a.shape[1], b.shape[1], a.dtype
    if name == "aten::bmm":
        a, b = args[:2]
        return a.shape[0] * a.shape[1], a.shape[2], b.shape[2], a.dtype
    if name == "rowhouse::scaled_mm":
        return args[0].shape[0], args[0].shape[1], args[2].shape[0], args[0].dtype
    if name == "rowhouse::gather_matmul":
        a, bs, group = args[:3]
        return a.shape[0] * ranks_of(group), a.shape[1], sum(b.shape[1] for b in bs), a.dtype
    if name == "rowhouse::gather_scaled_matmul":
        a, _, bs, _, _, group = args[:6]
        return a.shape[0] * ranks_of(group), a.shape[1], sum(b.shape[0] for b in bs), a.dtype
    if name == "rowhouse::matmul_scatter":
        return args[0].shape[0], args[0].shape[1], args[1].shape[1], args[0].dtype
    if name == "rowhouse::scaled_matmul_scatter":
        return args[0].shape[0], args[0].shape[1], args[2].shape[0], args[0].dtype
    return None


def nbytes_of(values: Any) -> int:
    """Of all tensors in there. A random generator's state has a size that tracing does not know, and counts nothing."""
    sizes = [t.numel() * t.element_size() for t in tree_leaves(values) if isinstance(t, Tensor)]
    return sum(n for n in sizes if isinstance(n, int))


def work_of(func: Any, args: Sequence[Any], out: Any) -> Work:
    nbytes = nbytes_of((*args, out))
    shape = matmul_shape(func, args)
    if shape is not None:
        m, k, n, dtype = shape
        precision = {torch.bfloat16: "bf16", torch.float32: "float32"}.get(dtype, "float8")
        return Work(f"{precision} matmul", 2.0 * m * k * n, nbytes)
    if (matmuls := ATTENTION.get(name_of(func))) is not None:
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.dim() == 4]
        q = max(tensors, key=lambda t: t.shape[1])  # As many heads as any of them.
        return Work("attention", matmuls * math.prod(q.shape) * q.shape[2], nbytes)
    return Work("memory", 0.0, nbytes)


def temporaries_of(func: Any, args: Sequence[Any], out: Any) -> int:
    """Bytes that an op takes for itself: a tensor parallel one what is gathered, or what is yet to be added up."""
    name = name_of(func)
    if name in ("rowhouse::gather_matmul", "rowhouse::gather_scaled_matmul"):
        keep, group = args[-1], args[2] if name == "rowhouse::gather_matmul" else args[5]
        return 0 if keep else args[0].nbytes * ranks_of(group)
    if name in ("rowhouse::matmul_scatter", "rowhouse::scaled_matmul_scatter"):
        return out.nbytes * (args[0].shape[0] // out.shape[0])
    return 0


def sent_by(func: Any, args: Sequence[Any]) -> list[Sent]:
    """The collectives of an op. What a tensor parallel one sends is counted as parallelisms/tp_ops.py does."""
    namespace, name = name_of(func).split("::") if "::" in name_of(func) else ("", "")
    if namespace == "rowhouse":
        return sent_by_tensor_parallel(name, args)
    if namespace == "c10d":
        groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
        if not groups:
            return []
        group = dist.ProcessGroup.unbox(groups[0]).group_name
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        kinds = {
            "_allgather_base_": "all_gather",
            "_reduce_scatter_base_": "reduce_scatter",
            "allreduce_": "all_reduce",
        }
        if name in kinds:
            whole = max(t.nbytes for t in tensors)
            return [in_a_ring(kinds[name], group, whole)]
    if namespace == "_c10d_functional":
        kinds = {
            "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
            "all_reduce": "all_reduce",
        }  # fmt: skip
        if name in kinds:
            group = args[-1]
            return [in_a_ring(kinds[name], group, args[0].nbytes * (ranks_of(group) if "gather_into" in name else 1))]
    return []


def in_a_ring(kind: str, group: str, whole: int, **more: Any) -> Sent:
    ranks = ranks_of(group)
    return Sent(kind, group, (2 if kind == "all_reduce" else 1) * whole * (ranks - 1) // ranks, **more)


def sent_by_tensor_parallel(name: str, args: Sequence[Any]) -> list[Sent]:
    def sent(kind: str, whole: int, group: str, fused: bool, layer: str) -> Sent:
        backward = torch._C._current_graph_task_id() != -1
        return in_a_ring(kind, group, whole, layer=layer, op=name, fused=fused, backward=backward)

    if name == "gather":
        x, _, group, layer = args
        return [sent("all_gather", x.nbytes * ranks_of(group), group, False, layer)]
    if name == "scatter":
        x, group, layer = args
        return [sent("reduce_scatter", x.nbytes, group, False, layer)]
    if name == "all_reduce":
        x, _, group, layer = args
        return [sent("all_reduce", x.nbytes, group, False, layer)]
    if name == "gather_matmul":
        a, _, group, fused, layer, _ = args
        return [sent("all_gather", a.nbytes * ranks_of(group), group, fused, layer)]
    if name == "gather_scaled_matmul":
        a, a_scale, _, _, _, group, fused, layer, _ = args
        return [sent("all_gather", (a.nbytes + a_scale.nbytes) * ranks_of(group), group, fused, layer)]
    if name == "matmul_scatter":
        a, b, group, fused, layer = args
        return [sent("reduce_scatter", a.shape[0] * b.shape[1] * a.element_size(), group, fused, layer)]
    if name == "scaled_matmul_scatter":
        a, _, b, _, dtype, group, fused, layer = args
        return [sent("reduce_scatter", a.shape[0] * b.shape[0] * dtype.itemsize, group, fused, layer)]
    return []
