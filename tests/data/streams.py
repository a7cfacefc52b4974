"""A source and a tokenizer that are simple enough to say what the loader must give."""

import random
from collections.abc import Iterator

from data.tokenizer import BOS, EOS


class ListSource:
    """Documents from a list; in every epoch rotated by one more, and each reading is kept in `readings`."""

    def __init__(self, texts: list[str]):
        self.texts, self.fingerprint = texts, f"list of {len(texts)} texts"
        self.readings: list[tuple[int, int]] = []

    def order(self, epoch: int) -> list[str]:
        shift = epoch % max(1, len(self.texts))
        return self.texts[shift:] + self.texts[:shift]

    def documents(self, start: int, epoch: int = 0) -> Iterator[tuple[int, str]]:
        self.readings.append((start, epoch))
        for number in range(start, len(self.texts)):
            yield number, self.order(epoch)[number]


class ByteTokenizer:
    """Bytes, after bos 0 and eos 1; keeps all texts that it encoded."""

    path, vocab_size, bos_id, eos_id, fingerprint = "bytes", 258, 0, 1, "bytes"

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return [byte + 2 for byte in text.encode()]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        text = b"".join(bytes([i - 2]) if i > 1 else (BOS, EOS)[i].encode() for i in ids)
        return text.decode("utf-8", "replace")


def random_texts(rng: random.Random, count: int, longest: int = 60) -> list[str]:
    """Some of them empty."""
    return ["".join(rng.choices("abcdeé \n", k=rng.randrange(longest))) for _ in range(count)]


def lane_stream(texts: list[str], tokenizer: ByteTokenizer, lane: int, lanes: int) -> list[int]:
    """The tokens of one lane, where `texts` are the documents of all epochs."""
    stream = []
    for text in texts[lane::lanes]:
        stream += [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    return stream
