"""Statistics of each layer's outputs, weights and gradients: what scripts.compare_layers sets two runs against by.

A *place* is where a step is looked at: what a layer gives, the gradient that arrives there, a weight, its gradient, the
loss. Of each, the values of all ranks and micro-batches of the step together: how many, their root mean square, mean
and largest magnitude, of those that are finite; and the share that is not.

Sums are in float64, so that how the values are split over ranks and micro-batches changes nothing but its last bits.
"""

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from telemetry.metrics import drop_later_lines

FILE = "layer_statistics.jsonl"
PIECE = 2**24  # Values that are summed at once: 128 MiB as float64.


class LayerStatistics:
    """Looks at every `freq`-th step and the first, and writes a line of each to `folder`/layer_statistics.jsonl.

    `freq` 0 looks at none. The model is a Llama whose ranks each hold other tokens of the batch, and whose parameters
    are DTensors, or the same on all ranks. Other steps pay nothing; one that is looked at pays a few passes over what
    it looks at, keeps none of it, and waits once.
    """

    def __init__(self, model: Any, freq: int, folder: Path):
        self.model, self.freq, self.path = model, freq, folder / FILE
        self.layers = layers_of(model)
        self.sums: dict[str, Tensor] = {}
        """Place -> this rank's, as sums_of gives them."""

    def begin(self, step: int) -> None:
        """Training goes on after `step`: drops the lines of later steps that an earlier process has left."""
        if dist.get_rank() == 0:
            drop_later_lines(self.path, step)

    def is_due(self, step: int) -> bool:
        return self.freq > 0 and (step == 1 or step % self.freq == 0)

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Around the forward and backward passes of a training step."""
        if not self.is_due(step):
            yield
            return
        self.sums = {}
        with looking_at_outputs(
            self.model,
            lambda layer, output: self.add(f"{layer} output", output),
            lambda layer, gradient: self.add(f"{layer} output gradient", gradient),
        ):
            yield

    @torch.no_grad()
    def add(self, place: str, x: Tensor) -> None:
        found = sums_of(x.detach())
        self.sums[place] = together(self.sums[place], found) if place in self.sums else found

    def write(self, step: int, loss: Tensor) -> None:
        """After `watching`, before the optimizer's step. `loss`: the global batch's, a scalar. For all ranks."""
        if not self.is_due(step):
            return
        for name, p in self.model.named_parameters():
            for place, x in ((name, local(p)), (f"{name} gradient", local(p.grad))):
                self.add(place, x if is_counted_here(p) else x[:0])
        self.add("loss", loss if dist.get_rank() == 0 else loss.new_empty(0))
        places = places_in_order(self.layers, [name for name, _ in self.model.named_parameters()])
        sums = torch.stack([self.sums[place].to(loss.device) for place in places])
        added, largest = sums[:, :4].contiguous(), sums[:, 4].contiguous()
        dist.all_reduce(added)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        self.sums = {}
        if dist.get_rank() == 0:
            of_all = torch.cat([added, largest[:, None]], dim=1).tolist()
            found = {place: statistics(*numbers) for place, numbers in zip(places, of_all, strict=True)}
            line = {"step": step, "places": found}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")


def layers_of(model: Any) -> list[str]:
    """Of a Llama, in the order of computation: the embedding, the blocks, the last norm."""
    return ["tok_embeddings", *(f"layers.{i}" for i in range(len(model.layers))), "norm"]


@contextmanager
def looking_at_outputs(
    model: Any, see_output: Callable[[str, Tensor], None], see_gradient: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Shows what each layer gives, and the gradient that comes back there, with the layer's name."""

    def look(layer: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        see_output(layer, output.detach())
        output.register_hook(functools.partial(see_gradient, layer))

    # Of the modules, whose forward functions may be compiled or recomputed: the hooks are outside of both.
    hooks = [model.get_submodule(n).register_forward_hook(functools.partial(look, n)) for n in layers_of(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def places_in_order(layers: list[str], parameters: list[str]) -> list[str]:
    """All places in the order in which a step comes to them: forward, to the loss, and back."""
    of_layer = {layer: [name for name in parameters if name.startswith(f"{layer}.")] for layer in layers}
    head = [name for name in parameters if not any(name in names for names in of_layer.values())]
    forward = [place for layer in layers for place in [*of_layer[layer], f"{layer} output"]]
    back = [
        place
        for layer in reversed(layers)
        for place in [f"{layer} output gradient", *(f"{name} gradient" for name in of_layer[layer])]
    ]
    return [*forward, *head, "loss", *(f"{name} gradient" for name in head), *back]


def sums_of(x: Tensor) -> Tensor:
    """float64 (5,): how many values, how many not finite; of the finite ones the sum, that of squares, the largest
    magnitude."""
    total = torch.zeros(5, dtype=torch.float64, device=x.device)
    for piece in x.flatten().split(PIECE) if x.numel() else ():
        finite = piece.isfinite()
        kept, number = piece.double().where(finite, 0.0), finite.new_ones(()) * piece.numel()
        found = [number, (~finite).sum(), kept.sum(), kept.square().sum(), kept.abs().amax()]
        total = together(total, torch.stack([one.double() for one in found]))
    return total


def together(one: Tensor, other: Tensor) -> Tensor:
    """sums_of what both are of."""
    return torch.cat([one[:4] + other[:4], torch.maximum(one[4:], other[4:])])


def statistics(count: float, bad: float, total: float, squares: float, largest: float) -> dict[str, float | None]:
    """As they are written: null for what no finite value is there to tell."""
    finite = count - bad
    return {
        "count": int(count),
        "rms": (squares / finite) ** 0.5 if finite else None,
        "mean": total / finite if finite else None,
        "largest": largest if finite else None,
        "not_finite": bad / count,
    }


def is_counted_here(p: Tensor) -> bool:
    """Whether this rank's part of a parameter counts: of what several ranks hold alike, that of the first one does."""
    if not isinstance(p, DTensor):
        return dist.get_rank() == 0
    coordinate = p.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(at == 0 for at, placement in zip(coordinate, p.placements, strict=True) if placement.is_replicate())


def local(p: Any) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p
