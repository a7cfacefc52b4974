"""Model FLOPs of a token and peak FLOP/s of a device: what MFU is a ratio of."""

import re

# Dense (without sparsity) tensor core FLOP/s from the vendors' datasheets, by a pattern of the name that the driver
# reports: (pattern, bf16, float8). The first match counts. Where a datasheet gives only figures "with sparsity", half.
PEAK_FLOPS: list[tuple[str, float, float | None]] = [
    (r"\bGB200\b", 2500e12, 5000e12),  # NVIDIA GB200 NVL72 datasheet, one of 72 GPUs
    (r"\bB200\b", 2250e12, 4500e12),  # NVIDIA HGX B200 datasheet, one of 8 GPUs
    (r"\bGH200\b", 990e12, 1979e12),  # NVIDIA GH200 datasheet
    (r"\bH200 NVL\b", 835.5e12, 1670.5e12),  # NVIDIA H200 datasheet, NVL column
    (r"\bH200\b", 989.4e12, 1978.9e12),  # NVIDIA H200 datasheet, SXM column
    (r"\bH100 NVL\b", 835.5e12, 1670.5e12),  # NVIDIA H100 NVL product brief
    (r"\bH100 PCIe\b", 756e12, 1513e12),  # NVIDIA H100 datasheet, PCIe column
    (r"\bH100 80GB HBM3\b", 989.4e12, 1978.9e12),  # NVIDIA H100 datasheet, SXM column
    (r"\bH20\b", 148e12, 296e12),  # as vendors of H20 systems state it; NVIDIA publishes no datasheet
    (r"\bA100\b", 312e12, None),  # NVIDIA A100 datasheet: the same for SXM and PCIe; no float8 units
    (r"\bL40S\b", 362.05e12, 733e12),  # NVIDIA L40S datasheet
    (r"\bMI300X\b", 1307.4e12, 2614.9e12),  # AMD Instinct MI300X datasheet
    (r"\bMI325X\b", 1307.4e12, 2614.9e12),  # AMD Instinct MI325X datasheet
]


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak in FLOP/s of one device, for matmuls in `precision` ("bf16" or "float8").

    `device_name` as torch.cuda.get_device_name gives it. None for a device that is not in the table, for a slice of
    one (MIG), and for a precision that it has no units for (float8 on A100) or that is not in the table (float32).
    """
    if "MIG" in device_name or precision not in ("bf16", "float8"):
        return None
    for pattern, bf16, float8 in PEAK_FLOPS:
        if re.search(pattern, device_name):
            return bf16 if precision == "bf16" else float8
    return None


def model_flops_per_token(
    *, num_params: int, num_embedding_params: int, n_layers: int, n_heads: int, head_dim: int, seq_len: int
) -> float:
    """FLOPs that one token of training needs, forward and backward: 6 N + 6 L H Q T.

    After PaLM (arXiv 2204.02311, appendix B), where attention is 12 L H Q T:

    - A matmul weight costs a multiplication and an addition a token forward, and twice that backward (gradient of the
      input, gradient of the weight): 6 FLOPs. N is `num_params` without `num_embedding_params`, the input embedding,
      which is a look-up. A table tied to the output head is a matmul there and counts once: give 0 then. (The norms'
      few weights are counted as if they were matmuls.)
    - In each of L layers and H heads a query of size Q meets T keys (2 Q T), and its weights meet T values (2 Q T);
      backward twice that: 12 Q T. A causal query meets half of the keys on average, and only those count here: 6 Q T.

    Recomputation by activation checkpointing does not count: these are the model's FLOPs, not the hardware's.
    """
    matmul = 6 * (num_params - num_embedding_params)
    attention = 6 * n_layers * n_heads * head_dim * seq_len
    return float(matmul + attention)
