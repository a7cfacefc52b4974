"""One run folder, one run: a second start would overwrite the checkpoints and the metrics of the first."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TextIO

from errors import UserError

logger = logging.getLogger("rowhouse")


def lock_run(folder: Path) -> TextIO:
    """Makes `folder` if need be, and takes run.lock in it for this process. For rank 0, before it writes there.

    Closing what is returned gives the lock back; so does the end of the process, however it ends: the kernel holds the
    lock, and what is left of the file does not count. run.lock tells who has it, or had it last, as JSON.

    Raises UserError where another process has the lock, and where the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "run.lock").open("a+")
    except OSError as error:
        raise UserError(f"job.dump_folder: {folder} cannot be written ({error.strerror}): choose another") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(file)
        file.close()
        raise UserError(
            f"job.dump_folder: {folder} is in use by {holder}: stop that run, or choose another job.dump_folder"
        ) from None
    except OSError as error:
        logger.warning(
            "%s: this file system has no locks (%s): nothing keeps a second run out of the folder",
            folder, errno.errorcode.get(error.errno or 0, error.strerror),
        )  # fmt: skip
        return file
    # A forked child shares the lock, and would keep it after this process.
    os.register_at_fork(after_in_child=file.close)
    file.truncate(0)
    json.dump(_me(), file)
    file.write("\n")
    file.flush()
    return file


def _me() -> dict[str, str | int]:
    me: dict[str, str | int] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": os.environ.get("USER", str(os.getuid())),
        "command": shlex.join(sys.argv),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    if "SLURM_JOB_ID" in os.environ:
        me["job"] = os.environ["SLURM_JOB_ID"]
    return me


def _holder(file: TextIO) -> str:
    """Who has the lock, from what the file says."""
    time.sleep(0.5)  # It may have the lock only just, and be about to write.
    file.seek(0)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        who = json.load(file)
        job = f", SLURM job {who['job']}" if "job" in who else ""
        return f"pid {who['pid']} on host {who['host']} since {who['started']} (user {who['user']}{job})"
    return "another run"
