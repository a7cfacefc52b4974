"""The Llama 3 model as plain mathematics: no process group, no precision, no compiler in here.

A batch is flattened to tokens at the door: the residual stream is (tokens, dim), sequence after sequence, from the
embedding to the logits, so that every matmul sees a matrix. Only attention views it as (batch, seq, heads, head_dim).
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from loss import cross_entropy_sum
from models.llama.shapes import LlamaShape, RopeScaling

# cuDNN is the fastest of torch's own on Hopper (docs/performance.md); the others serve where it cannot.
ATTENTION_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position for each pair of a head: float32 (head_dim / 2,). Scaling as in Llama 3.1."""
    freqs = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return freqs
    wavelengths = 2 * math.pi / freqs
    # 0 where a wave is longer than the original context allows, 1 where it is short, linear in between.
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * freqs / scaling.factor + smooth * freqs


def precompute_freqs_cis(seq_len: int, shape: LlamaShape) -> Tensor:
    """Cosine and sine of each position's rotation: float32 (seq_len, head_dim / 2, 2). Computed on the CPU."""
    freqs = rope_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), freqs)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotates neighbouring pairs (x[2i], x[2i+1]) of each head in float32; x: (batch, seq, heads, head_dim).

    As pairs * cos + swapped pairs * (-sin, sin): where the pairs are taken apart and put together again, the compiler's
    kernels take a third longer (docs/performance.md).
    """
    pairs = x.float().unflatten(-1, (-1, 2))
    cos, sin = freqs_cis[: x.shape[1], None].split(1, dim=-1)
    return (pairs * cos + pairs.flip(-1) * torch.cat((-sin, sin), dim=-1)).flatten(-2).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, backends: list[SDPBackend]) -> Tensor:
    """All (batch, heads, seq, head_dim); k and v may have fewer heads, each for a group of q's. Best backend first."""
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class PlainLinears:
    """How the blocks multiply by their weights; models/llama/parallelize.py puts others in its place."""

    def column(self, layer: str, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """The linears that share the input x: (tokens, dim) -> (tokens, out) each. `layer` names them in messages."""
        return tuple(linear(x) for linear in linears)

    def norm_column(self, layer: str, x: Tensor, norm: nn.RMSNorm, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """`column` of norm(x)."""
        return self.column(layer, norm(x), *linears)

    def row(self, layer: str, x: Tensor, linear: nn.Linear) -> Tensor:
        """The linear that writes to the residual stream: (tokens, in) -> (tokens, dim)."""
        return linear(x)

    def feed_forward(self, x: Tensor, norm: nn.RMSNorm, w1: nn.Linear, w3: nn.Linear, w2: nn.Linear) -> Tensor:
        """x + SwiGLU(norm(x)) (arXiv 2002.05202): (tokens, dim) -> (tokens, dim)."""
        gate, up = self.column("w1 w3", norm(x), w1, w3)
        return x + self.row("w2", F.silu(gate) * up, w2)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions (arXiv 2305.13245, 2104.09864)."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.backends = ATTENTION_BACKENDS
        self.linears = PlainLinears()
        self.wq = nn.Linear(shape.dim, shape.n_heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.n_kv_heads * shape.head_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.n_kv_heads * shape.head_dim, bias=False)
        self.wo = nn.Linear(shape.n_heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, norm: nn.RMSNorm, freqs_cis: Tensor, seq_len: int) -> Tensor:
        """Attention over norm(x). x: (tokens, dim) -> (tokens, dim); tokens = batch * seq_len."""
        qkv = self.linears.norm_column("wq wk wv", x, norm, self.wq, self.wk, self.wv)
        q, k, v = (t.view(-1, seq_len, t.shape[1] // self.head_dim, self.head_dim) for t in qkv)
        q, k = apply_rotary_emb(q, freqs_cis), apply_rotary_emb(k, freqs_cis)
        out = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.backends)
        return self.linears.row("wo", out.transpose(1, 2).flatten(0, 1).flatten(1), self.wo)


class FeedForward(nn.Module):
    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.linears = PlainLinears()
        self.w1 = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.w2 = nn.Linear(shape.hidden_dim, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.hidden_dim, bias=False)

    def forward(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        return self.linears.feed_forward(x, norm, self.w1, self.w3, self.w2)


class TransformerBlock(nn.Module):
    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, freqs_cis: Tensor, seq_len: int) -> Tensor:
        x = x + self.attention(x, self.attention_norm, freqs_cis, seq_len)
        return self.feed_forward(x, self.ffn_norm)


class Llama(nn.Module):
    """Token ids in, logits out. Build it under torch.device("meta"), then `to_empty` and `init_weights`."""

    def __init__(self, shape: LlamaShape, max_seq_len: int):
        super().__init__()
        self.shape = shape
        self.max_seq_len = max_seq_len
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        # A tied model has no weight of its own here: one parameter, one name in checkpoints.
        self.output = None if shape.tie_embeddings else nn.Linear(shape.dim, shape.vocab_size, bias=False)
        self.freqs_cis: Tensor
        self.register_buffer("freqs_cis", torch.empty(max_seq_len, shape.head_dim // 2, 2), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        """tokens: int64 (batch, seq_len) -> logits (batch * seq_len, vocab_size) in the compute precision.

        With labels, int64 (batch, seq_len), and count, a float32 scalar: the summed loss / count, a float32 scalar.
        """
        seq_len = tokens.shape[1]
        x = self.tok_embeddings(tokens.flatten())
        for layer in self.layers:
            x = layer(x, self.freqs_cis, seq_len)
        x = self.norm(x)
        return self.head(x) if labels is None else self.head_loss(x, labels.flatten(), count)

    def head(self, x: Tensor) -> Tensor:
        return self.output(x) if self.output is not None else F.linear(x, self.tok_embeddings.weight)

    def head_loss(self, x: Tensor, labels: Tensor, count: Tensor | None) -> Tensor:
        """models/llama/parallelize.py puts one in its place that does not need the logits."""
        assert count is not None
        return cross_entropy_sum(self.head(x), labels) / count

    @torch.no_grad()
    def init_weights(self, seed: int, device: torch.device) -> None:
        """Fills parameters and buffers. The values depend on the seed and each parameter's name alone, not on how the
        parameters are sharded: every mesh starts from the same model.

        Norms start at one; matrices are normal, cut at 3 standard deviations: 0.02, for the two that write to the
        residual stream (wo, w2) divided by sqrt(2 * (layer + 1)), and 1 / sqrt(dim) for the output head.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
                continue
            full = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            std = self.init_std(name)
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:6], "big"))
            nn.init.trunc_normal_(full, std=std, a=-3 * std, b=3 * std, generator=generator)
            if isinstance(parameter, DTensor):
                # Every rank has the same full tensor: each takes its shard, nothing is sent.
                shard = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(shard.to_local())
            else:
                parameter.copy_(full)
        self.freqs_cis = precompute_freqs_cis(self.max_seq_len, self.shape).to(self.freqs_cis.device)

    def init_std(self, name: str) -> float:
        if name == "output.weight":
            return self.shape.dim**-0.5
        if name.endswith(("wo.weight", "w2.weight")):
            layer = int(name.split(".")[1])
            return 0.02 / math.sqrt(2 * (layer + 1))
        return 0.02
