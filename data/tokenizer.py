"""Tokenizers: a `tokenizer.json`, a sentencepiece model, or a small BPE trained on Python's standard library.

They encode plain text only: what looks like a special token in a document ("<|end_of_text|>") is spelled out
in ordinary tokens, so that no document can end itself. The loader puts bos and eos around documents.
"""

import hashlib
import json
import logging
import os
import platform
import re
import uuid
from pathlib import Path
from typing import Any, Protocol

import tokenizers
import torch.distributed as dist
from tokenizers import decoders, models, pre_tokenizers, trainers

from data.sources import stdlib_documents
from errors import UserError

logger = logging.getLogger("rowhouse")

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
BOS_NAMES = (BOS, "<s>")
EOS_NAMES = (EOS, "</s>", "<|endoftext|>")

RECIPE = 1  # Of stdlib_tokenizer: with a new number, no file of an older recipe is taken for the new one.
TRAINING_BYTES = 4 << 20
STDLIB_VOCAB = 16384  # The most that the standard library's own tokenizer learns; small models take less.


class Tokenizer(Protocol):
    """Text to token ids and back."""

    path: str
    """The file that it was read from."""
    vocab_size: int
    """Every id is below it."""
    bos_id: int | None
    eos_id: int | None
    fingerprint: str
    """Equal for two tokenizers that give the same ids: a hash of the file, and bos and eos."""

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone, without bos or eos."""
        ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each text; releases the GIL."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text; a `tokenizer.json` shows special tokens by name, sentencepiece drops them."""
        ...


class JsonTokenizer:
    """A `tokenizer.json`, through the library `tokenizers`."""

    def __init__(self, path: Path):
        content = path.read_bytes()
        self.path = str(path)
        self.tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        named = special_names(path.parent / "tokenizer_config.json")
        self.bos_id = first_known(vocabulary, (*BOS_NAMES, named.get("bos_token")))
        self.eos_id = first_known(vocabulary, (*EOS_NAMES, named.get("eos_token")))
        self.fingerprint = fingerprint(content, self.bos_id, self.eos_id)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class SentencePieceTokenizer:
    """A sentencepiece `.model`."""

    def __init__(self, path: Path):
        from sentencepiece import SentencePieceProcessor

        content = path.read_bytes()
        self.path = str(path)
        self.processor = SentencePieceProcessor(model_proto=content)
        self.vocab_size = self.processor.vocab_size()
        bos, eos = self.processor.bos_id(), self.processor.eos_id()
        self.bos_id = bos if bos >= 0 else None
        self.eos_id = eos if eos >= 0 else None
        self.fingerprint = fingerprint(content, self.bos_id, self.eos_id)

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self.processor.encode(texts)

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids)


def open_tokenizer(path: str | None, vocab_size: int) -> Tokenizer:
    """The tokenizer of `path`, or the standard library's own, for a model of `vocab_size` rows. On all ranks at once.

    Raises UserError where it has more tokens than the model.
    """
    if path is not None:
        tokenizer = load_tokenizer(path)
    else:
        # One rank trains it, the others then find it kept.
        if dist.get_rank() != 0:
            dist.barrier()
        tokenizer = stdlib_tokenizer(min(vocab_size, STDLIB_VOCAB))
        if dist.get_rank() == 0:
            dist.barrier()
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"model.tokenizer_path: the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}: choose "
            f"another, or set model.vocab_size to {tokenizer.vocab_size} or more"
        )
    logger.info("tokenizer: %s, %d tokens", tokenizer.path, tokenizer.vocab_size)
    return tokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """Reads a `tokenizer.json`, a sentencepiece `.model`, or the one of these that a folder contains.

    bos and eos of a `tokenizer.json` are found by their well-known names, else in `tokenizer_config.json`
    beside it. Raises UserError where there is no such file, or where it is none of these.
    """
    file = find_file(Path(path).expanduser())
    try:
        if file.suffix == ".json":
            return JsonTokenizer(file)
        if is_tiktoken(file):
            raise UserError(
                f"model.tokenizer_path: {file} is in tiktoken's format (Llama 3's original), which is not "
                "read; give the tokenizer.json of the model's Hugging Face repository"
            )
        return SentencePieceTokenizer(file)
    except UserError:
        raise
    except Exception as error:  # The two libraries raise bare Exception and RuntimeError.
        raise UserError(
            f"model.tokenizer_path: {file} cannot be read as a tokenizer ({error}); "
            "give a tokenizer.json or a sentencepiece .model"
        ) from error


def find_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(
            f"model.tokenizer_path: there is no {path}; give a tokenizer.json, a sentencepiece .model, "
            "or a folder that contains one"
        )
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path / name).is_file():
            return path / name
    raise UserError(
        f"model.tokenizer_path: the folder {path} contains neither tokenizer.json nor tokenizer.model; "
        "download one of them there, or give another folder"
    )


def is_tiktoken(file: Path) -> bool:
    """Whether the first line is a token in base64 and its rank."""
    with open(file, "rb") as opened:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\r?\n?", opened.readline(4096)) is not None


def special_names(file: Path) -> dict[str, str]:
    """bos_token and eos_token of a `tokenizer_config.json`, as far as they are there."""
    if not file.is_file():
        return {}
    try:
        entries: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"model.tokenizer_path: {file} is not JSON ({error}); download it again") from error
    names = {}
    for key in ("bos_token", "eos_token"):
        entry = entries.get(key)
        name = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(name, str):
            names[key] = name
    return names


def first_known(vocabulary: dict[str, int], names: tuple[str | None, ...]) -> int | None:
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def fingerprint(content: bytes, bos_id: int | None, eos_id: int | None) -> str:
    return f"sha256 {hashlib.sha256(content).hexdigest()[:16]}, bos {bos_id}, eos {eos_id}"


def stdlib_tokenizer(vocab_size: int, cache_dir: Path | None = None) -> Tokenizer:
    """A byte-level BPE of (at most) `vocab_size` tokens, trained on the running Python's standard library.

    Trained once, in seconds, and kept in `cache_dir` ($ROWHOUSE_CACHE, else $XDG_CACHE_HOME/rowhouse, else
    ~/.cache/rowhouse). Always the same for one Python version; several processes may ask for it at once.
    Raises UserError where `vocab_size` does not hold the 256 bytes and 2 special tokens, or the folder can't
    be written.
    """
    if vocab_size < 258:
        raise UserError(f"model.vocab_size: {vocab_size} is too small for a byte-level tokenizer; give 258 or more")
    folder = cache_dir or default_cache()
    file = folder / f"stdlib-bpe-{vocab_size}-python{platform.python_version()}-v{RECIPE}.json"
    if not file.is_file():
        content = train_bpe(vocab_size)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Another process may be writing too: each writes a file of its own, and the last rename wins.
            temporary = folder / f"{file.name}.{uuid.uuid4().hex}"
            temporary.write_text(content, encoding="utf-8")
            os.replace(temporary, file)
        except OSError as error:
            raise UserError(
                f"the trained tokenizer cannot be kept in {folder} ({error.strerror}); set the environment "
                "variable ROWHOUSE_CACHE to a folder that can be written, or give model.tokenizer_path"
            ) from error
    return JsonTokenizer(file)


def default_cache() -> Path:
    if "ROWHOUSE_CACHE" in os.environ:
        return Path(os.environ["ROWHOUSE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rowhouse"


def train_bpe(vocab_size: int) -> str:
    """The content of a `tokenizer.json`."""
    documents = stdlib_documents(held_out=False)
    stride = max(1, documents.total_bytes // TRAINING_BYTES)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((documents.text(i) for i in range(0, len(documents), stride)), trainer)
    return tokenizer.to_str()
