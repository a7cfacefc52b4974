"""Applies the techniques to a Llama, in the one order that works, and says what was asked for and what was applied."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from errors import UserError
from float8.convert import Float8Config, convert_linears
from models.llama.model import Llama
from parallelisms.activation_checkpoint import ActivationCheckpointConfig, apply_activation_checkpointing
from parallelisms.compile import CompileConfig, compile_blocks
from parallelisms.fsdp import apply_fsdp
from parallelisms.mesh import ParallelismConfig


@dataclass(frozen=True)
class Applied:
    """One row of the table: a technique, what the configuration asked for, what the model got."""

    technique: str
    asked: str
    applied: str


def parallelize_llama(
    model: Llama,
    mesh: DeviceMesh,
    *,
    parallelism: ParallelismConfig,
    float8: Float8Config,
    activation_checkpoint: ActivationCheckpointConfig,
    compile: CompileConfig,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
) -> list[Applied]:
    """float8 -> activation checkpointing -> compile -> FSDP, on a model that is still on the meta device.

    Raises UserError where something asked for would apply to nothing.
    """
    blocks = len(model.layers)
    conversion = convert_linears(model, float8)
    checkpointed = apply_activation_checkpointing(model.layers, activation_checkpoint)
    compiled = compile_blocks(model.layers, compile)
    sharding = apply_fsdp(
        model,
        mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        cpu_offload=cpu_offload,
    )
    if compile.enable and "model" in compile.components and compiled == 0:
        raise UserError("compile.components: model compiled no block")

    ac = activation_checkpoint
    asked_ac = {"selective": f"selective, {ac.selective_ac_option}", "memory_budget": f"budget {ac.memory_budget}"}
    left: dict[str, list[str]] = {}
    for name, why in conversion.left.items():
        left.setdefault(why, []).append(name)
    shards, replicas = mesh.size(-1), mesh.size() // mesh.size(-1)
    asked_precision = f"{dtype_name(param_dtype)}, reduced in {dtype_name(reduce_dtype)}"
    gathered, reduced = (f"{n / 2**20:,.1f} MiB" for n in (sharding.all_gather_bytes, sharding.reduce_bytes))
    offload = [Applied("  CPU offload", "on", f"{sharding.units} units")] if cpu_offload else []
    return [
        Applied("float8", float8.recipe_name or "none", f"{len(conversion.converted)} linear layers"),
        *(Applied("  left out", why, f"{len(names)}: {summary(names)}") for why, names in left.items()),
        Applied("activation checkpointing", asked_ac.get(ac.mode, ac.mode), f"{checkpointed} of {blocks} blocks"),
        Applied("compile", " + ".join(compile.components) if compile.enable else "off", f"{compiled} blocks"),
        Applied("FSDP2", f"{shards} shards x {replicas} replicas", f"{sharding.units} units"),
        Applied("  precision", asked_precision, "master weights float32"),
        Applied("  reshard after forward", parallelism.fsdp_reshard_after_forward, f"{sharding.resharded} units"),
        Applied("  sent by a rank per micro-batch", "", f"{gathered} gathering, {reduced} reducing"),
        *offload,
    ]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def summary(names: list[str]) -> str:
    """A few names in full, many as the first and the last."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"


def table(rows: list[Applied]) -> str:
    """The rows as aligned text."""
    cells = [("", "asked for", "applied"), *((r.technique, r.asked, r.applied) for r in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
