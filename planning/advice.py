"""What to change so that a configuration fits: each change tried, the one that costs least time first."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from config import JobConfig
from errors import UserError
from planning.hardware import HEADROOM, Hardware
from planning.plan import Outline, make_outline
from settings import problems_of


@dataclass(frozen=True)
class Change:
    """Flags that change a configuration, or another number of ranks, and what comes of it."""

    flags: str
    world_size: int
    outline: Outline
    fits: bool


def advise(config: JobConfig, world_size: int, gpu: Hardware) -> list[Change]:
    """Single changes, then all of them one upon the other until it fits. Those that fit come first, the fastest of them
    first, and after them those that take more ranks."""
    budget = gpu.memory * (1 - HEADROOM)
    tried = []
    for flags, changed, ranks in changes(config, world_size):
        outline = outline_or_none(changed, ranks, gpu)
        if outline is not None:
            tried.append(Change(flags, ranks, outline, outline.peak <= budget))
    if not any(change.fits for change in tried):
        tried += together(config, world_size, gpu, budget)
    return sorted(tried, key=lambda c: (not c.fits, c.world_size, -c.outline.tokens_per_second))


def together(config: JobConfig, world_size: int, gpu: Hardware, budget: float) -> Iterator[Change]:
    """Strongest last: the changes one upon the other, each kept, until it fits."""
    taken: list[str] = []
    for _ in range(12):
        options = [option for option in changes(config, world_size) if option[2] == world_size]
        if not options:
            return
        flags, config, world_size = options[0]
        taken.append(flags)
        outline = outline_or_none(config, world_size, gpu)
        if outline is not None and outline.peak <= budget:
            yield Change(" ".join(taken), world_size, outline, True)
            return


def outline_or_none(config: JobConfig, world_size: int, gpu: Hardware) -> Outline | None:
    try:
        return make_outline(config, world_size, gpu)
    except UserError:  # The set-up refuses it: a norm split unevenly, say.
        return None


def changes(config: JobConfig, world_size: int) -> Iterator[tuple[str, JobConfig, int]]:
    """(flags, the changed configuration, its ranks), of those that the configuration's checks allow."""
    ac, parallelism, training = config.activation_checkpoint, config.parallelism, config.training
    replicate, shard, tp = parallelism.degrees(world_size)
    lanes = training.lanes(replicate * shard)
    candidates: list[tuple[dict[str, dict[str, object]], int]] = []
    stronger = {"none": ["matmuls", "op", "full"], "matmuls": ["op", "full"], "op": ["full"]}
    now = ac.selective_ac_option if ac.mode == "selective" else ac.mode
    for mode in stronger.get(now, ["full"] if now not in ("full",) else []):
        change = {"mode": "full"} if mode == "full" else {"mode": "selective", "selective_ac_option": mode}
        candidates.append(({"activation_checkpoint": dict(change)}, world_size))
    if training.local_batch_size > 1:
        half = {"local_batch_size": training.local_batch_size // 2, "global_batch_size": lanes}
        candidates.append(({"training": dict(half)}, world_size))
    if config.optimizer.state_dtype == "float32" and config.optimizer.implementation == "fused":
        candidates.append(({"optimizer": {"state_dtype": "bfloat16"}}, world_size))
    if parallelism.fsdp_reshard_after_forward != "always":
        candidates.append(({"parallelism": {"fsdp_reshard_after_forward": "always"}}, world_size))
    if replicate > 1:
        candidates.append(({"parallelism": {"data_parallel_replicate_degree": 1}}, world_size))
    if 2 * tp <= min(8, world_size):
        more = {
            "tensor_parallel_degree": 2 * tp,
            "data_parallel_shard_degree": -1,
            "enable_async_tensor_parallel": True,
        }
        candidates.append(({"parallelism": dict(more), "training": {"global_batch_size": lanes}}, world_size))
    if parallelism.data_parallel_shard_degree == -1:
        candidates.append(({"training": {"global_batch_size": lanes * 2}}, world_size * 2))
    for sections, ranks in candidates:
        changed = config
        for section, values in sections.items():
            old = getattr(changed, section)
            changed = dataclasses.replace(changed, **{section: dataclasses.replace(old, **values)})
        if not problems_of(changed, world_size=ranks):
            flags = " ".join(
                f"--{s}.{key} {flag(value)}" for s, values in sections.items() for key, value in values.items()
            )
            yield (f"--world-size {ranks}" if ranks != world_size else flags), changed, ranks


def flag(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
