import random

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from telemetry.flops import model_flops_per_token, peak_flops


@pytest.mark.parametrize(
    "name, bf16, float8",
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 1978.9e12),
        ("NVIDIA H100 PCIe", 756e12, 1513e12),
        ("NVIDIA H100 NVL", 835.5e12, 1670.5e12),
        ("NVIDIA H200", 989.4e12, 1978.9e12),
        ("NVIDIA H200 NVL", 835.5e12, 1670.5e12),
        ("NVIDIA H20", 148e12, 296e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, None),
        ("NVIDIA A100 80GB PCIe", 312e12, None),
        ("NVIDIA B200", 2250e12, 4500e12),
        ("NVIDIA GB200", 2500e12, 5000e12),
        ("NVIDIA L40S", 362.05e12, 733e12),
        ("AMD Instinct MI300X", 1307.4e12, 2614.9e12),
    ],
)
def test_known_devices(name, bf16, float8):
    assert peak_flops(name, "bf16") == bf16
    assert peak_flops(name, "float8") == float8


@pytest.mark.parametrize(
    "name", ["CPU", "", "NVIDIA GeForce RTX 4090", "NVIDIA L40", "NVIDIA A100X", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_unknown_devices_are_not_guessed(name):
    assert peak_flops(name, "bf16") is None


def test_other_precisions_are_not_guessed():
    assert peak_flops("NVIDIA H200", "float32") is None


@pytest.mark.parametrize("tied", [False, True])
def test_model_flops_are_those_that_torch_counts(tied):
    """Bare matmuls of a transformer, counted forward and backward; attention in full, so twice the causal part."""
    heads, head_dim, layers, seq_len, vocab = (random.randint(2, 6) for _ in range(5))
    dim = heads * head_dim
    embedding = nn.Embedding(vocab, dim)
    blocks = [[nn.Linear(dim, dim, bias=False) for _ in range(4)] for _ in range(layers)]
    head = nn.Linear(dim, vocab, bias=False)
    if tied:
        head.weight = embedding.weight

    counter = FlopCounterMode(display=False)
    with counter:
        x = embedding(torch.randint(vocab, (seq_len,)))
        for wq, wk, wv, wo in blocks:
            q, k, v = (w(x).view(seq_len, heads, head_dim).transpose(0, 1) for w in (wq, wk, wv))
            x = x + wo(((q @ k.mT).softmax(-1) @ v).transpose(0, 1).reshape(seq_len, dim))
        head(x).sum().backward()

    matrices = {p for block in blocks for w in block for p in w.parameters()} | {embedding.weight, head.weight}
    shape = {"n_layers": layers, "n_heads": heads, "head_dim": head_dim, "seq_len": seq_len}
    num_params = sum(p.numel() for p in matrices)
    num_embedding_params = 0 if tied else embedding.weight.numel()
    flops = model_flops_per_token(num_params=num_params, num_embedding_params=num_embedding_params, **shape)
    causal_half = 6 * layers * heads * head_dim * seq_len
    assert seq_len * (flops + causal_half) == counter.get_total_flops()


def test_llama_3_8b():
    flops = model_flops_per_token(
        num_params=8_030_261_248,
        num_embedding_params=128256 * 4096,
        n_layers=32,
        n_heads=32,
        head_dim=128,
        seq_len=8192,
    )
    assert flops == pytest.approx(51.5e9, rel=0.01)
