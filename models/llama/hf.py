"""Names and layouts between Rowhouse and Hugging Face's LlamaForCausalLM.

Hugging Face rotates the two halves of a head against each other, the papers (and this model) neighbouring pairs; the
rows of wq and wk are permuted between the two so that the logits are the same.
"""

from collections.abc import Mapping

from torch import Tensor

from models.llama.shapes import LlamaShape

BLOCK_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}


def hf_name(name: str) -> str:
    """Rowhouse's parameter name -> Hugging Face's."""
    module, _, kind = name.rpartition(".")
    if module.startswith("layers."):
        _, layer, inner = module.split(".", 2)
        return f"model.layers.{layer}.{BLOCK_NAMES[inner]}.{kind}"
    return f"{TOP_NAMES[module]}.{kind}"


def pairs_to_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of wq or wk, (heads * head_dim, dim), from neighbouring pairs to Hugging Face's two halves."""
    return weight.view(-1, head_dim // 2, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def halves_to_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `pairs_to_halves`."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def to_hf(state: Mapping[str, Tensor], shape: LlamaShape) -> dict[str, Tensor]:
    """Full (unsharded) parameters by Rowhouse's names -> by Hugging Face's names."""
    rotary = ("wq.weight", "wk.weight")
    return {
        hf_name(name): pairs_to_halves(weight, shape.head_dim) if name.endswith(rotary) else weight
        for name, weight in state.items()
    }


def from_hf(state: Mapping[str, Tensor], shape: LlamaShape, names: list[str]) -> dict[str, Tensor]:
    """Full parameters by Hugging Face's names -> Rowhouse's `names`. Raises KeyError for one that is missing."""
    rotary = ("wq.weight", "wk.weight")
    return {
        name: halves_to_pairs(state[hf_name(name)], shape.head_dim) if name.endswith(rotary) else state[hf_name(name)]
        for name in names
    }
