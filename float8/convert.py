"""Which linear layers compute in float8, with which recipe, and by whom: Rowhouse itself or torchao."""

import logging
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch._inductor.config
from torch import nn

from errors import UserError
from float8.scaled import ALIGNMENT


@dataclass(frozen=True)
class Float8Config:
    """float8 matmuls in the linear layers."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """One scale a tensor; one a row; one a row but the weight gradient in bf16; none: no float8."""
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])
    """Linear layers whose name contains one of these stay as they are. Each must match something."""
    backend: Literal["auto", "rowhouse", "torchao"] = "auto"
    """Who computes: auto is rowhouse for the row-wise recipes and torchao for tensorwise."""
    fast_accumulation: bool = True
    """Matmuls accumulate fast and less exactly: an error of 0.3 % beside float8's own 4 %. Of backend rowhouse."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.recipe_name == "tensorwise" and self.backend == "rowhouse":
            found.append(("backend", 'rowhouse has row-wise recipes only; take "auto", or recipe_name "rowwise"'))
        if not self.fast_accumulation and (self.recipe_name is None or self.backend_of_recipe != "rowhouse"):
            text = "only the row-wise recipes of backend rowhouse can do without it; leave it true, or take one of them"
            found.append(("fast_accumulation", text))
        return found

    @property
    def backend_of_recipe(self) -> str:
        """rowhouse or torchao."""
        by_recipe = "torchao" if self.recipe_name == "tensorwise" else "rowhouse"
        return by_recipe if self.backend == "auto" else self.backend


@dataclass(frozen=True)
class Selection:
    """What becomes of each linear layer: names in float8; names left alone, with why."""

    chosen: list[str]
    left: dict[str, str]


def select_linears(model: nn.Module, config: Float8Config) -> Selection:
    """The model's linear layers that the configuration puts in float8.

    Raises UserError where a filter matches nothing, where nothing is left to convert, and where the GPU has no float8.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if config.recipe_name is None:
        return Selection([], {})
    # A tied head is the embedding's weight: never float8, so a filter that names it has its way.
    tied = ["output"] if getattr(model, "output", model) is None else []
    for pattern in config.filter_fqns:
        if not any(pattern in name for name in [*linears, *tied]):
            raise UserError(
                f'float8.filter_fqns: "{pattern}" matches none of the linear layers '
                f"({', '.join(sorted({n.split('.')[-1] for n in linears}))}): correct or remove it"
            )
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        raise UserError(
            f"float8.recipe_name: {torch.cuda.get_device_name()} has no float8 matmul (compute capability 8.9 or "
            "newer is needed): set it to none"
        )
    left = {}
    for name, linear in linears.items():
        matches = [pattern for pattern in config.filter_fqns if pattern in name]
        if matches:
            left[name] = f'filter "{matches[0]}"'
        elif linear.in_features % ALIGNMENT or linear.out_features % ALIGNMENT:
            left[name] = f"{linear.in_features} x {linear.out_features} is not a multiple of {ALIGNMENT}"
    if len(left) == len(linears):
        raise UserError(
            f"float8.recipe_name: {config.recipe_name} applies to no layer; all are left out: "
            f"{'; '.join(sorted(set(left.values())))}: change float8.filter_fqns or set float8.recipe_name to none"
        )
    chosen = [name for name in linears if name not in left]
    return Selection(chosen, left | dict.fromkeys(tied, "tied to the embedding"))


def convert_with_torchao(model: nn.Module, config: Float8Config, chosen: list[str]) -> None:
    """Replaces the chosen linear layers, in place, by torchao's Float8Linear."""
    # It warns on import of each of its extensions that is not for this machine.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    assert config.recipe_name is not None
    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(config.recipe_name),
        module_filter_fn=lambda module, name: name in chosen,
    )
    if config.recipe_name != "tensorwise":
        # Recomputed activations must be rounded as they were the first time, or a row's scale may not cover its
        # values and the loss becomes NaN (pytorch issue 150859).
        torch._inductor.config.emulate_precision_casts = True
