"""The float8 kernels at the shapes of a Llama 3 8B block: are they right, and how near to the card's memory bandwidth?

    python -m scripts.bench_kernels

On a GPU every op is compared with its reference first (exit status 1 if one differs), then timed beside the same
reference under torch.compile. What is counted as bytes is the least: each input read once, each result written once.
Times are medians of replayed CUDA graphs, each of which goes through inputs of four times the L2 cache.

Without a GPU nothing is timed: what the kernels take of a Hopper multiprocessor is told, compiled ahead of time.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from float8.ops import REFERENCES, empty_maxima, empty_rows, launcher
from float8.scaled import FLOAT8

TOKENS, DIM, HIDDEN, QKV = 16384, 4096, 14336, 6144
L2_BYTES = 60 * 2**20
REPEATS = 30
# Quantisation, norms and elementwise work of one block, forward and backward, on one H200: torchao 0.17, compiled.
TORCHAO_MS = 12.9
# A kernel's float32 values differ from the reference's in the last bits. Where that changes a bf16 value it changes it
# by 2**-8, and one float8 value in 16 of those by up to 2**-3: of 10,000 values, one, but four where they are few.
STEP, CHANGED, FEWEST = 2**-3, 1e-4, 4


@dataclass(frozen=True)
class Case:
    op: str
    shape: str
    arguments: Callable[[str], tuple[Any, ...]]
    """Device -> the op's arguments."""
    bytes: int
    uses: int
    """Times a block's forward and backward pass does it."""
    exact: bool = True


def normal(device: str, *shape: int) -> Tensor:
    """bf16. Without a GPU only the compiler sees it: it stays empty."""
    new = torch.randn if device == "cuda" else torch.empty
    return new(shape, device=device, dtype=torch.bfloat16)


def quantised(device: str, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    x = normal(device, rows, cols)
    if device == "cuda":
        return REFERENCES["quantise_rows"](x, True)
    return (*empty_rows(x, rows, cols), empty_maxima(x, cols, True))


def halves(device: str, cols: int) -> tuple[Tensor, ...]:
    """What w1 and w3 give as one matmul: two matrices whose rows lie apart."""
    return normal(device, TOKENS, 2 * cols).split(cols, dim=1)


def norm_backward(device: str) -> tuple[Tensor, ...]:
    dy, x, residual = (normal(device, TOKENS, DIM) for _ in range(3))
    return dy, x, normal(device, DIM), torch.rsqrt(x.float().square().mean(dim=1)), residual


def rows_case(cols: int, uses: int) -> Case:
    size = TOKENS * cols
    return Case(
        "quantise_rows", f"{TOKENS} x {cols}", lambda device: (normal(device, TOKENS, cols), True), 3 * size, uses
    )


def columns_case(cols: int, uses: int) -> Case:
    size = TOKENS * cols
    return Case(
        "columns_from_rows", f"{TOKENS} x {cols}", lambda device: quantised(device, TOKENS, cols), 2 * size, uses
    )


def weights_case(cols: int, *outs: int) -> Case:
    shape = f"{' + '.join(map(str, outs))} x {cols}"
    size = sum(outs) * cols
    # In two passes: the columns' scales are known only after the first.
    return Case("quantise_weights", shape, lambda device: ([normal(device, out, cols) for out in outs],), 6 * size, 1)


CASES = [
    Case(
        "rms_norm_rows",
        f"{TOKENS} x {DIM}",
        lambda device: (normal(device, TOKENS, DIM), normal(device, DIM), 1e-5, True, False),
        3 * TOKENS * DIM,
        uses=2,
        exact=False,
    ),
    rows_case(DIM, uses=3),  # the attention's output; the gradients of wo's and w2's outputs
    Case(
        "quantise_parts",
        f"{TOKENS} x ({DIM} + {DIM // 4} + {DIM // 4})",
        lambda device: ([normal(device, TOKENS, cols) for cols in (DIM, DIM // 4, DIM // 4)], True),
        3 * TOKENS * QKV,
        uses=1,
    ),
    Case(
        "swiglu_rows",
        f"{TOKENS} x {HIDDEN}",
        lambda device: (*halves(device, HIDDEN), True),
        5 * TOKENS * HIDDEN,
        uses=1,
        exact=False,
    ),
    Case(
        "swiglu_backward_rows",
        f"{TOKENS} x {HIDDEN}",
        lambda device: (normal(device, TOKENS, HIDDEN), *halves(device, HIDDEN), True),
        8 * TOKENS * HIDDEN,
        uses=1,
        exact=False,
    ),
    Case("rms_norm_backward", f"{TOKENS} x {DIM}", norm_backward, 8 * TOKENS * DIM, uses=2, exact=False),
    columns_case(DIM, uses=5),  # both norms, the attention's output, the gradients of wo's and w2's outputs
    columns_case(QKV, uses=1),
    columns_case(HIDDEN, uses=1),
    columns_case(2 * HIDDEN, uses=1),
    weights_case(DIM, DIM, QKV // 6, QKV // 6),
    weights_case(DIM, DIM),
    weights_case(DIM, HIDDEN, HIDDEN),
    weights_case(HIDDEN, DIM),
]


# On a GPU.


def matrices(results: tuple[Tensor, ...]) -> list[Tensor]:
    """The results in float32; float8 data dequantised with the scale that follows it.

    A scale says nothing alone: where a maximum is at its border, the last bit doubles it and changes no value.
    """
    found, rest = [], list(results)
    while rest:
        first = rest.pop(0)
        found.append(first.float() * rest.pop(0) if first.dtype == FLOAT8 else first.float())
    return [matrix for matrix in found if matrix.numel()]


def error(case: Case) -> tuple[float, bool]:
    """(The largest error of a result, relative to its norm; whether all are as small as they have to be)"""
    arguments = case.arguments("cuda")
    expected = matrices(REFERENCES[case.op](*arguments))
    # What a kernel forgets to write is NaN.
    torch.full((8 * case.bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    got = matrices(getattr(torch.ops.rowhouse, case.op)(*arguments))
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True)]
    allowed = [0 if case.exact else STEP * max(CHANGED, FEWEST / b.numel()) ** 0.5 for b in expected]
    return max(errors), all(e <= most for e, most in zip(errors, allowed, strict=True))  # A NaN is not <=.


def microseconds(function: Callable[..., Any], argument_sets: list[tuple[Any, ...]]) -> float:
    """Median time of a call: one graph calls it with every set of arguments."""
    for arguments in argument_sets:
        function(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in argument_sets:
            function(*arguments)
    times = []
    for _ in range(REPEATS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[3:]) * 1000 / len(argument_sets)


def product_bandwidth(device: str = "cuda", elements: int = 2**28) -> float:
    """Bytes a second, read and written, of c = a * b in float32: what elementwise work can reach on this card.

    A copy is no ceiling: on one H200 `copy_` moves 2.77 TB/s, a product 4.28.
    """
    a, b = (torch.randn(elements, device=device) for _ in range(2))
    c = torch.empty_like(a)
    return 3 * a.nbytes / microseconds(lambda a, b, c: torch.mul(a, b, out=c), [(a, b, c)]) * 1e6


def measure() -> int:
    errors = {case: error(case) for case in CASES}
    wrong = [case for case in CASES if not errors[case][1]]
    for case in wrong:
        print(f"{case.op} {case.shape} differs from its reference: {errors[case][0]:.2e} of its norm")
    if wrong:
        return 1
    ceiling = product_bandwidth()
    rows, block, block_compiled = [], 0.0, 0.0
    for case in CASES:
        sets = [case.arguments("cuda") for _ in range(max(2, 4 * L2_BYTES // case.bytes))]
        time = microseconds(getattr(torch.ops.rowhouse, case.op), sets)
        torch._dynamo.reset()
        compiled = microseconds(torch.compile(REFERENCES[case.op], dynamic=False), sets)
        block, block_compiled = block + case.uses * time, block_compiled + case.uses * compiled
        rate = case.bytes / time * 1e6
        rows.append(
            f"| {case.op} | {case.shape} | {case.uses} | {case.bytes / 1e6:.0f} | {time:.0f} | {rate / 1e9:.0f} "
            f"| {rate / ceiling:.0%} | {compiled:.0f} | {compiled / time:.2f} | {errors[case][0]:.0e} |"
        )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a * b moves {ceiling / 1e12:.2f} TB/s")
    print(
        f"torchao, compiled, takes {TORCHAO_MS} ms a block, with RoPE and the residual additions, which are not below"
    )
    print("| op | shape | a block | MB | us | GB/s | of a * b | compiled us | times slower | error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    print(f"| a block | both ways | | | {block:.0f} | | | {block_compiled:.0f} | {block_compiled / block:.2f} | |")
    return 0


# Without one.


@dataclass(frozen=True)
class Resources:
    """What a program of a kernel takes; `spilled` is its stack in bytes a thread."""

    kernel: str
    warps: int
    registers: int
    spilled: int
    shared: int
    ptx: str

    @property
    def programs(self) -> int:
        """How many run at once on a multiprocessor of Hopper: 65536 registers, 227 KB of shared memory, 64 warps."""
        registers = -(-self.registers // 8) * 8
        return min(65536 // (registers * self.warps * 32), 227 * 1024 // (self.shared + 1024), 64 // self.warps)


class Hopper:
    """As much of a driver of Triton's as compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def compiling() -> Iterator[list[Resources]]:
    """Inside, kernels that are launched are compiled for Hopper and told of, and not run. Needs no GPU."""
    from triton.runtime import JITFunction, driver

    launch, found = JITFunction.run, []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(resources(launch(kernel, *args, grid=grid, warmup=True, **kwargs)))

    before = driver._active
    driver.set_active(Hopper())
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = launch
        driver._active = before


def resources(compiled: Any) -> Resources:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    metadata = compiled.metadata
    return Resources(metadata.name, metadata.num_warps, registers, stack, metadata.shared, compiled.asm["ptx"])


def compile_cases() -> Iterator[tuple[Case, Resources]]:
    for case in CASES:
        with compiling() as found:
            launcher(case.op)(*case.arguments("cpu"))
        yield from ((case, kernel) for kernel in found)


def explain() -> int:
    print("No GPU: whether the kernels are right on one, their times and their bandwidth can't be measured here.")
    try:
        import triton
    except ImportError:
        print("Nor is Triton there, so they can't be compiled either.")
        return 0
    print(f"Compiled for sm_90 by Triton {triton.__version__}; spilled: bytes a thread; at once: on a multiprocessor")
    print("| op | shape | kernel | warps | registers | spilled | shared | at once |")
    print("|---|---|---|---|---|---|---|---|")
    lines = [
        f"| {case.op} | {case.shape} | {kernel.kernel} | {kernel.warps} | {kernel.registers} | {kernel.spilled} "
        f"| {kernel.shared} | {kernel.programs} |"
        for case, kernel in compile_cases()
    ]
    print("\n".join(dict.fromkeys(lines)))
    return 0


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(measure() if torch.cuda.is_available() else explain())
