"""Communication in a trace of torch's profiler: its time, how much of that is exposed, its bytes; and a picture.

A trace is what `export_chrome_trace` writes, with the CPU's side and the shapes of inputs (record_shapes): a JSON file,
or a .gz of one. It shows Rowhouse's and torchtitan's steps alike, over NCCL; over gloo it has no kernels, and the bytes
only. Times in a trace are microseconds.
"""

import gzip
import json
import math
import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telemetry.intervals import Intervals, length, union, without
from telemetry.kernel_kinds import kind_of

Event = dict[str, Any]

# NCCL's kernels; symmetric memory's barriers and signals; copies between GPUs.
COMMUNICATION = re.compile(r"nccl|symmetric_memory|(barrier|put_signal|wait_signal)_kernel|multimem|PtoP")
COLLECTIVE = re.compile("gather|reduce|scatter|broadcast|all_?to_?all|send|recv")
GATHER = re.compile(r"nccl.*AllGather")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
BYTES = {
    "c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "long int": 8, "long": 8, "int": 4,
    "unsigned char": 1, "signed char": 1, "bool": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Communication:
    """Of one rank's step. The times are None where the trace does not show them."""

    milliseconds: float | None
    """Some communication runs."""
    exposed: float | None
    """It runs, and nothing else on the device does. Milliseconds."""
    exposed_gathers: float | None
    """The same of NCCL's all-gathers alone: FSDP2's, and tensor parallel ones that are not fused. Milliseconds."""
    sent: dict[str, float] | None
    """Bytes that the rank sends: "gather", "scatter" (reduce-scatters), "all-reduce"; fused ones included."""
    fused: float
    """Collectives that ran inside their matmul."""
    problem: str = ""
    """Why something is None."""


def read_trace(path: Path) -> list[Event]:
    """The events that have a duration."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]


def communication(events: list[Event], steps: int, ranks: int) -> Communication:
    """`events`: of whole steps, so many; ranks: of every group that communicates."""
    fused = [e for e in events if e["name"].startswith("symm_mem::fused_")]
    talk, gathers, compute = device_intervals(events)
    problems = []
    if not compute:
        problems.append("no times of communication: the trace has no kernels")
    elif fused and not any(is_copy(e) for e in communicating(events)):
        problems.append("no times of communication: the trace does not show the fused collectives' copies")
    times = (length(talk), length(without(talk, compute)), length(without(gathers, compute)))
    total, exposed, exposed_gathers = (None if problems else time / 1000 / steps for time in times)
    sent: dict[str, float] | None = None
    try:
        sent = {kind: bytes / steps for kind, bytes in sent_bytes(events, ranks).items()}
    except ValueError as error:
        problems.append(f"no bytes: {error}")
    return Communication(total, exposed, exposed_gathers, sent, len(fused) / steps, "; ".join(problems))


# On the device


def device_intervals(events: list[Event]) -> tuple[Intervals, Intervals, Intervals]:
    """When some communication runs, when NCCL's all-gathers do, when anything else does."""
    talk = communicating(events)
    ids = {id(event) for event in talk}
    rest = [e for e in events if e.get("cat") in ON_DEVICE and id(e) not in ids]
    return (
        union([span(e) for e in talk]),
        union([span(e) for e in talk if GATHER.search(e["name"])]),
        union([span(e) for e in rest]),
    )


def communicating(events: list[Event]) -> list[Event]:
    """What communicates on the device: by name, and the copies that a fused collective starts, whatever their name."""
    fused = Spans([e for e in events if e["name"].startswith("symm_mem::fused_")])
    started = {
        e["args"]["correlation"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {}) and fused.hold(e)
    }
    return [
        e
        for e in events
        if e.get("cat") in ON_DEVICE
        and (COMMUNICATION.search(e["name"]) or (is_copy(e) and e.get("args", {}).get("correlation") in started))
    ]


def is_copy(event: Event) -> bool:
    return event.get("cat") == "gpu_memcpy"


def span(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


class Spans:
    """The times of some of the host's events, none of which overlaps another of its thread."""

    def __init__(self, events: list[Event]):
        self.by_thread: dict[Any, Intervals] = {}
        for event in sorted(events, key=lambda e: e["ts"]):
            self.by_thread.setdefault(event["tid"], []).append(span(event))

    def hold(self, event: Event) -> bool:
        """Whether `event` begins within one of them, on the same thread."""
        spans = self.by_thread.get(event["tid"], [])
        at = bisect_right(spans, (event["ts"], math.inf))
        return at > 0 and event["ts"] < spans[at - 1][1]


# On the wire


def sent_bytes(events: list[Event], ranks: int) -> dict[str, float]:
    """Kind of collective -> bytes that this rank sends. Raises ValueError for a collective that is not known here."""
    functional = Spans([e for e in events if e["name"].startswith("_c10d_functional::")])
    sent = {"gather": 0.0, "scatter": 0.0, "all-reduce": 0.0}
    for event in events:
        # A functional collective calls one of c10d in its turn.
        is_inner = event["name"].startswith("c10d::") and functional.hold(event)
        if event.get("cat") == "cpu_op" and not is_inner and (found := sent_by(event, ranks)) is not None:
            sent[found[0]] += found[1]
    return sent


def sent_by(event: Event, ranks: int) -> tuple[str, float] | None:
    """(Kind, bytes that this rank sends) of a collective as the host called it. None for what is no collective.

    A ring passes (n - 1) / n of a buffer through every rank, an all-reduce twice that. Raises ValueError.
    """
    name, share = event["name"], (ranks - 1) / ranks
    if name.startswith("symm_mem::fused_"):
        return sent_fused(event, ranks)
    library, _, op = name.partition("::")
    if library not in ("c10d", "_c10d_functional") or not COLLECTIVE.search(op):
        return None
    match re.sub(r"(_out)?_?$", "", name):
        case "_c10d_functional::all_gather_into_tensor":
            return "gather", (ranks - 1) * nbytes(event, 0)
        case "_c10d_functional::reduce_scatter_tensor":
            return "scatter", share * nbytes(event, 0)
        case "_c10d_functional::all_reduce":
            return "all-reduce", 2 * share * nbytes(event, 0)
        case "c10d::_allgather_base":
            return "gather", nbytes(event, 0) - nbytes(event, 1)
        case "c10d::_reduce_scatter_base":
            return "scatter", nbytes(event, 1) - nbytes(event, 0)
        case "c10d::allreduce":  # Of a list, whose type the trace does not tell: losses, norms, counts. Few bytes.
            return "all-reduce", 2 * share * 4 * sum(math.prod(shape) for shape in event["args"]["Input Dims"][0])
    raise ValueError(f"what {name} sends is not known")


def sent_fused(event: Event, ranks: int) -> tuple[str, float]:
    """A is this rank's rows for a gather, and all rows for a scatter of A @ B, whose sums are bf16."""
    dims, name = event["args"]["Input Dims"], event["name"].removeprefix("symm_mem::")
    rows = math.prod(dims[0][:-1])
    if "gather" in name:
        # The scales travel where each rank has those of its rows: not where one stands for a tensor.
        scales = nbytes(event, 2) if "scaled" in name and math.prod(dims[2]) == rows else 0
        return "gather", (ranks - 1) * (nbytes(event, 0) + scales)
    return "scatter", (ranks - 1) / ranks * rows * dims[1][-1] * 2


def nbytes(event: Event, i: int) -> int:
    """Of the i-th input, a tensor."""
    args = event["args"]
    kind = args["Input type"][i]
    if kind not in BYTES:
        raise ValueError(f"what {event['name']} sends is not known: its input is {kind or 'of no type'}")
    return math.prod(args["Input Dims"][i]) * BYTES[kind]


# A picture


def draw(events: list[Event], file: Path, title: str) -> None:
    """A PNG of one block's forward pass, from one block's attention to the next one's: compute and communication.

    Raises ValueError where the trace has no three blocks.
    """
    # Not pyplot: the picture needs no window, nor a choice of who would draw one.
    from matplotlib.figure import Figure

    on_device = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    attention = [e["ts"] for e in on_device if kind_of(e["name"]) == "attention"]
    if len(attention) < 3:
        raise ValueError("the trace shows fewer than three attention kernels, between which a block lies")
    begin, end = attention[1:3]  # The trace may begin within the first block.
    talk = {id(e) for e in communicating(events)}
    bars: dict[str, Intervals] = {}
    for event in on_device:
        start, stop = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if start < stop:
            kind = "communication" if id(event) in talk else kind_of(event["name"])
            bars.setdefault(kind, []).append(((start - begin) / 1000, (stop - start) / 1000))
    figure = Figure(figsize=(12, 2.6), layout="constrained")
    axes = figure.add_subplot()
    colors = iter(["#4c72b0", "#8172b3", "#55a868", "#ccb974", "#8c8c8c", "#64b5cd"])
    for kind, spans in sorted(bars.items()):
        is_talk = kind == "communication"
        axes.broken_barh(
            spans, (0, 0.8) if is_talk else (1, 0.8), facecolors="#c44e52" if is_talk else next(colors), label=kind
        )
    axes.set_yticks([0.4, 1.4], ["communication", "compute"])
    axes.set_xlabel("ms")
    axes.set_xlim(0, (end - begin) / 1000)
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=7, fontsize=8, frameon=False)
    figure.savefig(file, dpi=150)
