"""Model FLOPs, and what a device could do: the two sides of MFU."""

# Dense peak FLOP/s of the datasheets (NVIDIA H100, H200, H20, A100, L40S, B200; AMD MI300X), by precision. The first
# name that the device's name contains counts.
PEAKS: dict[str, dict[str, float]] = {
    "H100 NVL": {"bf16": 835e12, "float8": 1671e12},
    "H100 PCIe": {"bf16": 756e12, "float8": 1513e12},
    "H100": {"bf16": 989e12, "float8": 1979e12},
    "H200": {"bf16": 989e12, "float8": 1979e12},
    "H20": {"bf16": 148e12, "float8": 296e12},
    "B200": {"bf16": 2250e12, "float8": 4500e12},
    "A100": {"bf16": 312e12},
    "L40S": {"bf16": 362e12, "float8": 733e12},
    "MI300X": {"bf16": 1307e12, "float8": 2615e12},
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense FLOP/s of the device in `precision` ("bf16", "float8"); None where it is not known: better none than a guess."""
    for name, peaks in PEAKS.items():
        if name in device_name:
            return peaks.get(precision)
    return None


def model_flops_per_token(
    *, num_params: int, num_embedding_params: int, n_layers: int, n_heads: int, head_dim: int, seq_len: int
) -> float:
    """FLOPs of one token's forward and backward pass (PaLM, arXiv 2204.02311, appendix B).

    A parameter in a matmul costs a multiplication and an addition forward and twice that backward: 6. The input
    embedding is a look-up (`num_embedding_params`: 0 where its table is also the output head). Attention costs
    12 * heads * head_dim * seq_len a layer when all tokens see all; a causal token sees half of them: 6.
    """
    return 6.0 * (num_params - num_embedding_params) + 6.0 * n_layers * n_heads * head_dim * seq_len
