"""What kind of work a kernel of a GPU, or an operator on a CPU, does: by its name."""

import re

KERNELS = {  # kind -> kernels whose names match, the first kind that does
    "communication": r"nccl|multimem|symm_mem|one_shot|two_shot",
    "attention": r"fmha|flash|cudnn_generated|cudnn::fusion|sdpa",
    "matmul": r"gemm|nvjet|cutlass|xmma|cublas|matmul",
    "optimizer": r"adam",
    "float8, norm, elementwise": r"triton|(rows|parts|columns|maxima)_kernel|rms_norm|swiglu|elementwise|reduce_kernel|"
    r"vectorized|softmax",
    "copies": r"memcpy|memset|copy|cat",
}

# What these call is theirs: a copy within a quantiser, say.
OPERATORS = {
    "FSDP, communication": r"^c10d::|^_c10d_functional::|^gloo:|^rowhouse::(gather|scatter|all_reduce)|matmul_scatter|"
    r"^fsdp::|^FSDP::",
    "attention": r"scaled_dot_product",
    "matmul": r"^aten::(mm|bmm|addmm|linear|matmul|_scaled_mm)$|^rowhouse::scaled_mm$",
    "optimizer": r"^Optimizer\.step|_fused_adam|_foreach_norm",
    "float8": r"^rowhouse::",
}
COMPILED = r"^CompiledFunction|^Torch-Compiled"  # What the compiler generated has no operator of its own.
OWN = {
    "elementwise, norm, loss": r"^aten::(?!.*(copy|cat|contiguous|clone|empty|zero))",
    "copies": r"^aten::",
}


def kind_of(kernel: str) -> str:
    """Of a kernel on a GPU."""
    return next((kind for kind, pattern in KERNELS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def kind_of_operator(names: list[str]) -> str:
    """Of an operator on a CPU; names: from the outermost operator around it to its own."""
    for name in names:
        for kind, pattern in OPERATORS.items():
            if re.search(pattern, name):
                return kind
    if any(re.search(COMPILED, name) for name in names):
        return "compiled"
    return next((kind for kind, pattern in OWN.items() if re.search(pattern, names[-1])), "other")
