"""CheckpointManager: saves a run every so many steps, and finds, verifies and loads what to go on from."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful

from checkpoint import folders
from checkpoint.config import CheckpointConfig
from checkpoint.state import ModelState, OptimizerState, pack, unpack
from checkpoint.storage import METADATA, CheckpointReader, CheckpointWriter
from errors import UserError

logger = logging.getLogger("rowhouse")


class CheckpointManager:
    """Saves and loads the named states. All methods are for all ranks at once; torch.distributed must be initialised.

    `folder` is the run's folder. States other than ModelState and OptimizerState must give the same on every rank, and
    only what torch.load(weights_only=True) reads. With config.enable false the methods do nothing. Raises UserError
    where the folder cannot be opened.
    """

    def __init__(self, config: CheckpointConfig, folder: Path, states: dict[str, Stateful]):
        self.config = config
        self.states = states
        self.future: Future | None = None
        self.staging: Future | None = None
        self.stager: DefaultStager | None = None
        self.started_step: int | None = None
        self.stall_seconds = 0.0
        """How long the last save has kept the training waiting, so far."""
        self.failed_steps: list[int] = []
        """Steps whose save failed, the same on all ranks."""
        if not config.enable:
            return
        location = config.folder if "://" in config.folder else (folder / config.folder).absolute()
        self.fs, self.root = folders.open_location(location, "checkpoint.folder")
        self.is_first_rank = dist.get_rank() == 0
        if self.is_first_rank:
            try:
                self.fs.makedirs(self.root, exist_ok=True)
                folders.recover(self.fs, self.root)
            except OSError as error:
                raise UserError(
                    f"checkpoint.folder: {self.root} cannot be written ({error}): give permission, or choose another "
                    "job.dump_folder"
                ) from error
        # A group of its own, on the CPU: a save in the background must not mix its collectives with the training's.
        self.group = dist.new_group(backend="gloo")

    def path(self, step: int) -> str:
        return f"{self.root}/step-{step}"

    # Loading

    def load(self) -> int | None:
        """Loads the latest undamaged checkpoint of the run (or load_step), else initial_load_path.

        Returns the step that the run goes on from; None for a fresh start, which includes one with the weights of
        initial_load_path alone. Raises UserError for a step that is not there, and for a checkpoint that is damaged or
        does not fit.
        """
        config = self.config
        if not config.enable:
            return None
        names = [name for name in self.states if name not in config.exclude_from_loading]
        for name in config.exclude_from_loading:
            if name not in self.states:
                logger.warning("checkpoint.exclude_from_loading: this run has no state %s", name)
        steps = self.own_steps()
        if config.load_step != -1 and config.load_step not in steps:
            raise UserError(
                f"checkpoint.load_step: {self.root} has no step-{config.load_step}; it has {list_steps(steps)}: "
                "choose one of these, or -1 for the latest"
            )
        if steps:
            if config.load_step != -1 and config.load_step < steps[-1]:
                logger.warning(
                    "checkpoint.load_step: %s still holds step-%d, which a resume without load_step takes",
                    self.root, steps[-1],
                )  # fmt: skip
            if config.initial_load_path is not None:
                logger.info("checkpoint.initial_load_path is not read: the run has checkpoints of its own")
            return self.read(self.fs, self.undamaged(steps), names, "checkpoint.folder")
        if config.initial_load_path is None or config.initial_load_in_hf:
            return None
        key = "checkpoint.initial_load_path"
        fs, path = folders.open_location(config.initial_load_path, key)
        self.check_initial(fs, path, key)
        if config.initial_load_model_only:
            self.read(fs, path, ["model"], key)
            return None
        return self.read(fs, path, names, key)

    def own_steps(self) -> list[int]:
        """The steps in the folder, ascending: as rank 0 sees it, so that all ranks choose the same."""
        answer = [folders.committed_steps(self.fs, self.root) if self.is_first_rank else None]
        dist.broadcast_object_list(answer, src=0, group=self.group)
        assert answer[0] is not None
        return answer[0]

    def undamaged(self, steps: list[int]) -> str:
        """The path of load_step, or of the latest step whose files are as they were written."""
        if self.config.load_step != -1:
            steps = [self.config.load_step]
        for step in reversed(steps):
            fault = fault_in(self.fs, self.path(step), self.group)
            if fault is None:
                return self.path(step)
            if self.config.load_step != -1 or self.config.on_damage == "stop":
                raise UserError(
                    f"checkpoint.folder: {fault}: restore it, resume from another with checkpoint.load_step, or set "
                    'checkpoint.on_damage to "fall_back"'
                )
            if self.is_first_rank:
                aside = folders.set_aside(self.fs, self.path(step))
                logger.warning("%s: step-%d is damaged, and now %s", fault, step, aside)
        raise UserError(
            f"checkpoint.folder: every checkpoint in {self.root} is damaged ({list_steps(steps)}): restore one, or "
            "begin anew with another job.dump_folder"
        )

    def check_initial(self, fs: Any, path: str, key: str) -> None:
        """Verifies a checkpoint of ours; what another tool has written through DCP is taken as it is."""
        if not fs.exists(f"{path}/{METADATA}"):
            raise UserError(
                f"{key}: {path} is no checkpoint (it has no file {METADATA}); the folder has "
                f"{list_steps(folders.committed_steps(fs, path))}: give the path of a step-N"
            )
        if not fs.exists(f"{path}/{folders.MANIFEST}"):
            logger.warning("%s: %s has no %s: its files cannot be verified", key, path, folders.MANIFEST)
        elif fault := fault_in(fs, path, self.group):
            raise UserError(f"{key}: {fault}: restore it, or give another")

    def read(self, fs: Any, path: str, names: list[str], key: str) -> int:
        """Loads the states `names` from the checkpoint `path`, which the setting `key` led to. Returns its step."""
        began = time.perf_counter()
        with read_errors(f"{key}: {path}"):
            reader = CheckpointReader(fs, path)
            stored = reader.read_metadata().state_dict_metadata
        saved = {name: tuple(item.size) for name, item in stored.items() if isinstance(item, TensorStorageMetadata)}
        step = torch.zeros((), dtype=torch.int64)
        wanted = {name: self.tensors_to_fill(name, saved, f"{key}: {path}") for name in names}
        if "step" in saved:
            wanted["step"] = step
        with read_errors(f"{key}: {path}"):
            dcp.load(wanted, storage_reader=reader, process_group=self.group)
        for name in names:
            loaded = wanted[name]
            self.states[name].load_state_dict(unpack(loaded) if isinstance(loaded, Tensor) else loaded)
        logger.info("loaded %s from %s (%.1f s)", ", ".join(names), path, time.perf_counter() - began)
        return int(step)

    def tensors_to_fill(self, name: str, saved: dict[str, tuple[int, ...]], place: str) -> Tensor | dict[str, Any]:
        """What a load of one state writes to: its tensors, or one for a packed state.

        `saved`: the checkpoint's shapes by name. Raises UserError, which begins with `place`, where they do not fit.
        """
        if not any(key == name or key.startswith(name + ".") for key in saved):
            raise UserError(
                f'{place} holds no {name}; add "{name}" to checkpoint.exclude_from_loading, or choose another'
            )
        state = self.states[name]
        if not isinstance(state, ModelState | OptimizerState):
            return torch.empty(saved[name], dtype=torch.uint8)
        tensors = state.state_dict()
        prefix = name + "."
        there = {key.removeprefix(prefix): shape for key, shape in saved.items() if key.startswith(prefix)}
        misfits = misfits_of(there, {key: tuple(tensor.shape) for key, tensor in tensors.items()})
        if misfits:
            raise UserError(
                f"{place} does not fit this run's {name}: {'; '.join(misfits)}. Restore the settings that it was saved "
                "with, or choose another checkpoint or job.dump_folder"
            )
        return tensors

    # Saving

    def maybe_save(self, step: int) -> None:
        """Saves if `step` is a multiple of the interval. Call after each step: it also ends saves in the background."""
        if not self.config.enable:
            return
        if self.future is not None and self.future.done():
            self.finish()
        if step % self.config.interval == 0:
            self.save(step)

    def save(self, step: int, *, last: bool = False) -> None:
        """Saves all states as step-N, after the save before has ended; with `last` returns only when it is on disk.

        In the background modes it returns when the states are copied, or (async_with_pinned_mem on a GPU) are being
        copied: see `wait_for_copy`. A save that fails is logged and kept in `failed_steps`; the run goes on.
        """
        if not self.config.enable:
            return
        self.wait()
        if step != self.started_step or step in self.failed_steps:
            self.began, self.started_step, self.stall_seconds = time.perf_counter(), step, 0.0
            tensors, writer = self.collect(step), CheckpointWriter(self.fs, self.path(step), step)
            if self.config.async_mode == "disabled":
                with self.saving():
                    dcp.save(tensors, storage_writer=writer, process_group=self.group)
            else:
                self.start_in_background(tensors, writer)
                self.stall_seconds = time.perf_counter() - self.began
        if last:
            self.wait()

    def start_in_background(self, tensors: dict[str, Any], writer: CheckpointWriter) -> None:
        in_process, gpu = self.config.async_mode == "async_with_pinned_mem", torch.cuda.is_available()
        # torch 2.11's closes itself after one use; later ones keep their (pinned) buffers for the next.
        if self.stager is not None and not self.stager._state_dict_stager._deepcopy_dispatch:
            self.stager.close()
            self.stager = None
        if self.stager is None:
            self.stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=gpu and in_process,
                    use_shared_memory=in_process,
                    use_async_staging=gpu and in_process,
                    use_non_blocking_copy=gpu and in_process,
                )
            )
        response: Any = dcp.async_save(
            tensors,
            storage_writer=writer,
            process_group=self.group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD,
            async_stager=self.stager,
        )
        if isinstance(response, AsyncSaveResponse):
            self.staging, response = response.staging_completion, response.upload_completion
        self.future = response

    def wait_for_copy(self) -> None:
        """Returns when the states may change again: call before the optimizer's step."""
        if self.staging is not None:
            began = time.perf_counter()
            self.staging.result()
            self.staging = None
            self.stall_seconds += time.perf_counter() - began

    def collect(self, step: int) -> dict[str, Any]:
        """All states as tensors, which DCP stores as "step", "model.<name>" ...: those of model and optimizer are the
        live ones, the others packed, on rank 0."""
        tensors: dict[str, Any] = {"step": torch.tensor(step)}
        for name, state in self.states.items():
            values = state.state_dict()
            if isinstance(state, ModelState | OptimizerState):
                tensors[name] = values
            elif self.is_first_rank:
                tensors[name] = pack(values)
        return tensors

    def wait(self) -> None:
        """Returns when a save in the background has ended, on all ranks."""
        if not self.config.enable:
            return
        if self.future is not None:
            self.finish()
        # Without condition: ranks see the end of a background save at different calls.
        dist.barrier(self.group)

    def finish(self) -> None:
        """Waits for the end of a save in the background."""
        assert self.future is not None
        future, self.future, self.staging = self.future, None, None
        with self.saving():
            future.result()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the end of a save: tells of it and removes older checkpoints, or tells of its failure.

        DCP raises a CheckpointException on all ranks where one fails. Whatever it was, the training can go on.
        """
        assert self.started_step is not None
        step = self.started_step
        try:
            yield
        except CheckpointException as error:
            self.failed_steps.append(step)
            if self.is_first_rank:
                logger.error(
                    "checkpoint.folder: %s could not be saved (%s): make room or give permission. Training goes on",
                    self.path(step), first_failure(error),
                )  # fmt: skip
                self.tidy(lambda: folders.remove(self.fs, folders.place_of(self.fs, self.path(step))))
            return
        if step in self.failed_steps:
            self.failed_steps.remove(step)
        if self.is_first_rank:
            seconds = time.perf_counter() - self.began
            waited = "" if self.config.async_mode == "disabled" else f", training waited {self.stall_seconds:.2f} s"
            logger.info("saved %s (%.1f s%s)", self.path(step), seconds, waited)
            self.tidy(lambda: self.prune(step))

    def prune(self, step: int) -> None:
        """Removes what keep_latest_k does not keep, now that `step` is committed and verified."""
        if not self.config.keep_latest_k:
            return
        # Later steps are those of a run that load_step went back behind: not older, and not this run's to remove.
        own_steps = [other for other in folders.committed_steps(self.fs, self.root) if other <= step]
        for other in own_steps[: -self.config.keep_latest_k]:
            folders.remove(self.fs, self.path(other))

    def tidy(self, work: Any) -> None:
        """Removing old files is not worth a run."""
        try:
            work()
        except OSError as error:
            logger.warning("checkpoint.folder: %s: not removed (%s)", self.root, error)

    def close(self) -> None:
        """Ends what is in the background. After an error on one rank, the others would wait here in vain."""
        if self.config.enable:
            self.wait()
            if self.stager is not None:
                self.stager.close()
            dist.destroy_process_group(self.group)


def fault_in(fs: Any, path: str, group: dist.ProcessGroup | None = None) -> str | None:
    """What is wrong with a committed checkpoint, the same on all ranks, each of which reads its share of it."""
    try:
        share = folders.records_of(fs, path)[dist.get_rank() :: dist.get_world_size()]
        faults = [fault for record in share if (fault := folders.fault_of(fs, path, record))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        faults = [f"{path}/{folders.MANIFEST} cannot be read ({first_failure(error)})"]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, faults, group=group)
    return next((fault for of_rank in of_all for fault in of_rank), None)


@contextmanager
def read_errors(place: str) -> Iterator[None]:
    """Damaged files fail in many ways; to the user they are one."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise UserError(
            f"{place} cannot be read ({first_failure(error)}): choose another with checkpoint.load_step or "
            "checkpoint.initial_load_path, or move it away"
        ) from error


def list_steps(steps: list[int]) -> str:
    return ", ".join(f"step-{step}" for step in steps) or "none"


def misfits_of(there: dict[str, tuple[int, ...]], here: dict[str, tuple[int, ...]]) -> list[str]:
    """What differs between the shapes in a checkpoint and those of a run, by name: a phrase for each kind."""
    found = []
    if missing := sorted(here.keys() - there.keys()):
        found.append(f"it lacks {a_few(missing)}")
    if unexpected := sorted(there.keys() - here.keys()):
        found.append(f"this run lacks {a_few(unexpected)}")
    reshaped = [name for name in sorted(there.keys() & here.keys()) if there[name] != here[name]]
    if reshaped:
        found.append(a_few([f"{name} is {there[name]} there and {here[name]} here" for name in reshaped]))
    return found


def a_few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def first_failure(error: BaseException) -> str:
    """The exception of the first rank that failed, out of DCP's collection of them, on one line."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
