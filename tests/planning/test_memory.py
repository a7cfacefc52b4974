"""Storages that live, are resized and die, of real tensors."""

import torch

from planning.memory import MemoryTracker, rounded


def tensor(kib: int) -> torch.Tensor:
    return torch.empty(kib * 1024, dtype=torch.uint8)


def test_it_counts_storages_while_they_live():
    memory = MemoryTracker()
    a, b = tensor(4), tensor(8)
    memory.add([a, b, a.view(2, -1), b[:100]])
    assert memory.nbytes == 12 * 1024
    del a
    assert memory.nbytes == 8 * 1024
    view = b[1:]
    del b
    assert memory.nbytes == 8 * 1024  # The view keeps it.
    del view
    assert memory.nbytes == 0 and memory.peak.nbytes == 12 * 1024


def test_sizes_are_rounded_as_the_allocator_does():
    assert [rounded(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_resized_storages():
    memory = MemoryTracker()
    a = tensor(4)
    memory.add([a])
    a.untyped_storage().resize_(0)
    memory.resized(a.untyped_storage())
    assert memory.nbytes == 0
    a.untyped_storage().resize_(16 * 1024)
    memory.resized(a.untyped_storage())
    assert memory.nbytes == memory.peak.nbytes == 16 * 1024


def test_kinds_are_found_afterwards():
    memory = MemoryTracker()
    weight = tensor(64)
    memory.add([weight])
    assert memory.name("parameters", [weight, weight]) == 64 * 1024
    memory.phase, memory.where = "forward", "block 0"
    kept, passing = tensor(128), tensor(256)
    memory.add([kept, passing])
    memory.pulse(512)
    del passing
    memory.phase = "backward"
    gradient = tensor(64)
    memory.add([gradient])
    assert memory.peak.where == "forward, block 0"
    kinds = memory.peak.by_kind()
    assert kinds["parameters"] == 64 * 1024 and kinds["activations"] == 128 * 1024
    assert kinds["temporaries"] == 256 * 1024 + 512 and sum(kinds.values()) == memory.peak.nbytes
    assert memory.name("gradients", [gradient]) == 64 * 1024
    assert memory.moments["backward, block 0"] == 256 * 1024
    del kept
    assert memory.peak.by_kind() == kinds
