"""Plans: of the shipped configurations, of deep models from shallow ones, and what makes one fit."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from config import CONFIGS, JobConfig, load_config
from planning.advice import advise, changes
from planning.estimate import link_rate
from planning.hardware import ACHIEVED_LINK, GIB, GPUS, HEADROOM, hardware, parse_bytes
from planning.plan import Plan, make_outline, make_plan, with_layers
from planning.text import advice_text, plan_text

H100 = GPUS["H100"]
DEBUG = "--config debug.toml --training.seq_len 64 --training.local_batch_size 2 --training.global_batch_size 8"

LARGE = f"{DEBUG} --model.n_layers 2 --training.local_batch_size 8 --activation_checkpoint.mode none"


def config_of(flags: str, world_size: int = 1) -> JobConfig:
    return load_config(flags.split(), world_size)


def stated(path: Path) -> list[tuple[int, int]]:
    """(Ranks, GB of each) of a file's first line: "8 GPUs of 80 GB, or 1 of 141 GB: ..." or "1 or 2 ranks ..."."""
    first = path.read_text().splitlines()[0].partition(":")[0]
    found = re.findall(r"(?:# |or )(\d+)(?: GPUs)?(?: of (\d+) GB)?", first)
    assert found, f"{path}: its first line does not say for how many ranks it is: {first}"
    return [(int(ranks), int(gb or 80)) for ranks, gb in found]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configurations_fit_where_they_say(path):
    for ranks, gigabytes in stated(path):
        config = load_config(["--config", str(path)], ranks)
        outline = make_outline(config, ranks, H100)
        assert outline.peak < (1 - HEADROOM) * gigabytes * 1e9, ranks
        # Weight and moments, 12 bytes a parameter, are there in any case.
        assert outline.peak > 12 * parameters(config) / ranks, ranks


def parameters(config: JobConfig) -> int:
    s = config.model.shape()
    attention = 2 * s.dim * (s.n_heads + s.n_kv_heads) * s.head_dim
    block = attention + 3 * s.dim * s.hidden_dim + 2 * s.dim
    return s.n_layers * block + s.dim + (1 if s.tie_embeddings else 2) * s.vocab_size * s.dim


@pytest.mark.parametrize(
    "flags",
    [
        "--activation_checkpoint.mode none",
        "--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option 2",
        "--activation_checkpoint.mode full --parallelism.fsdp_reshard_after_forward always "
        "--float8.recipe_name rowwise --float8.filter_fqns output",
    ],
)
def test_a_deep_model_follows_from_two_shallow_ones(flags):
    """Byte for byte: blocks are alike."""
    config = config_of(f"{DEBUG} --model.n_layers 17 --compile.enable true {flags}", 2)
    outline, plan = make_outline(config, 2, H100), make_plan(config, 2, H100)
    assert outline.peak == plan.peak
    assert outline.seconds == pytest.approx(plan.estimate.seconds, rel=1e-9)
    assert outline.tokens_per_second == pytest.approx(plan.tokens_per_second, rel=1e-9)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(config_of(f"{DEBUG} --model.n_layers 2 --float8.recipe_name rowwise", 2), 2, H100)


def test_the_text_says_what_the_plan_found(plan):
    text = plan_text(plan)
    assert f"{plan.num_params:,} parameters" in text and "dp_shard 2" in text
    assert re.search(r"fits: 0\.\d of 73\.6 GiB", text)
    assert f"{plan.peak / GIB:.2f}  in {plan.peak_where}" in text
    assert re.search(r"dp_shard all_gather +\d+ +\d", text)
    assert "estimate of a step (roofline, H100 80GB HBM3)" in text
    assert re.search(r"float8 matmuls: \d+ row-wise;", text) and "(128, 256) scale (128, 1)" in text


def test_a_plan_adds_up(plan):
    assert sum(plan.peak_by_kind.values()) == plan.peak
    assert plan.optimizer == pytest.approx(2 * plan.parameters, rel=1e-3)
    assert plan.gradients == plan.parameters
    assert plan.estimate.seconds == pytest.approx(sum(plan.estimate.by_kind.values()))
    assert plan.hardware_flops_per_token > plan.model_flops_per_token  # It is checkpointed.


def test_advice_tries_what_it_names():
    config = config_of(LARGE, 1)
    smallest = min(make_outline(changed, 1, H100).peak for _, changed, ranks in changes(config, 1) if ranks == 1)
    tight = dataclasses.replace(H100, memory=math.ceil(smallest / (1 - HEADROOM)))
    found = advise(config, 1, tight)
    assert found[0].fits and not all(change.fits for change in found)
    best = config_of(f"{LARGE} {found[0].flags}")
    assert make_outline(best, found[0].world_size, tight).peak == found[0].outline.peak
    speeds = [change.outline.tokens_per_second for change in found if change.fits and change.world_size == 1]
    assert speeds == sorted(speeds, reverse=True)
    assert advice_text(found).splitlines()[1].split()[0] == "fits"


def test_advice_puts_changes_together_and_says_where_nothing_helps():
    config = config_of(LARGE, 1)
    each = [make_outline(changed, ranks, H100).peak for _, changed, ranks in changes(config, 1)]
    together = [c for c in advise(config, 1, dataclasses.replace(H100, memory=int(min(each)))) if c.fits]
    assert len(together) == 1 and together[0].flags.count("--") > 2
    nothing = advise(config, 1, dataclasses.replace(H100, memory=2**20))
    assert "nor all of them together, fits" in advice_text(nothing)


def test_changes_keep_the_global_batch():
    config = config_of(f"{DEBUG} --parallelism.data_parallel_replicate_degree 2", 4)
    for overrides, changed, ranks in changes(config, 4):
        lanes = changed.training.lanes(ranks // changed.parallelism.tensor_parallel_degree)
        assert lanes == 8 * ranks // 4, overrides


@pytest.mark.parametrize(
    ("dim", "sizes", "rate"),
    [
        ("dp_shard", {"dp_shard": 8}, 450e9),
        ("tp", {"dp_shard": 32, "tp": 8}, 450e9),
        ("dp_shard", {"dp_shard": 32, "tp": 8}, 50e9),  # One rank of the ring in each node: one card.
        ("dp_shard", {"dp_shard": 32, "tp": 2}, 200e9),
        ("dp_shard", {"dp_shard": 256}, 400e9),
        ("dp_replicate", {"dp_replicate": 4, "dp_shard": 8}, 50e9),
        ("dp_replicate x dp_shard", {"dp_replicate": 4, "dp_shard": 8}, 400e9),
    ],
)
def test_what_a_link_gives(dim, sizes, rate):
    assert link_rate(dim, sizes, H100) == rate * ACHIEVED_LINK


def test_hardware():
    assert parse_bytes("80GiB") == 80 * 2**30 and parse_bytes("141GB") == 141 * 10**9
    assert hardware("H200", "80GiB", 800).network_rate == 100e9
    assert hardware("H200", "80GiB", None).memory == 80 * 2**30
    assert with_layers(config_of(DEBUG), 3).model.shape().n_layers == 3
