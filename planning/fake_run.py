"""One training step of the real trainer under fake tensors and a fake process group: no GPU, no network, no weights.

The model is on the "cpu" device (fake CUDA tensors need a GPU for autograd and FSDP2). What differs there from a GPU is
put right: attention is cuDNN's op, our ops are taken for their kernels, torch.compile splits graphs as for Inductor.
"""

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.attention import SDPBackend
from torch.testing._internal.distributed.fake_pg import FakeStore

from config import DebugConfig, JobConfig
from errors import UserError
from models.llama.model import Llama
from models.llama.parallelize import Applied, collectives_table
from optimizer import FiniteSteps, OptimizerConfig, global_norm, has_own_step
from parallelisms.fsdp import local
from parallelisms.linear_loss import plus_product
from parallelisms.mesh import Meshes
from parallelisms.tp_ops import Collective
from planning.costs import Sent, Work
from planning.graphs import Matmul, planning_backend
from planning.memory import Peak
from planning.observer import StepObserver
from trainer import Trainer


@dataclasses.dataclass(frozen=True)
class FakeRun:
    """What one rank's step was seen to take."""

    applied: list[Applied]
    peak: Peak
    moments: dict[str, int]
    """Phase and place -> the most bytes there."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    works: list[tuple[str, Work]]
    """Each with its phase."""
    sent: list[tuple[str, Sent]]
    """Each with its phase, of collectives with more than one rank."""
    matmuls: list[Matmul]
    tokens: int
    """Of the global batch."""
    model_flops_per_token: float
    num_params: int
    dims: dict[str, str]
    """Process group's name -> the mesh dimensions that it spans."""
    sizes: dict[str, int]
    """Mesh dimensions -> ranks."""


class AlwaysFinite(FiniteSteps):
    """Asks no fake tensor for its value."""

    def step(self, loss: Tensor, grad_norm: Tensor) -> None:
        if self.on_device:
            super().step(loss, grad_norm)
            return
        if self.max_norm:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, grad_norm)
        self.optimizer.step()


class NoClock:
    def step(self, tokens: int) -> None:
        pass


class NoCheckpoints:
    def wait_for_copy(self) -> None:
        pass


class FakeTrainer(Trainer):
    """The trainer without a folder, data or checkpoints. Its meshes are real, its parameters fake tensors of `mode`."""

    def __init__(self, config: JobConfig, mode: FakeTensorMode):
        self.mode = mode
        super().__init__(config, torch.device("cpu"))
        self.clock = NoClock()  # type: ignore[assignment]
        with mode:
            self.steps = AlwaysFinite(self.optimizer, 0, self.device, config.training.max_norm)

    def start_logging(self) -> None:
        pass

    def open_data(self) -> Any:
        self.share_of_batch()

    def keep_table(self) -> None:
        pass

    def fill(self, model: Llama) -> None:
        with self.mode:
            model.to_empty(device=self.device)

    def open_checkpoints(self) -> Any:
        return NoCheckpoints()

    def restore(self) -> None:
        pass

    def log(self, *args: Any) -> None:
        self.unlogged = None

    def prime_optimizer(self) -> None:
        """Makes its states, so that the first step is like all later ones."""
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()


def fake_run(config: JobConfig, world_size: int) -> FakeRun:
    """Rank 0's step. Raises the UserError that a run with this configuration would have met at its start."""
    if config.training.enable_cpu_offload:
        raise UserError(
            "training.enable_cpu_offload: a dry run follows the GPU's memory only, and does not know which part of it "
            "would be in the host's; set it to false to plan"
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    config = dataclasses.replace(config, debug=DebugConfig())  # What looks into a step is no part of it.
    observer = StepObserver()
    backend: Any = config.compile.backend
    if backend == "inductor":
        backend = planning_backend(observer)
        config = dataclasses.replace(config, compile=dataclasses.replace(config.compile, backend=backend))
    torch._dynamo.reset()
    # DTensor remembers what it did on a mesh like this one, with process groups that may be gone.
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with as_on_a_gpu(), quietly():
            trainer = FakeTrainer(config, mode)
            with mode:
                return observe(trainer, observer)
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def observe(trainer: FakeTrainer, observer: StepObserver) -> FakeRun:
    model, memory, config, training = trainer.model, observer.memory, trainer.config, trainer.config.training
    trainer.prime_optimizer()
    parameters = list(model.parameters())
    states = [t for p in parameters for t in trainer.optimizer.state[p].values() if isinstance(t, Tensor)]
    memory.add(map(local, [*parameters, *states, *model.buffers()]))
    parameter_bytes = memory.name("parameters", parameters)
    optimizer_bytes = memory.name("optimizer", states)
    rows = trainer.micro_batches * training.local_batch_size
    inputs = torch.empty(rows, training.seq_len, dtype=torch.int64)
    gradient_bytes = 0
    step = trainer.optimizer.step

    def optimizer_step(*args: Any) -> Any:
        nonlocal gradient_bytes
        gradient_bytes = memory.name("gradients", [p.grad for p in parameters if p.grad is not None])
        return step(*args)

    with observer.watching(model), mock.patch.object(trainer.optimizer, "step", optimizer_step):
        memory.phase = "forward"

        def norm(grads: list[Tensor]) -> Tensor:
            memory.phase, memory.where = "optimizer", ""
            return global_norm(grads)

        def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *_: Any) -> None:
            observer.note([Work("memory", 0.0, g.nbytes + 2 * (p.nbytes + m.nbytes + v.nbytes))], [], [])

        with mock.patch("trainer.global_norm", norm), mock.patch("adamw.update_torch", update):
            trainer.step = 1
            trainer.train_step(inputs, inputs)
    applied = list(trainer.applied)
    if trainer.meshes.tp is not None:
        ran = [collective(s) for _, s in observer.sent if s.op]
        applied += collectives_table(ran, model, trainer.micro_batches, config.parallelism)
    return FakeRun(
        applied=applied,
        peak=memory.peak,
        moments=memory.moments,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        works=observer.works,
        sent=observer.sent,
        matmuls=observer.matmuls,
        tokens=trainer.tokens_seen,
        model_flops_per_token=trainer.flops_per_token,
        num_params=trainer.num_params,
        dims=group_dims(trainer.meshes),
        sizes=dict(zip(trainer.meshes.whole.mesh_dim_names or (), trainer.meshes.whole.shape, strict=True)),
    )


def collective(sent: Sent) -> Collective:
    recomputed = sent.backward and not sent.layer.endswith("backward")
    return Collective(sent.layer, sent.op, sent.fused, recomputed, sent.nbytes)


def group_dims(meshes: Meshes) -> dict[str, str]:
    dims: dict[str, str] = {}
    whole = meshes.whole
    for name in whole.mesh_dim_names or ():
        dims[whole.get_group(name).group_name] = name
    if meshes.dp.mesh_dim_names == ("dp",):
        dims[meshes.dp.get_group().group_name] = "dp_replicate x dp_shard"
    dims.setdefault(dist.group.WORLD.group_name, "all")  # type: ignore[union-attr]
    return dims


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the log of a run that is not one."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """What a CPU does otherwise is replaced by what a GPU does, as far as memory, work and collectives go."""
    with (
        mock.patch("models.llama.model.causal_attention", cudnn_attention),
        mock.patch("models.llama.parallelize.why_not_fused", lambda mesh, float8: ""),
        mock.patch("parallelisms.float8_gather.quantise_rows_into", maxima_alone),
        mock.patch("parallelisms.float8_gather.columns_from_rows_into", lambda rows, maxima, out: None),
        mock.patch("parallelisms.linear_loss.plus_product", summed_in_the_matmul),
        mock.patch("adamw.update_torch", lambda *args: None),
        mock.patch("adamw.place_of", lambda p: None),
        mock.patch("optimizer.has_own_step", on_cuda),
        mock.patch("trainer.has_own_step", on_cuda),
        torch._dynamo.config.patch(automatic_dynamic_shapes=False),  # Each size has its own graph, and its own numbers.
        mock.patch.object(torch.Tensor, "item", lambda tensor: 1.0),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def on_cuda(config: OptimizerConfig, device: torch.device) -> bool:
    return has_own_step(config, torch.device("cuda"))


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, backends: list[SDPBackend]) -> Tensor:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]


def summed_in_the_matmul(dw: Tensor | None, gradient: Tensor, x: Tensor) -> Tensor:
    """plus_product without a product of its own: it goes, for a fake tensor's sake, over bytes of the sum."""
    if x.dtype == torch.float32:
        return plus_product(dw, gradient, x)
    if dw is None:
        dw = x.new_empty((gradient.shape[1], x.shape[1]), dtype=torch.float32)
    torch.mm(gradient.t(), x, out=dw.view(x.dtype)[:, : x.shape[1]])
    return dw


def maxima_alone(x: Tensor, out: Any) -> Tensor:
    """What the kernel makes besides what it writes over `out`."""
    return x.new_empty((1, x.shape[1]), dtype=torch.bfloat16)
