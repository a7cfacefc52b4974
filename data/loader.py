"""The loader: batches of packed rows from a thread that works ahead, and a state to resume from exactly.

A thread is enough: the tokenizers do their work outside of Python's lock.
"""

import contextlib
import queue
import threading
import weakref
from typing import Any, NamedTuple, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from data.packing import Packer
from data.sources import DATASET_KEY, DocumentSource
from data.tokenizer import Tokenizer
from errors import UserError


class Batch(NamedTuple):
    rows: Tensor  # int64 (num_lanes, seq_len + 1)
    positions: Tensor  # int64 (num_lanes, 2): where the lanes are after it
    documents_per_epoch: int


Batches: TypeAlias = queue.Queue[Batch | BaseException]


class BatchLoader:
    """This rank's rows of each global batch: `next` gives (inputs, labels), both int64 (num_lanes, seq_len).

    The global batch has `lanes` rows, of which this rank owns `num_lanes` from `first_lane` on; see
    data/packing.py. After `epochs` times through the source (None: never) it stops as soon as a lane can't
    fill a row; rows are always full. Up to `prefetch` batches are prepared ahead, from the first `next` on;
    what goes wrong there, `next` raises.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        lanes: int,
        first_lane: int,
        num_lanes: int,
        epochs: int | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
    ):
        if not 0 <= first_lane < first_lane + num_lanes <= lanes:
            raise ValueError(f"lanes {first_lane} to {first_lane + num_lanes - 1} are not among {lanes}")
        self.source, self.tokenizer, self.epochs = source, tokenizer, epochs
        self.seq_len, self.lanes, self.first_lane, self.num_lanes = seq_len, lanes, first_lane, num_lanes
        self.prefetch, self.pin_memory = prefetch, pin_memory
        self.label_counts = torch.zeros(tokenizer.vocab_size, dtype=torch.int64)
        """int64 (vocab_size,): how often each token was a label in the batches handed out so far."""
        self.start_at(torch.tensor([[lane, 0] for lane in range(lanes)]), documents_per_epoch=0)

    def start_at(self, positions: Tensor, documents_per_epoch: int) -> None:
        """positions: int64 (lanes, 2), of the lanes of all ranks; documents_per_epoch: 0 if unknown."""
        packer = Packer(
            self.source,
            self.tokenizer,
            seq_len=self.seq_len,
            first_lane=self.first_lane,
            num_lanes=self.num_lanes,
            epochs=self.epochs,
            positions=positions,
            documents_per_epoch=documents_per_epoch,
        )
        self.positions, self.documents_per_epoch = packer.positions(), documents_per_epoch
        self.waiting: Batch | None = None
        self.end: BaseException | None = None
        self.batches: Batches = queue.Queue(max(1, self.prefetch))
        stop = threading.Event()
        # The thread does not hold the loader, so that one that is dropped is freed and its thread stopped.
        self.thread = threading.Thread(target=prepare, args=(packer, self.batches, stop), name="data", daemon=True)
        # At exit too, as a daemon thread that is inside of the tokenizer then may crash the process.
        self.stop = weakref.finalize(self, stop_thread, self.thread, self.batches, stop)

    def __iter__(self) -> Self:
        return self

    def has_next(self) -> bool:
        """Whether there is another batch; waits for it. The position stays: ranks can agree before they move on."""
        if not self.stop.alive:
            raise ValueError("the loader is closed")
        if self.waiting is None and self.end is None:
            if self.thread.ident is None:
                self.thread.start()
            batch = self.batches.get()
            if isinstance(batch, BaseException):
                self.end = batch
            else:
                self.waiting = batch
        if self.end is not None and not isinstance(self.end, Exception):  # A SystemExit would end this process too.
            raise RuntimeError(f"the thread that reads the data was ended by {type(self.end).__name__}") from self.end
        if self.end is not None and not isinstance(self.end, StopIteration):
            raise self.end
        return self.waiting is not None

    def __next__(self) -> tuple[Tensor, Tensor]:
        if not self.has_next():
            raise StopIteration
        batch, self.waiting = self.waiting, None
        assert batch is not None
        self.positions, self.documents_per_epoch = batch.positions, batch.documents_per_epoch
        inputs, labels = batch.rows[:, :-1].contiguous(), batch.rows[:, 1:].contiguous()
        self.label_counts += torch.bincount(labels.flatten(), minlength=len(self.label_counts))
        if self.pin_memory:  # Here, as the current CUDA device of the other thread would not be this rank's.
            return inputs.pin_memory(), labels.pin_memory()
        return inputs, labels

    def unigram_entropy(self) -> float:
        """Nats per token of the labels so far: the loss of a model that knows only their frequencies."""
        return entropy(self.label_counts)

    def state_dict(self) -> dict[str, Any]:
        """Where the data goes on after the last batch handed out.

        Its "lanes" are this rank's, int64 (num_lanes, 2): (document, token within it). Everything else does
        not depend on the rank, but for "first_lane", and "documents_per_epoch" (0 until this rank has seen
        the end of an epoch).
        """
        return {
            "lanes": self.positions.clone(),
            "first_lane": self.first_lane,
            "seq_len": self.seq_len,
            "documents_per_epoch": self.documents_per_epoch,
            "fingerprint": self.source.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` says: one rank's, with the "lanes" of all ranks, in order: int64 (lanes, 2).

        The number of ranks and seq_len may be others than they were. Raises UserError for another number of
        lanes, another source or another tokenizer.
        """
        positions = state["lanes"]
        if len(positions) != self.lanes:
            raise UserError(
                f"training.global_batch_size: the checkpoint's is {len(positions)} and this run's "
                f"{self.lanes}, and the position in the data is kept by row of the batch; set it to "
                f"{len(positions)}"
            )
        if state["fingerprint"] != self.source.fingerprint:
            raise UserError(
                f"{DATASET_KEY}: the checkpoint was made from other data or another order\n"
                f"  then: {state['fingerprint']}\n  now:  {self.source.fingerprint}\n"
                "restore training.dataset, training.dataset_path and debug.seed, and the files as they were"
            )
        if state["tokenizer"] != self.tokenizer.fingerprint:
            raise UserError(
                "model.tokenizer_path: the checkpoint was made with another tokenizer (then: "
                f"{state['tokenizer']}; now: {self.tokenizer.fingerprint}, {self.tokenizer.path}); restore "
                "the one that was used"
            )
        self.close()
        self.start_at(positions.cpu(), state["documents_per_epoch"])

    def close(self) -> None:
        """Stops the thread; may be called again. `next` then raises ValueError."""
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def next_batch(loader: BatchLoader, can_end: bool) -> tuple[Tensor, Tensor] | None:
    """The next (inputs, labels) of each rank; None, on all ranks, when one has no more. For all ranks at once.

    With `can_end` false the data go on for ever, and the ranks need not ask each other.
    """
    if can_end:
        has_next = torch.tensor(loader.has_next(), dtype=torch.int32)
        dist.all_reduce(has_next, dist.ReduceOp.MIN)
        if not has_next:
            return None
    return next(loader)


def prepare(packer: Packer, batches: Batches, stop: threading.Event) -> None:
    """The thread: packs batches ahead until the data ends, something goes wrong, or it is stopped."""
    try:
        while not stop.is_set():
            if packer.has_rows():
                batches.put(Batch(packer.take_rows(), packer.positions(), packer.documents_per_epoch))
            elif not packer.tokenize_chunk():
                batches.put(StopIteration())
                return
    except BaseException as error:  # Whatever it is: `next` waits for it.
        batches.put(error)


def stop_thread(thread: threading.Thread, batches: Batches, stop: threading.Event) -> None:
    stop.set()
    with contextlib.suppress(queue.Empty):
        batches.get_nowait()  # Room for the one batch that it may be waiting to put
    if thread.ident is not None:
        thread.join(timeout=5)  # No longer, as it may hang in a read over the network


def entropy(counts: Tensor) -> float:
    """Entropy in nats of the frequencies that `counts`, int64 (vocab_size,), give; NaN if all are 0."""
    return float(torch.special.entr(counts.double() / counts.sum()).sum())
