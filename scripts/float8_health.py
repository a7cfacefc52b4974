"""What float8 would lose of a trained model's values: flushed to zero, subnormal, saturated, and the noise.

    python -m scripts.float8_health --checkpoint outputs/debug                     # the run may go on meanwhile
    python -m scripts.float8_health --checkpoint llama3-8b --dataset c4 --batches 4 --json health.json
    torchrun --nproc-per-node 8 -m scripts.float8_health --checkpoint outputs/llama8b

--checkpoint takes a run's folder, one of its step-N, or a Hugging Face folder (scripts/trained_model.py), and the text
is named as for scripts.evaluate. Batches of it go forward and backward through plain linears, in bfloat16 or float32.
Each operand of theirs, input, weight and gradient of the output, is quantised as each recipe would: by rows, by columns
made from these rows (float8/quantise.py), and as one tensor (torchao's tensorwise). Shares are of the values that are
not zero. Exit status: 0, or 2 with a sentence on what the user can mend.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from config import dataset_problems
from data.sources import DATASETS, open_source
from errors import UserError, leave
from float8.quantise import columns_from_rows, quantise_rows
from float8.scaled import FLOAT8, Float8Rows
from loss import cross_entropy_sum
from models.llama.model import Llama, PlainLinears
from scripts.evaluate import DATASET, SEED, Text, build_sharded, how_it_reads, inputs_and_labels, report
from scripts.trained_model import Trained, build, find_trained, run_on_ranks

TOKENS_AT_ONCE = 8192  # On a rank, at least one sequence.
PIECE = 2**21  # Values that are looked at together: 16 MiB as float64.
GROUPS = {"wq wk wv": "qkv", "wo": "wo", "w1 w3": "w13", "w2": "w2"}
HEAD = "output"
OPERANDS = ("input", "weight", "gradient")
WAYS = ("rows", "columns", "tensor")
GRADIENT_OF_TENSORWISE = torch.float8_e5m2
RECIPES = {
    "tensorwise": [(operand, "tensor") for operand in OPERANDS],
    "rowwise_with_gw_hp": [*((operand, "rows") for operand in OPERANDS), ("weight", "columns")],
    "rowwise": [(operand, way) for operand in OPERANDS for way in ("rows", "columns")],
}
"""What each quantises."""

Key: TypeAlias = tuple[int | None, str, str, str]
"""Block (None for the head), group, operand, way."""


# Quantising


def by_rows_and_columns(x: Tensor) -> Iterator[tuple[str, Tensor, Float8Rows]]:
    """Pieces of x, (rows, cols), by rows, and of its transpose, by columns, each with what becomes of it."""
    pieces = x.split(max(1, PIECE // x.shape[1]))
    quantised = [quantise_rows(piece) for piece in pieces]
    for piece, rows in zip(pieces, quantised, strict=True):
        yield "rows", piece, rows
    data, scale = (torch.cat(parts) for parts in zip(*((rows.data, rows.scale) for rows in quantised), strict=True))
    width = max(1, PIECE // x.shape[0])
    for piece, data_piece in zip(x.split(width, dim=1), data.split(width, dim=1), strict=True):
        yield "columns", piece.t(), columns_from_rows(Float8Rows(data_piece.contiguous(), scale))


def by_tensor(x: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Pieces of x with their float8 data and the scale of all, as torchao makes them; a value is data * scale."""
    largest = torch.finfo(dtype).max
    inverse = (largest / x.abs().amax().double().clamp(min=1e-12)).float()
    for piece in x.split(max(1, PIECE // x.shape[1])):
        yield piece, (piece.float() * inverse).clamp(-largest, largest).to(dtype), inverse.reciprocal()


def sums_of(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    """float64 (7,): how many values are not zero; of these flushed, subnormal, saturated, not finite; the sums of
    squares of the values and of what they are off by. A value of `data`, in any float8, stands for itself * scale.

    Flushed: zero now. Subnormal: below the smallest of full precision, and not zero. Saturated: the format's largest
    now, and more before than rounds to it.
    """
    form, x, rounded = torch.finfo(data.dtype), x.float(), data.float()
    magnitude, there = rounded.abs(), x != 0
    rounds_to_max = form.max + 2 ** math.floor(math.log2(form.max)) * form.eps / 2  # Half a step above it.
    numbers = [
        there,
        there & (magnitude == 0),
        (magnitude > 0) & (magnitude < form.smallest_normal),
        (magnitude == form.max) & (x.abs() > rounds_to_max * scale),
        ~x.isfinite(),
    ]
    squares = [x.double().square(), (rounded * scale - x).double().square()]
    return torch.stack([one.sum().double() for one in [*numbers, *squares]])


class Health:
    """Sums over all that it is shown; nothing else is kept."""

    def __init__(self) -> None:
        self.sums: dict[Key, Tensor] = {}

    def add(self, key: Key, found: Tensor) -> None:
        self.sums[key] = self.sums[key] + found if key in self.sums else found

    @torch.no_grad()
    def see(self, block: int | None, group: str, operand: str, parts: Sequence[Tensor], dim: int = 0) -> None:
        """An operand of linears that share an input: each linear's part of it, side by side along `dim`."""
        for way, x, rows in by_rows_and_columns(torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]):
            self.add((block, group, operand, way), sums_of(x, rows.data, rows.scale))
        dtype = GRADIENT_OF_TENSORWISE if operand == "gradient" else FLOAT8
        for part in parts:
            for x, data, scale in by_tensor(part, dtype):
                self.add((block, group, operand, "tensor"), sums_of(x, data, scale))

    def see_linears(
        self, block: int | None, group: str, x: Tensor, weights: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> None:
        """Of linears that share the input x: (tokens, in) -> (tokens, out) each. Gradients are seen in backward."""
        self.see(block, group, "input", [x.detach()])
        # The same at each batch, and on every rank.
        if dist.get_rank() == 0 and (block, group, "weight", "rows") not in self.sums:
            self.see(block, group, "weight", [weight.detach() for weight in weights])
        register_multi_grad_hook(outs, lambda gradients: self.see(block, group, "gradient", list(gradients), dim=1))


class SeenLinears(PlainLinears):
    """The plain linears of a block, looked at."""

    def __init__(self, health: Health, block: int):
        self.health, self.block = health, block

    def column(self, layer: str, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        outs = super().column(layer, x, *linears)
        self.health.see_linears(self.block, GROUPS[layer], x, [linear.weight for linear in linears], outs)
        return outs

    def row(self, layer: str, x: Tensor, linear: nn.Linear) -> Tensor:
        out = super().row(layer, x, linear)
        self.health.see_linears(self.block, GROUPS[layer], x, [linear.weight], [out])
        return out


def watch(model: Llama, health: Health) -> None:
    """Has the model's linears looked at. Its weights take no gradients: what flows through the linears is wanted."""
    model.requires_grad_(False)
    model.tok_embeddings.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    for i, block in enumerate(model.layers):
        block.attention.linears = block.feed_forward.linears = SeenLinears(health, i)  # type: ignore[union-attr]
    plain = model.head

    def head(x: Tensor) -> Tensor:
        logits = plain(x)
        weight = model.tok_embeddings.weight if model.output is None else model.output.weight
        health.see_linears(None, HEAD, x, [weight], [logits])
        return logits

    model.head = head  # type: ignore[method-assign]


# What is told


@dataclass(frozen=True)
class Found:
    """Of an operand of a group of linears, quantised in one way. Shares are of the values that are not zero."""

    block: int | None
    """None for the output head."""
    group: str
    operand: str
    by: str
    values: int
    flushed: float
    subnormal: float
    saturated: float
    not_finite: float
    db: float | None
    """Signal to noise; None where there is no noise, or a value is not finite."""

    @property
    def unit(self) -> float:
        """The format's unit roundoff."""
        is_wide = self.operand == "gradient" and self.by == "tensor"
        return torch.finfo(GRADIENT_OF_TENSORWISE if is_wide else FLOAT8).eps / 2

    @property
    def limit(self) -> float:
        """The share flushed at which zeros lose as much, value for value, as rounding: the mean relative error of
        rounded values, whose mantissas m are spread evenly on a logarithm, unit / 2 * mean(1 / m)."""
        return self.unit / 2 / (2 * math.log(2))

    @property
    def own_db(self) -> float:
        """Of such values: unit**2 / 3 * mean(1 / m**2) is the noise's part of the signal."""
        return -10 * math.log10(self.unit**2 / 3 * 3 / (8 * math.log(2)))

    def place(self) -> str:
        return self.group if self.block is None else f"block {self.block} {self.group}"


def found_of(key: Key, sums: list[float]) -> Found:
    values, *counts, signal, noise = sums
    block, group, operand, way = key
    flushed, subnormal, saturated, not_finite = (number / (values or 1) for number in counts)
    ratio = signal / noise if noise else math.inf
    db = 10 * math.log10(ratio) if 0 < ratio < math.inf else None
    return Found(block, group, operand, way, int(values), flushed, subnormal, saturated, not_finite, db)


def keys_of(blocks: int) -> list[Key]:
    places: list[tuple[int | None, str]] = [(block, group) for block in range(blocks) for group in GROUPS.values()]
    return [(*place, operand, way) for place in [*places, (None, HEAD)] for operand in OPERANDS for way in WAYS]


def gathered(health: Health, blocks: int, device: torch.device) -> list[Found]:
    """What all ranks have seen. For all at once."""
    keys, none = keys_of(blocks), torch.zeros(7, dtype=torch.float64, device=device)
    sums = torch.stack([health.sums.get(key, none) for key in keys])
    dist.all_reduce(sums)
    return [found_of(key, numbers) for key, numbers in zip(keys, sums.tolist(), strict=True)]


def table(found: list[Found]) -> str:
    """One row an operand."""
    heads = [f"{way}: {what}" for way in WAYS for what in ("flushed %", "subnormal %", "saturated %", "dB")]
    lines = ["| block | group | operand | " + " | ".join(heads) + " |", "| --- " * (3 + len(heads)) + "|"]
    for ways in zip(*(found[i :: len(WAYS)] for i in range(len(WAYS))), strict=True):
        one = ways[0]
        cells = ["" if one.block is None else str(one.block), one.group, one.operand]
        for way in ways:
            cells += [f"{100 * share:.2g}" for share in (way.flushed, way.subnormal, way.saturated)]
            cells.append("" if way.db is None else f"{way.db:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def worst(found: list[Found], recipe: str) -> Found:
    """Where the recipe would flush most; of several that flush as much, the noisiest."""
    return max(
        (one for one in found if (one.operand, one.by) in RECIPES[recipe]),
        key=lambda one: (one.flushed / one.limit, -math.inf if one.db is None else -one.db),
    )


def verdict(one: Found, recipe: str) -> str:
    """A sentence on what the recipe flushes most of."""
    noise = "no noise" if one.db is None else f"{one.db:.1f} dB (rounding alone: {one.own_db:.1f})"
    text = f"worst is {one.place()}, {one.operand} by {one.by}: {100 * one.flushed:.2g} % flushed to zero, {noise}"
    limit = f"the {100 * one.limit:.2g} % at which zeros lose as much, value for value, as rounding does"
    if one.flushed <= one.limit:
        return f"{recipe}: {text}; less than {limit}"
    if recipe == "tensorwise":
        advice = "rowwise gives each row a scale of its own"
    elif recipe == "rowwise" and one.by == "columns" and one.operand != "weight":
        advice = "rowwise_with_gw_hp does not quantise it"
    else:
        advice = "float8.filter_fqns leaves it out"
    return f"{recipe}: {text}; MORE than {limit}: {advice}"


def verdicts(found: list[Found]) -> list[str]:
    """On the head, which is in float8 only where float8.filter_fqns does not name it, then on the blocks."""
    blocks, head = ([one for one in found if (one.block is None) == is_head] for is_head in (False, True))
    not_finite = sorted({f"{one.place()} {one.operand}" for one in found if one.not_finite})
    return [
        *([f"NaN or infinite: {', '.join(not_finite)}"] if not_finite else []),
        f"the head, where it is in float8: {verdict(worst(head, 'rowwise'), 'rowwise')}",
        *(verdict(worst(blocks, recipe), recipe) for recipe in RECIPES),
    ]


# The command


def batches_of(text: Text, batches: int, name: str) -> list[list[list[int]]]:
    """This rank's, each of as many whole rows. The same batches whatever the number of ranks that share them."""
    ranks, size = dist.get_world_size(), max(1, TOKENS_AT_ONCE // text.seq_len)
    rows = [row for row in islice(text.rows(), batches * size * ranks) if len(row) == text.seq_len + 1]
    size = min(size, len(rows) // ranks)
    if size == 0:
        who = "1 rank takes" if ranks == 1 else f"{ranks} ranks take"
        raise UserError(
            f"--dataset: {name} has {len(rows)} whole rows of {text.seq_len} tokens, and {who} one at least: give more "
            "text, or a smaller --seq-len"
        )
    starts = range(dist.get_rank() * size, len(rows) // (size * ranks) * size * ranks, size * ranks)
    return [rows[start : start + size] for start in starts]


def build_plain(trained: Trained, device: torch.device, dtype: torch.dtype, seq_len: int) -> Llama:
    if dist.get_world_size() == 1:  # FSDP2 would hold the weights twice.
        return build(trained, device, dtype, seq_len, lambda model: None)
    return build_sharded(trained, device, dtype, seq_len)


def examine(arguments: argparse.Namespace, device: torch.device) -> None:
    check(arguments)
    trained = find_trained(arguments.checkpoint)
    seq_len, dtype = how_it_reads(trained, arguments, device)
    dataset = arguments.dataset or DATASET
    text = Text(open_source(dataset, arguments.dataset_path, SEED), trained.tokenizer, seq_len)
    batches = batches_of(text, arguments.batches, dataset)
    model, health = build_plain(trained, device, dtype, seq_len), Health()
    watch(model, health)
    for batch in batches:
        inputs, labels = (t.to(device) for t in inputs_and_labels(batch, seq_len))
        (cross_entropy_sum(model(inputs), labels.flatten()) / labels.numel()).backward()
    found = gathered(health, len(model.layers), device)
    tokens = dist.get_world_size() * len(batches) * len(batches[0]) * seq_len
    name = str(dtype).removeprefix("torch.")
    report(f"{trained.path}, {name}: {tokens:,} tokens of {dataset}, in sequences of {seq_len}\n\n{table(found)}\n")
    report("\n".join(verdicts(found)))
    if arguments.json is not None and dist.get_rank() == 0:
        about = {"model": trained.path, "dtype": name, "dataset": dataset, "seq_len": seq_len, "tokens": tokens}
        write_json(arguments.json, found, about)


def write_json(path: Path, found: list[Found], about: dict[str, Any]) -> None:
    blocks = [one for one in found if one.block is not None]
    most = {recipe: worst(blocks, recipe) for recipe in RECIPES}
    content = about | {
        "worst": {recipe: asdict(one) | {"limit": one.limit} for recipe, one in most.items()},
        "operands": [asdict(one) for one in found],
    }
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"--json: {path} cannot be written ({error.strerror}): give another") from error


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for what cannot be meant."""
    for flag, problem in dataset_problems(arguments.dataset or DATASET, arguments.dataset_path):
        raise UserError(f"--{flag}: {problem}")
    if arguments.batches < 1:
        raise UserError(f"--batches: {arguments.batches} show nothing: give 1 or more")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise UserError(f"--json: there is no folder {arguments.json.parent}: make it, or give another")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="float8_health", description=(__doc__ or "").split("\n\n")[0])
    add = made.add_argument
    add("--checkpoint", required=True, metavar="RUN", help="a run's folder, a step-N, or a Hugging Face folder")
    add("--dataset", metavar="NAME", help=f"one of {', '.join(DATASETS)} (default: {DATASET})")
    add("--dataset_path", metavar="PATH", help="where: as training.dataset_path")
    add("--seq-len", type=int, metavar="N", help="tokens in a row (default: as the model was trained)")
    text = f"so many batches of {TOKENS_AT_ONCE} tokens on each rank (default: %(default)s)"
    add("--batches", type=int, default=1, metavar="N", help=text)
    text = "precision to compute in (default: bfloat16 on a GPU, float32 on a CPU)"
    add("--dtype", choices=["float32", "bfloat16"], help=text)
    add("--json", type=Path, metavar="FILE", help="write all figures there as well")
    return made


def main() -> int:
    arguments = parser().parse_args()
    return run_on_ranks("float8_health", lambda device: examine(arguments, device))


if __name__ == "__main__":
    leave(main())
