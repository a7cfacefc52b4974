import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data.local import DOCUMENT_BYTES, TextFiles, permutation
from data.sources import DocumentSource, open_source
from errors import UserError


def text_files(folder: Path, texts: list[str]) -> None:
    for i, text in enumerate(texts):
        (folder / f"{i % 3}").mkdir(exist_ok=True)
        (folder / f"{i % 3}" / f"{i}.txt").write_text(text)


def json_line(text: str) -> str:
    return json.dumps({"id": 1, "text": text}, ensure_ascii=len(text) % 2 == 0) + "\n"


def json_files(folder: Path, texts: list[str]) -> None:
    """Two files; blank lines, CR LF line ends, and no line end after the last line."""
    half = len(texts) // 2
    (folder / "a.jsonl").write_text("\n" + "  \n".join(map(json_line, texts[:half])) + "\r\n", newline="")
    lines = "".join(json_line(text).replace("\n", "\r\n") for text in texts[half:])
    (folder / "b.json").write_text(lines.removesuffix("\r\n"), newline="")


def gzip_files(folder: Path, texts: list[str]) -> None:
    json_files(folder, texts[5:])
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json_line, texts[:5])).encode()))


def parquet_files(folder: Path, texts: list[str]) -> None:
    half = len(texts) // 2
    for name, part, kind in (
        ("a", texts[:half], pyarrow.string()),
        ("b", texts[half:], pyarrow.large_string()),
    ):
        table = pyarrow.table({"id": range(len(part)), "text": pyarrow.array(part, kind)})
        parquet.write_table(table, folder / f"{name}.parquet", row_group_size=4)


KINDS: dict[str, Callable[[Path, list[str]], None]] = {
    "text": text_files, "jsonl": json_files, "jsonl.gz": gzip_files, "parquet": parquet_files,
}  # fmt: skip


def dataset(kind: str) -> str:
    return kind.removesuffix(".gz")


def words(rng: random.Random) -> list[str]:
    """All different, none empty, as empty text files are no documents."""
    return [f"{i} " + "".join(rng.choices('abé東\n\t"\\', k=rng.randrange(30))) for i in range(rng.randrange(11, 30))]


def read(source: DocumentSource, start: int = 0, epoch: int = 0) -> list[str]:
    numbers, texts = zip(*source.documents(start, epoch), strict=True)
    assert list(numbers) == list(range(start, start + len(texts)))
    return list(texts)


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_once_in_an_order_of_seed_and_epoch(tmp_path, rng, kind):
    texts = words(rng)
    KINDS[kind](tmp_path, texts)
    source = open_source(dataset(kind), str(tmp_path), seed=7)
    first = read(source)
    assert sorted(first) == sorted(texts)
    assert first == read(open_source(dataset(kind), str(tmp_path), seed=7))
    orders = set()
    for seed in range(3):
        for epoch in range(3):
            orders.add(tuple(read(open_source(dataset(kind), str(tmp_path), seed), epoch=epoch)))
    assert all(sorted(order) == sorted(texts) for order in orders)
    assert len(orders) == 9 or kind == "jsonl.gz"
    assert len(orders) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_any_start(tmp_path, rng, kind):
    texts = words(rng)
    KINDS[kind](tmp_path, texts)
    source = open_source(dataset(kind), str(tmp_path), seed=rng.randrange(100))
    for epoch in (0, 1):
        whole = read(source, epoch=epoch)
        for start in range(len(texts)):
            assert read(source, start, epoch) == whole[start:]
        assert list(source.documents(len(texts), epoch)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_allows_a_move_and_nothing_else(tmp_path, rng, kind):
    here = tmp_path / "here"
    here.mkdir()
    KINDS[kind](here, words(rng))
    before = open_source(dataset(kind), str(here), seed=1).fingerprint
    assert open_source(dataset(kind), str(here), seed=2).fingerprint != before
    there = here.rename(tmp_path / "there")
    assert open_source(dataset(kind), str(there), seed=1).fingerprint == before
    KINDS[kind](there, words(rng) + ["one more"])
    assert open_source(dataset(kind), str(there), seed=1).fingerprint != before


def test_file_folder_and_pattern(tmp_path):
    for name in ("a.txt", "b.md", "sub/c.txt", "sub/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").touch()
    for path, found in (
        ("b.md", {"b.md"}),
        ("", {"a.txt", "sub/c.txt"}),
        ("*.md", {"b.md"}),
        ("**/*.md", {"b.md", "sub/d.md"}),
    ):
        assert set(read(open_source("text", str(tmp_path / path), 0))) == found


def test_long_text_is_cut_at_line_ends(tmp_path, rng):
    lines = ["é" * rng.randrange(200) + "\n" for _ in range(2000)]
    text = "".join(lines)
    (tmp_path / "long.txt").write_text(text)
    source = open_source("text", str(tmp_path), 0)
    assert isinstance(source, TextFiles)
    parts = [source.text(i) for i in range(len(source))]
    assert len(parts) > 3
    assert "".join(parts) == text
    assert all(part.endswith("\n") for part in parts)
    sizes = [len(part.encode()) for part in parts]
    assert max(sizes) <= DOCUMENT_BYTES
    assert min(sizes[:-1]) > DOCUMENT_BYTES - 500
    assert sorted(read(source)) == sorted(parts)


def test_long_lines_are_cut_between_characters(tmp_path, rng):
    text = "a" * rng.randrange(4) + "東🙂é" * 40_000
    (tmp_path / "line.txt").write_text(text)
    source = open_source("text", str(tmp_path), 0)
    assert isinstance(source, TextFiles)
    assert "".join(source.text(i) for i in range(len(source))) == text
    assert len(source) == -(-len(text.encode()) // (DOCUMENT_BYTES - 3))


def test_text_of_exactly_one_document(tmp_path):
    for extra, documents in ((0, 1), (1, 2)):
        (tmp_path / "a.txt").write_text("a" * (DOCUMENT_BYTES + extra))
        assert len(read(open_source("text", str(tmp_path), 0))) == documents


def test_half_a_surrogate_pair_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83db"}\n{"text": "\\ud83d\\ude42"}\n')
    assert sorted(read(open_source("jsonl", str(tmp_path), 0))) == ["a?b", "🙂"]


def test_rows_of_a_row_group_are_shuffled_too(tmp_path, rng):
    texts = words(rng)
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    orders = [read(open_source("parquet", str(tmp_path), seed), 0, e) for seed, e in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(order) for order in [texts, *orders]}) == 4


def test_parquet_is_not_read_whole(tmp_path):
    table = pyarrow.table({"text": ["x" * 100_000] * 400})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10, use_dictionary=False)
    del table
    source = open_source("parquet", str(tmp_path), 0)
    before = pyarrow.total_allocated_bytes()
    held = max(pyarrow.total_allocated_bytes() - before for _ in source.documents(0))
    assert held < 5_000_000  # Of 40 MB


def test_orders_do_not_change_with_versions():
    """A resumed run must find its documents, so these numbers are for ever."""
    assert permutation(8, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert permutation(8, 3, 1).tolist() == [0, 6, 2, 1, 3, 7, 4, 5]


BAD_FILES = [
    ("text", "a.txt", b"one\ntwo \xff\n", r"a\.txt: line 2 is not UTF-8"),
    ("text", "a.txt", b"", "no document"),
    ("jsonl", "a.jsonl", b"\n \n", "no document"),
    ("jsonl", "a.jsonl", b'\n{"text": "a"\n', r"a\.jsonl: line 2: not JSON"),
    ("jsonl", "a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl: line 1: not JSON"),
    ("jsonl", "a.jsonl", b'["text"]\n', r"a\.jsonl: line 1: not a JSON object"),
    ("jsonl", "a.jsonl", b'{"body": "a"}\n', r'a\.jsonl: line 1: no string in field "text" \(fields: body\)'),
    ("jsonl", "a.jsonl", b'{"text": null}\n', "line 1: no string"),
    ("jsonl", "a.json.gz", gzip.compress(b'\n{"text": 1}\n'), r"a\.json\.gz: line 2: no string"),
    ("jsonl", "a.jsonl.gz", gzip.compress(b"\n"), "no document"),
    ("jsonl", "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-12], "not a whole gzip file"),
    ("jsonl", "a.jsonl.gz", b'{"text": "a"}\n', "not a whole gzip file"),
    ("parquet", "a.parquet", b"PAR1 or not", r"a\.parquet: not a Parquet file"),
]


@pytest.mark.parametrize("kind, name, content, message", BAD_FILES)
def test_bad_files(tmp_path, kind, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"dataset_path.*{message}"):
        read(open_source(kind, str(tmp_path), 0))


@pytest.mark.parametrize(
    "table, message",
    [
        (pyarrow.table({"body": ["a"]}), r'no column "text" \(columns: body\)'),
        (pyarrow.table({"text": [1]}), 'column "text" is of type int64'),
        (pyarrow.table({"text": ["a", None]}), 'row 1 of row group 0 has no "text"'),
        (pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), "no document"),
    ],
)
def test_bad_parquet(tmp_path, table, message):
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=rf"dataset_path.*a\.parquet: {message}"):
        read(open_source("parquet", str(tmp_path), 0))


def test_nothing_to_read(tmp_path):
    (tmp_path / "a.md").touch()
    with pytest.raises(UserError, match="there is no .*absent"):
        open_source("text", str(tmp_path / "absent"), 0)
    with pytest.raises(UserError, match=r"contains no \.txt file"):
        open_source("text", str(tmp_path), 0)
