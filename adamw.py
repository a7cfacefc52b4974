"""AdamW in one pass over memory, with moments in float32 or in bfloat16.

On CUDA a step is one Triton kernel a parameter, which reads and writes each byte once: 28 an element, or 20 with
bfloat16 moments; two fewer with gradients in bfloat16 (parallelisms/one_shard.py). (torch's fused AdamW writes the
clipped gradient back besides: 32.) Elsewhere the same in PyTorch, which tests hold the kernel against.

bfloat16 moments take 12 bytes a parameter with its float32 weight and gradient, float32 ones 16. Rounding to the
nearest loses a change of less than half of the last place, in bfloat16 0.2 to 0.4% of a value. With
beta2 = 0.999 a second moment falls by 0.1% a step at the most: it never would. The moments are therefore rounded
*stochastically*: away from zero with a probability of the part that is cut off, so that their expectation is exact
(arXiv 1502.02551). All arithmetic is float32, and the weight takes the moments before they are rounded.

The random bits are a hash of the seed, the parameter, its step count and the element's place in the whole parameter. So
nothing but the step count has to be saved for a resumed run to go on bit for bit, and any number of ranks, whatever
part of a parameter each holds, draws the same bits for the same element.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

try:
    import triton
    import triton.language as tl
except ImportError:  # It comes with torch for CUDA.
    triton = None

BLOCK = 1024


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW over float32 parameters, plain or DTensor, with moments in `state_dtype`.

    A parameter's state has AdamW's names: `step` float32 (), on its device; `exp_avg`, `exp_avg_sq`, shaped and sharded
    as it is. Where `found_inf`, a float32 scalar on the device, is 1, a step changes nothing; the host does
    not wait to know.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        state_dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ):
        """`seed` fixes how bfloat16 moments are rounded."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.state_dtype = state_dtype
        self.seed = seed
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        self._step_supports_amp_scaling = True  # As torch's fused optimizers tell that they read these two.
        self.places: dict[Tensor, Place] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for group in self.param_groups:
            self.step_group(group, first)
            first += len(group["params"])
        return loss

    def step_group(self, group: dict[str, Any], first: int) -> None:
        """`first` is the number of the group's first parameter among all of them."""
        numbered = [(first + i, p) for i, p in enumerate(group["params"]) if p.grad is not None]
        if not numbered:
            return
        for _, p in numbered:
            if p not in self.places:
                self.places[p] = place_of(p)
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p, dtype=self.state_dtype),
                    "exp_avg_sq": torch.zeros_like(p, dtype=self.state_dtype),
                }
        steps = [self.state[p]["step"] for _, p in numbered]
        good = torch.ones_like(steps[0]) if self.found_inf is None else 1 - self.found_inf
        torch._foreach_add_(steps, [good] * len(steps))  # By a tensor alone torch 2.11 waits for the device.
        update = update_triton if steps[0].device.type == "cuda" else update_torch
        settings = settings_of(group)
        scale = torch.ones_like(good) if self.grad_scale is None else self.grad_scale
        for (number, p), factors in zip(numbered, factors_of(steps, good, scale, group).unbind(), strict=True):
            state = self.state[p]
            w, g, m, v = (local(t) for t in (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
            if w.numel():
                key = mix(mix(self.seed & 0xFFFFFFFF) ^ number) >> 1  # 31 bits, so that Triton sees one type of int.
                update(w, g.contiguous(), m, v, factors, key, self.places[p], settings)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Moments of any dtype. (torch's own casts them to that of the parameter: to twice the memory.)"""
        super().load_state_dict({**state_dict, "state": {}})
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(saved, own, strict=True):
            if key in state_dict["state"]:
                self.state[p] = {
                    name: value.to(p.device, torch.float32 if name == "step" else self.state_dtype)
                    for name, value in state_dict["state"][key].items()
                }


class Place(NamedTuple):
    """Where a rank's part of a parameter is: its element i is number start + (i // cols) * stride + i % cols."""

    start: int
    cols: int
    stride: int


class Settings(NamedTuple):
    """What the parameters of a group share in a step: all but what their step counts make of it."""

    decay: float
    """1 - lr * weight_decay"""
    weight1: float
    """1 - beta1"""
    beta2: float
    weight2: float
    """1 - beta2"""
    eps: float


def place_of(p: Tensor) -> Place:
    """Of a vector or a matrix, sharded in any way over any mesh. Raises ValueError where it is not contiguous."""
    if not local(p).is_contiguous():
        raise ValueError(f"a parameter of shape {tuple(p.shape)} is not contiguous: AdamW takes contiguous ones")
    if not isinstance(p, DTensor):
        return Place(0, 1, 1)
    (chunk,) = p.__create_chunk_list__()  # What checkpoints go by.
    start = sum(offset * stride for offset, stride in zip(chunk.offsets, p.stride(), strict=True))
    return Place(start, chunk.sizes[-1], p.shape[-1])


def settings_of(group: dict[str, Any]) -> Settings:
    (beta1, beta2), lr = group["betas"], group["lr"]
    return Settings(1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, group["eps"])


def factors_of(steps: list[Tensor], good: Tensor, scale: Tensor, group: dict[str, Any]) -> Tensor:
    """What a step count makes of the settings, on the device: float32 (parameters, 5).

    lr / (1 - beta1**step), (1 - beta2**step)**0.5, step, 1 for a good step or 0 for one that is left out, and what the
    gradients are divided by.
    """
    step, (beta1, beta2) = torch.stack(steps).double(), group["betas"]
    of_all = (t.double().expand_as(step) for t in (good, scale))
    columns = [group["lr"] / (1 - beta1**step), (1 - beta2**step).sqrt(), step, *of_all]
    return torch.stack(columns, dim=1).float()


def local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def mix(x):
    """A hash of 32 bits, one to one: lowbias32 of Chris Wellons' hash-prospector.

    Of a Python int, an int64 Tensor and Triton's uint32 alike: the latter wraps where the others are masked.
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def element_numbers(numel: int, place: Place) -> Tensor:
    """int64 (numel,)"""
    i = torch.arange(numel)
    return place.start + (i if place.cols == place.stride else i // place.cols * place.stride + i % place.cols)


def random_bits(elements: Tensor, step: int, key: int) -> Tensor:
    """32 of them for each of the elements, given by their numbers: int64, as they are."""
    return mix((elements & 0xFFFFFFFF) ^ mix(key ^ mix(step)))


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """float32 -> bfloat16, up or down so that the expectation is x. noise: int64, uniform in [0, 2**16)."""
    return ((x.view(torch.int32) + noise.to(torch.int32)) & -0x10000).view(torch.float32).bfloat16()


def update_torch(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: Tensor, key: int, place: Place, settings: Settings
) -> None:
    """A step of one parameter in place. p float32; g, m, v float32 or bfloat16; all contiguous; factors (5,)."""
    step_size, root, step, good, scale = factors.tolist()
    if not good:
        return
    decay, weight1, beta2, weight2, eps = settings
    g = g.float() / scale
    new_m = m.float().lerp_(g, weight1)
    new_v = v.float().mul_(beta2).addcmul_(g, g, value=weight2)
    p.mul_(decay).addcdiv_(new_m, (new_v.sqrt() / root).add_(eps), value=-step_size)
    if m.dtype == torch.float32:
        m.copy_(new_m)
        v.copy_(new_v)
        return
    bits = random_bits(element_numbers(p.numel(), place), int(step), key).to(p.device).view_as(p)
    m.copy_(round_stochastically(new_m, bits & 0xFFFF))
    v.copy_(round_stochastically(new_v, bits >> 16))


def update_triton(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: Tensor, key: int, place: Place, settings: Settings
) -> None:
    """As update_torch."""
    n = p.numel()
    # 8 warps: 4 elements a thread are 16 bytes of float32, the widest access.
    adamw_kernel[(triton.cdiv(n, BLOCK),)](
        p, g, m, v, factors, n, key, *place, *settings,
        WHOLE_ROWS=place.cols == place.stride, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


if triton is not None:
    mix_uint32 = triton.jit(mix)

    @triton.jit
    def round_bits(x, noise):
        """float32, uint32 -> bfloat16"""
        return ((x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)

    @triton.jit(do_not_specialize=["key", "start", "cols", "stride"])  # One kernel whatever they are.
    def adamw_kernel(
        p_ptr, g_ptr, m_ptr, v_ptr, factors_ptr, n, key, start, cols, stride, decay, weight1, beta2, weight2, eps,
        WHOLE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """update_torch of BLOCK elements."""
        if tl.load(factors_ptr + 3) == 0:
            return
        step_size, root, step = tl.load(factors_ptr), tl.load(factors_ptr + 1), tl.load(factors_ptr + 2)
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n
        p = tl.load(p_ptr + i, inside)
        g = tl.load(g_ptr + i, inside).to(tl.float32) / tl.load(factors_ptr + 4)
        m = tl.load(m_ptr + i, inside).to(tl.float32)
        v = tl.load(v_ptr + i, inside).to(tl.float32)
        m += weight1 * (g - m)
        v = beta2 * v + weight2 * g * g
        p = decay * p - step_size * (m / (tl.sqrt(v) / root + eps))
        tl.store(p_ptr + i, p, inside)
        if m_ptr.dtype.element_ty == tl.float32:
            tl.store(m_ptr + i, m, inside)
            tl.store(v_ptr + i, v, inside)
            return
        index = i.to(tl.uint32)
        if not WHOLE_ROWS:
            index = index // cols.to(tl.uint32) * stride.to(tl.uint32) + index % cols.to(tl.uint32)
        index += start.to(tl.uint32)
        bits = mix_uint32(index ^ mix_uint32(key.to(tl.uint32) ^ mix_uint32(step.to(tl.uint32))))
        tl.store(m_ptr + i, round_bits(m, bits & 0xFFFF), inside)
        tl.store(v_ptr + i, round_bits(v, bits >> 16), inside)
