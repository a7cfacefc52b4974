"""What a step of a configuration takes on one rank: memory, wire and time, and whether it fits."""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from config import JobConfig
from planning.estimate import Estimate, estimate
from planning.fake_run import FakeRun, fake_run
from planning.graphs import Matmul
from planning.hardware import HEADROOM, Hardware


@dataclass(frozen=True)
class Traffic:
    """Collectives of one rank and step, of one mesh dimension and kind."""

    dim: str
    kind: str
    calls: int
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank; tokens of the global batch."""

    world_size: int
    sizes: dict[str, int]
    """Mesh dimension -> ranks."""
    num_params: int
    tokens: int
    peak: int
    peak_where: str
    peak_by_kind: dict[str, int]
    parameters: int
    gradients: int
    optimizer: int
    budget: int
    """What the tensors may take of the device's memory."""
    device_memory: int
    gpu: str
    traffic: list[Traffic]
    hardware_flops_per_token: float
    model_flops_per_token: float
    estimate: Estimate
    tokens_per_second: float
    """Estimated, of one rank."""
    matmuls: list[tuple[Matmul, int]]
    """The float8 matmuls, each with how often it is called."""
    applied: list[tuple[str, str, str]]
    """The asked/applied table."""

    @property
    def fits(self) -> bool:
        return self.peak <= self.budget


def make_plan(config: JobConfig, world_size: int, gpu: Hardware) -> Plan:
    """Raises the UserError that the run itself would have met."""
    run = fake_run(config, world_size)
    traffic: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for _, sent in run.sent:
        key = (run.dims.get(sent.group, "all"), sent.kind)
        traffic[key] += sent.nbytes
        calls[key] += 1
    guess = estimate(run.works, run.sent, run.dims, run.sizes, gpu)
    return Plan(
        world_size=world_size,
        sizes=run.sizes,
        num_params=run.num_params,
        tokens=run.tokens,
        peak=run.peak.nbytes,
        peak_where=run.peak.where,
        peak_by_kind=run.peak.by_kind(),
        parameters=run.parameter_bytes,
        gradients=run.gradient_bytes,
        optimizer=run.optimizer_bytes,
        budget=int(gpu.memory * (1 - HEADROOM)),
        device_memory=gpu.memory,
        gpu=gpu.name,
        traffic=[Traffic(*key, calls[key], nbytes) for key, nbytes in traffic.items()],
        hardware_flops_per_token=sum(work.flops for _, work in run.works) * world_size / run.tokens,
        model_flops_per_token=run.model_flops_per_token,
        estimate=guess,
        tokens_per_second=run.tokens / world_size / guess.seconds,
        matmuls=list(Counter(run.matmuls).items()),
        applied=[(row.technique, row.asked, row.applied) for row in run.applied],
    )


@dataclass(frozen=True)
class Outline:
    """The numbers that a search goes by: bytes, seconds of a step, tokens/s of a rank."""

    peak: int
    peak_where: str
    seconds: float
    tokens_per_second: float


def make_outline(config: JobConfig, world_size: int, gpu: Hardware) -> Outline:
    """Of a deep model from two shallow ones: its blocks are alike, so that each number grows evenly with them.

    So do the bytes at each place of the step, counted from its nearer end; the peak is the largest of them. Where only
    every n-th block is checkpointed, n blocks are one.
    """
    layers, period = config.model.shape().n_layers, checkpointing_period(config)
    few = 4 * period + layers % period
    more = few + period
    if layers <= more:
        return outline_of(fake_run(config, world_size), gpu)
    runs = [fake_run(with_layers(config, n), world_size) for n in (few, more)]
    at_few, at_more = (places(run.moments, n, period) for run, n in zip(runs, (few, more), strict=True))
    further = (layers - more) // period
    peaks = {at: at_more[at] + further * (at_more[at] - at_few[at]) for at in at_more.keys() & at_few.keys()}
    where = max(peaks, key=lambda at: peaks[at])
    seconds = [outline_of(run, gpu).seconds for run in runs]
    whole = seconds[1] + further * (seconds[1] - seconds[0])
    return Outline(peaks[where], where, whole, runs[0].tokens / world_size / whole)


def checkpointing_period(config: JobConfig) -> int:
    ac = config.activation_checkpoint
    return int(ac.selective_ac_option) if ac.mode == "selective" and ac.selective_ac_option.isdecimal() else 1


def outline_of(run: FakeRun, gpu: Hardware) -> Outline:
    guess = estimate(run.works, run.sent, run.dims, run.sizes, gpu)
    ranks = math.prod(run.sizes.values())
    return Outline(run.peak.nbytes, run.peak.where, guess.seconds, run.tokens / ranks / guess.seconds)


def with_layers(config: JobConfig, layers: int) -> JobConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, n_layers=layers))


def places(moments: dict[str, int], layers: int, period: int) -> dict[str, int]:
    """By names that models of all depths share: "block 0", "block 1", "block -2", "block -1"."""
    found: dict[str, int] = {}
    for where, nbytes in moments.items():
        before, block, number = where.partition("block ")
        if block and int(number) >= 2 * period:
            number = str(int(number) - layers)
        found[before + block + number] = nbytes
    return found


def as_json(plan: Plan) -> dict[str, Any]:
    return {**dataclasses.asdict(plan), "fits": plan.fits}
