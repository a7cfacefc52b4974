"""Memory: peaks to report, and garbage collection at steps that all ranks share."""

import gc
import os
import resource
import sys
from dataclasses import dataclass

import torch

GIB = 1024**3


@dataclass(frozen=True)
class MemoryPeak:
    """The most memory that was taken, and its share of what there is."""

    gib: float
    """CUDA: reserved by the allocator (what the device must have); CPU: resident set of the process. GiB."""
    percent: float
    """`gib` in percent of the device's (CPU: the machine's) memory."""
    allocated_gib: float
    """CUDA: held by tensors (what the program needs); CPU: as `gib`. GiB."""


def peak_memory(device: torch.device) -> MemoryPeak:
    """The peak since the process began; on CUDA since the last torch.cuda.reset_peak_memory_stats(device)."""
    if device.type == "cuda":
        reserved, total = torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
        allocated = torch.cuda.max_memory_allocated(device)
        return MemoryPeak(reserved / GIB, 100 * reserved / total, allocated / GIB)
    # Linux counts in KiB, macOS in bytes.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MemoryPeak(resident / GIB, 100 * resident / total, resident / GIB)


class GarbageCollector:
    """Collects Python's garbage every `freq` steps and at no other time.

    Automatic collection comes at a moment of each rank's own, and all the others wait for that rank at the next
    collective. Turns it off for the process.
    """

    def __init__(self, freq: int):
        self.freq = freq
        gc.disable()
        # What setting up has left behind, of all ages: once.
        gc.collect()

    def step(self, step: int) -> None:
        """Call after each training step, on all ranks."""
        if step % self.freq == 0:
            # Generation 1: long-lived objects (the model, compiled code) are not visited, which keeps this short.
            gc.collect(1)
