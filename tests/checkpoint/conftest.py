import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """The test's own process is a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
