"""FlashAttention 4 in the place of cuDNN's attention, where its package is installed, fits and is the faster one.

On an H200 attention with heads of 128 takes about a tenth less time with it (docs/performance.md). torch.nn.attention
puts it behind torch's own flash attention op, so that the compiler and checkpointing see an op that they know. It calls
functions of the package that change from version to version without a word, so what comes out is looked at first.
"""

from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

PACKAGE = "flash-attn-4"
HOPPER, HEAD_DIM = 9, 128
TOKENS = 256
# Scores, their gradients and results are rounded to bf16, each by up to 2**-9. A scale that is a tenth too
# large is 10 % off, a mask that lets one token more through 38 %.
ALLOWED = 2**-6


def installed() -> str:
    """The package and its version; empty where it is not installed."""
    try:
        return f"{PACKAGE} {version(PACKAGE)}"
    except PackageNotFoundError:
        return ""


def why_not_activated(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> str:
    """From now on torch's flash attention is FlashAttention 4 in this process. Returns why it is not, else nothing.

    heads, kv_heads: of this rank; device: its type. Compiles the kernels that training needs (seconds).
    """
    if device != "cuda" or torch.cuda.get_device_capability()[0] != HOPPER:
        return "known to be faster on Hopper only"
    if head_dim != HEAD_DIM or dtype != torch.bfloat16:
        return f"known to be faster with heads of {HEAD_DIM} in bfloat16 only"
    try:
        activate_flash_attention_impl("FA4")
        errors = errors_of_flash_attention(heads, kv_heads, head_dim)
        if all(error <= ALLOWED for error in errors):  # A NaN is not.
            return ""
        why = f"it is wrong here: output and gradients of q, k, v are {', '.join(f'{e:.0%}' for e in errors)} off"
    except Exception as error:  # Whatever a version that does not fit comes to.
        why = f"{type(error).__name__}: {error}".split("\n")[0]
    restore_flash_attention_impl()
    return why


def errors_of_flash_attention(heads: int, kv_heads: int, head_dim: int) -> list[float]:
    """Of output and gradients of q, k and v, relative to their norms, beside float32's."""
    shapes = [(1, TOKENS, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    *qkv, g = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)

    def attention(backend: SDPBackend, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (t.to(dtype).requires_grad_() for t in qkv)
        with sdpa_kernel([backend]):
            q_heads, k_heads, v_heads = (t.transpose(1, 2) for t in (q, k, v))
            out = F.scaled_dot_product_attention(
                q_heads, k_heads, v_heads, is_causal=True, enable_gqa=heads != kv_heads
            )
        return [out, *torch.autograd.grad(out.transpose(1, 2), (q, k, v), g.to(dtype))]

    got = attention(SDPBackend.FLASH_ATTENTION, torch.bfloat16)
    expected = attention(SDPBackend.MATH, torch.float32)
    return [((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True)]
