"""A progress bar for those who look on."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


@contextmanager
def progress_bar(done: int, total: int, rank: int) -> Iterator[Any]:
    """Call the `update` of what it gives after each step. The first rank draws, where stdout is a terminal.

    The log's lines appear above the bar. Not rich: that hides the cursor, and a process which os._exit ends, as the
    watch does, cannot show it again.
    """
    if rank != 0 or not sys.stdout.isatty():
        with tqdm(disable=True) as bar:
            yield bar
        return
    with tqdm(total=total, initial=done, file=sys.stdout, unit=" steps", dynamic_ncols=True) as bar:
        with logging_redirect_tqdm():
            yield bar
