"""How well a trained model predicts text: perplexity on a data set, or the tasks of lm-evaluation-harness.

    python -m scripts.evaluate --checkpoint outputs/debug                       # on what is held out of stdlib
    python -m scripts.evaluate --checkpoint llama3-8b --dataset c4_validation --tokens 1_000_000
    torchrun --nproc-per-node 8 -m scripts.evaluate --checkpoint outputs/llama8b --dataset text --dataset_path corpus/
    python -m scripts.evaluate --checkpoint outputs/llama8b --tasks hellaswag,arc_easy      # needs: pip install lm_eval

--checkpoint takes a run's folder, one of its step-N, or a Hugging Face folder (scripts/trained_model.py). The text is
one stream of documents, in an order that is always the same, in rows as in training (data/packing.py); every token but
the first is predicted once. The ranks of torchrun share the rows, or split the model for tasks (scripts/harness.py).
Exit status: 0, or 2 with a sentence on what the user can mend.
"""

import argparse
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from config import dataset_problems
from data.sources import DATASETS, DocumentSource, open_source
from data.tokenizer import Tokenizer
from errors import UserError, leave
from float8.convert import Float8Config
from loss import IGNORE_INDEX
from models.llama.model import Llama
from models.llama.parallelize import parallelize_llama
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.compile import CompileConfig
from parallelisms.mesh import ParallelismConfig, build_meshes
from scripts.harness import run_tasks
from scripts.trained_model import (
    Trained,
    build,
    build_tensor_parallel,
    default_dtype,
    find_trained,
    run_on_ranks,
)

DATASET = "stdlib_validation"
SEED = 0  # Of the order of local documents.
TOKENS_AT_ONCE = 16384  # On a rank.
DOCUMENTS_AT_ONCE = 64  # That are tokenised together.


@dataclass
class Text:
    """Documents as one stream of tokens, in rows; counts what it has given.

    With `tokens` it ends with the document that reaches this number: documents are whole, so that bytes can be counted.
    """

    source: DocumentSource
    tokenizer: Tokenizer
    seq_len: int
    tokens: int | None = None
    documents: int = 0
    bytes: int = 0
    """Of UTF-8."""
    labels: int = 0
    """Tokens to predict."""

    def rows(self) -> Iterator[list[int]]:
        """seq_len + 1 tokens; a row begins with the last one of the row before, and the last row may be shorter."""
        stream: list[int] = []
        for document in self.tokenised():
            stream += document
            while len(stream) > self.seq_len:
                yield stream[: self.seq_len + 1]
                del stream[: self.seq_len]
        if len(stream) > 1:
            yield stream

    def tokenised(self) -> Iterator[list[int]]:
        """bos, tokens, eos of each document."""
        bos, eos = ([] if id is None else [id] for id in (self.tokenizer.bos_id, self.tokenizer.eos_id))
        texts = (text for _, text in self.source.documents(0))
        total = 0
        while some := list(islice(texts, DOCUMENTS_AT_ONCE)):
            for text, ids in zip(some, self.tokenizer.encode_batch(some), strict=True):
                document = [*bos, *ids, *eos]
                total += len(document)
                self.documents += 1
                self.bytes += len(text.encode())
                self.labels = total - 1
                yield document
                if self.tokens is not None and self.labels >= self.tokens:
                    return


@torch.no_grad()
def summed_loss(model: Llama, text: Text, device: torch.device) -> float:
    """Nats of all tokens of the text, the same on all ranks. For all ranks at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total, one = torch.zeros((), dtype=torch.float64, device=device), torch.ones((), device=device)
    rows, size = text.rows(), max(1, TOKENS_AT_ONCE // text.seq_len)
    while some := list(islice(rows, size * ranks)):
        # A rank without a row has the model called as well: the others gather its weights with it.
        inputs, labels = (t.to(device) for t in inputs_and_labels(some[rank::ranks] or [[]], text.seq_len))
        total += model(inputs, labels, one)
    dist.all_reduce(total)
    return total.item()


def inputs_and_labels(rows: list[list[int]], seq_len: int) -> tuple[Tensor, Tensor]:
    """int64 (rows, seq_len) both; what a row lacks is not predicted."""
    inputs = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    for i, row in enumerate(rows):
        if row:
            inputs[i, : len(row) - 1], labels[i, : len(row) - 1] = torch.tensor(row[:-1]), torch.tensor(row[1:])
    return inputs, labels


def build_sharded(trained: Trained, device: torch.device, dtype: torch.dtype, seq_len: int) -> Llama:
    """The model as training has it, its weights sharded over all ranks, each of which takes sequences of its own."""
    parallelism = ParallelismConfig()
    meshes = build_meshes(parallelism, device)

    def distribute(model: Llama) -> None:
        parallelize_llama(
            model, meshes, parallelism=parallelism, float8=Float8Config(), compile=CompileConfig(),
            activation_checkpoint=ActivationCheckpointConfig(mode="none"), param_dtype=dtype,
            reduce_dtype=torch.float32, cpu_offload=False,
        )  # fmt: skip

    return build(trained, device, dtype, seq_len, distribute)


def how_it_reads(trained: Trained, arguments: argparse.Namespace, device: torch.device) -> tuple[int, torch.dtype]:
    """Tokens of a sequence and the precision: those of --seq-len and --dtype, or else the model's and the device's."""
    seq_len = trained.max_seq_len if arguments.seq_len is None else arguments.seq_len
    if not 1 <= seq_len <= trained.max_seq_len:
        raise UserError(f"--seq-len: the model does not read {seq_len} tokens: give 1 to {trained.max_seq_len}")
    return seq_len, default_dtype(device) if arguments.dtype is None else getattr(torch, arguments.dtype)


def evaluate(arguments: argparse.Namespace, device: torch.device) -> None:
    check(arguments)
    trained = find_trained(arguments.checkpoint)
    seq_len, dtype = how_it_reads(trained, arguments, device)
    model_line = f"{trained.path}, {str(dtype).removeprefix('torch.')}, sequences of {seq_len}"
    if arguments.tasks is not None:
        model = build_tensor_parallel(trained, device, dtype, seq_len)
        table = run_tasks(arguments.tasks.split(","), model, trained)
        report(f"{model_line}\n{table}")
        return
    dataset = arguments.dataset or DATASET
    text = Text(open_source(dataset, arguments.dataset_path, SEED), trained.tokenizer, seq_len, arguments.tokens)
    nats = summed_loss(build_sharded(trained, device, dtype, seq_len), text, device)
    if text.labels < 1 or text.bytes < 1:
        raise UserError(f"--dataset: {dataset} has no text in it: give another")
    loss = nats / text.labels
    report(
        f"model       {model_line}\n"
        f"text        {dataset}: {text.documents:,} documents, {text.bytes:,} bytes, {text.labels:,} tokens\n"
        f"nats/token  {loss:.6f}\n"
        f"perplexity  {math.exp(loss):.4f}\n"
        f"bits/byte   {nats / math.log(2) / text.bytes:.6f}"
    )


def report(text: str) -> None:
    if dist.get_rank() == 0:
        print(text)


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for what cannot be meant, and for what would have no effect."""
    about_text = {
        "dataset": arguments.dataset, "dataset_path": arguments.dataset_path, "tokens": arguments.tokens
    }  # fmt: skip
    if arguments.tasks is not None:
        for flag, value in about_text.items():
            if value is not None:
                raise UserError(f"--{flag}: tasks bring their own text: leave --{flag} out, or --tasks")
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError("--tasks: the package lm_eval is not installed: pip install lm_eval")
    for flag, problem in dataset_problems(arguments.dataset or DATASET, arguments.dataset_path):
        raise UserError(f"--{flag}: {problem}")
    if arguments.tokens is not None and arguments.tokens < 1:
        raise UserError(f"--tokens: {arguments.tokens} are no text: give 1 or more")


def main() -> int:
    parser = argparse.ArgumentParser(prog="evaluate", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="RUN", help="a run's folder, a step-N, or a Hugging Face folder")
    add("--dataset", metavar="NAME", help=f"one of {', '.join(DATASETS)} (default: {DATASET})")
    add("--dataset_path", metavar="PATH", help="where: as training.dataset_path")
    add("--seq-len", type=int, metavar="N", help="tokens in a row (default: as the model was trained)")
    add("--tokens", type=int, metavar="N", help="end with the document that reaches N tokens (default: all, once)")
    text = "tasks of lm-evaluation-harness instead: names or YAML files, comma-separated"
    add("--tasks", metavar="NAMES", help=text)
    text = "precision to compute in (default: bfloat16 on a GPU, float32 on a CPU)"
    add("--dtype", choices=["float32", "bfloat16"], help=text)
    arguments = parser.parse_args()
    return run_on_ranks("evaluate", lambda device: evaluate(arguments, device))


if __name__ == "__main__":
    leave(main())
