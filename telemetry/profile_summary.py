"""A profiled window in a few lines: time by kind of kernel, and the longest kernels."""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from torch.autograd import DeviceType

from telemetry.intervals import length, union
from telemetry.kernel_kinds import kind_of, kind_of_operator

LONGEST = 15


@dataclass(frozen=True)
class Kind:
    kind: str
    milliseconds: float
    """Of a step."""
    share: float
    """Of the step's time."""
    calls: float
    """In a step."""
    longest: list[str]
    """Names of the kernels that take most of it."""


@dataclass(frozen=True)
class Summary:
    """Of one rank. On a GPU of what ran there; kernels of several streams may overlap. On a CPU of operators' own
    time."""

    steps: int
    milliseconds: float
    """Of a step, as the profiler saw it."""
    device: str
    busy: float
    """Share of the time in which kernels ran, on a GPU; on a CPU the share spent in operators."""
    kinds: list[Kind]
    kernels: list[tuple[str, float, float]]
    """The longest: name, milliseconds of a step, calls in a step."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def kinds_text(self) -> str:
        what = "kernels ran" if self.device == "cuda" else "operators ran"
        lines = [f"{self.milliseconds:,.1f} ms a step; {what} for {self.busy:.1%} of it"]
        lines.append(f"  {'kind':<28}{'ms':>9}{'share':>8}{'calls':>9}  longest")
        for k in self.kinds:
            names = ", ".join(name[:48] for name in k.longest)
            lines.append(f"  {k.kind:<28}{k.milliseconds:>9,.1f}{k.share:>8.1%}{k.calls:>9,.0f}  {names}")
        return "\n".join(lines)

    def text(self) -> str:
        lines = [self.kinds_text(), "", f"  {'ms':>9}{'calls':>9}  kernel"]
        lines += [f"  {ms:>9,.2f}{calls:>9,.0f}  {name[:150]}" for name, ms, calls in self.kernels]
        return "\n".join(lines) + "\n"


def summarise(events: Any) -> Summary:
    """events: what torch.profiler.profile.events() gives of whole steps. Raises ValueError where there is no step."""
    steps = [e for e in events if e.name.startswith("ProfilerStep") and e.device_type == DeviceType.CPU]
    if not steps:
        raise ValueError("the profile holds no step")
    wall = sum(e.time_range.elapsed_us() for e in steps)
    inner = [e for e in events if not e.name.startswith("ProfilerStep")]
    # An annotation on the GPU's side spans kernels, and gaps between them.
    on_gpu = [e for e in inner if e.device_type != DeviceType.CPU and not getattr(e, "is_user_annotation", False)]
    time: dict[tuple[str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    for event in on_gpu or inner:
        if on_gpu:
            kind, microseconds = kind_of(event.name), event.time_range.elapsed_us()
        else:
            kind, microseconds = kind_of_operator(names_around(event)), event.self_cpu_time_total
        time[kind, event.name] += microseconds
        calls[kind, event.name] += 1
    per_step = 1 / (1000 * len(steps))
    kinds = []
    for kind in sorted({kind for kind, _ in time}, key=lambda kind: -sum(t for (k, _), t in time.items() if k == kind)):
        own = sorted(((t, name) for (k, name), t in time.items() if k == kind), reverse=True)
        total, number = sum(t for t, _ in own), sum(n for (k, _), n in calls.items() if k == kind)
        kinds.append(Kind(kind, total * per_step, total / wall, number / len(steps), [name for _, name in own[:3]]))
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (kind, name), t in time.items():
        by_name[name][0] += t * per_step
        by_name[name][1] += calls[kind, name] / len(steps)
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:LONGEST]
    rows = [(name, milliseconds, number) for name, (milliseconds, number) in longest]
    spans = [(e.time_range.start, e.time_range.end) for e in on_gpu]
    busy = length(union(spans)) if on_gpu else sum(time.values())
    return Summary(len(steps), wall * per_step, "cuda" if on_gpu else "cpu", min(busy / wall, 1.0), kinds, rows)


def names_around(event: Any) -> list[str]:
    """The operators that called this one, the outermost first, and its own name."""
    names = []
    while event is not None:
        if not event.name.startswith("ProfilerStep"):
            names.append(event.name)
        event = event.cpu_parent
    return names[::-1]
