"""The section [checkpoint]."""

from dataclasses import dataclass, field
from typing import Literal

STATES = ("model", "optimizer", "lr_scheduler", "train_state", "data", "rng")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving the run, and going on from what was saved."""

    enable: bool = False
    """Save, and resume from what the folder holds."""
    folder: str = "checkpoint"
    """Where, in the run's folder (job.dump_folder): step-N. An absolute path, or a URL (s3://bucket/run), stands for
    itself."""
    interval: int = 500
    """Save every so many steps; the last step is saved in any case."""
    initial_load_path: str | None = None
    """A checkpoint (a step-N folder) to begin from, as long as the run has none of its own."""
    initial_load_model_only: bool = True
    """Of initial_load_path take the weights alone and begin at step 0; false goes on from all that it holds."""
    initial_load_in_hf: bool = False
    """initial_load_path is a folder of Hugging Face safetensors."""
    last_save_in_hf: bool = False
    """After the last step also export the weights for Hugging Face, to hf-step-N in the run's folder."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of that export."""
    keep_latest_k: int = 10
    """Remove all but this many of the latest checkpoints after a save; 0 keeps all."""
    load_step: int = -1
    """Resume from this step; -1 takes the latest."""
    on_damage: Literal["fall_back", "stop"] = "fall_back"
    """Where the latest checkpoint is damaged: resume from the one before, and keep the damaged one as step-N.damaged;
    or stop."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """async writes in a thread: training waits only for the copy to host memory. async_with_pinned_mem writes in a
    process of its own, and copies from the GPU while the next step runs, to pinned memory that is kept."""
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
        if self.initial_load_in_hf and self.initial_load_path is None:
            found.append(("initial_load_in_hf", "there is no initial_load_path to read; give the folder, or false"))
        if self.initial_load_in_hf and not self.initial_load_model_only:
            text = "a Hugging Face folder holds weights alone; set initial_load_model_only to true"
            found.append(("initial_load_in_hf", text))
        if self.export_dtype != "float32" and not self.last_save_in_hf:
            found.append(("export_dtype", "nothing is exported while last_save_in_hf is false; set that, or remove it"))
        if not self.enable:
            idle: dict[str, object] = {
                "initial_load_path": None, "load_step": -1, "exclude_from_loading": [], "last_save_in_hf": False
            }  # fmt: skip
            for key, value in idle.items():
                if getattr(self, key) != value:
                    found.append(
                        (key, "has no effect while checkpoint.enable is false; set that to true, or remove it")
                    )
        return found
