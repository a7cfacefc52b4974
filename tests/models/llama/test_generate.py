"""Generation with a cache gives what the training model gives when it reads everything anew for each token."""

import pytest
import torch
from torch import Tensor

from models.llama.generate import choose_token, generate
from models.llama.model import Llama
from tests.models.llama.test_model import SHAPES, rowhouse_model, spread_out

SEQ_LEN, NEW = 48, 16


@pytest.fixture(autouse=True)
def seed() -> None:
    seed = torch.seed() % 2**31
    print(f"the random inputs of this test are of seed {seed}")
    torch.manual_seed(seed)


def fresh_model(name: str = "grouped queries") -> Llama:
    model = rowhouse_model(SHAPES[name], SEQ_LEN)
    spread_out(model)
    return model


def fresh_prompts() -> list[list[int]]:
    """From one token to the longest that fits, in any order."""
    lengths = [1, SEQ_LEN - NEW, *torch.randint(2, SEQ_LEN - NEW, (3,)).tolist()]
    return [torch.randint(128, (lengths[i],)).tolist() for i in torch.randperm(len(lengths)).tolist()]


def greedy(logits: Tensor) -> Tensor:
    return choose_token(logits, temperature=0)


@torch.no_grad()
def read_anew(model: Llama, prompt: list[int], new: int = NEW) -> tuple[list[int], list[Tensor]]:
    """The greedy continuation by the training forward over the whole sequence, and the logits of each step."""
    ids, steps = list(prompt), []
    for _ in range(new):
        steps.append(model(torch.tensor([ids]))[-1])
        ids.append(int(steps[-1].argmax()))
    return ids[len(prompt) :], steps


def least_gap(steps: list[Tensor]) -> float:
    """By how much the most probable token was ahead of the next one, where it was closest."""
    return min(float(top[0] - top[1]) for top in (logits.topk(2).values for logits in steps))


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_is_token_for_token_what_the_training_model_says(name: str) -> None:
    while True:  # Drawn again where two tokens are as good as equal: then rounding decides.
        model, prompts = fresh_model(name), fresh_prompts()
        expected = [read_anew(model, prompt) for prompt in prompts]
        if min(least_gap(steps) for _, steps in expected) > 1e-3:
            break
    steps = list(generate(model, prompts, NEW, (), greedy))
    assert [list(row) for row in zip(*steps, strict=True)] == [ids for ids, _ in expected]


@pytest.mark.parametrize("name", SHAPES)
def test_logits_differ_by_rounding_alone(name: str) -> None:
    """Both are as far from float64 as float32 is: the same sums, in another order at most."""
    model, prompts = fresh_model(name), fresh_prompts()
    seen: list[Tensor] = []

    def forced(logits: Tensor) -> Tensor:
        seen.append(logits)
        return torch.randint(128, (len(prompts),))

    steps = list(generate(model, prompts, NEW, (), forced))
    sequences = [prompt + [int(step[i] or 0) for step in steps] for i, prompt in enumerate(prompts)]
    with torch.no_grad():
        # The logits that follow the prompt and each new token but the last.
        trained = [model(torch.tensor([ids]))[-NEW - 1 : -1] for ids in sequences]
        exact = [model.double()(torch.tensor([ids]))[-NEW - 1 : -1] for ids in sequences]
    cached = torch.stack(seen, dim=1)
    floor = max(float((t - e).norm() / e.norm()) for t, e in zip(trained, exact, strict=True))
    worst = max(float((c - e).norm() / e.norm()) for c, e in zip(cached, exact, strict=True))
    assert 0 < floor < 1e-5
    assert worst < 4 * floor


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    model, prompts = fresh_model(), fresh_prompts()
    seen: dict[str, list[Tensor]] = {"alone": [], "together": []}
    for name, batch in {"alone": prompts[:1], "together": prompts}.items():

        def forced(logits: Tensor, name: str = name) -> Tensor:
            seen[name].append(logits[0])
            return torch.arange(len(logits)) + len(seen[name])

        list(generate(model, batch, NEW, (), forced))
    alone, together = (torch.stack(seen[name]) for name in ("alone", "together"))
    assert (alone - together).norm() < 1e-5 * alone.norm()


def test_rows_end_by_themselves() -> None:
    model, prompts = fresh_model(), [[1, 2, 3], [4], [5, 6]]
    told = iter([[7, 8, 9], [9, 8, 8], [9, 8, 7], [6, 6, 6], [9, 6, 9], [1, 5, 1], [1, 1, 1]])
    choose = lambda logits: torch.tensor(next(told))  # noqa: E731
    steps = list(generate(model, prompts, NEW, {9, 5}, choose))
    assert steps == [[7, 8, None], [None, 8, None], [None, 8, None], [None, 6, None], [None, 6, None], [None] * 3]


def test_no_more_than_was_asked_for() -> None:
    model = fresh_model()
    assert len(list(generate(model, [[1, 2]], 5, (), greedy))) == 5
    assert len(list(generate(model, [[1] * (SEQ_LEN - 1)], 1, (), greedy))) == 1
    with pytest.raises(ValueError, match=r"47 and 2 tokens are more than 48"):
        next(generate(model, [[1] * (SEQ_LEN - 1)], 2, (), greedy))


def test_draws_follow_the_probabilities() -> None:
    n, logits = 20_000, torch.randn(8) * 2
    for temperature, top_k in [(1.0, None), (0.5, None), (2.0, 3), (1.0, 100)]:
        drawn = choose_token(logits.expand(n, -1), temperature, top_k, torch.Generator().manual_seed(torch.seed()))
        kept = logits >= logits.sort(descending=True).values[min(top_k or 8, 8) - 1]
        expected = (logits / temperature).where(kept, torch.tensor(-torch.inf)).softmax(dim=0)
        frequencies = torch.bincount(drawn, minlength=8) / n
        # Six standard deviations of a binomial frequency, and, as Bernstein's bound has it for what is expected less
        # than once, 12 draws: one false alarm in 10**7.
        assert ((frequencies - expected).abs() <= 6 * (expected * (1 - expected) / n).sqrt() + 12 / n).all()
        assert not frequencies[~kept].any()


def test_the_seed_decides() -> None:
    logits = torch.randn(50, 100)
    draw = lambda seed: choose_token(logits, 1.0, None, torch.Generator().manual_seed(seed)).tolist()  # noqa: E731
    assert draw(1) == draw(1) != draw(2)


def test_temperature_0_and_the_smallest_are_the_most_probable() -> None:
    logits = torch.randn(50, 100)
    for temperature in (0.0, 1e-30):
        assert torch.equal(choose_token(logits, temperature), logits.argmax(dim=1))
    assert torch.equal(choose_token(logits, 1.0, top_k=1), logits.argmax(dim=1))
