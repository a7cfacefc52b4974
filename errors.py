"""The exception that a user is meant to read, the exit statuses of train.py, and the way out."""

import multiprocessing
import os
import sys
from enum import IntEnum
from typing import NoReturn


class UserError(Exception):
    """Something that the user can mend: the text says what is wrong, where (file and key), and what to do.

    `train.py` prints the text without a traceback and exits with status 2.
    """


class ExitStatus(IntEnum):
    """What train.py ends with (docs/checkpoints.md). torchrun itself ends with 1 where any rank does not end with 0."""

    DONE = 0  # the last step, or the end of the data; saved
    FAILED = 1  # an exception that nobody foresaw, with its traceback
    USER_ERROR = 2
    NOT_SAVED = 3  # trained to the end, but a checkpoint could not be written
    NOT_FINITE = 4  # too many steps in a row whose loss or gradient was NaN or infinite
    HUNG = 5  # no progress within comm.train_timeout_seconds
    PEER_FAILED = 6  # another rank failed, and says how
    STOPPED = 75  # by a signal or training.max_time, after the step and a save: start it again to go on (EX_TEMPFAIL)


def leave(status: int) -> NoReturn:
    """Ends the process at once. For a process that has had a process group, when all of its own work is done.

    An orderly exit was seen to abort in a thread of a library ("terminate called"), with status -6 for 0 or 2.
    """
    for child in multiprocessing.active_children():  # A checkpoint's writer would tell of a broken pipe.
        child.terminate()
        child.join(timeout=5)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
