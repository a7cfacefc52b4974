"""The loss: summed, not averaged, so that any split of a batch adds up to the same."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # Labels of this value are not predicted and do not count.


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed negative log-likelihood in nats, float32 scalar. logits: (tokens, vocab); labels: int64 (tokens,)."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")


def valid_tokens(labels: Tensor) -> Tensor:
    """How many labels count: float32 scalar on their device (exact up to 2**24 a rank and step)."""
    return (labels != IGNORE_INDEX).sum(dtype=torch.float32)
