"""Which rank is where in the mesh, for every degree and number of ranks, and what is said of a degree that cannot be.

Meshes of many ranks are built on torch's fake backend: groups without processes behind them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallelisms.mesh import CommConfig, Meshes, ParallelismConfig, build_meshes, init_process_group, set_timeouts


@contextmanager
def meshes_of(rank: int, ranks: int, replicate: int = 1, shard: int = -1, tp: int = 1) -> Iterator[Meshes]:
    """What `rank` of a world of `ranks` builds."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        config = ParallelismConfig(
            data_parallel_replicate_degree=replicate, data_parallel_shard_degree=shard, tensor_parallel_degree=tp
        )
        yield build_meshes(config, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "replicate", "shard", "tp", "expected"),
    [
        (1, 1, -1, 1, (1, 1, 1)),
        (8, 1, -1, 1, (1, 8, 1)),
        (8, 2, -1, 1, (2, 4, 1)),
        (8, 8, -1, 1, (8, 1, 1)),
        (8, 1, -1, 4, (1, 2, 4)),
        (8, 2, -1, 4, (2, 1, 4)),
        (512, 4, 16, 8, (4, 16, 8)),
        # These do not multiply to the ranks; the configuration refuses them by that.
        (8, 1, 3, 1, (1, 3, 1)),
        (2, 1, -1, 4, (1, 0, 4)),
        (8, 1, -1, 3, (1, 2, 3)),
    ],
)
def test_degrees(ranks: int, replicate: int, shard: int, tp: int, expected: tuple[int, int, int]) -> None:
    config = ParallelismConfig(
        data_parallel_replicate_degree=replicate, data_parallel_shard_degree=shard, tensor_parallel_degree=tp
    )
    assert config.degrees(ranks) == expected


@pytest.mark.parametrize(
    ("config", "key", "text"),
    [
        (ParallelismConfig(data_parallel_replicate_degree=0), "data_parallel_replicate_degree", "give 1 or more"),
        (ParallelismConfig(tensor_parallel_degree=-1), "tensor_parallel_degree", "give 1 or more"),
        (ParallelismConfig(data_parallel_shard_degree=0), "data_parallel_shard_degree", "-1 for the ranks that remain"),
        (ParallelismConfig(enable_async_tensor_parallel=True), "enable_async_tensor_parallel", "nothing to overlap"),
        (ParallelismConfig(tensor_parallel_degree=2, async_tensor_parallel_strict=True),
         "async_tensor_parallel_strict", "set enable_async_tensor_parallel"),
        (CommConfig(init_timeout_seconds=0), "init_timeout_seconds", "1 second or more"),
    ],
)  # fmt: skip
def test_problems(config: ParallelismConfig | CommConfig, key: str, text: str) -> None:
    ((found, message),) = config.problems()
    assert found == key and text in message
    assert not any(default.problems() for default in (ParallelismConfig(), CommConfig()))


def test_one_dimension_of_shards() -> None:
    with meshes_of(5, 8) as meshes:
        assert meshes.fsdp.mesh_dim_names == ("dp_shard",) and meshes.fsdp.size() == 8
        assert (meshes.dp.size(), meshes.dp.get_local_rank(), meshes.tp) == (8, 5, None)


def test_replicas_share_the_batch_like_shards() -> None:
    for rank in range(8):
        with meshes_of(rank, 8, replicate=2) as meshes:
            assert meshes.fsdp.mesh_dim_names == ("dp_replicate", "dp_shard")
            assert meshes.fsdp.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
            assert (meshes.dp.size(), meshes.dp.get_local_rank()) == (8, rank)
            assert dist.get_process_group_ranks(meshes.dp.get_group()) == list(range(8))


def test_tensor_parallel_ranks_are_neighbours() -> None:
    for rank in range(8):
        with meshes_of(rank, 8, tp=2) as meshes:
            assert meshes.tp is not None
            first = rank // 2 * 2
            assert dist.get_process_group_ranks(meshes.tp.get_group()) == [first, first + 1]
            # They read the same data: the data parallel rank is that of the pair.
            assert (meshes.dp.size(), meshes.dp.get_local_rank()) == (4, rank // 2)
            assert meshes.fsdp.mesh_dim_names == ("dp_shard",)
            assert dist.get_process_group_ranks(meshes.dp.get_group()) == list(range(rank % 2, 8, 2))


def test_replicas_of_shards_of_tensor_parallel_ranks() -> None:
    with meshes_of(6, 8, replicate=2, tp=2) as meshes:
        assert meshes.whole.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
        assert meshes.tp is not None
        assert dist.get_process_group_ranks(meshes.tp.get_group()) == [6, 7]
        assert meshes.fsdp.mesh.tolist() == [[0, 2], [4, 6]]
        assert (meshes.dp.size(), meshes.dp.get_local_rank()) == (4, 3)


def test_one_shard_is_still_a_mesh() -> None:
    with meshes_of(1, 4, tp=4) as meshes:
        assert meshes.fsdp.mesh_dim_names == ("dp_shard",)
        assert meshes.fsdp.size() == meshes.dp.size() == 1 and meshes.tp is not None and meshes.tp.size() == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the CPU's process group")
def test_a_process_started_alone_is_a_world_of_one() -> None:
    def patience(group: dist.ProcessGroup) -> timedelta:
        return group._get_backend(torch.device("cpu")).options._timeout

    with patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        device = init_process_group(CommConfig(init_timeout_seconds=41, train_timeout_seconds=17))
        try:
            assert (device.type, dist.get_rank(), dist.get_world_size()) == ("cpu", 0, 1)
            meshes = build_meshes(ParallelismConfig(), device)
            value = torch.ones(1)
            dist.all_reduce(value, group=meshes.dp.get_group())
            assert value == 1
            checkpoints = dist.new_group(backend="gloo", timeout=timedelta(seconds=99))
            assert patience(dist.group.WORLD) == patience(meshes.dp.get_group()) == timedelta(seconds=41)
            set_timeouts(17, meshes)
            assert patience(dist.group.WORLD) == patience(meshes.dp.get_group()) == timedelta(seconds=17)
            assert patience(checkpoints) == timedelta(seconds=99)  # Not a group that trains: a save may take long.
        finally:
            dist.destroy_process_group()
