"""Where text comes from: a source gives numbered documents, in the same order every time.

Local files (data/local.py) and the running Python's own standard library are shuffled; what is streamed from
the Hugging Face hub keeps its order.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data.local import (
    FIELD,
    PATH_KEY,
    GzippedJsonLines,
    JsonLines,
    ParquetFiles,
    TextFiles,
    find_files,
    fingerprint_of,
)
from errors import UserError

HUB = {  # dataset: repository, configuration, split
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
    "fineweb_edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
}
SUFFIXES = {  # dataset: the files that are read in a folder
    "text": (".txt",),
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz"),
    "parquet": (".parquet",),
}
DATASETS = ("stdlib", "stdlib_validation", *HUB, "hf", *SUFFIXES)

DATASET_KEY = "training.dataset (or validation.dataset)"
HOLD_OUT = 50  # Every 50th document of the standard library is for validation.


class DocumentSource(Protocol):
    """Numbered documents."""

    fingerprint: str
    """What is read, in words: sources of equal fingerprint give the same documents in the same order."""

    def documents(self, start: int, epoch: int = 0) -> Iterator[tuple[int, str]]:
        """(number, text) from document number `start` on, counted from 0 without gaps, to the last document.

        The order, but not the number of documents, may depend on the epoch. Raises UserError for what can't
        be read.
        """
        ...


def open_source(dataset: str, dataset_path: str | None, seed: int) -> DocumentSource:
    """The source that the keys `dataset` and `dataset_path` name; `seed` draws the order of local documents.

    Raises UserError for an unknown dataset, for a path that is missing or that the dataset does not take, and
    for data that is empty or can't be read.
    """
    if dataset not in DATASETS:
        raise UserError(f'{DATASET_KEY}: there is no "{dataset}"; the datasets are: {", ".join(DATASETS)}')
    takes_path = dataset == "hf" or dataset in SUFFIXES
    if dataset_path is None and takes_path:
        raise UserError(f'{PATH_KEY}: dataset = "{dataset}" needs it; say where the data is')
    if dataset_path is None:
        if dataset in HUB:
            return HubDocuments(*HUB[dataset])
        return stdlib_documents(held_out=dataset == "stdlib_validation", seed=seed)
    if not takes_path:
        raise UserError(f'{PATH_KEY}: dataset = "{dataset}" takes no path; remove it, or choose another dataset')
    if dataset == "hf":
        return HubDocuments(dataset_path, None, "train")
    files = find_files(dataset_path, SUFFIXES[dataset])
    if dataset == "text":
        return TextFiles("text", files, seed)
    if dataset == "parquet":
        return ParquetFiles(files, seed)
    if any(file.suffix == ".gz" for file in files):
        return GzippedJsonLines(files, seed)
    return JsonLines(files, seed)


def stdlib_documents(*, held_out: bool, seed: int = 0) -> TextFiles:
    """The *.py files of the running Python's standard library: those held out for validation, or the rest."""
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "__pycache__"}
    files = [f for f in folder.rglob("*.py") if not left_out.intersection(f.relative_to(folder).parts)]
    if not files:
        raise UserError(f"{DATASET_KEY}: {folder}, the standard library, has no *.py file; choose another dataset")
    # Some of its files test other encodings, or broken ones: what is not UTF-8 in them is dropped.
    kind = "stdlib_validation" if held_out else "stdlib"
    documents = TextFiles(kind, sorted(files), seed, errors="ignore")
    is_held_out = np.arange(len(documents)) % HOLD_OUT == HOLD_OUT - 1
    documents.spans = documents.spans[is_held_out == held_out]
    return documents


class HubDocuments:
    """The field "text" of a data set that the library `datasets` streams: of the hub, or a local folder."""

    def __init__(self, repository: str, configuration: str | None, split: str):
        self.repository, self.configuration, self.split = repository, configuration, split
        self.fingerprint = f"{repository}, {configuration or 'default configuration'}, split {split}"
        if Path(repository).is_dir():
            files = sorted(f for f in Path(repository).rglob("*") if f.is_file())
            self.fingerprint = fingerprint_of("hf", files, seed=0) if files else self.fingerprint

    def documents(self, start: int, epoch: int = 0) -> Iterator[tuple[int, str]]:
        try:
            from datasets import load_dataset

            stream = load_dataset(self.repository, self.configuration, split=self.split, streaming=True)
            examples = iter(stream.skip(start))
        except Exception as error:  # Of requests, of the hub's client, of fsspec, of datasets itself: no common base.
            raise self.unreachable(error) from error
        number = start
        while True:
            try:
                example = next(examples, None)
            except Exception as error:
                raise self.unreachable(error) from error
            if example is None:
                return
            yield number, self.text(number, example)
            number += 1

    def text(self, number: int, example: dict[str, Any]) -> str:
        text = example.get(FIELD)
        if not isinstance(text, str):
            raise UserError(
                f'{PATH_KEY}: {self.repository}: example {number} has no string in field "{FIELD}" (fields: '
                f"{', '.join(example)}); choose another data set, or write a copy with that field and use "
                "jsonl or parquet"
            )
        return text

    def unreachable(self, error: Exception) -> UserError:
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        return UserError(
            f"{DATASET_KEY}: {self.fingerprint}: cannot be read ({type(error).__name__}: {error}); check the "
            f"name{', unset HF_HUB_OFFLINE' if offline else ''} and see that this machine reaches "
            "huggingface.co (a gated data set needs HF_TOKEN), or download the files and use dataset = "
            "jsonl or parquet"
        )
