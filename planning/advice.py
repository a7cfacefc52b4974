"""What to change so that a configuration fits: each change tried, the one that costs least time first."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    for overrides, changed, ranks in changes(config, world_size):
        outline = outline_or_none(changed, ranks, gpu)
        if outline is not None:
            more_ranks = f"--world-size {ranks} " if ranks != world_size else ""
            tried.append(Change((more_ranks + flags_of(overrides)).strip(), ranks, outline, outline.peak <= budget))
    if not any(change.fits for change in tried):
        tried += together(config, world_size, gpu, budget)
    return sorted(tried, key=lambda c: (not c.fits, c.world_size, -c.outline.tokens_per_second))


def together(config: JobConfig, world_size: int, gpu: Hardware, budget: float) -> Iterator[Change]:
    """The changes that keep the ranks one upon the other, until it fits."""
    taken: dict[str, Any] = {}
    while options := [option for option in changes(config, world_size) if option[2] == world_size]:
        overrides, config, _ = options[0]
        taken |= overrides
        outline = outline_or_none(config, world_size, gpu)
        if outline is not None and outline.peak <= budget:
            yield Change(flags_of(taken), world_size, outline, True)
            return


def outline_or_none(config: JobConfig, world_size: int, gpu: Hardware) -> Outline | None:
    try:
        return make_outline(config, world_size, gpu)
    except UserError:  # The set-up refuses it: a norm split unevenly, say.
        return None


def changes(config: JobConfig, world_size: int) -> Iterator[tuple[dict[str, Any], JobConfig, int]]:
    """(What to override, the changed configuration, its ranks), of those that the configuration's checks allow."""
    for overrides, ranks in candidates(config, world_size):
        changed = config
        for name, value in overrides.items():
            section, key = name.split(".")
            changed = dataclasses.replace(
                changed, **{section: dataclasses.replace(getattr(changed, section), **{key: value})}
            )
        if not problems_of(changed, world_size=ranks):
            yield overrides, changed, ranks


def candidates(config: JobConfig, world_size: int) -> Iterator[tuple[dict[str, Any], int]]:
    """(section.key -> value, ranks). On as many ranks the global batch stays; on twice as many it is twice as large."""
    ac, parallelism, training = config.activation_checkpoint, config.parallelism, config.training
    replicate, shard, tp = parallelism.degrees(world_size)
    lanes = training.lanes(replicate * shard)
    stronger = {"none": ["matmuls", "op", "full"], "matmuls": ["op", "full"], "full": []}
    for mode in stronger.get(ac.selective_ac_option if ac.mode == "selective" else ac.mode, ["full"]):
        if mode == "full":
            yield {"activation_checkpoint.mode": "full"}, world_size
        else:
            key = "activation_checkpoint.selective_ac_option"
            yield {"activation_checkpoint.mode": "selective", key: mode}, world_size
    if training.local_batch_size > 1:
        half = training.local_batch_size // 2
        yield {"training.local_batch_size": half, "training.global_batch_size": lanes}, world_size
    if config.optimizer.state_dtype == "float32" and config.optimizer.implementation == "fused":
        yield {"optimizer.state_dtype": "bfloat16"}, world_size
    if parallelism.fsdp_reshard_after_forward != "always":
        yield {"parallelism.fsdp_reshard_after_forward": "always"}, world_size
    if replicate > 1:
        yield {"parallelism.data_parallel_replicate_degree": 1}, world_size
    if 2 * tp <= min(8, world_size):
        yield (
            {
                "parallelism.tensor_parallel_degree": 2 * tp,
                "parallelism.data_parallel_shard_degree": -1,
                "parallelism.enable_async_tensor_parallel": True,
                "training.global_batch_size": lanes,
            },
            world_size,
        )
    if parallelism.data_parallel_shard_degree == -1:
        # A batch of one micro-batch a rank doubles by itself.
        yield {} if training.global_batch_size == -1 else {"training.global_batch_size": 2 * lanes}, 2 * world_size


def flags_of(overrides: dict[str, Any]) -> str:
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in overrides.items()}
    return " ".join(f"--{name} {value}" for name, value in values.items())
