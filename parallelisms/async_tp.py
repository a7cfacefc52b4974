"""Whether this machine can hide tensor parallel communication behind matmuls: found out by trying, not by version.

torch's fused symmetric-memory ops are private and have been wrong without a warning (docs/scale-shapes.md). At start
each of the four is compared with plain collectives on random data, two sequences a batch, and its signature with the
one that parallelisms/tp_ops.py calls.
"""

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from float8.quantise import quantise_rows
from parallelisms import tp_ops

SIGNATURES = {
    "fused_all_gather_matmul": ["A", "Bs", "gather_dim", "group_name", "return_A"],
    "fused_matmul_reduce_scatter": ["A", "B", "reduce_op", "scatter_dim", "group_name"],
    "fused_all_gather_scaled_matmul": [
        "A", "Bs", "A_scale", "B_scales", "gather_dim", "group_name", "biases", "result_scales", "out_dtypes",
        "use_fast_accum",
    ],
    "fused_scaled_matmul_reduce_scatter": [
        "A", "B", "A_scale", "B_scale", "reduce_op", "orig_scatter_dim", "scatter_dim_after_maybe_reshape",
        "group_name", "output_shape", "bias", "result_scale", "out_dtype", "use_fast_accum",
    ],
}  # fmt: skip


PLAN = {
    "forward": ["wq wk wv", "wo", "w1 w3", "w2"],
    "backward": ["wq wk wv backward", "wo backward", "w1 w3 backward", "w2 backward"],
}
"""The collectives of a block that are fused with a matmul, each once a micro-batch."""


@dataclass(frozen=True)
class BlockCollectives:
    """What a block's collectives were in one step: for each pass how many of the planned ones ran fused, per block."""

    fused: dict[str, float]
    missing: list[str]
    """Planned, but fewer of them ran fused than there are blocks and micro-batches."""
    recomputed: float
    """Collectives a block that activation checkpointing ran again."""
    sent: int
    """Bytes that this rank sent in the step, the embedding, the head and the loss included."""


def compare_with_plan(collectives: list[tp_ops.Collective], blocks: int) -> BlockCollectives:
    """`collectives`: all that ran in one step; blocks: of the model, times micro-batches."""
    ran = Counter(c.layer for c in collectives if c.fused and not c.recomputed)
    return BlockCollectives(
        fused={name: sum(min(ran[layer], blocks) for layer in layers) / blocks for name, layers in PLAN.items()},
        missing=[layer for layers in PLAN.values() for layer in layers if ran[layer] < blocks],
        recomputed=sum(c.recomputed for c in collectives) / blocks,
        sent=sum(c.sent for c in collectives),
    )


def why_not_fused(mesh: DeviceMesh, *, float8: bool) -> str:
    """Why the fused ops cannot serve on this tensor parallel mesh; empty where they can. The same on all its ranks."""
    reason = signature_problem()
    if not reason:
        try:
            reason = wrong_results(mesh, float8=float8)
        except NotImplementedError:
            reason = f"torch has no symmetric memory on {mesh.device_type}"
        except (RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    reasons: list[str] = [""] * mesh.size()
    dist.all_gather_object(reasons, reason, group=mesh.get_group())
    return next((r for r in reasons if r), "")


def signature_problem() -> str:
    for name, expected in SIGNATURES.items():
        op = getattr(torch.ops.symm_mem, name, None)
        if op is None:
            return f"torch {torch.__version__} has no symm_mem.{name}"
        found = [argument.name for argument in op.default._schema.arguments]
        if found != expected:
            return f"symm_mem.{name} takes {found} in torch {torch.__version__}, not {expected}"
    return ""


def wrong_results(mesh: DeviceMesh, *, float8: bool) -> str:
    """Compares fused and plain on (2 sequences x 32 tokens a rank, 64) x (64, 48)."""
    group, ranks, device = mesh.get_group().group_name, mesh.size(), mesh.device_type
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    rows, k, n = 2 * 32, 64, 48

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    share, full, b = random(rows, k), random(rows * ranks, k), random(n, k)
    share_q, full_q, b_q = quantise_rows(share), quantise_rows(full), quantise_rows(b)

    def results(fused: bool) -> list[torch.Tensor]:
        found = tp_ops.gather_matmul(share, [b.t(), b.t()], group, fused, "probe", True)
        found.append(tp_ops.matmul_scatter(full, b.t(), group, fused, "probe"))
        if float8:
            how = (torch.bfloat16, group, fused, "probe")
            found += tp_ops.gather_scaled_matmul(share_q.data, share_q.scale, [b_q.data], [b_q.scale], *how, True)
            found.append(tp_ops.scaled_matmul_scatter(full_q.data, full_q.scale, b_q.data, b_q.scale, *how))
        return found

    plain, fused = results(False), results(True)
    for i, (expected, got) in enumerate(zip(plain, fused, strict=True)):
        error = ((got.float() - expected.float()).norm() / expected.float().norm()).item()
        # Both round to bfloat16, 2**-9 each, once a summand and once for the sum; a wrong row makes it about 1.
        if not error < 2.0**-6:
            return f"a fused op is wrong here: result {i} of the probe is off by {error:.2g} of its size"
    return ""
