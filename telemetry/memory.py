"""Memory: the device's peak, and Python's garbage at set times."""

import gc
import resource
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MemoryPeak:
    """Since the start, in GiB. On CUDA: held by tensors, and reserved from the device; on a CPU both are the process."""

    allocated_gib: float
    reserved_gib: float


def peak_memory(device: torch.device) -> MemoryPeak:
    if device.type == "cuda":
        stats = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return MemoryPeak(stats[0] / 2**30, stats[1] / 2**30)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return MemoryPeak(resident, resident)


class GarbageCollector:
    """Collects every `freq` steps and never in between, so that all ranks pause at the same step (as torchtitan does)."""

    def __init__(self, freq: int):
        self.freq = freq
        gc.disable()
        gc.collect()

    def step(self, step: int) -> None:
        if step % self.freq == 0:
            gc.collect(1)
