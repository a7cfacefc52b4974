"""Names, layouts and the config.json between Rowhouse and Hugging Face's LlamaForCausalLM.

Hugging Face rotates the two halves of a head against each other, the papers (and this model) neighbouring pairs; the
rows of wq and wk are permuted between the two so that the logits are the same.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from models.llama.shapes import LlamaShape, RopeScaling

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
ROTARY = ("wq.weight", "wk.weight")

# Hugging Face's key -> the field of LlamaShape, and of RopeScaling.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
}
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
# What this model is and cannot be otherwise.
FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
# transformers' own values for what a config.json leaves out.
DEFAULTS = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip


# Weights


def hf_name(name: str) -> str:
    """Rowhouse's parameter name -> Hugging Face's."""
    module, _, kind = name.rpartition(".")
    if module.startswith("layers."):
        _, layer, inner = module.split(".", 2)
        return f"model.layers.{layer}.{BLOCK_NAMES[inner]}.{kind}"
    return f"{TOP_NAMES[module]}.{kind}"


def is_ignored(name: str, shape: LlamaShape) -> bool:
    """Whether a tensor of Hugging Face's is computed here, or is the embedding once more, as in transformers."""
    return name.endswith("rotary_emb.inv_freq") or (shape.tie_embeddings and name == "lm_head.weight")


def pairs_to_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of wq or wk, (heads * head_dim, dim), from neighbouring pairs to Hugging Face's two halves."""
    return weight.view(-1, head_dim // 2, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def halves_to_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `pairs_to_halves`."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def hf_rows(name: str, rows: int, shape: LlamaShape) -> Tensor | None:
    """Which of Hugging Face's rows is row i of the parameter: int64 (rows,); None where all are in their places."""
    if not name.endswith(ROTARY):
        return None
    return halves_to_pairs(torch.arange(rows)[:, None], shape.head_dim)[:, 0]


def to_hf(state: Mapping[str, Tensor], shape: LlamaShape) -> dict[str, Tensor]:
    """Full (unsharded) parameters by Rowhouse's names -> by Hugging Face's names."""
    return {
        hf_name(name): pairs_to_halves(weight, shape.head_dim) if name.endswith(ROTARY) else weight
        for name, weight in state.items()
    }


# config.json


def hf_config(
    shape: LlamaShape, max_seq_len: int, dtype: torch.dtype, bos_id: int | None = None, eos_id: int | None = None
) -> dict[str, Any]:
    """The content of the config.json of a model that is stored in `dtype`."""
    scaling = shape.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        **FIXED,
        **{key: getattr(shape, field) for key, field in SIZES.items()},
        "max_position_embeddings": max_seq_len,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tie_embeddings,
        # These three as transformers 4 spells them: 5 reads that too, but 4 does not read 5's.
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling
        and {"rope_type": "llama3", **{key: getattr(scaling, field) for key, field in SCALING.items()}},
        "torch_dtype": str(dtype).removeprefix("torch."),
        # Null where unknown: left out, they would be 1 and 2.
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
    }


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json of transformers 4 or 5 says of the mathematics, with its defaults; None where it says nothing.

    Raises AttributeError, TypeError, ValueError or ZeroDivisionError for one that transformers would not have written.
    """
    found: dict[str, Any] = {key: config.get(key) for key in (*FIXED, *SIZES, *DEFAULTS)}
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found["rope_theta"] = rope.pop("rope_theta", found["rope_theta"])
    kind = rope.pop("rope_type", None) or rope.pop("type", "default")
    rope.pop("type", None)  # An old spelling, which may stand beside the new one.
    found["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **rope}
    found |= {key: value for key, value in DEFAULTS.items() if found[key] is None}
    if found["num_key_value_heads"] is None:
        found["num_key_value_heads"] = found["num_attention_heads"]
    if found["head_dim"] is None and found["hidden_size"] is not None and found["num_attention_heads"] is not None:
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    return found


def differences(config: Mapping[str, Any], shape: LlamaShape) -> list[str]:
    """What a config.json says of the mathematics and `shape` does not: a phrase for each key. Raises as `facts`."""
    there, here = facts(config), facts(hf_config(shape, 0, torch.float32))
    return [
        f"{key} is {json.dumps(there[key])} there and {json.dumps(value)} here"
        for key, value in here.items()
        if there[key] != value
    ]


def shape_of(config: Mapping[str, Any]) -> LlamaShape:
    """The shape that a config.json describes. Raises ValueError where it is none that this model has."""
    found = facts(config)
    wrong = [f"{key} is {json.dumps(found[key])}, not an integer" for key in SIZES if type(found[key]) is not int]
    scaling = found["rope_scaling"]
    if scaling is not None and scaling.keys() != {"rope_type", *SCALING}:
        wrong.append(f"rope_scaling is {json.dumps(scaling)}, not Llama 3's")
    if wrong:
        raise ValueError("; ".join(wrong))
    shape = LlamaShape(
        **{field: found[key] for key, field in SIZES.items()},
        rope_theta=found["rope_theta"],
        rope_scaling=scaling and RopeScaling(**{field: scaling[key] for key, field in SCALING.items()}),
        norm_eps=found["rms_norm_eps"],
        tie_embeddings=found["tie_word_embeddings"],
    )
    if differs := differences(config, shape):
        raise ValueError("; ".join(differs))
    return shape
