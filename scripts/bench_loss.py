"""Output head and loss of Llama 3 8B for 16,384 tokens, forward and backward: memory and time, in chunks and whole.

    python -m scripts.bench_loss

The logits whole, in bf16, with the compiled cross entropy of loss.py; and parallelisms/linear_loss.py, in chunks of
several sizes. Memory is what is allocated at the peak beyond input, weight and labels, of which 1.1 GiB are the two
gradients. Needs a GPU.
"""

import functools
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from loss import cross_entropy_sum
from parallelisms import linear_loss
from parallelisms.linear_loss import HeadLoss, loss_and_gradient, scaled
from scripts.bench_kernels import DIM, TOKENS

VOCAB, STEPS = 128256, 5
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def measured(loss: Loss) -> tuple[float, float, Tensor]:
    """(GiB, milliseconds a step, the weight's gradient)"""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(VOCAB, DIM, device="cuda", dtype=torch.bfloat16) / DIM**0.5)
    labels = torch.randint(VOCAB, (TOKENS,), device="cuda")
    count = torch.tensor(float(TOKENS), device="cuda")
    loss(x, weight, labels, count).backward()  # Compiles.
    x.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    for _ in range(STEPS):
        x.grad = weight.grad = None
        loss(x, weight, labels, count).backward()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / STEPS
    assert weight.grad is not None
    return (torch.cuda.max_memory_allocated() - before) / 2**30, seconds * 1000, weight.grad


def main() -> int:
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing can be measured.")
        return 0
    compiler = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    whole_loss = compiler(cross_entropy_sum)
    whole: Loss = lambda x, weight, labels, count: whole_loss(x @ weight.t(), labels) / count  # noqa: E731
    in_chunks: Loss = HeadLoss(compiler(loss_and_gradient), compiler(scaled)).of_linear
    gib, milliseconds, expected = measured(whole)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    print("| logits at once | GiB | ms | weight gradient, relative to the first |\n| --- | --- | --- | --- |")
    print(f"| all, {TOKENS} tokens | {gib:.2f} | {milliseconds:.1f} | |")
    for chunk in (2**31, 2**30, 2**29, 2**28):
        linear_loss.CHUNK_ELEMENTS = chunk
        gib, milliseconds, got = measured(in_chunks)
        tokens = linear_loss.rows_of_chunk(TOKENS, VOCAB)
        error = (got - expected).norm().item() / expected.norm().item()
        print(f"| {tokens} tokens | {gib:.2f} | {milliseconds:.1f} | {error:.1e} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
