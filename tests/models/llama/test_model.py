"""The model against Hugging Face transformers: same weights, same logits."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.llama.hf import to_hf
from models.llama.model import Llama
from models.llama.shapes import FLAVORS, LlamaShape, RopeScaling

SHAPES = {
    "plain": LlamaShape(64, 2, 4, 4, 96, vocab_size=128, head_dim=16),
    "grouped queries": LlamaShape(64, 2, 4, 2, 96, vocab_size=128, head_dim=16, rope_theta=10000.0),
    "one kv head, wide heads": LlamaShape(64, 2, 2, 1, 96, vocab_size=128, head_dim=64),
    "scaled rotary": LlamaShape(
        64, 2, 4, 2, 96, vocab_size=128, head_dim=16, rope_scaling=RopeScaling(8.0, original_max_position=16)
    ),
    "tied": LlamaShape(
        64, 2, 4, 2, 96, vocab_size=128, head_dim=16, tie_embeddings=True,
        rope_scaling=RopeScaling(32.0, original_max_position=32),
    ),
}  # fmt: skip


def transformers_model(shape: LlamaShape) -> LlamaForCausalLM:
    rope: dict = {"rope_theta": shape.rope_theta, "rope_type": "default"}
    if shape.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": shape.rope_theta,
            "factor": shape.rope_scaling.factor,
            "low_freq_factor": shape.rope_scaling.low_freq_factor,
            "high_freq_factor": shape.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": shape.rope_scaling.original_max_position,
        }
    config = LlamaConfig(
        hidden_size=shape.dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        intermediate_size=shape.hidden_dim,
        vocab_size=shape.vocab_size,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    return LlamaForCausalLM(config).float().eval()


def rowhouse_model(shape: LlamaShape, seq_len: int = 48, seed: int = 0) -> Llama:
    with torch.device("meta"):
        model = Llama(shape, seq_len)
    model.to_empty(device="cpu")
    model.init_weights(seed, torch.device("cpu"))
    return model


def spread_out(model: Llama) -> None:
    """Fresh weights, norms included, large enough that each of them shows in the logits."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, mean=1.0 if parameter.ndim == 1 else 0.0)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str) -> None:
    shape = SHAPES[name]
    torch.manual_seed(torch.seed() % 2**31)
    model, peer = rowhouse_model(shape), transformers_model(shape)
    spread_out(model)
    peer.load_state_dict(to_hf(dict(model.named_parameters()), shape), strict=not shape.tie_embeddings)
    tokens = torch.randint(shape.vocab_size, (3, 48))
    with torch.no_grad():
        ours, theirs = model(tokens), peer(tokens).logits.flatten(0, 1)
    assert ours.shape == (3 * 48, shape.vocab_size)
    assert torch.isfinite(ours).all()
    error = (ours - theirs).norm() / theirs.norm()
    assert error < 1e-5, f"relative error {error:.2e}"


def test_a_sequence_sees_neither_its_future_nor_its_neighbours() -> None:
    model = rowhouse_model(SHAPES["grouped queries"])
    spread_out(model)
    tokens = torch.randint(128, (2, 48))
    changed = tokens.clone()
    changed[1, 30] = (changed[1, 30] + 1) % 128
    with torch.no_grad():
        same = (model(tokens) == model(changed)).all(dim=-1).view(2, 48)
    assert same[0].all() and same[1, :30].all() and not same[1, 30:].any()


def test_initial_weights_follow_the_seed_alone() -> None:
    shape = SHAPES["plain"]
    one, again, other = (dict(rowhouse_model(shape, seed=seed).named_parameters()) for seed in (1, 1, 2))
    for name, weight in one.items():
        assert torch.equal(weight, again[name])
        if not name.endswith("norm.weight"):
            assert not torch.equal(weight, other[name])
    assert one["layers.1.attention.wo.weight"].std() < 0.75 * one["layers.1.attention.wq.weight"].std()


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    [("1B", 1_235_814_400), ("3B", 3_212_749_824), ("8B", 8_030_261_248), ("70B", 70_553_706_496)],
)
def test_published_sizes(flavor: str, parameters: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in Llama(FLAVORS[flavor], 16).parameters()) == parameters
