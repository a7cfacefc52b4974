"""The matmuls of a Llama 3 8B block for 16,384 tokens, by every kernel there is for them: TFLOP/s, and their errors.

    python -m scripts.bench_matmuls [--autotune]

Row-wise float8 with fast accumulation is what Rowhouse runs. Beside it: bf16, tensor-wise float8 (one scale a matrix),
row-wise without fast accumulation, and with --autotune the compiler's best Triton kernel at some shapes (minutes).
Errors are relative to a float64 product of the same operands. Needs a GPU.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from float8.quantise import dequantise, quantise_rows
from float8.scaled import Float8Rows
from scripts.bench_kernels import DIM, HIDDEN, QKV, TOKENS, microseconds

# name -> (M, N, K): (M, K) @ (N, K).T
SHAPES = {
    "wq": (TOKENS, DIM, DIM),
    "wk or wv": (TOKENS, DIM // 4, DIM),
    "wq wk wv": (TOKENS, QKV, DIM),
    "w1": (TOKENS, HIDDEN, DIM),
    "w1 w3": (TOKENS, 2 * HIDDEN, DIM),
    "w2": (TOKENS, DIM, HIDDEN),
    "wq wk wv, input": (TOKENS, DIM, QKV),
    "w1 w3, input": (TOKENS, DIM, 2 * HIDDEN),
    "w2, input": (TOKENS, HIDDEN, DIM),
    "wq wk wv, weight": (QKV, DIM, TOKENS),
    "wo, weight": (DIM, DIM, TOKENS),
    "w1 w3, weight": (2 * HIDDEN, DIM, TOKENS),
    "w2, weight": (DIM, HIDDEN, TOKENS),
}
AUTOTUNED = ("wq", "w1 w3", "w1 w3, weight")

Kernel = Callable[[Float8Rows, Float8Rows, Tensor, Tensor], Tensor]


def rowwise(fast: bool) -> Kernel:
    def kernel(a: Float8Rows, b: Float8Rows, *_: Tensor) -> Tensor:
        dtype = torch.bfloat16
        return torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale.t(), out_dtype=dtype, use_fast_accum=fast)

    return kernel


def tensorwise(a: Float8Rows, b: Float8Rows, *_: Tensor) -> Tensor:
    one = a.scale[0, 0]
    return torch._scaled_mm(a.data, b.data.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


KERNELS: dict[str, Kernel] = {
    "bf16": lambda a, b, a_bf16, b_bf16: a_bf16 @ b_bf16.t(),
    "tensor-wise": tensorwise,
    "row-wise, accurate": rowwise(False),
    "row-wise": rowwise(True),
}


def operands(m: int, n: int, k: int) -> tuple[Float8Rows, Float8Rows, Tensor, Tensor]:
    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    return quantise_rows(a), quantise_rows(b), a, b


def accuracy(kernel: Kernel, a: Float8Rows, b: Float8Rows, *rest: Tensor) -> float:
    """Of 256 rows of the product, relative to their norm."""
    some = Float8Rows(a.data[:256], a.scale[:256])
    exact = dequantise(some).double() @ dequantise(b).double().t()
    return ((kernel(a, b, *rest)[:256].double() - exact).norm() / exact.norm()).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--autotune", action="store_true", help="the compiler's own kernels too, at some shapes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing can be measured.")
        return 0
    torch._inductor.config.max_autotune_gemm_backends = "TRITON"
    columns = [*KERNELS, *(["row-wise, Triton"] if arguments.autotune else [])]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; TFLOP/s\n")
    print(f"| matmul | M | N | K | {' | '.join(columns)} | error, accurate | error, fast |")
    print("| --- " * (len(columns) + 6) + "|")
    for name, (m, n, k) in SHAPES.items():
        sets = [operands(m, n, k) for _ in range(2)]
        kernels = dict(KERNELS)
        if arguments.autotune and name in AUTOTUNED:
            kernels["row-wise, Triton"] = torch.compile(rowwise(True), mode="max-autotune-no-cudagraphs", dynamic=False)
        rates = {label: 2e-6 * m * n * k / microseconds(kernel, sets) for label, kernel in kernels.items()}
        cells = [f"{rates[label]:,.0f}" if label in rates else "" for label in columns]
        errors = [f"{accuracy(KERNELS[label], *sets[0]):.1e}" for label in ("row-wise, accurate", "row-wise")]
        print("| " + " | ".join([name, f"{m}", f"{n}", f"{k}", *cells, *errors]) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
