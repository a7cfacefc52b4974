"""Weights & Biases: the run's folder and its run there belong together, also where the run is started again."""

import os
import tomllib
import uuid
from pathlib import Path
from typing import Any

from errors import UserError

ID_FILE = "wandb_id"


def open_wandb(folder: Path) -> Any:
    """The wandb run of the training run in `folder`, new, or, where `folder`/wandb_id names one, that one again.

    Its configuration is `folder`/config.toml's. WANDB_PROJECT, WANDB_NAME, WANDB_MODE=offline and the others are
    wandb's own; the project is rowhouse and the name the folder's where they say nothing. Raises UserError where wandb
    is not installed, or cannot begin.
    """
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "metrics.enable_wandb: Weights & Biases is not installed; run pip install wandb, or set it to false"
        ) from error
    id_path, config_path = folder / ID_FILE, folder / "config.toml"
    is_new = not id_path.is_file()
    id = uuid.uuid4().hex[:8] if is_new else id_path.read_text().strip()
    try:
        run = wandb.init(
            id=id,
            resume="allow",
            dir=folder,
            project=os.environ.get("WANDB_PROJECT", "rowhouse"),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            config=tomllib.loads(config_path.read_text()) if config_path.is_file() else None,
            settings=wandb.Settings(quiet=True),  # Its summary would push the run's last lines off the screen.
        )
    except (wandb.Error, ValueError) as error:  # ValueError: a variable of wandb's is set to nonsense.
        raise UserError(
            f"metrics.enable_wandb: Weights & Biases cannot begin ({' '.join(str(error).split())}): run wandb login, "
            "keep the run here with WANDB_MODE=offline, or set it to false"
        ) from error
    if is_new:
        id_path.write_text(id + "\n")
    # Not wandb's own count of steps: that never goes back, and a resumed run may repeat some.
    run.define_metric("*", step_metric="step")
    return run
