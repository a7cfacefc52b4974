"""A roofline estimate of a step's time: each op at what the GPU reaches, collectives at what the links reach.

An estimate, not a prediction: what overlaps is presumed to overlap wholly, launches and the host cost nothing.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from planning.costs import Sent, Work
from planning.hardware import ACHIEVED, ACHIEVED_LINK, Hardware


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step."""

    seconds: float
    by_kind: dict[str, float]
    """Kind of work -> its time; "exposed communication" is what the work does not hide."""
    communication: dict[str, float]
    """Mesh dimension -> time that its collectives take, hidden or not."""
    bound_by: str


def estimate(
    works: Iterable[tuple[str, Work]], sent: Iterable[tuple[str, Sent]], dims: dict[str, str], sizes: dict[str, int],
    gpu: Hardware,
) -> Estimate:  # fmt: skip
    """works, sent: with the phase in which they come. FSDP's collectives hide behind the work of their phase, tensor
    parallel ones behind the step's matmuls if they are fused with them, and not at all if not."""
    by_kind: dict[str, float] = defaultdict(float)
    by_phase: dict[str, float] = defaultdict(float)
    for phase, work in works:
        seconds = work_seconds(work, gpu)
        by_kind[work.kind] += seconds
        by_phase[phase] += seconds
    communication: dict[str, float] = defaultdict(float)
    waits: dict[str, float] = defaultdict(float)
    fused = 0.0
    for phase, s in sent:
        dim = dims.get(s.group, "all")
        seconds = s.nbytes / link_rate(dim, sizes, gpu)
        communication[dim] += seconds
        if s.fused:
            fused += seconds
        elif s.op:
            waits["tensor parallel"] += seconds
        else:
            waits[phase] += seconds
    matmuls = sum(seconds for kind, seconds in by_kind.items() if kind.endswith("matmul"))
    exposed = max(0.0, fused - matmuls) + waits.pop("tensor parallel", 0.0)
    exposed += sum(max(0.0, seconds - by_phase[phase]) for phase, seconds in waits.items())
    kinds = {**by_kind, "exposed communication": exposed}
    return Estimate(sum(kinds.values()), kinds, dict(communication), max(kinds, key=lambda kind: kinds[kind]))


def work_seconds(work: Work, gpu: Hardware) -> float:
    moved = work.nbytes / (gpu.memory_rate * ACHIEVED["memory"])
    if work.flops == 0:
        return moved
    return max(work.flops / (gpu.flops(work.kind) * ACHIEVED[work.kind]), moved)


def link_rate(dim: str, sizes: dict[str, int], gpu: Hardware) -> float:
    """Bytes/s of a rank in the rings of a mesh dimension. Neighbouring ranks share a node, the last dimension first."""
    names = list(sizes)
    own = [name for name in names if name in dim.split(" x ")] or names
    inner = math.prod(sizes[name] for name in names[names.index(own[-1]) + 1 :])
    ranks = math.prod(sizes[name] for name in own)
    in_node = max(1, min(ranks, gpu.gpus_per_node // inner))
    if ranks * inner <= gpu.gpus_per_node:
        return gpu.link_rate * ACHIEVED_LINK
    # Each byte enters a node once, through the network cards of all the ring's ranks there.
    return min(gpu.link_rate, gpu.network_rate * in_node) * ACHIEVED_LINK
