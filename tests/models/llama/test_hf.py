"""config.json both ways, in the spellings of transformers 4 and 5, and the order of rows."""

import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from models.llama.hf import differences, hf_config, hf_name, hf_rows, is_ignored, shape_of, to_hf
from models.llama.shapes import FLAVORS, LlamaShape, RopeScaling
from tests.models.llama.test_model import SHAPES, rowhouse_model, transformers_model

# As transformers 4 wrote them, in the parts that matter here.
META_LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA_3_2_1B: dict[str, Any] = {
    **META_LLAMA_3_8B, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "mlp_bias": False,
    "num_hidden_layers": 16, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip


@pytest.mark.parametrize(("config", "flavor"), [(META_LLAMA_3_8B, "8B"), (LLAMA_3_2_1B, "1B")])
def test_the_published_configurations_are_the_flavors(config: dict[str, Any], flavor: str) -> None:
    assert shape_of(config) == FLAVORS[flavor]
    assert differences(config, FLAVORS[flavor]) == []


@pytest.mark.parametrize("shape", [*FLAVORS.values(), *SHAPES.values()])
def test_shapes_round_trip(shape: LlamaShape) -> None:
    ours = json.loads(json.dumps(hf_config(shape, 4096, torch.bfloat16, bos_id=3, eos_id=4)))
    assert shape_of(ours) == shape
    read = LlamaConfig(**ours)
    assert shape_of(json.loads(read.to_json_string())) == shape
    assert (read.max_position_embeddings, read.bos_token_id, read.eos_token_id) == (4096, 3, 4)
    assert read.dtype == torch.bfloat16


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_own_configuration_is_read(name: str) -> None:
    config = json.loads(transformers_model(SHAPES[name]).config.to_json_string())
    assert "rope_scaling" not in config  # The spelling of 5.
    assert shape_of(config) == SHAPES[name]
    config.update(rope_scaling=config.pop("rope_parameters"), rope_theta=1.0)
    config["rope_scaling"]["type"] = config["rope_scaling"]["rope_type"]  # Both spellings stand in some files.
    assert shape_of(config) == SHAPES[name]


def test_unknown_ids_are_null() -> None:
    config = hf_config(SHAPES["plain"], 64, torch.float32)
    assert LlamaConfig(**config).eos_token_id is None
    del config["eos_token_id"]
    assert LlamaConfig(**config).eos_token_id == 2  # Why they are not left out.


def test_all_differences_are_told_at_once() -> None:
    other = LlamaShape(32, 3, 2, 1, 48, vocab_size=64, head_dim=8, rope_theta=1e4, norm_eps=1e-6, tie_embeddings=True)
    found = differences(hf_config(other, 64, torch.float32), SHAPES["scaled rotary"])
    assert found == [
        "vocab_size is 64 there and 128 here",
        "hidden_size is 32 there and 64 here",
        "intermediate_size is 48 there and 96 here",
        "num_hidden_layers is 3 there and 2 here",
        "num_attention_heads is 2 there and 4 here",
        "num_key_value_heads is 1 there and 2 here",
        "head_dim is 8 there and 16 here",
        "rms_norm_eps is 1e-06 there and 1e-05 here",
        "tie_word_embeddings is true there and false here",
        "rope_theta is 10000.0 there and 500000.0 here",
        'rope_scaling is null there and {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, '
        '"high_freq_factor": 4.0, "original_max_position_embeddings": 16} here',
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, 'model_type is "mistral" there and "llama" here'),
        (
            {"attention_bias": True, "hidden_act": "gelu"},
            'hidden_act is "gelu" there and "silu" here; attention_bias is true there and false here',
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_scaling is {"rope_type": "linear", "factor": 2.0}'),
        (
            {"hidden_size": None, "vocab_size": "many"},
            'vocab_size is "many", not an integer; hidden_size is null, not an integer; head_dim is null',
        ),
    ],
)
def test_what_this_model_is_not_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        shape_of(META_LLAMA_3_8B | change)
    assert message in str(error.value)


def test_the_row_order_is_that_of_whole_weights() -> None:
    shape = SHAPES["grouped queries"]
    state = dict(rowhouse_model(shape).named_parameters())
    theirs = to_hf(state, shape)
    moved = []
    for name, weight in state.items():
        rows = hf_rows(name, weight.shape[0], shape)
        moved += [name] if rows is not None else []
        tensor = theirs[hf_name(name)]
        assert torch.equal(tensor if rows is None else tensor[rows], weight)
    assert moved == [f"layers.{i}.attention.{w}.weight" for i in (0, 1) for w in ("wq", "wk")]


def test_what_is_computed_here_is_ignored() -> None:
    tied, own = SHAPES["tied"], SHAPES["plain"]
    assert is_ignored("lm_head.weight", tied) and not is_ignored("lm_head.weight", own)
    assert is_ignored("model.layers.3.self_attn.rotary_emb.inv_freq", own)
    assert not is_ignored("model.layers.3.self_attn.q_proj.bias", own)


def test_scaling_of_another_kind_differs() -> None:
    scaling = hf_config(SHAPES["scaled rotary"], 64, torch.float32)
    assert differences(scaling, LlamaShape(64, 2, 4, 2, 96, vocab_size=128, head_dim=16)) != []
    wider = LlamaShape(64, 2, 4, 2, 96, vocab_size=128, head_dim=16, rope_scaling=RopeScaling(4.0))
    assert len(differences(scaling, wider)) == 1
