"""What the kernels' benchmark compares with. (What it says without a GPU: tests/float8/test_kernels.py.)"""

import pytest
import torch

from scripts import bench_kernels


def test_the_ceiling_is_an_elementwise_product(monkeypatch) -> None:
    def two_microseconds(function, argument_sets) -> float:
        ((a, b, c),) = argument_sets
        function(a, b, c)
        assert torch.equal(c, a * b)
        return 2.0

    monkeypatch.setattr(bench_kernels, "microseconds", two_microseconds)
    # Two float32 are read and one is written.
    assert bench_kernels.product_bandwidth("cpu", 1000) == pytest.approx(12_000 / 2e-6)
