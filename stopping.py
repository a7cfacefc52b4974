"""Stopping a run from outside: signals and a time limit, agreed on by all ranks, after a whole step."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# torchrun passes a signal on to ranks that the terminal or the queue has sent it to already: that is one request.
SAME_REQUEST_SECONDS = 2.0
OUT_OF_TIME = 1000  # Beside the signals' numbers.


class StopRequests:
    """The first SIGTERM, SIGUSR1 or SIGINT asks the run to stop; a second one, 2 s later or more, ends it at once.

    "At once" is with status 128 + the signal's number, also while the main thread waits in a collective. Times are
    in seconds.
    """

    def __init__(self, max_time: float | None = None):
        self.deadline = None if max_time is None else time.monotonic() + max_time
        self.signal: signal.Signals | None = None
        self.asked_at = 0.0
        self.vote: torch.Tensor | None = None
        self.ballot: dist.Work | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals, in the main thread's with-block; what they did before is restored after it."""
        # A handler in Python runs only between two of the main thread's instructions. The interpreter writes the
        # signal's number to this socket at once, and a thread of our own reads it.
        ours, interpreters = socket.socketpair()
        interpreters.setblocking(False)
        previous_fd = signal.set_wakeup_fd(interpreters.fileno(), warn_on_full_buffer=False)
        previous = {number: signal.signal(number, ignore) for number in SIGNALS}
        threading.Thread(target=self.read, args=(ours,), name="signals", daemon=True).start()
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            interpreters.close()

    def read(self, ours: socket.socket) -> None:
        with ours:
            while numbers := ours.recv(64):
                for number in numbers:
                    if number in SIGNALS:
                        self.receive(signal.Signals(number))

    def receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.asked_at = number, now
        elif now - self.asked_at >= SAME_REQUEST_SECONDS:
            os._exit(128 + number)

    def agreed(self) -> str | None:
        """After each step, on all ranks: why the run stops here, the same on all; None to go on.

        It is the outcome of the vote that the call before has begun, so that no rank waits for another here.
        """
        if self.ballot is not None:
            assert self.vote is not None
            self.ballot.wait()
            if reason := int(self.vote):
                return "training.max_time" if reason == OUT_OF_TIME else signal.Signals(reason).name
        out_of_time = self.deadline is not None and time.monotonic() >= self.deadline
        own = self.signal if self.signal is not None else OUT_OF_TIME if out_of_time else 0
        self.vote = torch.tensor(int(own))
        self.ballot = dist.all_reduce(self.vote, dist.ReduceOp.MAX, async_op=True)
        return None


def ignore(number: int, frame: FrameType | None) -> None:
    """Signals must have a handler to be written to the socket."""
