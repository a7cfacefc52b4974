"""Packing documents into rows without losing a token, the same at every number of ranks.

The global batch has `lanes` rows, and every row, a lane, is a token stream of its own: document number d
belongs to lane d % lanes, and a lane is bos, tokens, eos of its documents, one after the other. A row is the
next seq_len + 1 tokens; the row after it begins with the last token of this one, so that each token is once
an input and once a label:

    lane    t0 t1 t2 t3 t4 t5 t6 t7 t8 ...         (seq_len 4)
    row 0   t0 t1 t2 t3 t4                         inputs t0..t3, labels t1..t4
    row 1               t4 t5 t6 t7 t8

A rank owns some neighbouring lanes; it reads the same documents as every other rank, but tokenises only its
own. So the global batch depends neither on the number of ranks nor on how they accumulate gradients, and
the place of a lane is two integers: the document of its next token, and how many tokens of that document come
before. That is the whole state.

Document numbers go on over epochs: document i of epoch e is number e * documents_per_epoch + i.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from data.sources import DATASET_KEY, DocumentSource
from data.tokenizer import Tokenizer
from errors import UserError

CHUNK = 1 << 18  # Characters that are tokenised at a time, so that the tokenizer can use several threads.


class Lane:
    """The tokens of one row of the batch that have been read and not yet been packed."""

    def __init__(self, document: int, offset: int):
        self.next_document = document  # The next one to append
        self.offset = offset  # Tokens of the first piece (or of the next document, where there is none) that are packed
        self.pieces: deque[tuple[int, np.ndarray]] = deque()  # Documents: number, int32 tokens
        self.unread = -offset

    @property
    def position(self) -> tuple[int, int]:
        """(document, offset) of the next token."""
        return (self.pieces[0][0] if self.pieces else self.next_document), self.offset

    def append(self, tokens: np.ndarray, lanes: int) -> None:
        """Adds the tokens of the next document: never empty, as eos is among them."""
        self.pieces.append((self.next_document, tokens))
        self.unread += len(tokens)
        self.next_document += lanes

    def take(self, length: int) -> np.ndarray:
        """int32 (length + 1,): the next tokens, of which the last is left for the next time."""
        parts, missing, begin = [], length + 1, self.offset
        for _, tokens in self.pieces:
            parts.append(tokens[begin : begin + missing])
            missing -= len(parts[-1])
            begin = 0
            if missing == 0:
                break
        self.offset += length
        self.unread -= length
        while self.offset >= len(self.pieces[0][1]):
            self.offset -= len(self.pieces.popleft()[1])
        return np.concatenate(parts)


class Packer:
    """Rows of the lanes [first_lane, first_lane + num_lanes), from one pass over the source.

    positions: int64 (lanes, 2), (document, offset) of all lanes of the global batch; documents_per_epoch: 0
    where it is not known yet. epochs: None begins again for ever.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        first_lane: int,
        num_lanes: int,
        epochs: int | None,
        positions: Tensor,
        documents_per_epoch: int,
    ):
        if tokenizer.eos_id is None:
            raise UserError(
                f"model.tokenizer_path: {tokenizer.path} names no end-of-text token, without which documents "
                "would run into each other; give a tokenizer that does (a tokenizer.json also by the "
                '"eos_token" of a tokenizer_config.json beside it)'
            )
        self.source, self.tokenizer = source, tokenizer
        self.seq_len, self.epochs = seq_len, epochs
        self.num_all_lanes, self.first_lane = len(positions), first_lane
        self.documents_per_epoch = documents_per_epoch
        self.lanes = [Lane(*position) for position in positions[first_lane : first_lane + num_lanes].tolist()]
        # Of all lanes: while the length of an epoch is unknown, only the smallest is sure to be in the first.
        self.unread_documents = self.read(start=int(positions[:, 0].min()))

    def has_rows(self) -> bool:
        """Whether every lane has the tokens of a row; if not, `tokenize_chunk` gets more."""
        return all(lane.unread > self.seq_len for lane in self.lanes)

    def take_rows(self) -> Tensor:
        """int64 (num_lanes, seq_len + 1)."""
        return torch.from_numpy(np.stack([lane.take(self.seq_len) for lane in self.lanes])).long()

    def positions(self) -> Tensor:
        """int64 (num_lanes, 2): (document, offset) of the next token of each lane."""
        return torch.tensor([lane.position for lane in self.lanes], dtype=torch.int64)

    def tokenize_chunk(self) -> bool:
        """Reads on, and adds what it read to its lanes. Returns False when all is read."""
        lanes, texts, characters = [], [], 0
        for number, text in self.unread_documents:
            row = number % self.num_all_lanes - self.first_lane
            if 0 <= row < len(self.lanes) and number >= self.lanes[row].next_document:
                lanes.append(self.lanes[row])
                texts.append(text)
                characters += len(text)
                if characters >= CHUNK:
                    break
        bos = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        for lane, ids in zip(lanes, self.tokenizer.encode_batch(texts), strict=True):
            tokens = np.array([*bos, *ids, self.tokenizer.eos_id], dtype=np.int32)
            if not lane.pieces and lane.offset >= len(tokens):
                raise UserError(
                    f"{DATASET_KEY}: {self.source.fingerprint}: document {lane.next_document} has "
                    f"{len(tokens)} tokens, but the checkpoint has read {lane.offset} of it: the data is not "
                    "what it was; restore it, or start anew"
                )
            lane.append(tokens, self.num_all_lanes)
        return bool(texts)

    def read(self, start: int) -> Iterator[tuple[int, str]]:
        """(number, text) of all documents from number `start` on, epoch after epoch."""
        epoch, first = divmod(start, self.documents_per_epoch) if self.documents_per_epoch else (0, start)
        while self.epochs is None or epoch < self.epochs:
            count = first
            for index, text in self.source.documents(first, epoch):
                yield epoch * self.documents_per_epoch + index, text
                count = index + 1
            if count == 0:
                raise UserError(f"{DATASET_KEY}: {self.source.fingerprint}: no document is in it; give other data")
            if self.documents_per_epoch not in (0, count):
                raise UserError(
                    f"{DATASET_KEY}: {self.source.fingerprint}: had {self.documents_per_epoch} documents "
                    f"before, and has {count} in epoch {epoch}: the data is not what it was; restore it, or "
                    "start anew"
                )
            self.documents_per_epoch = count
            epoch, first = epoch + 1, 0
