"""The memory that tensors take, followed storage by storage: of fake tensors, which take none, and of real ones alike.

It counts what CUDA's allocator would count as allocated. What that keeps beyond it (reserved), what the libraries
take for themselves and the CUDA context are not tensors (docs/planning.md).
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallelisms.fsdp import local

BLOCK = 512  # Bytes: CUDA's allocator rounds up to multiples of it.
LARGE = 2**16  # Bytes from which on it is found out who made a storage.
MAKERS = {
    "_fsdp_collectives.py": "communication",
    "fsdp.py": "communication",  # parallelisms/fsdp.py: the reduction in place.
    "_fsdp_param.py": "gathered weights",
    "float8_gather.py": "gathered weights",
    "one_shard.py:take": "gathered weights",
}
"""Source file, or a function in it -> what the storages are that its code makes."""
KINDS = [
    "parameters", "gradients", "optimizer", "activations", "gathered weights", "communication", "temporaries", "rest",
]  # fmt: skip


@dataclass(eq=False)
class Storage:
    """One that lives or has lived. Its kind may be known only later: a temporary is what its pass does not leave."""

    nbytes: int
    kind: str
    born: str
    reference: Any = None


@dataclass
class Peak:
    nbytes: int = 0
    where: str = ""
    storages: list[tuple[Storage, int]] = field(default_factory=list)
    """With their bytes at that moment: FSDP2 frees by resizing."""
    inside: int = 0
    """Bytes that a compiled graph or an op took for itself at that moment."""

    def by_kind(self) -> dict[str, int]:
        kinds = Counter(dict.fromkeys(KINDS, 0))
        for storage, nbytes in self.storages:
            kinds[storage.kind] += nbytes
        kinds["temporaries"] += self.inside
        return dict(kinds)


class MemoryTracker:
    """Told of every tensor that is made (`add`), it follows their storages until they are freed or resized."""

    def __init__(self) -> None:
        self.live: dict[int, Storage] = {}
        self.nbytes = 0
        self.peak = Peak()
        self.moments: dict[str, int] = {}
        """Phase and place -> the most bytes there."""
        self.phase = "set-up"
        """What is done: set-up, forward, backward or optimizer."""
        self.where = ""
        """Where in the model."""

    def add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self.add_storage(tensor.untyped_storage())

    def add_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.live:
            return
        made = Storage(rounded(storage.nbytes()), "rest", self.phase)
        made.kind = maker() if made.nbytes >= LARGE else "rest"
        if made.kind == "rest" and self.phase in ("forward", "backward"):
            made.kind = "temporaries" if self.phase == "backward" else "activations"
        made.reference = weakref.ref(storage, lambda _: self.free(key))
        self.live[key] = made
        self.nbytes += made.nbytes
        self.pulse(0)

    def free(self, key: int) -> None:
        storage = self.live.pop(key)
        self.nbytes -= storage.nbytes
        if storage.kind == "activations" and storage.born == self.phase:
            storage.kind = "temporaries"

    def resized(self, storage: torch.UntypedStorage) -> None:
        known = self.live.get(storage._cdata)
        if known is not None:
            before, known.nbytes = known.nbytes, rounded(storage.nbytes())
            self.nbytes += known.nbytes - before
            self.pulse(0)

    def pulse(self, inside: int) -> None:
        """`inside` more bytes are taken for a moment."""
        where = f"{self.phase}, {self.where}" if self.where else self.phase
        self.moments[where] = max(self.moments.get(where, 0), self.nbytes + inside)
        if self.nbytes + inside > self.peak.nbytes:
            self.peak = Peak(self.nbytes + inside, where, [(s, s.nbytes) for s in self.live.values()], inside)

    def name(self, kind: str, tensors: Iterable[Tensor]) -> int:
        """Says what tensors are. Returns their bytes, without rounding."""
        nbytes = 0
        for tensor in {id(t): t for t in map(local, tensors)}.values():
            nbytes += tensor.nbytes
            storage = self.live.get(tensor.untyped_storage()._cdata)
            if storage is not None:
                storage.kind = kind
        return nbytes


def maker() -> str:
    """Who makes the storage that is being made, by the innermost source file that MAKERS names."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename.rsplit("/", 1)[-1]
        kind = MAKERS.get(file) or MAKERS.get(f"{file}:{frame.f_code.co_name}")
        if kind is not None:
            return kind
        frame = frame.f_back  # type: ignore[assignment]
    return "rest"


def rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
