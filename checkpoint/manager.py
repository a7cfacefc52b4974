"""CheckpointManager: saves a run every so many steps, and finds and loads what to go on from.

A checkpoint is the folder step-N, written by all ranks through torch.distributed.checkpoint. Whatever moment the run is
killed at, each step-N is whole:

    step-N.tmp    being written. Rank 0 renames it to step-N when all ranks have finished and the files are on disk;
                  one that is found at the start is of a save that was cut off, and is removed.
    step-N.old    the former step-N, while a new one takes its place; put back at the start if that did not happen.
"""

import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from checkpoint.state import ModelState, OptimizerState, pack, unpack
from errors import UserError

logger = logging.getLogger("rowhouse")

STATES = ("model", "optimizer", "lr_scheduler", "train_state", "data", "rng")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving the run, and going on from what was saved."""

    enable: bool = False
    """Save, and resume from what the folder holds."""
    folder: str = "checkpoint"
    """Where, in the run's folder (job.dump_folder): step-N."""
    interval: int = 500
    """Save every so many steps; the last step is saved in any case."""
    initial_load_path: str | None = None
    """A checkpoint (a step-N folder) to begin from, as long as the run has none of its own."""
    initial_load_model_only: bool = True
    """Of initial_load_path take the weights alone and begin at step 0; false goes on from all that it holds."""
    keep_latest_k: int = 10
    """Remove all but this many of the latest checkpoints after a save; 0 keeps all."""
    load_step: int = -1
    """Resume from this step; -1 takes the latest."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async writes in the background: training waits only for the copy to host memory."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """What not to load: any of model, optimizer, lr_scheduler, train_state, data, rng."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.interval < 1:
            found.append(("interval", f"{self.interval} is too small; give 1 or more"))
        if self.keep_latest_k < 0:
            found.append(("keep_latest_k", f"{self.keep_latest_k} is negative; give 0 (keep all) or more"))
        if self.load_step < -1:
            found.append(("load_step", f"{self.load_step} is no step; give 0 or more, or -1 for the latest"))
        unknown = [name for name in self.exclude_from_loading if name not in STATES]
        if unknown:
            text = f"a checkpoint has no {', '.join(unknown)}; choose from {', '.join(STATES)}"
            found.append(("exclude_from_loading", text))
        if self.initial_load_path is not None and self.initial_load_model_only and "model" in self.exclude_from_loading:
            text = (
                "leaves nothing to load of initial_load_path (initial_load_model_only is true); change one of the three"
            )
            found.append(("exclude_from_loading", text))
        if not self.enable:
            for key, idle in (("initial_load_path", None), ("load_step", -1), ("exclude_from_loading", [])):
                if getattr(self, key) != idle:
                    found.append(
                        (key, "has no effect while checkpoint.enable is false; set that to true, or remove it")
                    )
        return found


class CheckpointManager:
    """Saves and loads the named states. All methods are for all ranks at once; torch.distributed must be initialised.

    `folder` is the run's folder. States other than ModelState and OptimizerState must give the same on every rank, and
    only what torch.load(weights_only=True) reads. With config.enable false the methods do nothing. Raises UserError
    where the folder cannot be written.
    """

    def __init__(self, config: CheckpointConfig, folder: Path, states: dict[str, Stateful]):
        self.config = config
        self.folder = folder / config.folder
        self.states = states
        self.future: Future | None = None
        self.started_step: int | None = None
        if not config.enable:
            return
        self.is_first_rank = dist.get_rank() == 0
        if self.is_first_rank:
            with self.write_errors():
                self.folder.mkdir(parents=True, exist_ok=True)
                finish_cut_off_saves(self.folder)
        # A group of its own, on the CPU: a save in the background must not mix its collectives with the training's.
        self.group = dist.new_group(backend="gloo")

    # Loading

    def load(self) -> int | None:
        """Loads the latest checkpoint of the run (or load_step), else initial_load_path.

        Returns the step that the run goes on from; None for a fresh start, which includes one with the weights of
        initial_load_path alone. Raises UserError for a step that is not there, and for a checkpoint that cannot be
        read or does not fit.
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
                f"checkpoint.load_step: {self.folder} has no step-{config.load_step}; it has {list_steps(steps)}: "
                "choose one of these, or -1 for the latest"
            )
        if steps:
            step = config.load_step if config.load_step != -1 else steps[-1]
            if step < steps[-1]:
                logger.warning(
                    "checkpoint.load_step: %s still holds step-%d, which a resume without load_step takes",
                    self.folder, steps[-1],
                )  # fmt: skip
            if config.initial_load_path is not None:
                logger.info("checkpoint.initial_load_path is not read: the run has checkpoints of its own")
            return self.read(self.folder / f"step-{step}", names, "checkpoint.folder")
        if config.initial_load_path is None:
            return None
        path = Path(config.initial_load_path)
        if not (path / ".metadata").is_file():
            raise UserError(
                f"checkpoint.initial_load_path: {path} is no checkpoint (it has no file .metadata); the folder has "
                f"{list_steps(complete_steps(path))}: give the path of a step-N"
            )
        if config.initial_load_model_only:
            self.read(path, ["model"], "checkpoint.initial_load_path")
            return None
        return self.read(path, names, "checkpoint.initial_load_path")

    def own_steps(self) -> list[int]:
        """The steps in the folder, ascending: as rank 0 sees it, so that all ranks choose the same."""
        answer = [complete_steps(self.folder) if self.is_first_rank else None]
        dist.broadcast_object_list(answer, src=0, group=self.group)
        assert answer[0] is not None
        return answer[0]

    def read(self, path: Path, names: list[str], key: str) -> int:
        """Loads the states `names` from the checkpoint `path`, which the setting `key` led to. Returns its step."""
        began = time.perf_counter()
        with read_errors(f"{key}: {path}"):
            stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        saved = {name: tuple(item.size) for name, item in stored.items() if isinstance(item, TensorStorageMetadata)}
        step = torch.zeros((), dtype=torch.int64)
        wanted = {name: self.tensors_to_fill(name, saved, f"{key}: {path}") for name in names}
        if "step" in saved:
            wanted["step"] = step
        with read_errors(f"{key}: {path}"):
            dcp.load(wanted, checkpoint_id=path, process_group=self.group)
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

        In async_mode "async" returns when the states are copied, and a failure is raised by the next call. Raises
        UserError where the folder cannot be written.
        """
        if not self.config.enable:
            return
        self.wait()
        if step != self.started_step:
            self.began, self.started_step = time.perf_counter(), step
            tensors, path = self.collect(step), self.folder / f"step-{step}.tmp"
            with self.write_errors():
                if self.config.async_mode == "async":
                    response: Any = dcp.async_save(tensors, checkpoint_id=path, process_group=self.group)
                    self.future = response
                else:
                    dcp.save(tensors, checkpoint_id=path, process_group=self.group)
                    self.commit(step)
        if last or self.config.async_mode == "disabled":
            self.wait()

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
        """Returns when a save in the background is on disk and has its name, on all ranks."""
        if not self.config.enable:
            return
        if self.future is not None:
            self.finish()
        # Without condition: ranks see the end of a background save at different calls, and rank 0 renames.
        dist.barrier(self.group)

    def finish(self) -> None:
        """Waits for this rank's part of a save in the background, then commits it. Raises what it failed with."""
        assert self.future is not None and self.started_step is not None
        future, self.future = self.future, None
        with self.write_errors():
            # Rank 0 writes the metadata after all ranks have written their files: its end is the end for all.
            future.result()
            self.commit(self.started_step)

    def commit(self, step: int) -> None:
        """Rank 0: gives the checkpoint, written in full, its name; then removes what keep_latest_k does not keep."""
        if not self.is_first_rank:
            return
        path = self.folder / f"step-{step}"
        new, old = path.with_name(f"step-{step}.tmp"), path.with_name(f"step-{step}.old")
        sync_folder(new)
        if path.exists():
            path.rename(old)
        new.rename(path)
        sync_folder(self.folder)
        if old.exists():
            shutil.rmtree(old)
        logger.info("saved %s (%.1f s)", path, time.perf_counter() - self.began)
        # Later steps are those of a run that load_step went back behind: not older, and not this run's to remove.
        own_steps = [other for other in complete_steps(self.folder) if other <= step]
        if self.config.keep_latest_k:
            for other in own_steps[: -self.config.keep_latest_k]:
                # Renamed first, so that half a checkpoint never has a checkpoint's name.
                doomed = (self.folder / f"step-{other}").rename(self.folder / f"step-{other}.tmp")
                shutil.rmtree(doomed)

    @contextmanager
    def write_errors(self) -> Iterator[None]:
        """A full disk or a missing permission is the user's to mend; anything else stays as it is."""
        try:
            yield
        except (OSError, CheckpointException) as error:
            cause = failure_of(error)
            # A full disk comes out of torch.save as a RuntimeError of its zip writer, inline_container.cc.
            if not isinstance(cause, OSError) and "inline_container" not in str(cause):
                raise
            raise UserError(
                f"checkpoint.folder: {self.folder} cannot be written ({first_failure(error)}): make room or give "
                "permission, or choose another job.dump_folder"
            ) from error

    def close(self) -> None:
        """Ends what is in the background. After an error on one rank, the others would wait here in vain."""
        if self.config.enable:
            self.wait()
            dist.destroy_process_group(self.group)


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


def complete_steps(folder: Path) -> list[int]:
    """The N of each whole step-N in a folder, ascending. The metadata is written last."""
    found = [re.fullmatch(r"step-(\d+)", path.parent.name) for path in folder.glob("step-*/.metadata")]
    return sorted(int(match[1]) for match in found if match)


def list_steps(steps: list[int]) -> str:
    return ", ".join(f"step-{step}" for step in steps) or "none"


def finish_cut_off_saves(folder: Path) -> None:
    """Leaves only whole checkpoints behind, after a kill at any moment of `CheckpointManager.commit`."""
    for old in folder.glob("step-*.old"):
        path = old.with_suffix("")
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)
    for cut_off in folder.glob("step-*.tmp"):
        logger.info("removing %s, of a save that was cut off", cut_off)
        shutil.rmtree(cut_off)


def sync_folder(folder: Path) -> None:
    """Has the names in a folder on disk; DCP has done so with the files' contents."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def failure_of(error: BaseException) -> BaseException:
    """The exception of the first rank that failed, out of DCP's collection of them."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def first_failure(error: BaseException) -> str:
    cause = failure_of(error)
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
