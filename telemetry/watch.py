"""A run that hangs or loses a rank ends: soon, on every rank, and saying why.

Left alone, a rank whose peer is stopped, dead or stuck waits in a collective until a timeout that says nothing of the
cause. Here each rank promises signs of life. One that breaks the promise, and all the others with it, write where each
of their threads is, and leave. And a rank that fails tells the others, which would wait for it in vain.
"""

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from errors import ExitStatus, UserError

POLL_SECONDS = 0.5
DUMP_AT = 0.8
"""Of the patience. Collectives time out at the whole of it, and that must not come first."""
GRACE_SECONDS = 2.0
"""For the ranks that learn of a hang from the store, to write their stacks too."""
STORE_LOST_SECONDS = 2.0
"""At a normal end the store's host may leave first: time for the others to close their watch."""
STORE_GONE = "the store is gone: the process that hosts it, rank 0 or torchrun, has ended"
FLIGHT_RECORDER = "flight-recorder-rank-"
"""What torchfrtrace, the reader of these files, expects: a common beginning, then the rank."""


def record_collectives(folder: Path) -> None:
    """Has torch remember its last collectives, and NCCL dump them to `folder` too. Call before init_process_group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "stacks" / FLIGHT_RECORDER))


class Promise(NamedTuple):
    """The main thread will call `expect` again before `since + seconds` on the monotonic clock."""

    what: str
    seconds: float
    since: float

    def dump_at(self) -> float:
        return self.since + DUMP_AT * self.seconds

    def slack(self) -> float:
        """Seconds from the dump to when the backstop ends the process, at the latest."""
        return max(0.15 * self.seconds, 5.0)


@dataclass(frozen=True)
class News:
    """What went wrong first, on any rank. The store keeps one."""

    kind: Literal["hung", "failed", "user error"]
    rank: int
    text: str


@dataclass(frozen=True)
class Peer:
    """Where a rank runs."""

    host: str
    pid: int

    def state(self) -> str:
        """What /proc says of a process on this host: R (running), T (stopped), D (disk sleep) ..., or gone."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return "gone"
        return status.partition("State:")[2].partition("\n")[0].strip()


class Watch:
    """Ends this process when its main thread gives no sign of life, or when another rank hangs or fails.

    Three threads look on. One keeps the time. One talks to the store, which does not answer while the process that
    hosts it is stopped. The third is faulthandler's, the backstop: it is written in C, and so works while a thread of
    this process holds the interpreter lock.

    `folder` is the run's: dumps go to stacks/rank-N.txt and stacks/flight-recorder-rank-N; those of an earlier run are
    removed. `store` is the process group's. `seconds` is the patience until the first `expect`.

    Call `close` at the end, or `fail` with the exception that ended the run.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, store: dist.Store, seconds: float):
        self.rank, self.world_size = rank, world_size
        self.me = Peer(socket.gethostname(), os.getpid())
        # A client of its own: a call that waits, in another thread, would keep a shared one locked.
        self.store = dist.PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=10))
        self.store.set(f"peer/{rank}", json.dumps(asdict(self.me)))
        stacks = folder / "stacks"
        stacks.mkdir(parents=True, exist_ok=True)
        self.path, self.flight_path = stacks / f"rank-{rank}.txt", stacks / f"{FLIGHT_RECORDER}{rank}"
        self.flight_path.unlink(missing_ok=True)
        self.file = self.path.open("w")  # Open all the time: the backstop can open nothing.
        self.backstop_at = 0.0
        self.expect("setting up", seconds)
        self.dumped = False
        self.dumping = threading.Lock()
        self.telling = threading.Lock()
        """Whoever has it says why the run ends, and ends this process. Never released."""
        self.closed = threading.Event()
        self.flight_recorder = threading.Thread(target=self.dump_flight_recorder, daemon=True)
        self.threads = [threading.Thread(target=f, daemon=True, name=f.__name__) for f in (self.keep_time, self.listen)]
        for thread in self.threads:
            thread.start()

    def expect(self, what: str, seconds: float) -> None:
        """A sign of life: the next one comes within `seconds`, after `what` ("step 12"). Call it every step.

        Without it stacks are dumped after 0.8 of `seconds`, and the process is left within `seconds`, or a few seconds
        later if `seconds` is less than a minute.
        """
        self.promise = Promise(what, seconds, time.monotonic())
        self.arm_backstop(self.promise)

    def arm_backstop(self, promise: Promise) -> None:
        # This starts a thread, which takes milliseconds on a busy machine: not at every step.
        earliest, latest = promise.dump_at() + promise.slack() * 2 / 3, promise.dump_at() + promise.slack()
        if not earliest <= self.backstop_at <= latest:
            faulthandler.dump_traceback_later(latest - promise.since, exit=True, file=self.file)
            self.backstop_at = latest

    def close(self) -> None:
        """The end of the watch, for a run that ended well. Call it after a barrier: rank 0 may host the store."""
        self.closed.set()
        for thread in self.threads:
            thread.join(timeout=10 * POLL_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        self.file.close()
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # The others' files are still there.
            self.path.parent.rmdir()

    # Failing

    def fail(self, error: Exception) -> ExitStatus:
        """For the handler of the exception that ends this rank: tells the user and the other ranks why; once.

        A UserError is told by rank 0, whichever ranks raise it. Another error is told with its traceback, but for one
        that follows from another rank's: that is named instead. Returns what to leave with. Do so by os._exit: an
        orderly exit may wait for threads that wait for other ranks. The promise still holds, and ends that.
        """
        self.telling.acquire()  # The listening thread cannot end this process any more for what it hears.
        with self.dumping:
            dumped = self.dumped
        if dumped:
            self.threads[0].join()  # It leaves, as the other ranks have done: hence the error.
        if isinstance(error, UserError):
            own = News("user error", self.rank, str(error))
        else:
            own = News("failed", self.rank, f"failed: {type(error).__name__}: {error}".split("\n")[0][:1000])
        first = self.claim(own)
        if self.rank == 0 and own.kind == "user error":
            first = own
        if first == own and own.kind == "failed":
            traceback.print_exception(error)
            self.tell_gone_peers()
        return self.tell(first)

    def tell(self, news: News) -> ExitStatus:
        """Says why the run ends, where that is this rank's to say. Returns what to leave with."""
        if news.kind != "user error":
            status = ExitStatus.FAILED if news.rank == self.rank else ExitStatus.PEER_FAILED
            if news.rank != self.rank:
                self.say(f"rank {news.rank} {news.text}; this rank stops")
        else:
            status = ExitStatus.USER_ERROR
            if self.rank == 0:
                _write(f"train.py: {news.text}")
                with contextlib.suppress(dist.DistError):
                    self.store.set("told", "")
            elif not self.rank_zero_tells() and self.rank == news.rank:
                _write(f"train.py: on rank {self.rank}: {news.text}")
        if self.world_size > 1 and (self.rank == 0 or self.rank != news.rank):
            # torchrun names the rank that leaves first: let it be the one that failed. And where rank 0 hosts the
            # store, the others have yet to read it.
            time.sleep(3 * POLL_SECONDS)
        return status

    def rank_zero_tells(self) -> bool:
        """Waits for it, since torchrun ends all ranks when the first one leaves."""
        with contextlib.suppress(dist.DistError):
            for _ in range(6):
                if self.store.check(["told"]):
                    return True
                time.sleep(POLL_SECONDS)
        return False

    def tell_gone_peers(self) -> None:
        """A rank that was killed could not say so; this one's error is then likely its consequence."""
        time.sleep(POLL_SECONDS)  # A process that ends closes its connections first.
        try:
            for rank, peer in enumerate(self.peers()):
                if peer.host == self.me.host and peer.state().startswith(("gone", "Z")):
                    self.say(f"rank {rank} (pid {peer.pid}) is gone: was it killed, for its memory perhaps?")
        except dist.DistError:
            self.say(STORE_GONE)

    # Listening

    def listen(self) -> None:
        """The thread that talks to the other ranks, through the store."""
        lost = 0.0
        while not self.closed.wait(POLL_SECONDS):
            try:
                if self.dumped:
                    self.leave_together()
                news = self.news()
                if news is None:
                    continue
                if news.kind == "hung" and not self.telling.locked():
                    self.dump(f"stops because rank {news.rank} {news.text}")
                elif news.kind != "hung" and self.telling.acquire(blocking=False):
                    os._exit(self.tell(news))
            except dist.DistError:
                if self.dumped:
                    self.leave_hung()  # The store's host has dumped too, and was faster.
                lost += POLL_SECONDS
                if lost > STORE_LOST_SECONDS and self.telling.acquire(blocking=False):
                    self.say(f"{STORE_GONE}; this rank stops")
                    os._exit(ExitStatus.PEER_FAILED)

    def news(self) -> News | None:
        return News(**json.loads(self.store.get("news"))) if self.store.check(["news"]) else None

    def claim(self, news: News) -> News:
        """Makes this the news, if there is none yet. Returns what then is; without a store, what this rank knows."""
        try:
            return News(**json.loads(self.store.compare_set("news", "", json.dumps(asdict(news)))))
        except dist.DistError:
            return news

    def peers(self) -> list[Peer]:
        texts = self.store.multi_get([f"peer/{rank}" for rank in range(self.world_size)])
        return [Peer(**json.loads(text)) for text in texts]

    # Hanging

    def keep_time(self) -> None:
        """The thread that ends a hang; it depends on nothing but the clock."""
        while not self.dumped:
            left = self.promise.dump_at() - time.monotonic()
            if self.closed.wait(min(max(left, 0.0), POLL_SECONDS)):
                return
            if time.monotonic() >= self.promise.dump_at():
                self.dump("gives no sign of life")
        time.sleep(self.promise.slack() + 3)  # The listening thread compares the dumps, and leaves before.
        self.say("the store does not tell who dumped: the process that hosts it, rank 0 or torchrun, may be stopped")
        os._exit(ExitStatus.HUNG)

    def dump(self, why: str) -> None:
        """Writes all that is known of where this rank is; once."""
        with self.dumping:
            if self.dumped:
                return
            promise = self.promise
            where = f"{why}: {time.monotonic() - promise.since:.0f} s in {promise.what}"
            # Should the following hang as well, or the rest.
            faulthandler.dump_traceback_later(promise.slack() + 6, exit=True, file=self.file)
            try:
                print(f"rank {self.rank} (pid {self.me.pid} on {self.me.host}) {where}\n", file=self.file, flush=True)
                faulthandler.dump_traceback(self.file, all_threads=True)
            except OSError as error:  # A full disk, say. The run ends all the same.
                self.say(f"no stacks in {self.path}: {error}")
            self.say(f"{where}; stacks: {self.path}")
            self.flight_recorder.start()
            self.dumped = True

    def dump_flight_recorder(self) -> None:
        """The last collectives, as torch remembers them. NCCL has a recorder of its own, the other backends another."""
        name = "_dump_nccl_trace" if torch.cuda.is_available() else "_dump_fr_trace"
        recorded = getattr(torch._C._distributed_c10d, name, None)
        if recorded is not None:
            self.flight_path.write_bytes(recorded())

    def leave_together(self) -> NoReturn:
        """Waits for the others' dumps, names the ranks that have made none, and leaves."""
        start, promise = time.monotonic(), self.promise
        self.claim(News("hung", self.rank, f"hangs in {promise.what}"))
        self.store.append("dumped", f"{self.rank} ")  # type: ignore[attr-defined]
        while len(dumped := self.ranks_that_dumped()) < self.world_size and time.monotonic() < start + GRACE_SECONDS:
            time.sleep(POLL_SECONDS / 5)
        if missing := self.missing(dumped):
            self.say("no dump from " + ", ".join(missing))
        if len(dumped) < self.world_size:
            # One that holds its interpreter lock has yet to dump, by its backstop. torchrun ends it if this one leaves.
            time.sleep(max(0.0, start + promise.slack() + 1 - time.monotonic()))
        self.leave_hung()

    def leave_hung(self) -> NoReturn:
        self.flight_recorder.join()
        os._exit(ExitStatus.HUNG)

    def ranks_that_dumped(self) -> set[int]:
        return {int(rank) for rank in self.store.get("dumped").split()}

    def missing(self, dumped: set[int]) -> list[str]:
        """The ranks that have not dumped, as this rank is to name them.

        The lowest rank of a host that has dumped speaks for its host, where it sees the others' state; the lowest of
        all for the hosts from which none has.
        """
        peers = self.peers()
        speakers = {peers[rank].host: rank for rank in sorted(dumped, reverse=True)}
        named = []
        for rank, peer in enumerate(peers):
            if rank not in dumped and speakers.get(peer.host, min(dumped)) == self.rank:
                state = peer.state() if peer.host == self.me.host else f"on {peer.host}"
                named.append(f"rank {rank} (pid {peer.pid}: {state})")
        return named

    def say(self, text: str) -> None:
        _write(f"rank {self.rank}: {text}")


def _write(text: str) -> None:
    """To stderr, past Python's buffer and past logging: a thread that hangs may hold their locks."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
