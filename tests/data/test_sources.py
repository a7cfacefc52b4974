import json
import sysconfig
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from data.sources import DATASETS, HUB, open_source, stdlib_documents
from errors import UserError


def test_stdlib_and_its_validation_share_nothing():
    training, validation = stdlib_documents(held_out=False), stdlib_documents(held_out=True)
    spans = [set(map(tuple, source.spans.tolist())) for source in (training, validation)]
    assert not spans[0] & spans[1]
    assert len(spans[1]) == (len(spans[0]) + len(spans[1])) // 50
    assert not [file for file in training.files if "site-packages" in file.parts or file.suffix != ".py"]
    together = sorted(spans[0] | spans[1])
    sizes = [file.stat().st_size for file in training.files]
    assert sum(end - begin for _, begin, end in together) == sum(sizes)
    assert training.fingerprint != validation.fingerprint


def test_stdlib_documents_are_its_text():
    source = open_source("stdlib", None, seed=3)
    folder = Path(sysconfig.get_path("stdlib"))
    texts = dict(source.documents(0))
    assert sorted(texts) == list(range(len(texts)))
    assert (folder / "bisect.py").read_text() in texts.values()
    assert list(source.documents(len(texts) - 2)) == sorted(texts.items())[-2:]
    other = open_source("stdlib", None, seed=4)
    assert next(other.documents(0))[1] != texts[0] or next(other.documents(1))[1] != texts[1]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_local_folder_through_datasets(tmp_path, rng, kind):
    texts = [f"{i} é\n" + "x" * rng.randrange(50) for i in range(rng.randrange(5, 30))]
    if kind == "parquet":
        table = pyarrow.table({"id": range(len(texts)), "text": texts})
        parquet.write_table(table, tmp_path / "train.parquet", row_group_size=4)
    else:
        lines = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)]
        (tmp_path / "train.jsonl").write_text("".join(lines))
    source = open_source("hf", str(tmp_path), seed=0)
    for epoch, start in ((0, 0), (0, rng.randrange(len(texts))), (1, len(texts))):
        assert list(source.documents(start, epoch)) == list(enumerate(texts))[start:]
    before = source.fingerprint
    (tmp_path / "more.jsonl").write_text("{}\n")
    assert open_source("hf", str(tmp_path), seed=0).fingerprint != before


def test_local_folder_without_the_field(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"body": "a", "id": 1}\n')
    with pytest.raises(UserError, match=r'dataset_path.*example 0 has no string in field "text" \(fields: body, id\)'):
        next(open_source("hf", str(tmp_path), 0).documents(0))


def test_folder_that_datasets_cannot_read(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        next(open_source("hf", str(tmp_path), 0).documents(0))


@pytest.mark.parametrize("dataset", [*HUB, "hf"])
def test_hub_that_is_not_reached(monkeypatch, dataset):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((*args, kwargs["split"], kwargs["streaming"]))
        raise ConnectionError("no route to huggingface.co")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source(dataset, "someone/something" if dataset == "hf" else None, 0)
    with pytest.raises(UserError, match="no route to huggingface.co.*HF_TOKEN.*download"):
        next(source.documents(0))
    repository = HUB.get(dataset, ("someone/something", None, "train"))
    assert asked == [(*repository, True)]
    assert repository[0] in source.fingerprint


def test_hub_that_fails_later(monkeypatch):
    def examples():
        yield {"text": "first"}
        raise OSError("connection reset")

    def load_dataset(*args, **kwargs):
        return datasets.IterableDataset.from_generator(examples)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    documents = open_source("c4", None, 0).documents(0)
    assert next(documents) == (0, "first")
    with pytest.raises(UserError, match="connection reset"):
        next(documents)


def test_keys_that_do_not_fit(tmp_path):
    with pytest.raises(UserError, match='"wikitext".*stdlib, stdlib_validation, c4,') as error:
        open_source("wikitext", None, 0)
    assert all(name in str(error.value) for name in DATASETS)
    for dataset in ("text", "jsonl", "parquet", "hf"):
        with pytest.raises(UserError, match=f'dataset_path.*"{dataset}" needs it'):
            open_source(dataset, None, 0)
    for dataset in ("stdlib", "stdlib_validation", *HUB):
        with pytest.raises(UserError, match=f'dataset_path.*"{dataset}" takes no path'):
            open_source(dataset, str(tmp_path), 0)
