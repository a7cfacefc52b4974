"""Folders of safetensors files, written and read, whole and damaged."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint import safetensors_files
from checkpoint.safetensors_files import INDEX, SINGLE, SafetensorsFolder, fill, new_folder, write_safetensors
from errors import UserError


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Of 400, 400, 80 and 1200 bytes in float32."""
    return {"a": torch.randn(10, 10), "b": torch.randn(10, 10), "norm": torch.randn(20), "c": torch.randn(30, 10)}


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tensors in three files: a and b; norm; c, which is larger than a file should be."""
    monkeypatch.setattr(safetensors_files, "SHARD_BYTES", 800)
    path = tmp_path / "hf"
    path.mkdir()
    write_safetensors(path, shapes_of(tensors), tensors.values(), torch.float32)
    return path


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def file(number: int) -> str:
    return f"model-{number:05}-of-00003.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_reads_what_is_written(tmp_path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    write_safetensors(tmp_path, shapes_of(tensors), tensors.values(), dtype)
    written = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor.to(dtype)) for name, tensor in tensors.items())


def test_files_are_no_larger_than_they_should_be(folder: Path, tensors: dict[str, Tensor]) -> None:
    index = json.loads((folder / INDEX).read_text())
    assert index["weight_map"] == {"a": file(1), "b": file(1), "norm": file(2), "c": file(3)}
    assert index["metadata"]["total_size"] == 2080
    assert [list(load_file(folder / file(number))) for number in (1, 2, 3)] == [["a", "b"], ["norm"], ["c"]]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_filled_in_their_own_dtype(tmp_path: Path, tensors: dict[str, Tensor], stored: torch.dtype) -> None:
    save_file({name: tensor.to(stored) for name, tensor in tensors.items()}, tmp_path / SINGLE)
    files = SafetensorsFolder(tmp_path, "key")
    assert files.shapes == shapes_of(tensors)
    for dtype in (torch.float32, torch.bfloat16):
        for name, tensor in tensors.items():
            weight = torch.empty(tensor.shape, dtype=dtype)
            fill(weight, files, name, None)
            assert torch.equal(weight, tensor.to(stored).to(dtype))


def test_rows_in_another_order(folder: Path, tensors: dict[str, Tensor]) -> None:
    rows = torch.randperm(30)
    weight = torch.empty(30, 10)
    fill(weight, SafetensorsFolder(folder, "key"), "c", rows)
    assert torch.equal(weight, tensors["c"][rows])


def damage_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


FAULTS: dict[str, tuple[Any, str]] = {
    "no folder": (shutil.rmtree, "key: FOLDER has neither model.safetensors nor model.safetensors.index.json: give a"),
    "pickles": (
        lambda f: [(f / INDEX).unlink(), (f / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")],
        "has neither model.safetensors nor",
    ),
    "two files missing": (
        lambda f: [(f / file(n)).unlink() for n in (1, 2)],
        f"key: FOLDER: {file(1)} is missing, {file(2)} is missing: fetch the folder again, or give another",
    ),
    "truncated": (lambda f: os.truncate(f / file(1), 700), f"{file(1)} is damaged ("),
    "empty": (lambda f: (f / file(2)).write_bytes(b""), f"{file(2)} is damaged ("),
    "a pickle by another name": (lambda f: (f / SINGLE).write_bytes(b"\x80\x02}q\x00." * 9), f"{SINGLE} is damaged ("),
    "index cut off": (lambda f: os.truncate(f / INDEX, 60), f"{INDEX} is damaged (JSONDecodeError: "),
    "index of nothing": (lambda f: (f / INDEX).write_text("[]"), f"{INDEX} is damaged (TypeError: "),
    "index without map": (lambda f: (f / INDEX).write_text("{}"), f"{INDEX} is damaged (KeyError: 'weight_map'): "),
    "index of more": (
        lambda f: damage_index(f, lambda i: i["weight_map"].update(d=file(1), e=file(2))),
        f"{file(1)} lacks d, {file(2)} lacks e",
    ),
    "integers": (
        lambda f: save_file({"a": torch.zeros(2, dtype=torch.int8)}, f / SINGLE),
        "key: FOLDER: a is I8, not one of F32, BF16, F16: fetch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_sentence(name: str, folder: Path) -> None:
    damage, message = FAULTS[name]
    damage(folder)
    with pytest.raises(UserError) as error:
        SafetensorsFolder(folder, "key")
    assert message.replace("FOLDER", str(folder)) in str(error.value)


def test_tensors_that_do_not_fit_are_told_at_once(folder: Path, tensors: dict[str, Tensor]) -> None:
    files = SafetensorsFolder(folder, "key")
    files.check(shapes_of(tensors), lambda name: False)
    expected = {**shapes_of(tensors), "a": (10, 20), "norm": (20, 1), "new": (1,)}
    del expected["b"]
    with pytest.raises(UserError) as error:
        files.check(expected, lambda name: False)
    assert str(error.value) == (
        f"key: {folder} does not hold the model of its config.json: it lacks new; the model has no b; a is (10, 10) "
        "instead of (10, 20), norm is (20,) instead of (20, 1): fetch it again, or give another"
    )
    files.check({"a": (10, 10), "c": (30, 10)}, lambda name: name in ("b", "norm"))


def export(folder: Path, value: float) -> None:
    with new_folder(folder) as temporary:
        write_safetensors(temporary, {"a": (3,)}, [torch.full((3,), value)], torch.float32)


def value_of(folder: Path) -> float:
    weight = torch.empty(3)
    fill(weight, SafetensorsFolder(folder, "key"), "a", None)
    return weight[0].item()


def test_an_export_takes_the_place_of_the_former_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        export(tmp_path / "new" / "hf", value)
        assert value_of(tmp_path / "new" / "hf") == value
    assert os.listdir(tmp_path / "new") == ["hf"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    export(tmp_path / "hf", 1.0)
    with pytest.raises(ZeroDivisionError):
        export(tmp_path / "hf", 1 / 0)
    with pytest.raises(OSError, match="disk"), new_folder(tmp_path / "hf") as temporary:
        (temporary / "half").write_text("x")
        raise OSError("disk")
    assert value_of(tmp_path / "hf") == 1.0
    assert os.listdir(tmp_path) == ["hf"]


def test_a_kill_leaves_no_half_export(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with new_folder(tmp_path / "hf") as temporary:
            (temporary / INDEX).write_text("x")
            os._exit(0)
    os.waitpid(child, 0)
    assert os.listdir(tmp_path) == ["hf.tmp"]
    export(tmp_path / "hf", 3.0)
    assert os.listdir(tmp_path) == ["hf"] and value_of(tmp_path / "hf") == 3.0


def test_what_is_no_export_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "precious").write_text("x")
    with pytest.raises(FileExistsError, match="step-3 already, and it is no export"):
        export(tmp_path / "step-3", 1.0)
    assert (tmp_path / "step-3" / "precious").read_text() == "x"
