"""AdamW and its learning rate."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from adamw import AdamW
from errors import UserError


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101)."""

    name: Literal["AdamW"] = "AdamW"
    """The optimizer."""
    lr: float = 8e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.95
    """Decay of the gradient's square."""
    eps: float = 1e-8
    """Added to the root of the square."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    no_weight_decay: list[str] = field(default_factory=lambda: ["norm", "tok_embeddings"])
    """Parameters whose name contains one of these are not decayed. Each must match something."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the step is computed; fused is the fastest: on CUDA and for bfloat16 moments our own (adamw.py)."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the two moments. bfloat16, rounded stochastically, saves 4 bytes a parameter; it needs fused."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                found.append((key, f"{getattr(self, key)} is not a decay; give a number from 0 to below 1"))
        for key in ("lr", "eps", "weight_decay"):
            if getattr(self, key) < 0:
                found.append((key, f"{getattr(self, key)} is negative; give 0 or more"))
        if self.state_dtype == "bfloat16" and self.implementation != "fused":
            text = f'bfloat16 has no {self.implementation} step; set optimizer.implementation "fused", or take float32'
            found.append(("state_dtype", text))
        return found


@dataclass(frozen=True)
class LRSchedulerConfig:
    """Learning rate: linear warm-up, then constant, then decay. decay_ratio says which part decays: 0 none (constant),
    1 or none all that follows the warm-up, between them the last part (warm-up, stable, decay: WSD)."""

    warmup_steps: int = 200
    """Steps of linear warm-up."""
    total_steps: int | None = None
    """Steps that the schedule spans; none takes training.steps."""
    decay_ratio: float | None = None
    """Share of total_steps that decays, at the end; none decays from the end of the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Form of the decay."""
    min_lr_factor: float = 0.0
    """Share of the peak learning rate at the end."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.warmup_steps < 0:
            found.append(("warmup_steps", f"{self.warmup_steps} is negative; give 0 or more"))
        if self.total_steps is not None and self.total_steps < 1:
            found.append(("total_steps", f"{self.total_steps} is too small; give 1 or more, or none"))
        for key in ("decay_ratio", "min_lr_factor"):
            if getattr(self, key) is not None and not 0 <= getattr(self, key) <= 1:
                found.append((key, f"{getattr(self, key)} is not a share; give a number from 0 to 1"))
        return found


def lr_factor(step: int, config: LRSchedulerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (1 is the first), as a share of the peak."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    decay_steps = total_steps - config.warmup_steps
    if config.decay_ratio is not None:
        decay_steps = min(decay_steps, round(total_steps * config.decay_ratio))
    if decay_steps == 0:
        return 1.0
    # The last step of the schedule is still trained: the lowest rate is reached just after it.
    progress = (step - 1 - (total_steps - decay_steps)) / decay_steps
    progress = min(max(progress, 0.0), 1.0)
    shapes = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }
    return config.min_lr_factor + (1 - config.min_lr_factor) * shapes[config.decay_type]


def has_own_step(config: OptimizerConfig, device: torch.device) -> bool:
    """Whether AdamW's steps are ours, which take gradients in bfloat16 too."""
    return config.implementation == "fused" and (config.state_dtype == "bfloat16" or device.type == "cuda")


def build_optimizer(model: nn.Module, config: OptimizerConfig, seed: int = 0) -> torch.optim.Optimizer:
    """AdamW in two groups, with and without weight decay. Raises UserError where a no_weight_decay matches nothing.

    `seed` fixes how bfloat16 moments are rounded. The model has its tensors by now: where they are decides on the step.
    """
    parameters = dict(model.named_parameters())
    for pattern in config.no_weight_decay:
        if not any(pattern in name for name in parameters):
            raise UserError(f'optimizer.no_weight_decay: "{pattern}" matches no parameter: correct or remove it')
    spared = {name for name in parameters if any(pattern in name for pattern in config.no_weight_decay)}
    groups = [
        {
            "params": [p for name, p in parameters.items() if name not in spared],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for name, p in parameters.items() if name in spared], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    how: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if has_own_step(config, next(iter(parameters.values())).device):
        return AdamW(groups, **how, state_dtype=getattr(torch, config.state_dtype), seed=seed)
    implementation = config.implementation
    return torch.optim.AdamW(groups, **how, fused=implementation == "fused", foreach=implementation == "foreach")


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def global_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients: a float32 scalar; of DTensors a DTensor. (torch.nn.utils.get_total_norm rounds that
    of gradients in bfloat16 to bfloat16.)"""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, torch.float32)))


class NotFinite(Exception):
    """More steps in a row than allowed had a NaN or an infinity in loss or gradient. They changed no weight."""


class FiniteSteps:
    """Steps of an optimizer with clipped gradients, which change nothing where the loss or the gradient is not finite.

    Such steps are counted on the device, so that a good step waits for nothing: a fused optimizer learns there whether
    to go and what to divide the gradients by, which saves a pass over them; the others are called by the host, which
    waits. All ranks decide alike, as norm and loss are global.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, max_in_a_row: int, device: torch.device, max_norm: float = 0):
        """max_norm: what gradients are clipped to; 0 for not at all."""
        self.optimizer = optimizer
        self.max_in_a_row = max_in_a_row
        self.max_norm = max_norm
        # What torch.amp.GradScaler goes by: whether step() reads found_inf and grad_scale.
        self.on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.total, self.in_a_row, self.longest = torch.zeros(3, device=device)

    def step(self, loss: Tensor, grad_norm: Tensor) -> None:
        """loss, grad_norm: scalars of the global batch, anything finite where its gradients are.

        Gradients whose norm is above max_norm count as if it were that; p.grad itself may stay or not.
        """
        bad = (~(loss.isfinite() & grad_norm.to(loss.device).isfinite())).float()
        self.total += bad
        self.in_a_row = (self.in_a_row + 1) * bad
        self.longest = torch.maximum(self.longest, self.in_a_row)
        if self.on_device:
            self.optimizer.found_inf = bad  # type: ignore[attr-defined]  # As torch.amp.GradScaler does.
            if self.max_norm:
                # As torch.nn.utils.clip_grads_with_norm_ does.
                scale = ((grad_norm + 1e-6) / self.max_norm).clamp(min=1)
                self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not bad:
            if self.max_norm:
                parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, grad_norm)
            self.optimizer.step()

    def check(self) -> int:
        """The number of steps that were skipped. Waits for the device. Raises NotFinite after too many in a row."""
        longest = int(self.longest)
        if longest > self.max_in_a_row:
            raise NotFinite(
                f"the loss or the gradient was NaN or infinite in {longest} step{'s' * (longest > 1)} in a row, and "
                f"training.max_skipped_steps allows {self.max_in_a_row}. The weights were not changed by them. Resume "
                "from the last checkpoint with a lower optimizer.lr or training.max_norm, or allow more"
            )
        return int(self.total)
