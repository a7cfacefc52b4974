"""Several GPUs of one host: speed, exposed communication, bytes on the wire and memory, next to torchtitan.

    python -m scripts.bench_parallel                            # every case, on all GPUs that are there
    python -m scripts.bench_parallel --gpus 1 2 4 8             # ... and how FSDP scales up to them
    python -m scripts.bench_parallel --cases '*/async-tp/*' --repeats 1 --json async.json --picture async.png
    python -m scripts.bench_parallel --check                    # on two CPU ranks: is it counted right?

A case is BY/RECIPE/PARALLEL/AC/GPUS. By Rowhouse, or by torchtitan 0.2.2 where it is installed, in turn: its row-wise
float8 is the stock plan. The model is as wide as Llama 3 8B, sequences are of 8192 tokens, two a data parallel rank;
tensor parallelism is over all GPUs of the case. Each run has processes of its own, one a GPU: steps to compile and warm
up, timed ones, and two in torch's profiler, whose trace of rank 0 tells the communication (scripts/overlap.py). What
fails or hangs is a row that says so.
"""

import argparse
import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from config import load_config
from errors import UserError, leave
from models.llama.shapes import FLAVORS
from scripts import bench_torchtitan, parallel_check
from scripts.bench import PROFILED, ROOT, TITAN_FLOAT8, TITAN_ROWWISE, last_loss, run_steps, timed, training
from scripts.local_ranks import NO_MULTICAST, free_port
from scripts.overlap import Communication, communication, draw, read_trace
from scripts.parallel_results import Case, Row, Run, goals, table
from telemetry.memory import GIB, peak_memory

RECIPES, PARALLELS, MODES = ["bf16", "tensorwise", "rowwise"], ["fsdp", "tp", "async-tp"], ["full", "selective"]
SEQ_LEN, SEQUENCES = 8192, 2
PEERS_PATIENCE = 10.0  # Seconds in which the ranks beside one that failed may say why, too.
TRACES = ROOT / "outputs" / "bench_parallel"

# What a case trains


def all_cases(gpus: list[int]) -> list[Case]:
    """Everything on the largest number of GPUs, by Rowhouse and torchtitan in turn; on fewer Rowhouse's FSDP."""
    most = max(gpus)
    cases = [
        Case(by, recipe, parallel, ac, most)
        for ac, parallel, recipe, by in product(MODES, PARALLELS, RECIPES, ("rowhouse", "torchtitan"))
    ]
    fewer = sorted(set(gpus) - {most})
    return cases + [Case("rowhouse", r, "fsdp", ac, n) for ac, n, r in product(MODES, fewer, ("bf16", "rowwise"))]


def layers_that_fit(memory: int, gpus: int) -> int:
    """Layers of the 8B model that a GPU of so many bytes holds its part of; all 32 at most.

    With selective checkpointing, which keeps the most: a layer's input, q, k, the attention's output and one half of
    SwiGLU in bf16. 15 % of the memory and 8 GiB are left to gathered weights, logits and the allocator.
    """
    shape = FLAVORS["8B"]
    kv = shape.n_kv_heads * shape.head_dim
    layer = 2 * shape.dim * shape.dim + 2 * shape.dim * kv + 3 * shape.dim * shape.hidden_dim
    kept = 2 * (3 * shape.dim + kv + shape.hidden_dim) * SEQUENCES * SEQ_LEN
    state = 16 / gpus  # Bytes a parameter: weight, gradient and two moments in float32.
    room = 0.85 * memory - 8 * GIB - state * 2 * shape.vocab_size * shape.dim
    return max(1, min(shape.n_layers, int(room / (state * layer + kept))))


def rowhouse_flags(case: Case, layers: int, on_gpu: bool) -> str:
    if on_gpu:
        flags = f"--config llama8b.toml --training.seq_len {SEQ_LEN} --training.local_batch_size {SEQUENCES}"
    else:
        flags = parallel_check.FLAGS
    flags += f" --model.n_layers {layers} --activation_checkpoint.mode {case.ac}"
    if case.recipe != "bf16":
        flags += f" --float8.recipe_name {case.recipe}"
    if case.parallel != "fsdp":
        flags += f" --parallelism.tensor_parallel_degree {case.gpus}"
    if case.parallel == "async-tp":
        # On a GPU plain collectives in its place would be another case.
        strict = str(on_gpu).lower()
        flags += " --parallelism.enable_async_tensor_parallel true"
        flags += f" --parallelism.async_tensor_parallel_strict {strict}"
    return flags


def torchtitan_flags(case: Case) -> str:
    """The recipes as its documentation recommends them. Its last steps are profiled."""
    last = bench_torchtitan.STEPS + 2 + PROFILED
    flags = f"--training.steps {last} --profiling.enable_profiling --profiling.profile_freq {last}"
    flags += f" --profiling.profiler_active {PROFILED} --profiling.profiler_warmup 1"
    flags += f" --training.local_batch_size {SEQUENCES} --activation_checkpoint.mode {case.ac}"
    if case.recipe == "tensorwise":
        flags += f" {TITAN_FLOAT8} --quantize.linear.float8.enable_fsdp_float8_all_gather"
        flags += " --quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    elif case.recipe == "rowwise":
        flags += f" {TITAN_ROWWISE}"
    if case.parallel != "fsdp":
        flags += f" --parallelism.tensor_parallel_degree {case.gpus} --training.dtype bfloat16"
    if case.parallel == "async-tp":
        flags += " --parallelism.enable_async_tensor_parallel"
    return flags


def note_on(case: Case) -> str:
    if case.by == "torchtitan" and case.parallel != "fsdp":
        return "weights and moments in bf16 too: it has no mixed precision without FSDP"
    return ""


def refusal(case: Case, layers: int, on_gpu: bool) -> str:
    """Why the case is not tried; empty where it is."""
    if case.parallel != "fsdp" and case.gpus == 1:
        return "tensor parallelism needs two GPUs"
    if case.by == "torchtitan":
        return "" if find_spec("torchtitan") else "torchtitan is not installed (pip install torchtitan==0.2.2)"
    try:
        load_config(rowhouse_flags(case, layers, on_gpu).split(), case.gpus)
    except UserError as error:
        return " ".join(str(error).split()).rpartition("command line: ")[2]
    return ""


# One run


class RunFailed(Exception):
    """A sentence for the table."""


def run_case(case: Case, layers: int, limit: float, on_gpu: bool, keep: Path | None = None) -> Run:
    """Runs the case once, and keeps its trace as `keep` where that is given. Raises RunFailed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.by == "torchtitan":
            bench_torchtitan.prepare(folder)
            command = [sys.executable, bench_torchtitan.__file__, "--job.config_file", "bench.toml"]
            command += torchtitan_flags(case).split()
            run_ranks(command, case.gpus, limit, folder, env={"BENCH_LAYERS": str(layers)}, cwd=folder)
            try:
                found = bench_torchtitan.result_of((folder / "output.0").read_text())
            except ValueError as error:
                raise RunFailed("failed: its log tells no speed") from error
        else:
            flags = rowhouse_flags(case, layers, on_gpu)
            command = [sys.executable, "-m", "scripts.bench_parallel", "--measure", name, flags]
            run_ranks(command, case.gpus, limit, folder, env={} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
            found = json.loads((folder / "result.json").read_text())
        traces = [*folder.glob("trace.json.gz"), *folder.glob("outputs/profile_traces/*/rank0_trace.json")]
        if traces:
            told = communication(read_trace(traces[0]), PROFILED, case.gpus)
        else:
            told = Communication(None, None, None, None, 0, "no trace was written")
        if traces and keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            keep.write_bytes(traces[0].read_bytes())
    return Run(found["tokens_per_second"], found["gib"], found["loss"], layers, told)


def run_ranks(
    command: list[str], ranks: int, limit: float, folder: Path, env: dict[str, str], cwd: Path = ROOT
) -> None:
    """Runs `command` once a rank, as torchrun would; what rank i prints goes to output.i in `folder`.

    Raises RunFailed where a rank fails, and after `limit` seconds. No rank is left behind.
    """
    shared = os.environ | NO_MULTICAST | env
    shared |= {"OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    started: list[subprocess.Popen] = []
    end = time.monotonic() + limit
    try:
        for rank in range(ranks):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # One process group for all, to end them and what they start.
            group = started[0].pid if started else 0
            with (folder / f"output.{rank}").open("w") as output:
                started.append(
                    subprocess.Popen(command, cwd=cwd, env=own, stdout=output, stderr=output, process_group=group)
                )
        while time.monotonic() < end and any(process.poll() is None for process in started):
            if any(process.poll() for process in started):
                end = min(end, time.monotonic() + PEERS_PATIENCE)
            time.sleep(0.1)
        if status := next((status for process in started if (status := process.poll())), 0):
            outputs = [(folder / f"output.{rank}").read_text(errors="replace") for rank in range(ranks)]
            raise RunFailed(why_failed(outputs, status))
        if any(process.poll() is None for process in started):
            raise RunFailed(f"ended after {limit:.0f} s: it hung, or is slow")
    finally:
        if any(process.poll() is None for process in started):
            os.killpg(started[0].pid, signal.SIGKILL)
        for process in started:
            process.wait()


def why_failed(outputs: list[str], status: int) -> str:
    """The exception that the ranks' outputs tell of; not that another rank went away, where one says more."""
    exception = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)", re.MULTILINE)
    told = [text.removeprefix("errors.UserError: ") for output in outputs for text in exception.findall(output)]
    own = [text for text in told if not re.search(r"onnection|DistBackendError|DistNetworkError|peer|gloo", text)]
    last = [output.strip().splitlines()[-1] for output in outputs if output.strip()]
    return f"failed with status {status}: {[*own, *told, *last, 'it printed nothing'][0][:300]}"


def measure(folder: Path, flags: str) -> None:
    """A rank's part of a run of Rowhouse. Rank 0 writes the result and its trace to `folder`."""
    with training(flags) as trainer:
        _, seconds = timed(trainer)
        memory = peak_memory(trainer.device)
        on_device = [ProfilerActivity.CUDA] if trainer.device.type == "cuda" else []
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, *on_device], record_shapes=True) as profiler:
            run_steps(trainer, PROFILED)
        sequences = trainer.config.training.lanes(trainer.dp_degree)
        tokens = trainer.config.training.seq_len * sequences / trainer.world_size
        if trainer.rank == 0:
            profiler.export_chrome_trace(str(folder / "trace.json.gz"))
            result = {
                "tokens_per_second": tokens / statistics.median(seconds),
                "gib": memory.gib,
                "loss": last_loss(trainer),
            }
            (folder / "result.json").write_text(json.dumps(result))
        dist.barrier()


# All of them


def run_all(rows: list[Row], repeats: int, layers: int, limit: float, on_gpu: bool, file: Path | None) -> int:
    """Runs the rows' cases in turn, so often, and puts into the rows what came of it. Returns how many cases failed."""
    failures = 0
    for row in rows:
        row.problem, row.note = refusal(row.case, layers, on_gpu), note_on(row.case)
    for repeat in range(1, repeats + 1):
        for row in rows:
            if row.problem:
                continue
            try:
                row.runs.append(run_case(row.case, layers, limit, on_gpu, trace_of(row.case) if on_gpu else None))
                print(f"{repeat}: {row.case}: {row.runs[-1].tokens_per_second:,.0f} tokens/s a GPU", flush=True)
            except RunFailed as error:
                row.problem = f"{error}{f' (run {repeat})' if row.runs else ''}"
                print(f"{repeat}: {row.case}: {row.problem}", flush=True)
                failures += 1
            write(rows, file)
    write(rows, file)
    return failures


def write(rows: list[Row], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(as_json(rows), indent=1))


def trace_of(case: Case) -> Path | None:
    """Where the trace is kept: of async TP in row-wise float8."""
    is_kept = (case.by, case.recipe, case.parallel) == ("rowhouse", "rowwise", "async-tp")
    return TRACES / f"{str(case).replace('/', '-')}.json.gz" if is_kept else None


def as_json(rows: list[Row]) -> dict:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {"device": device, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    return {**about, "goals": [str(goal) for goal in goals(rows)], "rows": [row.as_json() for row in rows]}


def report(rows: list[Row], picture: Path | None, on_gpu: bool) -> None:
    """The goals, the traces, the picture, and last the table."""
    if on_gpu:
        print("\nGoals:", *(f"- {goal}" for goal in goals(rows)), sep="\n")
    traces = [(row.case, path) for row in rows if row.runs and on_gpu and (path := trace_of(row.case)) is not None]
    for case, path in traces:
        print(f"\nRank 0's trace of {case}, for https://ui.perfetto.dev: {path}")
    if picture is not None:
        try:
            if not traces:
                raise ValueError("no run of Rowhouse's row-wise float8 with async TP left a trace")
            case, path = traces[-1]
            draw(read_trace(path), picture, f"One block, forward, of {case}")
            print(f"\nOne block of {case}: {picture}")
        except ValueError as error:
            print(f"\n--picture: {picture} is not drawn: {error}")
    print(f"\n{', '.join(str(value) for value in list(as_json(rows).values())[:3])}\n\n{table(rows)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], epilog="See the beginning of scripts/bench_parallel.py."
    )
    parser.add_argument("--gpus", type=int, nargs="+", metavar="N", help="numbers of GPUs (default: all of this host)")
    parser.add_argument("--cases", nargs="+", metavar="PATTERN", default=["*"], help="only these, as the shell matches")
    parser.add_argument("--layers", type=int, metavar="N", help="of the model (default: as many as fit, 32 at most)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of all cases in turn (default: 3)")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of one run (default: 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all results")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a PNG: one block of async TP in row-wise float8")
    parser.add_argument("--matrix", action="store_true", help="scripts.scale_shape_matrix too, over NCCL")
    parser.add_argument("--check", action="store_true", help="on two CPU ranks: whether the counting is right")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "FLAGS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        logging.disable(logging.INFO)
        measure(Path(args.measure[0]), args.measure[1])
        leave(0)
    try:
        return check(args) if args.check or not torch.cuda.is_available() else bench(args)
    except UserError as error:
        print(f"bench_parallel: {error}", file=sys.stderr)
        return 2


def bench(args: argparse.Namespace) -> int:
    """Exit status 1 if a case or the matrix failed; a goal that is missed is no failure."""
    there = torch.cuda.device_count()
    gpus = args.gpus or [there]
    if min(gpus) < 1 or max(gpus) > there:
        raise UserError(f"--gpus: {min(gpus) if min(gpus) < 1 else max(gpus)} cannot be had: {there} are here")
    if args.repeats < 1 or args.limit <= 0 or (args.layers is not None and args.layers < 1):
        raise UserError("--repeats, --limit and --layers: give 1 or more")
    cases = [case for case in all_cases(gpus) if any(fnmatch(str(case), pattern) for pattern in args.cases)]
    if not cases:
        raise UserError(f"--cases: no case is like {' '.join(args.cases)}; one is {all_cases(gpus)[0]}")
    memory = torch.cuda.get_device_properties(0).total_memory
    layers = args.layers or layers_that_fit(memory, min(case.gpus for case in cases))
    status = 0
    if args.matrix:
        command = [sys.executable, "-m", "scripts.scale_shape_matrix", "--device", "nccl"]
        status = subprocess.run(command, cwd=ROOT, env=os.environ | NO_MULTICAST).returncode
    rows = [Row(case) for case in cases]
    print(f"{len(rows)} cases, {args.repeats} times, {layers} layers as wide as 8B's", flush=True)
    # A run that is ended by a signal tells what it has.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        failures = run_all(rows, args.repeats, layers, args.limit, True, args.json)
    finally:
        report(rows, args.picture, True)
    return 1 if status or failures else 0


def check(args: argparse.Namespace) -> int:
    """Runs what gloo can on two ranks, and compares what is counted with formulas. Exit status 1 if it differs."""
    if not torch.cuda.is_available():
        print("There is no GPU here: speed and exposed communication cannot be measured. Whether it is counted right:")
    given = {"--gpus": args.gpus, "--layers": args.layers, "--picture": args.picture, "--matrix": args.matrix}
    if unused := [flag for flag, value in given.items() if value]:
        print(f"{', '.join(unused)}: for GPUs, and not applied")
    rows = [Row(case) for case in parallel_check.CASES]
    failures = run_all(rows, 1, parallel_check.LAYERS, args.limit, False, args.json)
    found = [parallel_check.of_intervals(), *(parallel_check.of_bytes(row) for row in rows if row.runs)]
    print(*(f"{'right' if is_right else 'WRONG'}: {what}" for what, is_right in found), sep="\n")
    report(rows, None, False)
    return 1 if failures or not all(is_right for _, is_right in found) else 0


if __name__ == "__main__":
    sys.exit(main())
