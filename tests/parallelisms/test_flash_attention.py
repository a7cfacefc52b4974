"""FlashAttention 4 takes over only where it is installed, known to be faster, and right; the table says so."""

import importlib.metadata
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from models.llama.model import ATTENTION_BACKENDS, Llama
from models.llama.parallelize import put_flash_attention
from models.llama.shapes import LlamaShape
from parallelisms import flash_attention
from parallelisms.mesh import Meshes, ParallelismConfig, build_meshes


@pytest.fixture
def meshes() -> Iterator[Meshes]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield build_meshes(ParallelismConfig(), torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if there were one. What was done to torch's flash attention."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash_attention, "activate_flash_attention_impl", done.append)
    monkeypatch.setattr(flash_attention, "restore_flash_attention_impl", lambda: done.append("restored"))
    return done


def activate(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> str:
    return flash_attention.why_not_activated(32, 8, head_dim, dtype, "cuda")


def test_it_is_looked_at_before_it_is_used(on_hopper: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "errors_of_flash_attention", lambda *_: [0.003, 0.004, 0.004, 0.003])
    assert activate() == "" and on_hopper == ["FA4"]
    monkeypatch.setattr(flash_attention, "errors_of_flash_attention", lambda *_: [0.003, 0.004, torch.nan, 0.003])
    assert "wrong" in activate() and on_hopper == ["FA4", "FA4", "restored"]


def test_a_version_that_does_not_fit(on_hopper: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(*_: int) -> None:
        raise ValueError("too many values to unpack (expected 2)")

    monkeypatch.setattr(flash_attention, "errors_of_flash_attention", too_many)
    assert activate() == "ValueError: too many values to unpack (expected 2)" and on_hopper[-1] == "restored"


def test_where_it_is_not_known_to_be_faster(on_hopper: list[str]) -> None:
    assert "heads of 128" in activate(head_dim=64) and "bfloat16" in activate(dtype=torch.float32)
    assert "Hopper" in flash_attention.why_not_activated(32, 8, 128, torch.bfloat16, "cpu")
    assert on_hopper == []


def test_what_the_table_says(meshes: Meshes, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = Llama(LlamaShape(256, 2, 2, 1, 96, vocab_size=128), 32)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(flash_attention, "version", missing)
    assert put_flash_attention(model, meshes, torch.bfloat16) == []
    monkeypatch.setattr(flash_attention, "version", lambda name: "4.0")
    (row,) = put_flash_attention(model, meshes, torch.bfloat16)
    assert (row.asked, row.applied) == ("flash-attn-4 4.0", "torch's: known to be faster on Hopper only")
    assert all(block.attention.backends is ATTENTION_BACKENDS for block in model.layers)
    monkeypatch.setattr(flash_attention, "why_not_activated", lambda *_: "")
    (row,) = put_flash_attention(model, meshes, torch.bfloat16)
    assert row.applied == "2 blocks"
    assert all(block.attention.backends == [flash_attention.SDPBackend.FLASH_ATTENTION] for block in model.layers)
