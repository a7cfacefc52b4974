"""torch.compile, one block at a time: the blocks are alike, so the compiler works once for all of them."""

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile."""

    enable: bool = False
    """Compile the components."""
    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    """What is compiled: model (each transformer block, as one graph) and loss."""
    backend: str = "inductor"
    """The compiler's backend."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        unknown = [name for name in self.components if name not in ("model", "loss")]
        if unknown or not self.components:
            found.append(
                (
                    "components",
                    f"{unknown or 'an empty list'} cannot be compiled; the components are model, loss",
                )
            )
        if self.backend not in torch.compiler.list_backends(exclude_tags=()):
            known = ", ".join(torch.compiler.list_backends())
            found.append(("backend", f'"{self.backend}" is not a backend of this torch; the backends are: {known}'))
        return found


def compile_blocks(layers: nn.ModuleList, config: CompileConfig) -> int:
    """Compiles each block's forward as one graph; a break in it is an error. Returns how many blocks.

    The forward function is compiled, not the module: parameters keep their names, and FSDP's hooks stay outside.
    """
    if not (config.enable and "model" in config.components):
        return 0
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=config.backend, fullgraph=True)
    return len(layers)
