"""What scripts.bench_parallel checks without GPUs: bytes against formulas, intervals against a known answer."""

from itertools import product
from typing import Any

from models.llama.shapes import FLAVORS
from scripts.overlap import communication
from scripts.parallel_results import Case, Row

RANKS, LAYERS, SEQ_LEN, SEQUENCES = 2, 1, 32, 2
CASES = [Case("rowhouse", r, p, "none", RANKS) for p, r in product(("fsdp", "tp", "async-tp"), ("bf16", "rowwise"))]
FLAGS = (
    f"--config debug.toml --training.seq_len {SEQ_LEN} --training.local_batch_size {SEQUENCES} "
    "--training.global_batch_size -1 --training.mixed_precision_param bfloat16"
)
BF16, FLOAT32 = 2, 4


def of_bytes(row: Row) -> tuple[str, bool]:
    """(What was compared, whether it is the same): gathers and reduce-scatters, to the byte. All-reduces are small."""
    sent = row.runs[0].communication.sent or {"gather": 0, "scatter": 0}
    found = round(sent["gather"]), round(sent["scatter"])
    expected = fsdp_bytes(row.case) if row.case.parallel == "fsdp" else tp_bytes(row.case)
    compared = [f"{name}s {a:,} bytes, by formula {b:,}" for name, a, b in zip(sent, found, expected, strict=False)]
    return f"{row.case}: {'; '.join(compared)}", found == expected


def fsdp_bytes(case: Case) -> tuple[int, int]:
    """(All-gathers, reduce-scatters) that a rank sends in a step of the small model."""
    shape, others = FLAVORS["debugmodel"], RANKS - 1
    kv = shape.n_kv_heads * shape.head_dim
    linears = [(shape.dim, shape.dim), (kv, shape.dim), (kv, shape.dim), (shape.dim, shape.dim)]
    linears += [(shape.hidden_dim, shape.dim), (shape.hidden_dim, shape.dim), (shape.dim, shape.hidden_dim)]
    norm, embedding = shape.dim, shape.vocab_size * shape.dim
    weights = sum(out * in_ for out, in_ in linears)
    # A rank sends its part to each other one. In float8: bytes, a float32 scale a row, bf16 maxima of its columns.
    in_float8 = sum(out // RANKS * (in_ + FLOAT32) + BF16 * in_ for out, in_ in linears)
    linear_bytes = weights // RANKS * BF16 if case.recipe == "bf16" else in_float8
    block = linear_bytes + 2 * norm // RANKS * BF16
    # Twice, forward and backward, but the last unit, which is kept: the norm and the head.
    gathered = 2 * (LAYERS * block + embedding // RANKS * BF16) + (norm + embedding) // RANKS * BF16
    parameters = LAYERS * (weights + 2 * norm) + 2 * embedding + norm
    return others * gathered, others * parameters // RANKS * FLOAT32


def tp_bytes(case: Case) -> tuple[int, int]:
    """The same with tensor parallelism: 6 gathers and 4 reduce-scatters a block; 2 and 2 of embedding and head."""
    dim, tokens, others = FLAVORS["debugmodel"].dim, SEQUENCES * SEQ_LEN, RANKS - 1
    row = dim * BF16 if case.recipe == "bf16" else dim + FLOAT32
    share = others * tokens // RANKS
    return share * (LAYERS * 6 * row + 2 * dim * BF16), share * (LAYERS * 4 + 2) * dim * BF16


def of_intervals() -> tuple[str, bool]:
    """A trace whose times are known: (what was compared, whether it is the same)."""
    told = communication(synthetic_trace(), steps=2, ranks=4)
    found = (told.milliseconds, told.exposed, told.exposed_gathers, told.sent and told.sent["gather"], told.fused)
    return f"a trace of known times: {found}, known {KNOWN}", found == KNOWN


# Of two steps: communication 0 to 3, 5 to 6 and 8 to 10 ms; compute 1 to 2, 4 to 6 and 9 to 12. NCCL gathers 0 to 3.
KNOWN = (3.0, 1.5, 1.0, 3 * (16 * 64 + 16 * 4) / 2, 0.5)


def synthetic_trace() -> list[dict[str, Any]]:
    """A gather, a copy of a fused gather of 16 rows of 64 float8 with their scales, barriers; kernels around them."""

    def on_device(category: str, name: str, begin: float, end: float, correlation: int = 0) -> dict[str, Any]:
        return event(category, name, begin, end, tid=7, args={"correlation": correlation})

    fused = {"Input Dims": [[16, 64], [], [16, 1]], "Input type": ["c10::Float8_e4m3fn", "TensorList", "float"]}
    return [
        on_device("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 2.5),
        on_device("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2, 3),
        on_device("kernel", "nvjet_qqtst_128x256_128x6_2x1_v_bz_coopA_NNT", 1, 2),
        on_device("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", 4, 5),
        on_device("kernel", "triton_poi_fused_add_0", 5, 6),
        event("cpu_op", "symm_mem::fused_all_gather_scaled_matmul", 3, 3.5, tid=1, args=fused),
        event("cuda_runtime", "cudaMemcpyAsync", 3.1, 3.2, tid=1, args={"correlation": 11}),
        on_device("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 5, 6, correlation=11),
        event("cuda_runtime", "cudaMemcpyAsync", 3.6, 3.7, tid=1, args={"correlation": 12}),
        on_device("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 11, 12, correlation=12),
        on_device("kernel", "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int)", 8, 9),
        on_device("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 9, 10),
        on_device("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", 9, 11),
    ]


def event(category: str, name: str, begin: float, end: float, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    """From and to milliseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": begin * 1000, "dur": (end - begin) * 1000, "tid": tid,
            "args": args}  # fmt: skip
