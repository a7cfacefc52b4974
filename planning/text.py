"""A plan in words and tables, for people."""

from collections import Counter

from models.llama.parallelize import Applied, table
from planning.advice import Change
from planning.hardware import GIB, HEADROOM
from planning.plan import Plan


def plan_text(plan: Plan) -> str:
    mesh = " x ".join(f"{name} {size}" for name, size in plan.sizes.items())
    tensor_parallel = plan.sizes.get("tp", 1)
    lines = [
        f"{plan.world_size} ranks ({mesh}), of which each holds {plan.parameters / 4 / plan.num_params:.2%} of "
        f"{plan.num_params:,} parameters and computes {1 / tensor_parallel:.0%} of the sequences that it reads",
        "",
        table([Applied(*row) for row in plan.applied]),
        "",
        *memory_lines(plan),
        "",
        *traffic_lines(plan),
        "",
        *time_lines(plan),
        "",
        *matmul_lines(plan),
    ]
    return "\n".join(lines)


def memory_lines(plan: Plan) -> list[str]:
    lines = ["memory of a rank, GiB:  whole step" + "at the peak".rjust(16)]
    whole = {"parameters": plan.parameters, "gradients": plan.gradients, "optimizer": plan.optimizer}
    for kind, nbytes in plan.peak_by_kind.items():
        held = f"{whole[kind] / GIB:.2f}" if kind in whole else ""
        lines.append(f"  {kind:<18}{held:>14}{nbytes / GIB:>16.2f}")
    lines.append(f"  {'peak':<18}{'':>14}{plan.peak / GIB:>16.2f}  in {plan.peak_where}")
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    share = f"{plan.device_memory / GIB:.1f} GiB of {plan.gpu}, less {HEADROOM:.0%} for what is not a tensor"
    return [*lines, f"{verdict}: {plan.peak / GIB:.1f} of {plan.budget / GIB:.1f} GiB ({share})"]


def traffic_lines(plan: Plan) -> list[str]:
    lines = ["sent by a rank in a step:" + "calls".rjust(16) + "MiB".rjust(14)]
    for traffic in plan.traffic:
        lines.append(f"  {traffic.dim + ' ' + traffic.kind:<28}{traffic.calls:>11}{traffic.nbytes / 2**20:>14,.1f}")
    return lines if plan.traffic else ["sent by a rank in a step: nothing"]


def time_lines(plan: Plan) -> list[str]:
    guess = plan.estimate
    lines = [
        f"estimate of a step (roofline, {plan.gpu}): {guess.seconds * 1000:,.0f} ms, {plan.tokens_per_second:,.0f} "
        f"tokens/s a rank; bound by {guess.bound_by}"
    ]
    for kind, seconds in sorted(guess.by_kind.items(), key=lambda item: -item[1]):
        lines.append(f"  {kind:<28}{seconds * 1000:>11,.1f} ms")
    for dim, seconds in guess.communication.items():
        lines.append(f"  {'(all of ' + dim + ')':<28}{seconds * 1000:>11,.1f} ms")
    more = plan.hardware_flops_per_token / plan.model_flops_per_token
    lines.append(
        f"FLOPs a token: {plan.model_flops_per_token / 1e9:,.1f} G of the model, "
        f"{plan.hardware_flops_per_token / 1e9:,.1f} G computed ({more:.2f} x)"
    )
    return lines


def matmul_lines(plan: Plan) -> list[str]:
    if not plan.matmuls:
        return ["float8 matmuls: none"]
    by_scaling: Counter[str] = Counter()
    for matmul, count in plan.matmuls:
        by_scaling[matmul.scaling] += count
    found = ", ".join(f"{count} {scaling}" for scaling, count in by_scaling.items())
    lines = [f"float8 matmuls: {found}; row-wise is data (rows, columns) with scale (rows, 1)"]
    for matmul, count in plan.matmuls:
        right = ", ".join(f"{data} scale {scale}" for data, scale in matmul.right)
        lines.append(f"  {count:>5} x {matmul.op}: {matmul.left[0]} scale {matmul.left[1]} by {right}")
    return lines


def advice_text(changes: list[Change]) -> str:
    lines = ["tried:" + "GiB".rjust(12) + "tokens/s".rjust(12)]
    for change in changes:
        fits = "fits" if change.fits else "    "
        speed = f"{change.outline.tokens_per_second:,.0f}"
        lines.append(f"  {fits}{change.outline.peak / GIB:>12.1f}{speed:>12}  {change.flags}")
    if not any(change.fits for change in changes):
        lines.append("none of these, nor all of them together, fits: more GPUs, or a shorter training.seq_len")
    return "\n".join(lines)
