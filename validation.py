"""Validation: the mean loss over other data, the same batches each time."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from config import JobConfig
from data.loader import BatchLoader, next_batch
from data.sources import open_source
from data.tokenizer import Tokenizer
from errors import UserError
from loss import valid_tokens
from parallelisms.mesh import Meshes


@torch.no_grad()
def validate(
    config: JobConfig,
    model: nn.Module,
    tokenizer: Tokenizer,
    meshes: Meshes,
    device: torch.device,
    after_batch: Callable[[], None],
) -> float:
    """Mean loss over the validation batches of all ranks, in nats a token. For all ranks at once.

    Raises UserError where the data do not fill one batch.
    """
    validation = config.validation
    rows = validation.local_batch_size
    lanes = rows * meshes.dp.size()
    source = open_source(validation.dataset, validation.dataset_path, config.debug.seed)
    total, count = torch.zeros(2, device=device)
    one = torch.ones((), device=device)
    model.eval()
    with BatchLoader(
        source, tokenizer, seq_len=config.training.seq_len, lanes=lanes, num_lanes=rows,
        first_lane=meshes.dp.get_local_rank() * rows, epochs=1,
    ) as loader:  # fmt: skip
        batches = 0
        while batches != validation.steps and (batch := next_batch(loader, can_end=True)) is not None:
            inputs, labels = (t.to(device) for t in batch)
            total += model(inputs, labels, one)
            count += valid_tokens(labels)
            batches += 1
            after_batch()
    model.train()
    if batches == 0:
        raise UserError(
            f"validation.dataset: {validation.dataset} does not fill one batch of {lanes} sequences: lower "
            "validation.local_batch_size or training.seq_len, or give more data"
        )
    for sum_of_ranks in (total, count):
        dist.all_reduce(sum_of_ranks, group=meshes.dp.get_group())
    return (total / count).item()
