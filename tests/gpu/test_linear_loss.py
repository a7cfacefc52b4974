"""The head's weight gradient on a GPU: the matmul adds chunk to chunk in float32, and rounds nothing to bf16."""

import pytest
import torch

from parallelisms.linear_loss import plus_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_chunks_are_added_up_in_float32() -> None:
    chunks = [[torch.randn(256, n, device="cuda", dtype=torch.bfloat16) for n in (1000, 512)] for _ in range(4)]
    dw = None
    for gradient, x in chunks:
        dw = plus_product(dw, gradient, x)
    exact = sum(gradient.double().t() @ x.double() for gradient, x in chunks)
    assert dw is not None and dw.dtype == torch.float32
    # 1,024 products a sum: float32's rounding, 2**-24, as often as that. A product in bf16 would be 2**-9 off.
    error = ((dw.double() - exact).norm() / exact.norm()).item()
    assert error < 1024 * 2**-24
