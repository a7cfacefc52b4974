"""Every combination of precision, activation checkpointing, batch, tensor parallel degree, async TP and compilation,
against one process without tensor parallelism.

    python -m scripts.scale_shape_matrix [--quick] [--device cuda] [--json FILE]

The model is a small Llama. Its oracle is the same model in float64. The *floor* of a quantity (the logits, the gradient
at the first block's input, each weight's gradient) is what one process loses against the oracle with the same recipe,
measured in the same run: rounding to bf16 or float8, nothing else. A case passes if no quantity is further from the
oracle than its floor times what `ALLOWED` says, and if the collectives planned ran fused. A mistaken row shows as an
error near 1.

On a CPU the ranks are gloo processes, and async TP runs torch's own CUDA index algebra (scripts/symm_mem_on_cpu.py).
With --device cuda they share one GPU, with real symmetric memory; with --device nccl each has a GPU of its own, and
cases with more ranks than there are GPUs are left out. Exit status 1 if any case misses.
"""

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from float8.convert import Float8Config
from models.llama.model import Llama, TransformerBlock
from models.llama.parallelize import parallelize_llama
from models.llama.shapes import LlamaShape
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.async_tp import compare_with_plan
from parallelisms.compile import CompileConfig
from parallelisms.linears import Linears
from parallelisms.mesh import Meshes, ParallelismConfig, build_meshes
from parallelisms.tp_ops import recording
from scripts import symm_mem_on_cpu
from scripts.local_ranks import NO_MULTICAST, launch

SHAPE = LlamaShape(64, 2, 8, 4, 128, vocab_size=256, head_dim=16)
SEQ_LEN = 64
CUDA_SHAPE = LlamaShape(512, 2, 8, 4, 1024, vocab_size=2048, head_dim=64)
CUDA_SEQ_LEN = 256
RECIPES = ["bf16", "rowwise", "rowwise_with_gw_hp"]
AC_MODES = ["none", "full", "selective op", "selective layer"]
# The smallest quantities, the norms' gradients, have 64 elements: a relative error measured on n random ones scatters
# by 1 / sqrt(2 n) = 9 %, the ratio of two by 12.5 %; four times that are allowed. In bf16 tensor parallelism also
# rounds more often, a sum's parts and then the sum: twice the variance. Beside float8's error that is nothing.
ALLOWED = {"bf16": 2**0.5 * 1.5, "rowwise": 1.5, "rowwise_with_gw_hp": 1.5}


@dataclass(frozen=True)
class Case:
    recipe: str
    ac: str
    batch: int
    """Sequences a data parallel rank takes."""
    tp: int
    asynchronous: bool = False
    dp: int = 1
    compiled: bool = False

    def __str__(self) -> str:
        how = f"tp {self.tp}{' async' if self.asynchronous else ''}{f' x fsdp {self.dp}' if self.dp > 1 else ''}"
        return f"{self.recipe}, AC {self.ac}, batch {self.batch}, {how}, {'compiled' if self.compiled else 'eager'}"


@dataclass
class Result:
    """Errors relative to the oracle's norm; `ratio` is the largest of them over its floor, at the quantity `worst`."""

    case: Case
    output: float
    input_grad: float
    weight_grad: float
    ratio: float
    worst: str
    fused: str
    ok: bool
    problem: str = ""


def cases(quick: bool, cuda: bool) -> list[Case]:
    if cuda:
        grid = itertools.product(RECIPES, AC_MODES, (2, 5), (1, 2, 4))
        return [Case(r, ac, b, tp, tp > 1, compiled=True) for r, ac, b, tp in grid if not quick or (b == 2 and tp < 4)]
    recipes, batches, degrees = (RECIPES[:2], (1, 3), (1, 2)) if quick else (RECIPES, (1, 2, 3, 5), (1, 2, 4))
    eager = [
        Case(recipe, ac, batch, tp, asynchronous)
        for recipe, ac, batch, tp in itertools.product(recipes, AC_MODES, batches, degrees)
        for asynchronous in ((False, True) if tp > 1 else (False,))
    ]
    two_by_two = [Case(r, ac, 3, 2, True, dp=2) for r, ac in itertools.product(recipes, AC_MODES)]
    compiled = [
        Case("bf16", "none", 2, 2, True, compiled=True),
        *(Case(r, ac, 2, 2, True, compiled=True) for r, ac in itertools.product(RECIPES[1:], AC_MODES)),
        *(Case(r, "selective op", 2, 1, compiled=True) for r in RECIPES),
        Case("rowwise", "full", 5, 4, True, compiled=True),
        Case("rowwise", "full", 3, 2, False, compiled=True),
        Case("rowwise", "selective op", 3, 2, True, dp=2, compiled=True),
    ]
    return [*eager, *two_by_two[:2]] if quick else [*eager, *two_by_two, *compiled]


# The model, and what is measured of it


def shape_and_seq_len(device: torch.device) -> tuple[LlamaShape, int]:
    return (SHAPE, SEQ_LEN) if device.type == "cpu" else (CUDA_SHAPE, CUDA_SEQ_LEN)


@torch.no_grad()
def fill(model: Llama, device: torch.device) -> None:
    """Weights that bf16 holds exactly, norms that are not all one, the same on every mesh."""
    model.init_weights(0, device)
    for name, p in model.named_parameters():
        local = p.to_local() if isinstance(p, DTensor) else p
        if name.endswith("norm.weight"):
            full = 1 + 0.3 * torch.linspace(0, 40, p.numel(), device=device).sin()
            if isinstance(p, DTensor):
                full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None).to_local()
            local.copy_(full)
        local.copy_(local.bfloat16())


def batch_of(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and labels of the global batch; every seventh label does not count."""
    shape, seq_len = shape_and_seq_len(device)
    generator = torch.Generator().manual_seed(100 + case.batch)
    tokens = torch.randint(shape.vocab_size, (case.batch * case.dp, seq_len + 1), generator=generator)
    inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    labels.view(-1)[::7] = -100
    return inputs.to(device), labels.to(device)


def measure(model: Llama, inputs: Tensor, labels: Tensor, count: Tensor) -> dict[str, Tensor]:
    """One forward and backward. This rank's input gradient, and the parameters' gradients as they are."""
    found: dict[str, Tensor] = {}

    def keep(module, args, out):
        found["input gradient"] = out
        out.retain_grad()

    hook = model.tok_embeddings.register_forward_hook(keep)
    model(inputs, labels, count).backward()
    hook.remove()
    embedded = found["input gradient"]
    assert embedded.grad is not None
    grads = {f"{name} gradient": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"input gradient": embedded.grad, **grads}


@torch.no_grad()
def logits_of(model: Llama, inputs: Tensor) -> Tensor:
    return model(inputs)


def one_process(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The case's batch on one process without FSDP or tensor parallelism, nothing recomputed, in eager."""
    shape, seq_len = shape_and_seq_len(device)
    model = Llama(shape, seq_len).to(device)
    fill(model, device)
    model = model.to(dtype)
    model.freqs_cis = model.freqs_cis.float()
    if case.recipe != "bf16" and dtype == torch.bfloat16:
        for block in model.layers:
            assert isinstance(block, TransformerBlock)
            linears = Linears(column_recipe=case.recipe, row_recipe=case.recipe, group="", fused=False)
            block.attention.linears = block.feed_forward.linears = linears  # type: ignore[assignment]
    inputs, labels = batch_of(case, device)
    return {"logits": logits_of(model, inputs), **measure(model, inputs, labels, (labels >= 0).sum())}


@functools.cache
def oracle_and_floors(recipe: str, batch: int, dp: int, device: torch.device) -> tuple[dict, dict[str, float]]:
    case = Case(recipe, "none", batch, 1, dp=dp)
    exact = one_process(case, device, torch.float64)
    same_recipe = one_process(case, device, torch.bfloat16)
    return exact, {name: error(same_recipe[name], value) for name, value in exact.items()}


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


@functools.cache
def meshes_for(tp: int, dp: int, device: torch.device) -> Meshes:
    config = ParallelismConfig(tensor_parallel_degree=tp, data_parallel_shard_degree=dp)
    return build_meshes(config, device)


def run_case(case: Case, device: torch.device) -> tuple[dict[str, Tensor], str]:
    """The case on all ranks: whole tensors, and which of the planned collectives ran fused."""
    torch._dynamo.reset()
    shape, seq_len = shape_and_seq_len(device)
    meshes = meshes_for(case.tp, case.dp, device)
    with torch.device("meta"):
        model = Llama(shape, seq_len)
    mode, _, option = case.ac.partition(" ")
    parallelize_llama(
        model,
        meshes,
        parallelism=ParallelismConfig(
            tensor_parallel_degree=case.tp,
            enable_async_tensor_parallel=case.asynchronous,
            async_tensor_parallel_strict=case.asynchronous,
        ),
        float8=Float8Config(recipe_name=None if case.recipe == "bf16" else case.recipe),  # type: ignore[arg-type]
        activation_checkpoint=ActivationCheckpointConfig(
            mode=mode,  # type: ignore[arg-type]
            selective_ac_option={"layer": "2"}.get(option, "op"),
        ),
        compile=CompileConfig(enable=case.compiled, components=["model"]),
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cpu_offload=False,
    )
    model.to_empty(device=device)
    fill(model, device)
    inputs, labels = batch_of(case, device)
    mine = slice(meshes.dp.get_local_rank() * case.batch, (meshes.dp.get_local_rank() + 1) * case.batch)
    with recording() as collectives:
        found = measure(model, inputs[mine], labels[mine], (labels >= 0).sum())
    found["logits"] = logits_of(model, inputs[mine])
    found = {name: whole_parameter(t, meshes) if isinstance(t, DTensor) else t for name, t in found.items()}
    # Rank 0 compares: it needs all of the logits and of the input gradient.
    found["logits"] = whole(found["logits"], meshes, tp_dim=1)
    found["input gradient"] = whole(found["input gradient"], meshes, tp_dim=0)
    plan = compare_with_plan(collectives, len(model.layers))
    fused = ", ".join(f"{name} {count:g}/4" for name, count in plan.fused.items()) if case.asynchronous else ""
    return found, fused


def whole(part: Tensor, meshes: Meshes, tp_dim: int) -> Tensor:
    """Joins the parts of the ranks: tensor parallel ones along `tp_dim`, data parallel ones after one another."""
    for mesh, dim in ((meshes.tp, tp_dim), (meshes.dp, 0)):
        if mesh is not None and mesh.size() > 1:
            parts = [torch.empty_like(part) for _ in range(mesh.size())]
            dist.all_gather(parts, part.contiguous(), group=mesh.get_group())
            part = torch.cat(parts, dim=dim)
    return part


def whole_parameter(t: DTensor, meshes: Meshes) -> Tensor:
    """Like t.full_tensor(), in whose functional collectives ranks that share a GPU over gloo die of SIGSEGV (2.11)."""
    if meshes.dp.size() > 1:
        return t.full_tensor()
    placement = t.placements[-1]
    return whole(t.to_local(), meshes, placement.dim) if isinstance(placement, Shard) else t.to_local()


def judge(case: Case, found: dict[str, Tensor], fused: str, device: torch.device) -> Result:
    exact, floors = oracle_and_floors(case.recipe, case.batch, case.dp, device)
    errors = {name: error(found[name], value) for name, value in exact.items()}
    ratios = {name: errors[name] / floors[name] for name in errors}
    worst = max(ratios, key=lambda name: ratios[name] if ratios[name] == ratios[name] else float("inf"))
    planned = not case.asynchronous or fused == "forward 4/4, backward 4/4"
    weights = max(e for name, e in errors.items() if name not in ("logits", "input gradient"))
    ok = all(ratio <= ALLOWED[case.recipe] for ratio in ratios.values()) and planned  # A NaN is not <=.
    return Result(case, errors["logits"], errors["input gradient"], weights, ratios[worst], worst, fused, ok)


def run_cases(chosen: list[Case], device_type: str, folder: str) -> None:
    """The ranks' part: rank 0 writes a JSON line a case."""
    gpu = int(os.environ["LOCAL_RANK"]) if device_type == "nccl" else 0
    device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", gpu)
    kernels = symm_mem_on_cpu.install() if device.type == "cpu" else None
    results = Path(folder) / f"{dist.get_world_size()}.jsonl"
    for case in chosen:
        found, fused = run_case(case, device)
        if dist.get_rank() == 0:
            result = judge(case, found, fused, device)
            with results.open("a") as sink:
                sink.write(json.dumps(asdict(result)) + "\n")
            print(f"{'ok  ' if result.ok else 'MISS'} {result.ratio:.2f} {case}", file=sys.stderr, flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        for recipe in {case.recipe for case in chosen}:
            batch, dp = next((case.batch, case.dp) for case in chosen if case.recipe == recipe)
            _, floors = oracle_and_floors(recipe, batch, dp, device)
            (Path(folder) / f"floors {recipe}.json").write_text(json.dumps(floors))
    del kernels


# The table


def markdown(results: list[Result], floors: dict[str, dict[str, float]]) -> str:
    lines = ["| recipe | floor: logits | input gradient | weight gradients (largest) |", "| --- | --- | --- | --- |"]
    for recipe, floor in floors.items():
        weights = max(e for name, e in floor.items() if name not in ("logits", "input gradient"))
        lines.append(f"| {recipe} | {floor['logits']:.4f} | {floor['input gradient']:.4f} | {weights:.4f} |")
    lines += [
        "",
        "| recipe | AC | batch | TP | async | FSDP | mode | logits | input grad | weight grads | / floor | fused | |",
        "| --- " * 13 + "|",
    ]
    for r in results:
        c = r.case
        lines.append(
            f"| {c.recipe} | {c.ac} | {c.batch} | {c.tp} | {'on' if c.asynchronous else 'off'} | {c.dp} "
            f"| {'compiled' if c.compiled else 'eager'} | {r.output:.4f} | {r.input_grad:.4f} | {r.weight_grad:.4f} "
            f"| {r.ratio:.2f} | {r.fused} | {'ok' if r.ok else '**miss** ' + (r.problem or r.worst)} |"
        )
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    """The largest errors by recipe, ranks and mode, over checkpointing modes and batches."""
    groups: dict[tuple, list[Result]] = {}
    for r in results:
        c = r.case
        how = ("on" if c.asynchronous else "off", "compiled" if c.compiled else "eager")
        groups.setdefault((c.recipe, f"{c.tp} x {c.dp}", *how), []).append(r)
    lines = [
        "| recipe | TP x FSDP | async | mode | cases | logits | input grad | weight grads | / floor |",
        "| --- " * 9 + "|",
    ]
    for key, rows in sorted(groups.items()):
        largest = [max(getattr(r, n) for r in rows) for n in ("output", "input_grad", "weight_grad")]
        errors = " | ".join(f"{value:.4f}" for value in largest)
        lines.append(f"| {' | '.join(key)} | {len(rows)} | {errors} | {max(r.ratio for r in rows):.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small part of the matrix, in under two minutes")
    parser.add_argument("--device", choices=["cpu", "cuda", "nccl"], default="cpu", help="nccl: a GPU each")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, help="only these")
    parser.add_argument("--degrees", nargs="+", type=int, default=[1, 2, 4], help="only these degrees of TP")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ |= NO_MULTICAST
    start = time.monotonic()
    chosen = [
        case
        for case in cases(arguments.quick, arguments.device != "cpu")
        if case.recipe in arguments.recipes and case.tp in arguments.degrees
    ]
    if arguments.device == "nccl":
        gpus = torch.cuda.device_count()
        if gpus == 0:
            parser.error("--device nccl: there is no GPU here")
        print(f"{sum(case.tp > gpus for case in chosen)} cases need more than the {gpus} GPUs here, and are left out")
        chosen = [case for case in chosen if case.tp <= gpus]
    results, floors = run(chosen, arguments.device)
    print(markdown(results, floors), summary(results), sep="\n\n")
    missed = sum(not r.ok for r in results)
    print(f"\n{len(results) - missed} of {len(results)} cases are at their floor")
    for recipe in floors:
        largest = max(r.ratio for r in results if r.case.recipe == recipe)
        print(f"{recipe}: the largest error is {largest:.2f} floors; {ALLOWED[recipe]:.2f} are allowed")
    print(f"{time.monotonic() - start:.0f} s, torch {torch.__version__}, {arguments.device}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"results": [asdict(r) for r in results], "floors": floors}, indent=1))
    return 1 if missed else 0


def run(chosen: list[Case], device_type: str) -> tuple[list[Result], dict[str, dict[str, float]]]:
    """Runs the cases, one launch for each number of ranks. A launch that fails makes the cases it leaves misses."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({case.tp * case.dp for case in chosen}):
            part = [case for case in chosen if case.tp * case.dp == ranks]
            failure = ""
            try:
                launch(run_cases, ranks, part, device_type, folder, nccl=device_type == "nccl")
            except Exception as exception:  # Whatever it was, the other launches still have something to say.
                failure = str(exception).strip().splitlines()[-1][:200]
                print(exception, file=sys.stderr)
            file = Path(folder) / f"{ranks}.jsonl"
            done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            results += [Result(**{**entry, "case": Case(**entry["case"])}) for entry in done]
            nan = float("nan")
            results += [Result(c, nan, nan, nan, nan, "", "", False, failure) for c in part[len(done) :]]
        floors = {
            recipe: json.loads(path.read_text())
            for recipe in RECIPES
            if (path := Path(folder) / f"floors {recipe}.json").exists()
        }
    return results, floors


if __name__ == "__main__":
    sys.exit(main())
