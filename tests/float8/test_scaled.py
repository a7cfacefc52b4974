"""The scale-shape contract: what does not fit is refused with both shapes, never reshaped."""

import pytest
import torch

from float8.quantise import quantise_rows
from float8.scaled import FLOAT8, Float8Rows, ScaleShapeError, fast_accumulation, scaled_mm


def test_issue_864_is_refused() -> None:
    data, scale = torch.zeros(1, 8192, 2048, dtype=FLOAT8), torch.ones(8192, 1)
    with pytest.raises(ScaleShapeError, match=r"\(1, 8192, 2048\).*\(8192, 1\)"):
        Float8Rows(data, scale)


@pytest.mark.parametrize(
    "data, scale",
    [
        (torch.zeros(4, 8, dtype=FLOAT8), torch.ones(4)),
        (torch.zeros(4, 8, dtype=FLOAT8), torch.ones(8, 1)),
        (torch.zeros(4, 8, dtype=FLOAT8), torch.ones(1, 4)),
        (torch.zeros(4, 8, dtype=FLOAT8), torch.ones(4, 1, dtype=torch.bfloat16)),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 1)),
        (torch.zeros(8, 4, dtype=FLOAT8).t(), torch.ones(4, 1)),
    ],
)
def test_what_does_not_fit_is_refused(data: torch.Tensor, scale: torch.Tensor) -> None:
    with pytest.raises(ScaleShapeError):
        Float8Rows(data, scale)


def test_matmul_of_rows_is_exact_up_to_the_output() -> None:
    torch.manual_seed(0)
    a, b = quantise_rows(torch.randn(48, 64) * 1e-3), quantise_rows(torch.randn(32, 64) * 1e3)
    exact = (a.data.double() * a.scale) @ (b.data.double() * b.scale).t()
    # Products of float8 values are exact in float32; the sum of 64 rounds at 2**-24 each.
    assert (scaled_mm(a, b, torch.float32) - exact).norm() < 64 * 2**-24 * exact.norm()
    # bf16: 8 bits of mantissa, so 2**-9 at most.
    assert (scaled_mm(a, b, torch.bfloat16) - exact).norm() < 2**-9 * exact.norm()


def test_matmul_over_different_lengths_is_refused() -> None:
    with pytest.raises(ScaleShapeError, match="64 columns on the left, 32"):
        scaled_mm(quantise_rows(torch.randn(16, 64)), quantise_rows(torch.randn(16, 32)), torch.float32)


@pytest.mark.parametrize("fast", [True, False])
def test_how_matmuls_accumulate(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found, matmul = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: found.append(k["use_fast_accum"]) or matmul(*a, **k))
    rows = quantise_rows(torch.randn(16, 32))
    assert fast_accumulation(fast) == fast
    try:
        scaled_mm(rows, rows, torch.float32)
    finally:
        fast_accumulation(True)
    assert found == [fast]
