"""Saving, keeping and resuming: a checkpoint is a folder step-N, whole or not there.

It is written as step-N.tmp and renamed when every rank has finished, so that a run that is killed at any moment leaves
the checkpoints that it had, and a half-written one never counts.
"""

import logging
import os
import re
import shutil
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from errors import UserError

logger = logging.getLogger("rowhouse")

PARTS = ("model", "optimizer", "train_state", "data", "rng")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder."""
    folder: str = "checkpoint"
    """Where, within the run's folder."""
    interval: int = 500
    """Save every so many steps; the last step is always saved."""
    initial_load_path: str | None = None
    """A checkpoint (a step-N folder) to start from when the run has none of its own."""
    initial_load_model_only: bool = True
    """Take only the model from initial_load_path, and start at step 0."""
    keep_latest_k: int = 10
    """Keep only so many; 0 keeps all."""
    load_step: int = -1
    """Resume from this step's checkpoint; -1 takes the newest."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async copies the state to host memory and writes it while training goes on."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """Parts that are not resumed, of: model, optimizer, train_state, data, rng."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.interval < 1:
            found.append(("interval", f"{self.interval} is too small; give 1 or more"))
        if self.keep_latest_k < 0:
            found.append(("keep_latest_k", f"{self.keep_latest_k} is negative; give 0 (all) or more"))
        unknown = [part for part in self.exclude_from_loading if part not in PARTS]
        if unknown:
            found.append(
                (
                    "exclude_from_loading",
                    f"{unknown} are no parts of a checkpoint; the parts are {', '.join(PARTS)}",
                )
            )
        return found


class CheckpointManager:
    """Saves and loads the states of a run, all ranks together. Call `close` at the end."""

    def __init__(self, config: CheckpointConfig, folder: Path, states: dict[str, Stateful]):
        self.config = config
        self.folder = folder / config.folder
        self.states = states
        self.saving: Future | None = None
        self.group = dist.new_group(backend="gloo") if config.async_mode == "async" else None
        if config.enable and dist.get_rank() == 0:
            for leftover in self.folder.glob("step-*.tmp"):
                shutil.rmtree(leftover)
        dist.barrier()

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint, ascending."""
        found = [re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*")]
        return sorted(int(match[1]) for match in found if match)

    # Loading

    def load(self) -> int | None:
        """Loads the run's own checkpoint, or initial_load_path; returns the run's step, None for a fresh start."""
        steps = self.steps()
        if self.config.load_step != -1 and self.config.load_step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise UserError(f"checkpoint.load_step: {self.folder} has no step {self.config.load_step}; it has: {there}")
        if steps:
            step = steps[-1] if self.config.load_step == -1 else self.config.load_step
            self.load_folder(
                self.folder / f"step-{step}", [p for p in PARTS if p not in self.config.exclude_from_loading]
            )
            return step
        if self.config.initial_load_path is None:
            return None
        path = Path(self.config.initial_load_path)
        if not (path / ".metadata").is_file():
            raise UserError(
                f"checkpoint.initial_load_path: {path} is not a checkpoint (a folder step-N with .metadata)"
            )
        parts = ["model"] if self.config.initial_load_model_only else list(PARTS)
        self.load_folder(path, [p for p in parts if p not in self.config.exclude_from_loading])
        return None

    def load_folder(self, path: Path, parts: list[str]) -> None:
        reader = dcp.FileSystemReader(path)
        saved = reader.read_metadata().state_dict_metadata
        state = {part: self.states[part].state_dict() for part in parts}
        if "model" in state:
            self.check_model(path, state["model"], saved)
        if "rng" in state and any(f"rng.{key}" not in saved for key in state["rng"]):
            logger.info("the checkpoint has no random state for this rank: it keeps its seed's")
            del state["rng"]
        dcp.load(state, storage_reader=reader)
        for part in state:
            self.states[part].load_state_dict(state[part])
        logger.info("loaded %s from %s", ", ".join(state), path)

    def check_model(self, path: Path, model: dict[str, Any], saved: dict[str, Any]) -> None:
        """Raises UserError where the checkpoint is of another model."""
        names = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
        shapes = {
            n: s.size for n, s in ((n, saved[f"model.{n}"]) for n in names) if isinstance(s, TensorStorageMetadata)
        }
        wrong = [f"{n} is missing" for n in model if n not in names]
        wrong += [f"{n} is not in this model" for n in sorted(names) if n not in model]
        wrong += [f"{n} is {tuple(s)}, here {tuple(model[n].shape)}" for n, s in shapes.items() if n in model and s != model[n].shape]  # fmt: skip
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise UserError(
                f"{path} is a checkpoint of another model ({'; '.join(wrong[:3])}{more}): restore the [model] section, "
                "or choose another job.dump_folder or checkpoint.initial_load_path"
            )

    # Saving

    def maybe_save(self, step: int) -> None:
        """Saves when the interval says so. An earlier asynchronous save that failed is raised here."""
        if self.saving is not None and self.saving.done():
            self.wait()
        if step % self.config.interval == 0:
            self.save(step)

    def save(self, step: int, *, last: bool = False) -> None:
        """Saves now; the last one, or with async_mode disabled, until it is on the disk."""
        self.wait()
        temporary = self.folder / f"step-{step}.tmp"
        state = {part: stateful.state_dict() for part, stateful in self.states.items()}
        writer = dcp.FileSystemWriter(temporary)
        if self.config.async_mode == "async" and not last:
            saving = dcp.async_save(state, storage_writer=writer, process_group=self.group)
            assert isinstance(saving, Future)
            self.saving = saving
            # Rank 0's part ends when all have written: it alone commits, from the thread that saved.
            saving.add_done_callback(lambda done: done.exception() or self.commit(step))
        else:
            dcp.save(state, storage_writer=writer)
            self.commit(step)

    def commit(self, step: int) -> None:
        """On rank 0: makes step-N.tmp count, then removes the checkpoints that are too many."""
        if dist.get_rank() != 0:
            return
        final, temporary = self.folder / f"step-{step}", self.folder / f"step-{step}.tmp"
        replaced = self.folder / f"step-{step}.replaced.tmp"
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in self.steps()[: -self.config.keep_latest_k] if self.config.keep_latest_k else []:
            shutil.rmtree(self.folder / f"step-{old}")
        logger.info("saved %s", final)

    def wait(self) -> None:
        """Until the asynchronous save is on the disk; raises what went wrong in it."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            saving.result()

    def close(self) -> None:
        self.wait()


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
