"""What a tensor parallel rank sends for one block, forward and backward: Rowhouse's plan next to the stock one.

    python -m scripts.wire_bytes [--tp 2]

Stock is what torchtitan applies: torch's ColwiseParallel, RowwiseParallel and SequenceParallel over torchao's row-wise
Float8Linear. Both blocks run once, in one process with a fake process group, and every collective is counted as it is
called, with its bytes. A ring passes (n - 1) / n of a buffer through every rank, an all-reduce twice that.
"""

import argparse
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from float8.convert import Float8Config, Selection, convert_with_torchao
from models.llama.model import Llama
from models.llama.parallelize import replace_linears
from models.llama.shapes import LlamaShape
from parallelisms.mesh import Meshes, ParallelismConfig
from parallelisms.tp_ops import recording

# Llama 3 8B's block at a quarter of its width: the bytes are proportional to it, but for the scales' 4 a token.
SHAPE = LlamaShape(1024, 1, 16, 8, 3584, vocab_size=1024, head_dim=64)
BATCH, SEQ_LEN = 2, 256

Counts = dict[str, list[int]]
"""Collective -> [how many, bytes sent]."""


class FunctionalCollectives(TorchDispatchMode):
    """Counts the functional collectives, those that DTensor makes included."""

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks = ranks
        self.counts: Counts = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # It calls again with what it is made of.
        name = func._schema.name.removeprefix("_c10d_functional::")
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            others = self.ranks - 1
            sent = {
                "all_gather_into_tensor": others * args[0].nbytes,
                "reduce_scatter_tensor": others * args[0].nbytes // self.ranks,
                "all_reduce": 2 * others * args[0].nbytes // self.ranks,
            }[name]
            entry = self.counts[f"{name.split('_')[0]}_{name.split('_')[1]} {str(args[0].dtype)[6:]}"]
            entry[0] += 1
            entry[1] += sent
        return func(*args, **(kwargs or {}))


class StockBlock(nn.Module):
    """A Llama block that keeps (batch, seq, dim) throughout."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.head_dim = shape.head_dim
        kv = shape.n_kv_heads * shape.head_dim
        self.attention_norm, self.ffn_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        sizes = {
            "wq": (shape.dim, shape.dim),
            "wk": (shape.dim, kv),
            "wv": (shape.dim, kv),
            "wo": (shape.dim, shape.dim),
        }
        self.attention = nn.ModuleDict({name: nn.Linear(i, o, bias=False) for name, (i, o) in sizes.items()})
        self.attention.forward = self.attend
        sizes = {
            "w1": (shape.dim, shape.hidden_dim),
            "w3": (shape.dim, shape.hidden_dim),
            "w2": (shape.hidden_dim, shape.dim),
        }
        self.feed_forward = nn.ModuleDict({name: nn.Linear(i, o, bias=False) for name, (i, o) in sizes.items()})
        self.feed_forward.forward = lambda x: self.feed_forward["w2"](
            F.silu(self.feed_forward["w1"](x)) * self.feed_forward["w3"](x)
        )

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.attention[name](x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for name in ("wq", "wk", "wv")
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.attention["wo"](out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def stock(mesh: DeviceMesh) -> Counts:
    block = StockBlock(SHAPE).bfloat16()
    names = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    convert_with_torchao(block, Float8Config(recipe_name="rowwise", backend="torchao"), names)
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": gather,
        "ffn_norm": SequenceParallel(),
        "feed_forward": gather,
    }
    plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "feed_forward.w2")}
    parallelize_module(block, mesh, plan)
    x = torch.randn(BATCH, SEQ_LEN // mesh.size(), SHAPE.dim, dtype=torch.bfloat16, requires_grad=True)
    with FunctionalCollectives(mesh.size()) as collectives:
        block(x).sum().backward()
    return collectives.counts


def rowhouse(mesh: DeviceMesh) -> Counts:
    with torch.device("meta"):
        model = Llama(SHAPE, SEQ_LEN)
    chosen = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "output"]
    parallelism = ParallelismConfig(tensor_parallel_degree=mesh.size())
    replace_linears(model, Meshes(mesh, mesh, mesh, mesh), parallelism, "rowwise", Selection(chosen, {}))
    model.bfloat16().to_empty(device="cpu")
    model.init_weights(0, torch.device("cpu"))
    x = torch.randn(BATCH * SEQ_LEN // mesh.size(), SHAPE.dim, dtype=torch.bfloat16, requires_grad=True)
    with recording() as ran:
        model.layers[0](x, model.freqs_cis, SEQ_LEN).sum().backward()
    counts: Counts = defaultdict(lambda: [0, 0])
    for collective in ran:
        counts[collective.kind][0] += 1
        counts[collective.kind][1] += collective.sent
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel degree")
    tp = parser.parse_args().tp
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    mesh = dist.init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    results = {"stock": stock(mesh), "Rowhouse": rowhouse(mesh)}
    tokens = BATCH * SEQ_LEN
    print(
        f"One block, forward and backward, TP {tp}, row-wise float8: what a rank sends, in bytes a token of the batch\n"
    )
    print("| plan | collective | number | bytes a token |\n| --- | --- | --- | --- |")
    for name, counts in results.items():
        for kind, (number, sent) in sorted(counts.items()):
            print(f"| {name} | {kind} | {number} | {sent / tokens:,.1f} |")
        total = [sum(c[i] for c in counts.values()) for i in (0, 1)]
        print(f"| **{name}** | all | {total[0]} | {total[1] / tokens:,.1f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
