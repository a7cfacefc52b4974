"""Documents of local files: plain text, JSON lines, Parquet.

The files are indexed once (of text only the sizes are read, of JSON lines the line ends, of Parquet the
footers), and the documents visited in an order drawn from the seed and the epoch, so that the loss of a run
is stationary and any document can be gone to directly. Gzip allows no such thing: there the files are
shuffled, and the lines are not.
"""

import glob
import gzip
import hashlib
import json
import mmap
import os
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from errors import UserError

PATH_KEY = "training.dataset_path (or validation.dataset_path)"
FIELD = "text"
DOCUMENT_BYTES = 64 << 10  # Longer text files are cut, or one file would keep its lane of the batch for many steps.


def find_files(dataset_path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The file; or the files with these suffixes in a folder, at any depth; or those of a pattern."""
    path = Path(dataset_path).expanduser()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.name.endswith(suffixes) and f.is_file())
        if not files:
            raise UserError(
                f"{PATH_KEY}: the folder {path} contains no {' or '.join(suffixes)} file; give another "
                f"folder, or a pattern (like {path}/*.md) for files of other names"
            )
    else:
        files = sorted(Path(f) for f in glob.glob(str(path), recursive=True) if os.path.isfile(f))
        if not files:
            raise UserError(f"{PATH_KEY}: there is no {path}; give a file, a folder or a pattern that exists")
    for file in files:
        if not os.access(file, os.R_OK):
            refuse(file, "may not be read; change its permissions")
    return files


def refuse(file: Path, text: str, cause: Exception | None = None) -> NoReturn:
    """Raises UserError: `text` says what is wrong with the file, and what to do."""
    raise UserError(f"{PATH_KEY}: {file}: {text}") from cause


def fingerprint_of(kind: str, files: list[Path], seed: int) -> str:
    """Of the sizes, and of the names below the folder that all share: files may be moved, not changed."""
    base = os.path.commonpath([file.absolute().parent for file in files])
    sizes = [file.stat().st_size for file in files]
    names = [os.path.relpath(file.absolute(), base) for file in files]
    listing = "\n".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    digest = hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{kind}: {len(files)} files, {sum(sizes)} bytes, sha256 of names and sizes {digest}, seed {seed}"


def permutation(size: int, *seeds: int) -> np.ndarray:
    """int64 (size,), drawn from the seeds."""
    # From raw bits, which numpy promises to keep from version to version, unlike Generator.permutation.
    bits = np.random.PCG64([seed % 2**63 for seed in seeds]).random_raw(size)
    return np.argsort(bits, kind="stable")


def refuse_empty(files: list[Path], documents: int) -> None:
    if documents == 0:
        more = f" (and {len(files) - 1} more files)" if len(files) > 1 else ""
        refuse(files[0], f"no document is in it{more}; give data that is not empty")


class TextFiles:
    """UTF-8 text files, a document each; one longer than DOCUMENT_BYTES is cut into several, at line ends."""

    def __init__(self, kind: str, files: list[Path], seed: int, *, errors: str = "strict"):
        self.files, self.seed, self.errors = files, seed, errors
        self.fingerprint = fingerprint_of(kind, files, seed)
        spans = [(f, begin, end) for f, file in enumerate(files) for begin, end in cut(file)]
        refuse_empty(files, len(spans))
        self.spans = np.array(spans, dtype=np.int64)  # (documents, 3): file, first byte, end

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def total_bytes(self) -> int:
        return int((self.spans[:, 2] - self.spans[:, 1]).sum())

    def text(self, document: int) -> str:
        f, begin, end = self.spans[document].tolist()
        with open(self.files[f], "rb") as opened:
            opened.seek(begin)
            content = opened.read(end - begin)
        try:
            return content.decode("utf-8", self.errors)
        except UnicodeDecodeError as error:
            line = line_number(self.files[f], begin + error.start)
            refuse(self.files[f], f"line {line} is not UTF-8; convert the file, or leave it out", error)

    def documents(self, start: int, epoch: int = 0) -> Iterator[tuple[int, str]]:
        order = permutation(len(self), self.seed, epoch)
        for number in range(start, len(self)):
            yield number, self.text(order[number])


def cut(file: Path) -> Iterator[tuple[int, int]]:
    """(first byte, end) of the documents in a text file: all of it, or its parts where it is long."""
    size = file.stat().st_size
    if size <= DOCUMENT_BYTES:
        if size > 0:
            yield 0, size
        return
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        begin = 0
        while begin < size:
            end = min(begin + DOCUMENT_BYTES, size)
            if end < size:
                line_end = content.rfind(b"\n", begin, end)
                if line_end >= 0:
                    end = line_end + 1
                else:  # A line longer than a document: cut between two characters, not within one.
                    end = next((i for i in range(end, end - 4, -1) if content[i] & 0xC0 != 0x80), end)
            yield begin, end
            begin = end


def line_number(file: Path, position: int) -> int:
    """Of the line that the byte at `position` is in, counted from 1."""
    with open(file, "rb") as opened:
        size = 1 << 20
        return 1 + sum(opened.read(min(size, position - at)).count(b"\n") for at in range(0, position, size))


class JsonLines:
    """One JSON object a line, whose field "text" is the document. Blank lines are none."""

    def __init__(self, files: list[Path], seed: int):
        self.files, self.seed = files, seed
        self.fingerprint = fingerprint_of("jsonl", files, seed)
        starts = array("q")  # Of the lines in all files
        self.ends = []  # How many of them there are up to and with each file
        for file in files:
            position = 0
            with open(file, "rb") as opened:
                for line in opened:
                    if not line.isspace():
                        starts.append(position)
                    position += len(line)
            self.ends.append(len(starts))
        refuse_empty(files, len(starts))
        self.starts = np.frombuffer(starts, dtype=np.int64)

    def documents(self, start: int, epoch: int = 0) -> Iterator[tuple[int, str]]:
        order = permutation(len(self.starts), self.seed, epoch)
        for number in range(start, len(order)):
            document = order[number]
            file = self.files[np.searchsorted(self.ends, document, side="right")]
            position = int(self.starts[document])
            with open(file, "rb") as opened:
                opened.seek(position)
                line = opened.readline()
            try:
                text = text_of_line(line)
            except ValueError as error:
                refuse(file, f"line {line_number(file, position)}: {error}", error)
            yield number, text


class GzippedJsonLines:
    """JSON lines of files that may be compressed. A later start still decompresses all that is before it."""

    def __init__(self, files: list[Path], seed: int):
        self.files, self.seed = files, seed
        self.fingerprint = fingerprint_of("jsonl.gz", files, seed)

    def documents(self, start: int, epoch: int = 0) -> Iterator[tuple[int, str]]:
        number = 0
        for f in permutation(len(self.files), self.seed, epoch):
            for line_number, line in enumerate(self.lines(self.files[f]), 1):
                if line.isspace():
                    continue
                if number >= start:
                    try:
                        text = text_of_line(line)
                    except ValueError as error:
                        refuse(self.files[f], f"line {line_number}: {error}", error)
                    yield number, text
                number += 1
        refuse_empty(self.files, number)

    def lines(self, file: Path) -> Iterator[bytes]:
        if file.suffix != ".gz":
            with open(file, "rb") as opened:
                yield from opened
            return
        try:
            with gzip.open(file, "rb") as unzipped:
                yield from unzipped
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            refuse(file, f"not a whole gzip file ({error}); fetch it again", error)


def text_of_line(line: bytes) -> str:
    """The text in a JSON object; raises ValueError (what is wrong; what to do) for anything else."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(entry, dict):
        raise ValueError(f'not a JSON object; each line must be one, with a field "{FIELD}"')
    if not isinstance(entry.get(FIELD), str):
        raise ValueError(f'no string in field "{FIELD}" (fields: {", ".join(entry)}); rename the field that has it')
    text = entry[FIELD]
    # JSON can spell half of a surrogate pair, which is no text and has no UTF-8: it becomes "?".
    return text.encode("utf-8", "replace").decode() if b"\\u" in line else text


class ParquetFiles:
    """Rows of Parquet files, whose string column "text" is the document.

    Row groups are read whole, one at a time; their order is drawn, and within each that of its rows.
    """

    def __init__(self, files: list[Path], seed: int):
        self.files, self.seed = files, seed
        self.fingerprint = fingerprint_of("parquet", files, seed)
        groups = [(f, g, rows) for f, file in enumerate(files) for g, rows in enumerate(row_groups(file)) if rows]
        refuse_empty(files, len(groups))
        self.groups = np.array(groups, dtype=np.int64)  # (groups, 3): file, number within it, rows

    def documents(self, start: int, epoch: int = 0) -> Iterator[tuple[int, str]]:
        from pyarrow import parquet

        order = permutation(len(self.groups), self.seed, epoch)
        ends = np.cumsum(self.groups[order, 2])
        for i in range(np.searchsorted(ends, start, side="right"), len(order)):
            f, group, rows = self.groups[order[i]].tolist()
            first = int(ends[i]) - rows  # The number of this group's first document
            column = parquet.ParquetFile(self.files[f]).read_row_group(group, columns=[FIELD]).column(FIELD)
            rows_in_order = permutation(rows, self.seed, epoch, i)
            for number in range(max(start, first), first + rows):
                row = int(rows_in_order[number - first])
                text = column[row].as_py()
                if text is None:
                    refuse(self.files[f], f'row {row} of row group {group} has no "{FIELD}"; remove such rows')
                yield number, text


def row_groups(file: Path) -> list[int]:
    """Rows of each row group."""
    import pyarrow
    from pyarrow import parquet

    try:
        opened = parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        refuse(file, f"not a Parquet file ({error}); fetch it again, or leave it out", error)
    schema = opened.schema_arrow
    if FIELD not in schema.names:
        refuse(
            file,
            f'no column "{FIELD}" (columns: {", ".join(schema.names)}); rename the column that has the text',
        )
    kind = schema.field(FIELD).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        refuse(file, f'column "{FIELD}" is of type {kind}; it must be of strings')
    return [opened.metadata.row_group(g).num_rows for g in range(opened.num_row_groups)]
