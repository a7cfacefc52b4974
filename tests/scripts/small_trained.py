"""Small models as a run and an export leave them, for the scripts that use them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint.config import CheckpointConfig
from checkpoint.manager import CheckpointManager
from checkpoint.state import ModelState
from data.tokenizer import Tokenizer, stdlib_tokenizer
from hugging_face import export_hf
from models.llama.model import Llama
from models.llama.shapes import FLAVORS, LlamaShape
from tests.models.llama.test_generate import least_gap, read_anew
from tests.models.llama.test_model import rowhouse_model, spread_out

SEQ_LEN = 64
TEXTS = ["def main(", "x", "# ünï is a text of several tokens"]
DOCUMENTS = ["import os\n" * 40, "ünï\n", "def f(self):\n    return [3]\n" * 30, "x = 1\n", "class A:\n    pass\n" * 25]
NEW = 20  # Tokens that are written after each text.
# More rows than the tokenizer has tokens, and divisible by two ranks.
SHAPE = replace(FLAVORS["debugmodel"], n_layers=2, vocab_size=320)
TIED = replace(SHAPE, tie_embeddings=True)
CONFIG = """
[model]
flavor = "debugmodel"
n_layers = 2
vocab_size = 320
tokenizer_path = "{tokenizer}"

[training]
seq_len = 64

[parallelism]
data_parallel_shard_degree = 4
"""


def write_documents(folder: Path) -> None:
    """To `folder`/texts, a file each."""
    (folder / "texts").mkdir()
    for i, text in enumerate(DOCUMENTS):
        (folder / "texts" / f"{i}.txt").write_text(text)


@contextmanager
def one_rank() -> Iterator[None]:
    """This process is a world of one. The scripts make theirs themselves."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def greedy_text(tokenizer: Tokenizer, model: Llama, prompt: list[int], new: int) -> str:
    """What follows the prompt (bos and a text) by the training forward, up to the end of the text.

    The model may have rows for which there is no token: they are not chosen.
    """
    assert model.output is not None
    whole = model.output.weight.data
    model.output.weight.data = whole[: tokenizer.vocab_size]
    ids = read_anew(model, prompt, new)[0]
    model.output.weight.data = whole
    ids = ids[: ids.index(tokenizer.eos_id)] if tokenizer.eos_id in ids else ids
    return tokenizer.decode(prompt[1:] + ids)[len(tokenizer.decode(prompt[1:])) :]


class Fixed:
    """A state that stands for the loader's."""

    def __init__(self, state: dict[str, str]):
        self.state = state

    def state_dict(self) -> dict[str, str]:
        return self.state

    def load_state_dict(self, state: dict[str, str]) -> None: ...


def fresh_model(shape: LlamaShape, tokenizer: Tokenizer) -> Llama:
    """Fresh weights, with which greedy decoding after TEXTS never has to choose between equals."""
    while True:
        seed = torch.seed() % 2**31
        print(f"the weights of this test are of seed {seed}")
        torch.manual_seed(seed)
        model = rowhouse_model(shape, SEQ_LEN)
        spread_out(model)
        if min(least_gap(read_anew(model, prompt, NEW)[1]) for prompt in prompts(tokenizer)) > 1e-3:
            return model


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    assert tokenizer.bos_id is not None
    return [[tokenizer.bos_id, *tokenizer.encode(text)] for text in TEXTS]


def save_run(folder: Path, model: Llama, steps: list[int], tokenizer_path: str, trained_with: str) -> None:
    """A run's folder: config.toml and checkpoints. `trained_with`: the fingerprint of the tokenizer then."""
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(CONFIG.format(tokenizer=tokenizer_path))
    states = {"model": ModelState(model), "data": Fixed({"tokenizer": trained_with})}
    manager = CheckpointManager(CheckpointConfig(enable=True), folder, states)
    for step in steps:
        manager.save(step, last=True)
    manager.close()


def train_small(folder: Path) -> Llama:
    """Leaves run, with two checkpoints of other weights and the returned model's as step 9; hf, an export of that
    model; and tied, an export of one whose head is its embedding."""
    tokenizer = stdlib_tokenizer(300, folder / "tokenizers")
    model, tied = (fresh_model(shape, tokenizer) for shape in (SHAPE, TIED))
    with one_rank():
        save_run(folder / "run", rowhouse_model(SHAPE, SEQ_LEN), [5, 8], tokenizer.path, tokenizer.fingerprint)
        save_run(folder / "run", model, [9], tokenizer.path, tokenizer.fingerprint)
        export_hf(model, folder / "hf", torch.float32, tokenizer)
        export_hf(tied, folder / "tied", torch.float32, tokenizer)
    return model


def flip_a_bit(step: Path) -> None:
    file = next(step.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@contextmanager
def own_environment() -> Iterator[None]:
    """Undoes what a script that is started without torchrun writes there: that it is alone."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
