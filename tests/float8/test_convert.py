"""Which linears become float8, what is said of those that a filter or a shape leaves out, what each recipe computes."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from errors import UserError
from float8.convert import Float8Config, convert_with_torchao, select_linears
from loss import cross_entropy_sum
from models.llama.model import Llama
from models.llama.parallelize import replace_linears
from models.llama.shapes import LlamaShape
from parallelisms.mesh import ParallelismConfig, build_meshes

SHAPE = LlamaShape(64, 2, 4, 2, 96, vocab_size=128, head_dim=16)
SEQ_LEN = 32
BLOCK_LINEARS = 7

# Rounding to e4m3, of 3 mantissa bits, leaves a relative error of 0.0263 (tests/float8/test_quantise.py), and a matmul
# with two such operands one of sqrt(2) times that. torchao's tensorwise rounds gradients to e5m2, of 2 mantissa bits:
# twice that.
ROUNDING = 0.0263
FLOOR = ROUNDING * 2**0.5
# From the tokens to the loss there are 4 float8 matmuls in series in a block (q k v, wo, w1 w3, w2), and as many on the
# way back. Independent errors add up in squares. The residual stream goes around them, so this is a bound.
SERIES = 4 * SHAPE.n_layers
ALLOWED = (2 * SERIES) ** 0.5 * FLOOR
ALLOWED_TENSORWISE = (SERIES * FLOOR**2 + SERIES * (ROUNDING**2 + (2 * ROUNDING) ** 2)) ** 0.5


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_model(shape: LlamaShape = SHAPE) -> Llama:
    with torch.device("meta"):
        model = Llama(shape, SEQ_LEN)
    model.to_empty(device="cpu")
    model.init_weights(0, torch.device("cpu"))
    return model


def gradients(model: Llama) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SHAPE.vocab_size, (3, SEQ_LEN + 1), generator=generator)
    cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:].flatten()).backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def test_a_filter_that_matches_nothing_names_what_there_is() -> None:
    text = r'float8.filter_fqns: "head" matches none of the linear layers \(output, w1, w2, w3, wk, wo, wq, wv\)'
    with pytest.raises(UserError, match=text + ": correct or remove it"):
        select_linears(small_model(), Float8Config("rowwise", ["output", "head"]))


def test_leaving_everything_out_is_an_error() -> None:
    with pytest.raises(UserError, match=r'float8.recipe_name: rowwise applies to no layer.*filter "layers"'):
        select_linears(small_model(), Float8Config("rowwise", ["output", "layers"]))
    odd = LlamaShape(40, 1, 2, 1, 72, vocab_size=100, head_dim=20)
    with pytest.raises(UserError, match=r"applies to no layer.*72 x 40 is not a multiple of 16.*change float8.filter"):
        select_linears(small_model(odd), Float8Config("rowwise", ["output"]))


def test_what_is_left_alone_says_why() -> None:
    shape = LlamaShape(64, 1, 4, 2, 72, vocab_size=128, head_dim=16)  # w1, w2, w3 have a side of 72
    selection = select_linears(small_model(shape), Float8Config("rowwise", ["output", "wk"]))
    assert selection.chosen == [f"layers.0.attention.{name}" for name in ("wq", "wv", "wo")]
    assert selection.left == {
        "layers.0.attention.wk": 'filter "wk"',
        "layers.0.feed_forward.w1": "64 x 72 is not a multiple of 16",
        "layers.0.feed_forward.w2": "72 x 64 is not a multiple of 16",
        "layers.0.feed_forward.w3": "64 x 72 is not a multiple of 16",
        "output": 'filter "output"',
    }


def test_a_tied_head_may_be_filtered() -> None:
    shape = LlamaShape(64, 1, 4, 2, 96, vocab_size=128, head_dim=16, tie_embeddings=True)
    selection = select_linears(small_model(shape), Float8Config("rowwise", ["output"]))
    assert len(selection.chosen) == BLOCK_LINEARS and selection.left == {"output": "tied to the embedding"}


def test_without_a_recipe_nothing_is_chosen_and_no_filter_is_asked_for() -> None:
    selection = select_linears(small_model(), Float8Config(None, ["nothing like it"]))
    assert (selection.chosen, selection.left) == ([], {})


@pytest.mark.parametrize(
    "config", [Float8Config(fast_accumulation=False), Float8Config("rowwise", ["output"], "torchao", False)]
)
def test_what_cannot_be_accumulated_otherwise_is_told(config: Float8Config) -> None:
    ((key, text),) = config.problems()
    assert key == "fast_accumulation" and "row-wise recipes of backend rowhouse" in text
    assert not Float8Config("rowwise", fast_accumulation=False).problems()


def test_half_a_column_group_is_an_error() -> None:
    model, config = small_model(), Float8Config("rowwise", ["output", "wk"])
    meshes = build_meshes(ParallelismConfig(), torch.device("cpu"))
    with pytest.raises(UserError, match=r"filter_fqns: layers.0.attention.wk would be left out, but .*wq, .*wv not"):
        replace_linears(model, meshes, ParallelismConfig(), "rowwise", select_linears(model, config))


@pytest.mark.parametrize(
    ("recipe", "backend", "dtype"),
    [
        *itertools.product(("tensorwise", "rowwise", "rowwise_with_gw_hp"), ("torchao",), ("float32", "bfloat16")),
        *itertools.product(("rowwise", "rowwise_with_gw_hp"), ("rowhouse",), ("float32", "bfloat16")),
    ],
)
def test_gradients_of_every_recipe_are_at_the_floor(recipe: str, backend: str, dtype: str) -> None:
    exact = gradients(small_model())
    model, config = small_model(), Float8Config(recipe, ["output"], backend)  # type: ignore[arg-type]
    selection = select_linears(model, config)
    assert len(selection.chosen) == BLOCK_LINEARS * SHAPE.n_layers
    model.to(getattr(torch, dtype))
    if backend == "torchao":
        convert_with_torchao(model, config, selection.chosen)
        converted = [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]
        assert converted == selection.chosen
    else:
        meshes = build_meshes(ParallelismConfig(), torch.device("cpu"))
        replace_linears(model, meshes, ParallelismConfig(), recipe, selection)
    grads = gradients(model)
    assert grads.keys() == exact.keys()
    errors = {name: ((grads[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}
    allowed = ALLOWED_TENSORWISE if recipe == "tensorwise" else ALLOWED
    wrong = {name: error for name, error in errors.items() if not error < allowed}  # NaN is wrong too.
    assert not wrong, f"more than {allowed:.3f}: {wrong}"
    # It was float8 indeed: bf16 alone is below 0.01.
    assert all(errors[f"{name}.weight"] > 0.8 * FLOOR for name in selection.chosen), errors
