"""Where the first NaN or infinity of a step comes from: which layer's output, gradient or weight.

torch's own anomaly mode tells the operation, but sees none within compiled blocks or our autograd functions. What is
looked at here lies between the blocks, outside of compiled and recomputed code.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from telemetry.layer_statistics import local, looking_at_outputs

logger = logging.getLogger("rowhouse")


@dataclass(frozen=True)
class Seen:
    place: str
    shape: tuple[int, ...]
    bad: Tensor
    """How many values are NaN or infinite: int64, a scalar on the device."""


class AnomalyDetector:
    """Looks at what the layers of a Llama give and get, in the order of computation, where it is `on`.

    It waits for the device once a step, and reads all that it looks at: for finding a fault, not for every day.
    """

    def __init__(self, model: Any, on: bool):
        self.model, self.on = model, on
        self.seen: list[Seen] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the forward and backward passes of a step."""
        if not self.on:
            yield
            return
        self.seen = []
        with looking_at_outputs(
            self.model,
            lambda layer, output: self.see(f"the output of {layer}", output),
            lambda layer, gradient: self.see(f"the gradient that came back to the output of {layer}", gradient),
        ):
            yield

    def see(self, place: str, x: Tensor) -> None:
        self.seen.append(Seen(place, tuple(x.shape), (~x.isfinite()).sum()))

    def check(self, step: int) -> None:
        """After `watching`, before the optimizer's step: this rank says what it saw first that is not finite."""
        if not self.on:
            return
        between, self.seen = self.seen, []
        parameters = list(self.model.named_parameters())
        # A weight that is not finite was so before the step: it comes first.
        for name, p in parameters:
            self.see(f"the weight of {name}", local(p.detach()))
        self.seen += between
        for name, p in parameters:
            self.see(f"the gradient of {name}", local(p.grad))
        counts = torch.stack([seen.bad for seen in self.seen]).tolist()
        bad = [(seen, count) for seen, count in zip(self.seen, counts, strict=True) if count]
        self.seen = []
        if bad:
            first, count = bad[0]
            logger.error(
                "rank %d, step %d: the first that is NaN or infinite is %s: %d values of %s; what came before it is "
                "finite, %d places after it are not",
                dist.get_rank(), step, first.place, count, first.shape, len(bad) - 1,
            )  # fmt: skip
