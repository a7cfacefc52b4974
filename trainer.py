"""Trainer: sets a run up in named steps, then trains. Reads top to bottom."""

import contextlib
import json
import logging
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint.manager import CheckpointManager
from checkpoint.state import DataState, ModelState, OptimizerState, RngState
from config import JobConfig
from data.loader import BatchLoader, entropy
from data.sources import open_source
from data.tokenizer import Tokenizer, load_tokenizer, stdlib_tokenizer
from errors import UserError
from loss import cross_entropy_sum, valid_tokens
from models.llama.model import Llama
from models.llama.parallelize import collectives_table, parallelize_llama, table
from optimizer import build_optimizer, lr_factor, set_lr
from parallelisms.fsdp import DTYPES
from parallelisms.mesh import build_meshes, set_timeouts
from parallelisms.tensor_parallel import vocab_parallel_cross_entropy_sum
from parallelisms.tp_ops import recording
from settings import write_toml
from telemetry.flops import model_flops_per_token, peak_flops
from telemetry.memory import GarbageCollector, peak_memory
from telemetry.metrics import MetricsWriter, StepClock
from telemetry.profiling import maybe_profile

logger = logging.getLogger("rowhouse")

STDLIB_VOCAB = 16384  # The most that the standard library's own tokenizer learns; small models take less.


class Trainer:
    """One rank's part of a training run. Needs the process group; `train()` carries it out, `close()` ends it."""

    def __init__(self, config: JobConfig, device: torch.device):
        self.config = config
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.folder = Path(config.job.dump_folder)
        self.step = 0
        self.tokens_seen = 0
        self.last_loss: float | None = None
        self.unlogged: tuple[Tensor, Tensor, Tensor, Tensor, float] | None = None
        """What `log` takes, of a step that has not been logged."""
        self.data_ended = False
        self.writer: MetricsWriter | None = None
        self.clock = StepClock()
        self.start_logging()
        self.set_determinism()
        self.meshes = build_meshes(config.parallelism, self.device)
        self.tokenizer = self.open_tokenizer()
        self.loader = self.open_data()
        self.model = self.build_model()
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.loss_fn = self.build_loss()
        self.checkpoints = self.open_checkpoints()
        self.restore()

    # Setting up

    def start_logging(self) -> None:
        """Rank 0 tells what happens; the others warn. The resolved configuration goes to the run's folder."""
        logger.setLevel(logging.INFO if self.rank == 0 else logging.WARNING)
        if self.rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_toml(self.config, self.folder / "config.toml")
            except OSError as error:
                raise UserError(
                    f"job.dump_folder: {self.folder} cannot be written ({error.strerror}): choose another"
                ) from error
        logger.info(
            "%s: %d x %s, torch %s",
            self.config.job.description,
            self.world_size,
            self.device_name(),
            torch.__version__,
        )

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def set_determinism(self) -> None:
        debug = self.config.debug
        torch.manual_seed(debug.seed)
        torch.use_deterministic_algorithms(debug.deterministic)

    def open_tokenizer(self) -> Tokenizer:
        model, shape = self.config.model, self.config.model.shape()
        if model.tokenizer_path is not None:
            tokenizer = load_tokenizer(model.tokenizer_path)
        else:
            # One rank trains it, the others then find it kept.
            with self.rank_zero_first():
                tokenizer = stdlib_tokenizer(min(shape.vocab_size, STDLIB_VOCAB))
        if tokenizer.vocab_size > shape.vocab_size:
            raise UserError(
                f"model.tokenizer_path: the tokenizer has {tokenizer.vocab_size} tokens, the model "
                f"{shape.vocab_size}: choose another, or set model.vocab_size to {tokenizer.vocab_size} or more"
            )
        logger.info("tokenizer: %s, %d tokens", tokenizer.path, tokenizer.vocab_size)
        return tokenizer

    @contextlib.contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        if self.rank != 0:
            dist.barrier()
        yield
        if self.rank == 0:
            dist.barrier()

    def open_data(self) -> BatchLoader:
        """This rank's rows of every global batch."""
        training = self.config.training
        self.dp_degree, self.dp_rank = self.meshes.dp.size(), self.meshes.dp.get_local_rank()
        self.dp_group = self.meshes.dp.get_group()
        lanes = training.lanes(self.dp_degree)
        rows = lanes // self.dp_degree
        self.micro_batches = rows // training.local_batch_size
        logger.info(
            "global batch: %d sequences x %d tokens = %d micro-batches of %d on %d ranks",
            lanes, training.seq_len, self.micro_batches, training.local_batch_size, self.dp_degree,
        )  # fmt: skip
        return BatchLoader(
            open_source(training.dataset, training.dataset_path, self.config.debug.seed),
            self.tokenizer,
            seq_len=training.seq_len,
            lanes=lanes,
            first_lane=self.dp_rank * rows,
            num_lanes=rows,
            epochs=training.epochs,
            pin_memory=self.device.type == "cuda",
        )

    def build_model(self) -> Llama:
        config, training = self.config, self.config.training
        if training.enable_cpu_offload and self.device.type == "cpu":
            raise UserError("training.enable_cpu_offload: there is no GPU here to offload from: set it to false")
        with torch.device("meta"):
            model = Llama(config.model.shape(), training.seq_len)
        params = {name: p.numel() for name, p in model.named_parameters()}
        self.num_params, embedding = sum(params.values()), params["tok_embeddings.weight"]
        self.flops_per_token = model_flops_per_token(
            num_params=self.num_params,
            num_embedding_params=0 if model.output is None else embedding,
            n_layers=model.shape.n_layers,
            n_heads=model.shape.n_heads,
            head_dim=model.shape.head_dim,
            seq_len=training.seq_len,
        )
        self.applied = parallelize_llama(
            model,
            self.meshes,
            parallelism=config.parallelism,
            float8=config.float8,
            activation_checkpoint=config.activation_checkpoint,
            compile=config.compile,
            param_dtype=DTYPES[training.mixed_precision_param],
            reduce_dtype=DTYPES[training.mixed_precision_reduce],
            cpu_offload=training.enable_cpu_offload,
        )
        model.to_empty(device="cpu" if training.enable_cpu_offload else self.device)
        model.init_weights(config.debug.seed, self.device)
        if training.enable_cpu_offload:
            model.freqs_cis = model.freqs_cis.to(self.device)
        logger.info("%s: %s parameters", config.model.flavor, f"{self.num_params:,}")
        logger.info("asked for and applied:\n%s", table(self.applied))
        self.keep_table()
        return model

    def keep_table(self) -> None:
        if self.rank == 0:
            (self.folder / "applied.json").write_text(
                json.dumps([asdict(row) for row in self.applied], indent=1) + "\n"
            )

    def build_loss(self) -> Any:
        compile, tp = self.config.compile, self.meshes.tp
        loss_fn = cross_entropy_sum if tp is None else vocab_parallel_cross_entropy_sum(tp)
        if compile.enable and "loss" in compile.components:
            return torch.compile(loss_fn, backend=compile.backend, fullgraph=True)
        return loss_fn

    def open_checkpoints(self) -> CheckpointManager:
        return CheckpointManager(
            self.config.checkpoint,
            self.folder,
            {
                "model": ModelState(self.model),
                "optimizer": OptimizerState(self.model, self.optimizer),
                "train_state": self,
                "data": DataState(self.loader, self.dp_group),
                "rng": RngState(self.device),
            },
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens_seen": self.tokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]

    def restore(self) -> None:
        if self.checkpoints.load() is not None:
            logger.info("resumed after step %d (%s tokens)", self.step, f"{self.tokens_seen:,}")

    # Training

    def train(self) -> None:
        """Trains to the last step or to the end of the data, then saves. Returns at once if no step is left."""
        config, steps = self.config, self.config.training.steps
        if self.rank == 0:
            self.writer = MetricsWriter(config.metrics, self.folder, start_step=self.step, total_steps=steps)
        first_step = self.step + 1
        self.clock.start()
        garbage = GarbageCollector(config.training.gc_freq)
        with maybe_profile(config.profiling, self.folder, start_step=self.step, rank=self.rank) as profiler:
            while self.step < steps:
                batch = self.next_batch(self.loader, config.training.epochs is not None)
                if batch is None:
                    logger.info("the data ends after step %d", self.step)
                    self.data_ended = True
                    break
                self.step += 1
                if self.step == first_step:
                    self.first_step(*batch)
                else:
                    self.train_step(*batch)
                garbage.step(self.step)
                profiler.step()
                if config.validation.enable and self.step % config.validation.freq == 0:
                    with self.paused_clock():
                        self.validate()
                saves_now = config.checkpoint.enable and self.step % config.checkpoint.interval == 0
                with self.paused_clock() if saves_now else contextlib.nullcontext():
                    if self.step < steps:
                        self.checkpoints.maybe_save(self.step)
        if self.step >= first_step:
            if self.unlogged is not None:
                self.log(*self.unlogged)
            if config.validation.enable and self.step % config.validation.freq != 0:
                self.validate()
            self.checkpoints.save(self.step, last=True)
        self.report(first_step)

    @contextlib.contextmanager
    def paused_clock(self) -> Iterator[None]:
        """Around what is no part of a step; the device first finishes the steps, whose time is theirs."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self.clock.outside():
            yield

    def next_batch(self, loader: BatchLoader, can_end: bool) -> tuple[Tensor, Tensor] | None:
        """The next (inputs, labels), both (rows, seq_len) on the host; None, on all ranks, when one has no more."""
        with self.clock.waiting_for_data():
            if can_end:
                has_next = torch.tensor(loader.has_next(), dtype=torch.int32)
                dist.all_reduce(has_next, dist.ReduceOp.MIN)
                if not has_next:
                    return None
            return next(loader)

    def first_step(self, inputs: Tensor, labels: Tensor) -> None:
        """A step that is watched: which tensor parallel collectives ran, and fused or not."""
        with recording() as collectives:
            self.train_step(inputs, labels)
        if self.meshes.tp is not None:
            rows = collectives_table(collectives, self.model, self.micro_batches, self.config.parallelism)
            logger.info("tensor parallel collectives of the first step:\n%s", table(rows))
            self.applied += rows
            self.keep_table()
        set_timeouts(self.config.comm, self.meshes)

    def train_step(self, inputs: Tensor, labels: Tensor) -> None:
        """One optimizer step over this rank's rows of the global batch: int64 (rows, seq_len) on the host."""
        training = self.config.training
        loss_sum, tokens, global_tokens = self.forward_backward(inputs, labels)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.max_norm or float("inf"))
        lr = self.config.optimizer.lr * lr_factor(self.step, self.config.lr_scheduler, self.config.schedule_steps)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()

        self.clock.step(labels.numel() * self.dp_degree // self.world_size)  # Tensor parallel ranks share their tokens.
        self.tokens_seen += labels.numel() * self.dp_degree
        self.unlogged = (loss_sum, tokens, global_tokens, grad_norm, lr)
        if self.step == 1 or self.step % self.config.metrics.log_freq == 0 or self.step == training.steps:
            self.log(*self.unlogged)

    def forward_backward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adds the gradients of the mean loss over the global batch to the parameters.

        Returns this rank's summed loss, its valid tokens, and those of the global batch: float32 scalars on the device.
        """
        size = self.config.training.local_batch_size
        inputs, labels = (t.to(self.device, non_blocking=True) for t in (inputs, labels))
        tokens = valid_tokens(labels)
        global_tokens = tokens.clone()
        dist.all_reduce(global_tokens, group=self.dp_group)
        losses = []
        for micro_inputs, micro_labels in zip(inputs.split(size), labels.split(size), strict=True):
            loss = self.loss_fn(self.model(micro_inputs), micro_labels.flatten())
            # Gradients are summed over micro-batches and ranks: dividing here makes the sum a mean over tokens.
            (loss / global_tokens).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum(), tokens, global_tokens

    def log(self, loss_sum: Tensor, tokens: Tensor, global_tokens: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Writes the metrics of this step and of the interval since the last one. Waits for the device."""
        self.unlogged = None
        loss_max = loss_sum / tokens.clamp(min=1)
        loss_sum = loss_sum.clone()
        dist.all_reduce(loss_sum, group=self.dp_group)
        dist.all_reduce(loss_max, dist.ReduceOp.MAX, group=self.dp_group)
        norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
        self.last_loss = (loss_sum / global_tokens).item()
        times, memory = self.clock.read(), peak_memory(self.device)
        tokens_per_second = times.tokens / times.seconds
        flops = tokens_per_second * self.flops_per_token
        precision = {"float32": "float32", "bfloat16": "bf16"}[self.config.training.mixed_precision_param]
        peak = peak_flops(self.device_name(), "float8" if self.config.float8.recipe_name else precision)
        if self.writer is not None:
            values = {
                "loss": self.last_loss,
                "loss_max": loss_max.item(),
                "grad_norm": norm.item(),
                "lr": lr,
                "tokens_seen": self.tokens_seen,
                "tokens_per_second": tokens_per_second,
                "tflops": flops / 1e12,
                "mfu": None if peak is None else flops / peak,
                "step_seconds": times.seconds / times.steps,
                "data_share": times.data_seconds / times.seconds,
                "memory_gib": memory.gib,
                "memory_allocated_gib": memory.allocated_gib,
            }
            self.writer.write(self.step, values)

    @torch.no_grad()
    def validate(self) -> None:
        """Mean loss over the validation batches, the same ones each time."""
        validation = self.config.validation
        batch_size = validation.local_batch_size
        source = open_source(validation.dataset, validation.dataset_path, self.config.debug.seed)
        total, count = torch.zeros(2, 1, device=self.device)
        lanes = batch_size * self.dp_degree
        first_lane = self.dp_rank * batch_size
        self.model.eval()
        with BatchLoader(
            source, self.tokenizer, seq_len=self.config.training.seq_len, lanes=lanes, first_lane=first_lane,
            num_lanes=batch_size, epochs=1,
        ) as loader:  # fmt: skip
            batches = 0
            while batches != validation.steps:
                batch = self.next_batch(loader, can_end=True)
                if batch is None:
                    break
                inputs, labels = (t.to(self.device) for t in batch)
                total += self.loss_fn(self.model(inputs), labels.flatten())
                count += valid_tokens(labels)
                batches += 1
        self.model.train()
        if batches == 0:
            raise UserError(
                f"validation.dataset: {validation.dataset} does not fill one batch of {lanes} sequences: lower "
                "validation.local_batch_size or training.seq_len, or give more data"
            )
        dist.all_reduce(total, group=self.dp_group)
        dist.all_reduce(count, group=self.dp_group)
        if self.writer is not None:
            self.writer.write_validation(self.step, {"validation_loss": (total / count).item()})

    # Ending

    def report(self, first_step: int) -> None:
        """The last lines of a run: what it reached, where things are, how it goes on."""
        counts = self.loader.label_counts.clone()
        dist.all_reduce(counts, group=self.dp_group)
        config = self.config
        if self.rank != 0:
            return
        raise_what = f"--training.epochs (now {config.training.epochs})" if self.data_ended else "--training.steps"
        if self.step < first_step:
            logger.info(
                "nothing to do after step %d of %d; raise %s, or choose another --job.dump_folder",
                self.step, config.training.steps, raise_what,
            )  # fmt: skip
            return
        if self.last_loss is not None:
            logger.info(
                "loss %.4f at step %d; the text's unigram entropy is %.4f (both in nats a token)",
                self.last_loss, self.step, entropy(counts),
            )  # fmt: skip
        logger.info("metrics: %s", self.folder / "metrics.jsonl")
        if config.metrics.enable_tensorboard:
            logger.info("TensorBoard: tensorboard --logdir %s", self.folder / config.metrics.save_tb_folder)
        if config.checkpoint.enable:
            logger.info("checkpoint: %s", self.folder / config.checkpoint.folder / f"step-{self.step}")
            more = f"--training.steps {config.training.steps * 2}"
            if self.data_ended:
                more = f"--training.epochs {(config.training.epochs or 0) + 1}"
            how = f"torchrun --nproc-per-node {self.world_size} train.py" if self.world_size > 1 else "python train.py"
            logger.info("to go on: %s --config %s %s", how, shlex.quote(str(self.folder / "config.toml")), more)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.checkpoints.close()
        self.loader.close()
