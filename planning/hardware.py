"""What is presumed of GPUs and of the links between them."""

import dataclasses
import re
from dataclasses import dataclass

from errors import UserError
from telemetry.flops import peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One GPU of a node of `gpus_per_node`, and its links. Bytes, bytes/s; rates are the vendor's peaks."""

    name: str
    memory: int
    memory_rate: float
    link_rate: float
    """NVLink, one direction."""
    network_rate: float = 50e9
    """Between nodes, of one GPU's network card: 400 Gb/s."""
    gpus_per_node: int = 8

    def flops(self, kind: str) -> float:
        """Peak FLOP/s for a kind of planning.costs.Work."""
        bf16 = peak_flops(self.name, "bf16")
        assert bf16 is not None
        if kind == "float8 matmul":
            return peak_flops(self.name, "float8") or bf16
        return bf16 / 8 if kind == "float32 matmul" else bf16


# Memory as CUDA reports it; rates from the vendor's datasheets (bidirectional NVLink figures halved).
GPUS = {
    "A100": Hardware("A100", int(79.2 * GIB), 2.04e12, 300e9),
    "H100": Hardware("H100 80GB HBM3", int(79.1 * GIB), 3.35e12, 450e9),
    "H200": Hardware("H200", int(139.8 * GIB), 4.8e12, 450e9),
    "B200": Hardware("B200", int(178.4 * GIB), 8.0e12, 900e9),
}

# The share of a peak that is reached: measured on one H200 (docs/performance.md); that of the links is presumed.
ACHIEVED = {"float8 matmul": 0.65, "bf16 matmul": 0.7, "float32 matmul": 0.7, "attention": 0.6, "memory": 0.65}
ACHIEVED_LINK = 0.8

HEADROOM = 0.07
"""Share of the memory left to the CUDA context, the communication library's buffers and the allocator's gaps."""


def hardware(gpu: str, memory: str | None, network_gbps: float | None) -> Hardware:
    """What the command line names. Raises UserError."""
    if gpu not in GPUS:
        raise UserError(f'--gpu: "{gpu}" is not known; the GPUs are {", ".join(GPUS)}')
    found = GPUS[gpu]
    if memory is not None:
        found = dataclasses.replace(found, memory=parse_bytes(memory))
    if network_gbps is not None:
        if network_gbps <= 0:
            raise UserError(f"--network-gbps: {network_gbps:g} moves nothing; give Gb/s of one GPU, more than 0")
        found = dataclasses.replace(found, network_rate=network_gbps * 1e9 / 8)
    return found


def parse_bytes(text: str) -> int:
    """80GiB, 141GB, 512MiB -> bytes. Raises UserError."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT])(i?)B", text)
    try:
        assert match is not None
        number, unit, binary = match.groups()
        nbytes = int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit) + 1))
        assert nbytes > 0
    except (AssertionError, ValueError):
        raise UserError(f'--device-memory: "{text}" is no amount of memory; give one like 80GiB or 141GB') from None
    return nbytes
