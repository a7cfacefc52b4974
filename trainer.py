"""Trainer: sets a run up in named steps, then trains. Reads top to bottom."""

import contextlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint.manager import CheckpointManager
from checkpoint.state import DataState, ModelState, OptimizerState, RngState
from config import JobConfig
from data.loader import BatchLoader, entropy, next_batch
from data.sources import open_source
from data.tokenizer import open_tokenizer
from ending import Ending, closing_lines
from errors import ExitStatus, UserError
from hugging_face import export_hf, load_hf
from loss import valid_tokens
from models.llama.model import Llama
from models.llama.parallelize import collectives_table, parallelize_llama, table
from optimizer import FiniteSteps, NotFinite, build_optimizer, global_norm, has_own_step, lr_factor, set_lr
from parallelisms.fsdp import DTYPES, whole
from parallelisms.mesh import build_meshes, set_timeouts
from parallelisms.tp_ops import recording
from settings import write_toml
from stopping import StopRequests
from telemetry.anomaly import AnomalyDetector
from telemetry.flops import model_flops_per_token, peak_flops
from telemetry.layer_statistics import LayerStatistics
from telemetry.memory import GarbageCollector, peak_memory
from telemetry.metrics import MetricsWriter
from telemetry.profiling import maybe_profile
from telemetry.progress import progress_bar
from telemetry.run_clock import RunClock
from telemetry.watch import Watch
from validation import validate

logger = logging.getLogger("rowhouse")

SAVE_PATIENCE = 1800.0  # Seconds: gloo's own patience, with which the ranks wait for each other in a save.


class Trainer:
    """One rank's part of a training run. Needs the process group; `train()` carries it out, `close()` ends it.

    `watch` is told what is done next and how long that may take; `stop` says when to end early.
    """

    def __init__(
        self, config: JobConfig, device: torch.device, watch: Watch | None = None, stop: StopRequests | None = None
    ):
        self.config = config
        self.device = device
        self.watch = watch
        self.stop = stop or StopRequests(config.training.max_time)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.folder = Path(config.job.dump_folder)
        self.step = 0
        self.tokens_seen = 0
        self.last_loss: float | None = None
        self.unlogged: tuple[Tensor, Tensor, Tensor, float] | None = None
        """What `log` takes, of a step that has not been logged."""
        self.data_ended = False
        self.stopped_by: str | None = None
        self.writer: MetricsWriter | None = None
        self.clock = RunClock(device)
        self.start_logging()
        self.set_determinism()
        self.meshes = build_meshes(config.parallelism, self.device)
        self.loader = self.open_data()
        self.model = self.build_model()
        self.optimizer = build_optimizer(self.model, config.optimizer, config.debug.seed)
        training = config.training
        self.steps = FiniteSteps(self.optimizer, training.max_skipped_steps, self.device, training.max_norm)
        self.checkpoints = self.open_checkpoints()
        self.restore()
        self.anomalies = AnomalyDetector(self.model, config.debug.detect_anomaly)
        self.layer_statistics = LayerStatistics(self.model, config.debug.layer_statistics_freq, self.folder)

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

    def open_data(self) -> BatchLoader:
        """This rank's rows of every global batch."""
        training = self.config.training
        self.tokenizer = open_tokenizer(self.config.model.tokenizer_path, self.config.model.shape().vocab_size)
        lanes, rows = self.share_of_batch()
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

    def share_of_batch(self) -> tuple[int, int]:
        """(Sequences of a global batch, of which this rank reads so many)"""
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
        return lanes, rows

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
            micro_batches=self.micro_batches,
            any_gradient=has_own_step(config.optimizer, self.device),
        )
        self.fill(model)
        logger.info("%s: %s parameters", config.model.flavor, f"{self.num_params:,}")
        logger.info("asked for and applied:\n%s", table(self.applied))
        self.keep_table()
        return model

    def fill(self, model: Llama) -> None:
        """Gives the parameters memory and their first values."""
        offload = self.config.training.enable_cpu_offload
        model.to_empty(device="cpu" if offload else self.device)
        model.init_weights(self.config.debug.seed, self.device)
        if offload:
            model.freqs_cis = model.freqs_cis.to(self.device)

    def keep_table(self) -> None:
        if self.rank == 0:
            (self.folder / "applied.json").write_text(
                json.dumps([asdict(row) for row in self.applied], indent=1) + "\n"
            )

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
        checkpoint = self.config.checkpoint
        if self.checkpoints.load() is not None:
            logger.info("resumed after step %d (%s tokens)", self.step, f"{self.tokens_seen:,}")
        elif checkpoint.initial_load_in_hf and checkpoint.initial_load_path is not None:
            load_hf(self.model, Path(checkpoint.initial_load_path))

    # Training

    def train(self) -> ExitStatus:
        """Trains to the last step, to the end of the data or until it is asked to stop, then saves.

        Returns at once if no step is left.
        """
        try:
            return self.train_to_the_end()
        except NotFinite as error:  # On all ranks at once. The weights are good, but nobody asked to go on with them.
            if self.rank == 0:
                logger.error("step %d: %s", self.step, error)
            return ExitStatus.NOT_FINITE

    def train_to_the_end(self) -> ExitStatus:
        config, steps = self.config, self.config.training.steps
        if self.rank == 0:
            self.writer = MetricsWriter(config.metrics, self.folder, start_step=self.step, total_steps=steps)
        self.layer_statistics.begin(self.step)
        first_step = self.step + 1
        self.clock.begin(self.folder, self.step, self.model.layers[0], compiles=config.compile.enable)
        garbage = GarbageCollector(config.training.gc_freq)
        with (
            maybe_profile(config.profiling, self.folder, start_step=self.step, rank=self.rank) as profiler,
            progress_bar(self.step, steps, self.rank) as bar,
        ):
            while self.step < steps:
                self.expect(f"step {self.step + 1}", compiles=self.step + 1 == first_step)
                with self.clock.waiting_for_data():
                    batch = next_batch(self.loader, config.training.epochs is not None)
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
                bar.update()
                if config.validation.enable and self.step % config.validation.freq == 0:
                    self.validate()
                self.stopped_by = self.stop.agreed()
                if self.stopped_by is not None:
                    logger.info("%s: stopping after step %d", self.stopped_by, self.step)
                    break
                if self.step < steps:
                    self.maybe_save()
        if self.step >= first_step:
            self.finish()
        if config.checkpoint.last_save_in_hf and self.stopped_by is None:
            self.export()  # Also of a run that has been at its end before, and is started again for this.
        self.report(first_step)
        return self.status()

    def expect(self, what: str, compiles: bool = False) -> None:
        """Tells the watch what is done next. What compiles takes the patience of the start."""
        if self.watch is not None:
            comm = self.config.comm
            self.watch.expect(what, comm.init_timeout_seconds if compiles else comm.train_timeout_seconds)

    def validate(self) -> None:
        self.expect(f"validation after step {self.step}", compiles=True)
        with self.clock.outside("run_validation_seconds"):
            loss = validate(
                self.config, self.model, self.tokenizer, self.meshes, self.device,
                after_batch=lambda: self.expect(f"validation after step {self.step}"),
            )  # fmt: skip
        if self.writer is not None:
            self.writer.write_validation(self.step, {"validation_loss": loss})

    def maybe_save(self) -> None:
        checkpoint = self.config.checkpoint
        saves_now = checkpoint.enable and self.step % checkpoint.interval == 0
        with self.clock.outside("run_save_seconds") if saves_now else contextlib.nullcontext():
            if saves_now:
                self.steps.check()
                self.expect_save()
            self.checkpoints.maybe_save(self.step)

    def expect_save(self) -> None:
        if self.watch is not None:
            self.watch.expect(f"saving step {self.step}", SAVE_PATIENCE)

    def finish(self) -> None:
        """What a run does after its last step, whatever ended it."""
        if self.unlogged is not None:
            self.log(*self.unlogged)
        validation = self.config.validation
        if validation.enable and self.step % validation.freq != 0 and self.stopped_by is None:
            self.validate()
        self.expect_save()
        with self.clock.outside("run_save_seconds"):
            self.checkpoints.save(self.step, last=True)

    def export(self) -> None:
        dtype = getattr(torch, self.config.checkpoint.export_dtype)
        self.expect_save()
        set_timeouts(SAVE_PATIENCE, self.meshes)  # Ranks wait while the first one writes.
        with self.clock.outside("run_save_seconds"):
            export_hf(self.model, self.folder / f"hf-step-{self.step}", dtype, self.tokenizer)

    def status(self) -> ExitStatus:
        if self.checkpoints.failed_steps:
            return ExitStatus.NOT_SAVED
        return ExitStatus.DONE if self.stopped_by is None else ExitStatus.STOPPED

    def first_step(self, inputs: Tensor, labels: Tensor) -> None:
        """A step that is watched: which tensor parallel collectives ran, and fused or not."""
        with recording() as collectives:
            self.train_step(inputs, labels)
        if self.meshes.tp is not None:
            rows = collectives_table(collectives, self.model, self.micro_batches, self.config.parallelism)
            logger.info("tensor parallel collectives of the first step:\n%s", table(rows))
            self.applied += rows
            self.keep_table()
        set_timeouts(self.config.comm.train_timeout_seconds, self.meshes)

    def train_step(self, inputs: Tensor, labels: Tensor) -> None:
        """One optimizer step over this rank's rows of the global batch: int64 (rows, seq_len) on the host."""
        with self.layer_statistics.watching(self.step), self.anomalies.watching():
            loss, tokens, global_tokens = self.forward_backward(inputs, labels)
        loss_max = loss * global_tokens / tokens.clamp(min=1)
        dist.all_reduce(loss, group=self.dp_group)
        self.layer_statistics.write(self.step, loss)
        self.anomalies.check(self.step)
        grad_norm = whole(global_norm([p.grad for p in self.model.parameters() if p.grad is not None]))
        lr = self.config.optimizer.lr * lr_factor(self.step, self.config.lr_scheduler, self.config.schedule_steps)
        set_lr(self.optimizer, lr)
        self.checkpoints.wait_for_copy()
        self.steps.step(loss, grad_norm)
        if self.anomalies.on:
            self.steps.check()
        self.optimizer.zero_grad()

        self.clock.step(labels.numel() * self.dp_degree // self.world_size)  # Tensor parallel ranks share their tokens.
        self.tokens_seen += labels.numel() * self.dp_degree
        self.unlogged = (loss, loss_max, grad_norm, lr)
        if self.step == 1 or self.step % self.config.metrics.log_freq == 0 or self.step == self.config.training.steps:
            self.log(*self.unlogged)

    def forward_backward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adds the gradients of the mean loss over the global batch to the parameters.

        Returns this rank's share of that mean, its valid tokens, and those of the global batch: float32 scalars on the
        device.
        """
        size = self.config.training.local_batch_size
        inputs, labels = (t.to(self.device, non_blocking=True) for t in (inputs, labels))
        tokens = valid_tokens(labels)
        global_tokens = tokens.clone()
        dist.all_reduce(global_tokens, group=self.dp_group)
        losses = []
        for micro_inputs, micro_labels in zip(inputs.split(size), labels.split(size), strict=True):
            # Gradients are summed over micro-batches and ranks: dividing here makes the sum a mean over tokens.
            loss = self.model(micro_inputs, micro_labels, global_tokens)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum(), tokens, global_tokens

    def log(self, loss: Tensor, loss_max: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Writes the metrics of this step and of the interval since the last one. Waits for the device."""
        self.unlogged = None
        dist.all_reduce(loss_max, dist.ReduceOp.MAX, group=self.dp_group)
        self.last_loss = loss.item()
        times, more = self.clock.read(self.step)
        memory = peak_memory(self.device)
        tokens_per_second = times.tokens / times.seconds
        flops = tokens_per_second * self.flops_per_token
        precision = {"float32": "float32", "bfloat16": "bf16"}[self.config.training.mixed_precision_param]
        peak = peak_flops(self.device_name(), "float8" if self.config.float8.recipe_name else precision)
        if self.writer is not None:
            values = {
                "loss": self.last_loss,
                "loss_max": loss_max.item(),
                "grad_norm": grad_norm.item(),
                "lr": lr,
                "skipped_steps": int(self.steps.total),
                "tokens_seen": self.tokens_seen,
                "tokens_per_second": tokens_per_second,
                "tflops": flops / 1e12,
                "mfu": None if peak is None else flops / peak,
                "step_seconds": times.seconds / times.steps,
                "data_share": times.data_seconds / times.seconds,
                "memory_gib": memory.gib,
                "memory_allocated_gib": memory.allocated_gib,
                **more,
            }
            self.writer.write(self.step, values)
        self.steps.check()

    # Ending

    def report(self, first_step: int) -> None:
        counts = self.loader.label_counts.clone()
        dist.all_reduce(counts, group=self.dp_group)
        ending = Ending(
            first_step=first_step,
            step=self.step,
            loss=self.last_loss,
            unigram_entropy=entropy(counts),
            data_ended=self.data_ended,
            stopped_by=self.stopped_by,
            saved=self.step not in self.checkpoints.failed_steps,
        )
        if self.writer is not None and self.step >= first_step:
            logger.info("%s", self.clock.goodput.end(self.folder, self.step, self.stopped_by))
        for line in closing_lines(self.config, ending, self.world_size):
            logger.info("%s", line)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.checkpoints.close()
        self.loader.close()
