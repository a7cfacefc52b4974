"""FlashAttention 4 on a GPU: as right as cuDNN, and left alone where its version does not fit torch's."""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from parallelisms import flash_attention

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not flash_attention.installed(), reason="flash-attn-4 is not installed"),
]


@pytest.fixture(autouse=True)
def torch_s_own_after() -> Iterator[None]:
    yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("kv_heads", [8, 32])
def test_it_is_right(kv_heads: int) -> None:
    assert flash_attention.why_not_activated(32, kv_heads, 128, torch.bfloat16, "cuda") == ""
    assert torch.nn.attention.current_flash_attention_impl() == "FA4"


def test_a_version_that_gives_more_results(monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module("flash_attn.cute.interface")
    forward = package._flash_attn_fwd

    @functools.wraps(forward)  # It keeps compiled kernels in attributes of its own.
    def with_one_more(*args: Any, **kwargs: Any) -> Any:
        return (*forward(*args, **kwargs), None)

    monkeypatch.setattr(package, "_flash_attn_fwd", with_one_more)
    assert "too many values" in flash_attention.why_not_activated(32, 8, 128, torch.bfloat16, "cuda")
    assert torch.nn.attention.current_flash_attention_impl() is None
