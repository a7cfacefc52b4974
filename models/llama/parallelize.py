"""Applies the techniques to a Llama, in the one order that works, and says what was asked for and what was applied."""

import functools
import types
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend

from errors import UserError
from float8.convert import Float8Config, Selection, convert_with_torchao, select_linears
from float8.scaled import ALIGNMENT, fast_accumulation
from models.llama.model import Llama, TransformerBlock
from parallelisms import flash_attention
from parallelisms.activation_checkpoint import ActivationCheckpointConfig, apply_activation_checkpointing
from parallelisms.async_tp import compare_with_plan, why_not_fused
from parallelisms.compile import CompileConfig, compile_blocks
from parallelisms.float8_gather import Float8Gather, gather_in_float8
from parallelisms.fsdp import Sharding, apply_fsdp
from parallelisms.linear_loss import CHUNK_ELEMENTS, HeadLoss, loss_and_gradient, scaled
from parallelisms.linears import Linears, local_weight, take_local_weights
from parallelisms.mesh import Meshes, ParallelismConfig
from parallelisms.one_shard import cast_weights
from parallelisms.tensor_parallel import split_embedding, split_norm_tokens, split_parameter
from parallelisms.tp_ops import Collective

# Of each part of a block: the linears that share its input, and the one that writes to the residual stream.
PARTS = [("attention", "wq wk wv", "wo"), ("feed_forward", "w1 w3", "w2")]


@dataclass(frozen=True)
class Applied:
    """One row of the table: a technique, what the configuration asked for, what the model got."""

    technique: str
    asked: str
    applied: str


def parallelize_llama(
    model: Llama,
    meshes: Meshes,
    *,
    parallelism: ParallelismConfig,
    float8: Float8Config,
    activation_checkpoint: ActivationCheckpointConfig,
    compile: CompileConfig,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
    micro_batches: int = 1,
    any_gradient: bool = False,
) -> list[Applied]:
    """float8 and tensor parallel -> activation checkpointing -> compile -> FSDP, on a model still on the meta device.

    micro_batches: forward and backward passes of a step; any_gradient: the optimizer takes those of `param_dtype` too.
    Raises UserError where something asked for would apply to nothing.
    """
    selection = select_linears(model, float8)
    linears_rows = [
        Applied("float8", float8.recipe_name or "none", f"{len(selection.chosen)} linear layers"),
        *left_out(selection),
    ]
    # With resharding FSDP2 frees weights between their uses; torchao's linears take the weights that FSDP2 gives them.
    one_shard = meshes.fsdp.size() == 1 and not cpu_offload and parallelism.fsdp_reshard_after_forward != "always"
    one_shard = one_shard and not (selection.chosen and float8.backend_of_recipe == "torchao")
    if selection.chosen and float8.backend_of_recipe == "torchao":
        convert_with_torchao(model, float8, selection.chosen)
    elif selection.chosen or meshes.tp is not None or one_shard:
        fast_accumulation(float8.fast_accumulation)
        linears_rows += replace_linears(model, meshes, parallelism, float8.recipe_name, selection)

    attention_rows = put_flash_attention(model, meshes, param_dtype)
    loss_row = put_loss(model, meshes.tp, compile, "output" in selection.chosen)
    blocks = len(model.layers)
    checkpointed = apply_activation_checkpointing(model.layers, activation_checkpoint)
    compiled = compile_blocks(model.layers, compile)
    if meshes.tp is not None and not one_shard:
        for block in model.layers:
            take_local_weights(block)
    gathers: list[Float8Gather] = []
    if selection.chosen and float8.backend_of_recipe == "rowhouse":
        gathers = [] if cpu_offload else float8_gathers(model, selection, meshes.fsdp.size(-1))
        applied = f"{sum(len(gather.linears) for gather in gathers)} of {len(selection.chosen)} linear layers"
        why_not = "CPU offload" if cpu_offload else "rows that the shards do not divide"
        if not gathers:
            applied += f": {why_not}"
        how = "quantised before a block" if one_shard else "gathered by FSDP2 in float8"
        linears_rows.append(Applied(f"  {how}", "", applied))
    grad_dtype = param_dtype if one_shard and any_gradient and micro_batches == 1 else torch.float32
    if one_shard:
        cast_weights(
            model,
            param_dtype,
            gathers,
            is_compiled=compiled > 0,
            micro_batches=micro_batches,
            grad_dtype=grad_dtype,
        )
        sharding = Sharding(0, 0, 0.0, 0.0)
    else:
        sharding = apply_fsdp(
            model,
            meshes.fsdp,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            reshard_after_forward=parallelism.fsdp_reshard_after_forward,
            cpu_offload=cpu_offload,
            in_float8=[linear.weight for gather in gathers for linear in gather.linears],
        )
        gather_in_float8(model, gathers)
    if compile.enable and "model" in compile.components and compiled == 0:
        raise UserError("compile.components: model compiled no block")

    ac = activation_checkpoint
    asked_ac = {"selective": f"selective, {ac.selective_ac_option}", "memory_budget": f"budget {ac.memory_budget}"}
    shards, replicas = meshes.fsdp.size(-1), meshes.fsdp.size() // meshes.fsdp.size(-1)
    asked_precision = f"{dtype_name(param_dtype)}, reduced in {dtype_name(reduce_dtype)}"
    gathered, reduced = (f"{n / 2**20:,.1f} MiB" for n in (sharding.all_gather_bytes, sharding.reduce_bytes))
    offload = [Applied("  CPU offload", "on", f"{sharding.units} units")] if cpu_offload else []
    return [
        *linears_rows,
        Applied("activation checkpointing", asked_ac.get(ac.mode, ac.mode), f"{checkpointed} of {blocks} blocks"),
        Applied("compile", " + ".join(compile.components) if compile.enable else "off", f"{compiled} blocks"),
        *attention_rows,
        loss_row,
        Applied(
            "FSDP2",
            f"{shards} shards x {replicas} replicas",
            "none: one shard" if one_shard else f"{sharding.units} units",
        ),
        Applied("  precision", asked_precision, f"master weights float32, gradients {dtype_name(grad_dtype)}"),
        Applied("  reshard after forward", parallelism.fsdp_reshard_after_forward, f"{sharding.resharded} units"),
        Applied("  sent by a rank per micro-batch", "", f"{gathered} gathering, {reduced} reducing"),
        *offload,
    ]


def left_out(selection: Selection) -> list[Applied]:
    names_by_reason: dict[str, list[str]] = {}
    for name, why in selection.left.items():
        names_by_reason.setdefault(why, []).append(name)
    return [Applied("  left out", why, f"{len(names)}: {summary(names)}") for why, names in names_by_reason.items()]


def replace_linears(
    model: Llama, meshes: Meshes, parallelism: ParallelismConfig, recipe: str | None, selection: Selection
) -> list[Applied]:
    """Puts Rowhouse's own linears in the place of the plain ones, tensor parallel where there is a mesh for it."""
    tp = meshes.tp
    group = "" if tp is None else tp.get_group().group_name
    rows = []
    fused = False
    if tp is not None:
        rows.append(Applied("tensor parallel", f"degree {tp.size()}", f"{len(model.layers)} blocks, embedding, head"))
        if parallelism.enable_async_tensor_parallel:
            reason = why_not_fused(tp, float8=recipe is not None)
            if reason and parallelism.async_tensor_parallel_strict:
                raise UserError(
                    f"parallelism.enable_async_tensor_parallel: {reason}: turn it off, or turn "
                    "parallelism.async_tensor_parallel_strict off to take plain collectives"
                )
            fused = not reason
            rows.append(Applied("  async TP", "on", "fused collectives" if fused else f"plain collectives: {reason}"))

    def recipe_of(names: list[str]) -> str | None:
        chosen = [name for name in names if name in selection.chosen]
        if chosen and len(chosen) < len(names):
            raise UserError(
                f"float8.filter_fqns: {', '.join(n for n in names if n not in chosen)} would be left out, but "
                f"{', '.join(chosen)} not: they share one quantised input: name all of them or none, or take "
                'float8.backend "torchao"'
            )
        return recipe if chosen else None

    for i, block in enumerate(model.layers):
        for part, column, row in PARTS:
            prefix = f"layers.{i}.{part}."
            getattr(block, part).linears = Linears(
                column_recipe=recipe_of([prefix + name for name in column.split()]),
                row_recipe=recipe_of([prefix + row]),
                group=group,
                fused=fused,
            )
    head = Linears(column_recipe=recipe_of(["output"]), row_recipe=None, group=group, fused=fused)
    if model.output is None:
        tied = lambda self, x: head.column("output", x, self.tok_embeddings)[0]  # noqa: E731
        model.head = types.MethodType(tied, model)  # type: ignore[method-assign]
    else:
        own = lambda self, x: head.column("output", x, self)[0]  # noqa: E731
        model.output.forward = types.MethodType(own, model.output)  # type: ignore[method-assign]
    if tp is not None:
        split_parameters(model, tp)
        for name in selection.chosen:
            check_alignment(name, local_weight(model.get_submodule(name)).shape, tp.size())
    return rows


def float8_gathers(model: Llama, selection: Selection, shards: int) -> list[Float8Gather]:
    """The linears in float8 that share an input, where FSDP2 divides all their rows evenly among its shards."""
    groups: list[list[nn.Linear]] = []
    if model.output is not None and "output" in selection.chosen:
        groups.append([model.output])
    for i, block in enumerate(model.layers):
        for part, column, row in PARTS:
            for names in (column.split(), [row]):
                if f"layers.{i}.{part}.{names[0]}" in selection.chosen:
                    groups.append([getattr(getattr(block, part), name) for name in names])
    outs = [[local_weight(linear).shape[0] for linear in linears] for linears in groups]
    return [
        Float8Gather(linears, sizes)
        for linears, sizes in zip(groups, outs, strict=True)
        if all(size % shards == 0 for size in sizes)
    ]


def put_flash_attention(model: Llama, meshes: Meshes, dtype: torch.dtype) -> list[Applied]:
    """Has the blocks attend by FlashAttention 4 where it is installed. What is not installed nobody asked for."""
    package = flash_attention.installed()
    if not package:
        return []
    ranks, shape = 1 if meshes.tp is None else meshes.tp.size(), model.shape
    heads, kv_heads = shape.n_heads // ranks, shape.n_kv_heads // ranks
    device = meshes.whole.device_type
    why_not = flash_attention.why_not_activated(heads, kv_heads, shape.head_dim, dtype, device)
    for block in [] if why_not else model.layers:
        assert isinstance(block, TransformerBlock)
        block.attention.backends = [SDPBackend.FLASH_ATTENTION]
    return [Applied("attention", package, f"torch's: {why_not}" if why_not else f"{len(model.layers)} blocks")]


def put_loss(model: Llama, tp: DeviceMesh | None, compile: CompileConfig, head_is_float8: bool) -> Applied:
    """Has the model's head make the loss of the logits, and not need them whole where it multiplies in bf16."""
    compiled = compile.enable and "loss" in compile.components
    compiler = functools.partial(torch.compile, backend=compile.backend, fullgraph=True)
    loss = HeadLoss(
        compiler(loss_and_gradient) if compiled else loss_and_gradient,
        compiler(scaled, dynamic=False) if compiled else scaled,
        rank=0 if tp is None else tp.get_local_rank(),
        group="" if tp is None else tp.get_group().group_name,
    )
    linear = model.tok_embeddings if model.output is None else model.output
    head = model.head if model.output is None else model.output.forward

    def forward(self: nn.Module, x: Tensor, labels: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        if labels is None:
            return head(x)
        assert count is not None
        if head_is_float8:
            return loss.of_logits(head(x), labels, count)
        return loss.of_linear(x, local_weight(linear), labels, count)

    # FSDP gathers the head's weight for a call of the module; a tied one belongs to the whole model.
    if model.output is None:
        model.head_loss = types.MethodType(forward, model)  # type: ignore[method-assign]
    else:
        model.output.forward = types.MethodType(forward, model.output)  # type: ignore[method-assign]
        model.head_loss = model.output.__call__  # type: ignore[method-assign]
    chunks = "of whole logits" if head_is_float8 else f"chunks of {CHUNK_ELEMENTS // linear.weight.shape[0]:,} tokens"
    return Applied("loss", "compiled" if compiled else "eager", chunks)


def split_parameters(model: Llama, tp: DeviceMesh) -> None:
    """Makes the model's parameters DTensors over the tensor parallel ranks, and its norms and embedding take shares."""
    for block in model.layers:
        assert isinstance(block, TransformerBlock)
        for part, column, row in PARTS:
            for name in column.split():
                split_parameter(getattr(getattr(block, part), name), tp, Shard(0))
            split_parameter(getattr(getattr(block, part), row), tp, Shard(1))
        split_norm_tokens(block.attention_norm, tp)
        split_norm_tokens(block.ffn_norm, tp)
    split_norm_tokens(model.norm, tp)
    split_embedding(model.tok_embeddings, tp)
    if model.output is not None:
        split_parameter(model.output, tp, Shard(0))


def collectives_table(
    collectives: list[Collective], model: Llama, micro_batches: int, parallelism: ParallelismConfig
) -> list[Applied]:
    """What one step's tensor parallel collectives were. Raises UserError in strict mode if planned ones are missing."""
    found = compare_with_plan(collectives, len(model.layers) * micro_batches)
    if found.missing and parallelism.async_tensor_parallel_strict:
        raise UserError(
            f"parallelism.async_tensor_parallel_strict: not fused in every block: {', '.join(found.missing)}: turn "
            "parallelism.async_tensor_parallel_strict off to go on without"
        )
    fused = found.fused.items() if parallelism.enable_async_tensor_parallel else ()
    return [
        *(Applied(f"fused per block, {name}", "4 of 4", f"{count:g} of 4") for name, count in fused),
        Applied("run again by recomputation", "", f"{found.recomputed:g} per block"),
        Applied("sent by a rank per micro-batch", "", f"{found.sent / micro_batches / 2**20:,.1f} MiB"),
    ]


def check_alignment(name: str, shape: torch.Size, tp: int) -> None:
    if shape[0] % ALIGNMENT or shape[1] % ALIGNMENT:
        raise UserError(
            f"float8.recipe_name: {name} split over {tp} ranks is {shape[0]} x {shape[1]}, not a multiple of "
            f"{ALIGNMENT}: lower parallelism.tensor_parallel_degree, or name the layer in float8.filter_fqns"
        )


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
