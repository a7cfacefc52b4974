"""Text from a Llama, token after token: the keys and values of what was read are kept, not computed again.

The blocks are the training model's; only attention is written once more, since it reads from the cache. Prompts of any
lengths share a batch. Each row has its own positions, from 0, and what fills up a shorter prompt stands *behind* it,
where none of its tokens looks; the row's next tokens then take those places in the cache:

    row 0   a b c d e | x y ...        positions 0 1 2 3 4 | 5 6 ...
    row 1   f g . . . | x y ...                  0 1 . . . | 2 3 ...
"""

from collections.abc import Callable, Collection, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.llama.model import Attention, Llama, TransformerBlock, apply_rotary_emb, causal_attention


class KVCache:
    """Keys and values of every layer, by row and position: (layers, rows, length, kv heads of this rank, head_dim)."""

    def __init__(self, model: Llama, rows: int, length: int):
        attention = model.layers[0].attention
        assert isinstance(attention, Attention)
        wk, head_dim = attention.wk.weight, attention.head_dim
        shape = (len(model.layers), rows, length, wk.shape[0] // head_dim, head_dim)
        # Zeros: attention multiplies by 0 what it does not look at, and 0 times NaN is NaN.
        self.keys, self.values = wk.new_zeros(shape), wk.new_zeros(shape)


def read_tokens(model: Llama, tokens: Tensor, positions: Tensor, cache: KVCache, end: int) -> Tensor:
    """Adds tokens to what each row has read. tokens, positions: int64 (rows, n) -> (rows * n, dim), for model.head.

    Either prompts, at the positions 0 to n - 1, or one token a row. `end`: all positions are below it.
    """
    freqs_cis = model.freqs_cis[positions.flatten()]
    seen = None
    if tokens.shape[1] == 1:
        seen = (torch.arange(end, device=tokens.device) <= positions)[:, None, None]
    x = model.tok_embeddings(tokens.flatten())
    for block, keys, values in zip(model.layers, cache.keys[:, :, :end], cache.values[:, :, :end], strict=True):
        assert isinstance(block, TransformerBlock)
        x = x + attend(block.attention, x, block.attention_norm, freqs_cis, positions, keys, values, seen)
        x = block.feed_forward(x, block.ffn_norm)
    return model.norm(x)


def attend(
    attention: Attention, x: Tensor, norm: nn.RMSNorm, freqs_cis: Tensor, positions: Tensor, keys: Tensor,
    values: Tensor, seen: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention over norm(x) and the cache, to which it adds. x: (rows * n, dim) -> (rows * n, dim).

    freqs_cis: of each token, (rows * n, head_dim / 2, 2); keys, values: (rows, end, kv heads, head_dim); seen: which
    of these a row looks at, bool (rows, 1, 1, end), where n is 1; None for prompts, which look at themselves.
    """
    rows, n = positions.shape
    qkv = attention.linears.norm_column("wq wk wv", x, norm, attention.wq, attention.wk, attention.wv)
    # For the rotation all tokens are one sequence, as each brings its own.
    q, k, v = (t.unflatten(1, (-1, attention.head_dim)) for t in qkv)
    q, k = (apply_rotary_emb(t[None], freqs_cis)[0] for t in (q, k))
    q, k, v = (t.unflatten(0, (rows, n)) for t in (q, k, v))
    row = torch.arange(rows, device=x.device)[:, None]
    keys[row, positions], values[row, positions] = k, v
    if seen is None:
        out = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attention.backends)
        out = out.transpose(1, 2)
    else:
        # The heads that share a key stand as its queries: no key is copied. Not by cuDNN, which plans each new length.
        q, k, v = q.view(rows, keys.shape[2], -1, attention.head_dim), keys.transpose(1, 2), values.transpose(1, 2)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return attention.linears.row("wo", out.reshape(rows * n, -1), attention.wo)


@torch.no_grad()
def generate(
    model: Llama,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_ids: Collection[int],
    choose: Callable[[Tensor], Tensor],
) -> Iterator[list[int | None]]:
    """Yields, step by step, the next token of each prompt; None for one that has ended, with one of `stop_ids`.

    Prompts are token ids, at least one each. `choose`: logits (rows, vocab_size) -> int64 (rows,). Raises ValueError
    where prompt and new tokens together are longer than model.max_seq_len.
    """
    device, rows, longest = model.freqs_cis.device, len(prompts), max(map(len, prompts))
    if longest + max_new_tokens > model.max_seq_len:
        raise ValueError(f"{longest} and {max_new_tokens} tokens are more than {model.max_seq_len}")
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
    cache = KVCache(model, rows, longest + max_new_tokens)
    x = read_tokens(model, tokens, torch.arange(longest, device=device).expand(rows, -1), cache, longest)
    x = x.view(rows, longest, -1)[torch.arange(rows, device=device), lengths - 1]
    ended = [False] * rows
    for step in range(max_new_tokens):
        chosen = choose(model.head(x))
        ids = chosen.tolist()
        ended = [was or id in stop_ids for was, id in zip(ended, ids, strict=True)]
        yield [None if over else id for over, id in zip(ended, ids, strict=True)]
        if all(ended) or step + 1 == max_new_tokens:
            return
        x = read_tokens(model, chosen[:, None], (lengths + step)[:, None], cache, longest + step + 1)


def choose_token(
    logits: Tensor, temperature: float, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """The most probable token at temperature 0, else one drawn: of all, or of the top_k most probable.

    logits: (rows, vocab_size) -> int64 (rows,).
    """
    if temperature == 0:
        return logits.argmax(dim=1)
    logits = logits.float()
    logits = (logits - logits.amax(dim=1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[1]:
        least = logits.topk(top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]
