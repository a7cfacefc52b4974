"""Models to and from Hugging Face folders: by way of transformers, and on every kind of mesh."""

import json
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer

import hugging_face
from checkpoint import safetensors_files
from checkpoint.config import CheckpointConfig
from checkpoint.manager import CheckpointManager
from checkpoint.safetensors_files import SafetensorsFolder
from checkpoint.state import ModelState
from data.tokenizer import load_tokenizer, stdlib_tokenizer
from errors import UserError
from float8.convert import Float8Config
from hugging_face import export_hf, load_hf
from models.llama.hf import hf_name
from models.llama.model import Llama
from models.llama.parallelize import parallelize_llama
from models.llama.shapes import FLAVORS, LlamaShape
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.compile import CompileConfig
from parallelisms.fsdp import local
from parallelisms.mesh import ParallelismConfig, build_meshes
from scripts import convert
from scripts.local_ranks import launch
from tests.models.llama.test_model import SHAPES, rowhouse_model, spread_out, transformers_model

CPU = torch.device("cpu")
fork = multiprocessing.get_context("fork")
GROUPED = SHAPES["grouped queries"]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def values(model: torch.nn.Module) -> dict[str, Tensor]:
    """Whole copies, also of a sharded model."""
    state: dict[str, Any] = model.state_dict()
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in state.items()}


def rounded(model: Llama, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype).float() for name, tensor in values(model).items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_files(one: Path, other: Path) -> None:
    assert sorted(os.listdir(one)) == sorted(os.listdir(other))
    assert [file for file in os.listdir(one) if (one / file).read_bytes() != (other / file).read_bytes()] == []


def assert_same_logits(ours: Llama, peer: Any) -> None:
    tokens = torch.randint(ours.shape.vocab_size, (2, 48))
    with torch.no_grad():
        logits, theirs = ours(tokens), peer(tokens).logits.flatten(0, 1)
    assert (logits - theirs).norm() < 1e-5 * theirs.norm()


# By way of transformers


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_loads_the_export(
    name: str, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_files, "SHARD_BYTES", 100_000)
    model = rowhouse_model(SHAPES[name])
    spread_out(model)
    export_hf(model, tmp_path / "hf", torch.float32, None)
    peer, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert_same_logits(model, peer.eval())


@pytest.mark.parametrize("name", SHAPES)
def test_what_transformers_saved_is_loaded(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    peer = transformers_model(SHAPES[name])
    for parameter in peer.parameters():
        torch.nn.init.normal_(parameter, std=0.2, mean=1.0 if parameter.ndim == 1 else 0.0)
    peer.save_pretrained(tmp_path / "one")
    peer.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for kind in ("one", "many"):
        model = rowhouse_model(SHAPES[name])
        load_hf(model, tmp_path / kind)
        assert_same_logits(model, peer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["grouped queries", "tied"])
def test_a_round_trip_keeps_every_bit(name: str, dtype: torch.dtype, tmp_path: Path, one_rank: None) -> None:
    model, back = rowhouse_model(SHAPES[name], seed=1), rowhouse_model(SHAPES[name], seed=2)
    export_hf(model, tmp_path / "hf", dtype, None)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == dtype
    load_hf(back, tmp_path / "hf")
    assert_equal(values(back), rounded(model, dtype))
    export_hf(back, tmp_path / "again", dtype, None)
    assert_same_files(tmp_path / "hf", tmp_path / "again")


def test_the_tokenizer_goes_with_the_model(tmp_path: Path, one_rank: None) -> None:
    model = rowhouse_model(SHAPES["plain"])
    tokenizer = stdlib_tokenizer(300, tmp_path)
    export_hf(model, tmp_path / "hf", torch.bfloat16, tokenizer)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (tokenizer.bos_id, tokenizer.eos_id)
    text = "def f(x):\n\treturn 'ünï  code'"
    ids = tokenizer.encode(text)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"] == ids

    (tmp_path / "hf" / "tokenizer_config.json").write_text("{}")
    export_hf(model, tmp_path / "second", torch.bfloat16, load_tokenizer(str(tmp_path / "hf")))
    assert {"tokenizer.json", "tokenizer_config.json"} < set(os.listdir(tmp_path / "second"))
    Path(tokenizer.path).unlink()
    export_hf(model, tmp_path / "third", torch.bfloat16, tokenizer)
    assert "tokenizer.json" not in os.listdir(tmp_path / "third")


# What goes wrong


def test_another_model_is_a_sentence(tmp_path: Path, one_rank: None) -> None:
    export_hf(rowhouse_model(SHAPES["plain"]), tmp_path / "hf", torch.float32, None)
    with pytest.raises(UserError) as error:
        load_hf(rowhouse_model(SHAPES["tied"]), tmp_path / "hf")
    text = str(error.value)
    assert text.startswith(
        f"checkpoint.initial_load_path: {tmp_path / 'hf'} holds another model than this run's: num_key_value_heads is "
        "4 there and 2 here; tie_word_embeddings is false there and true here; rope_scaling is null there"
    )
    assert text.endswith("change model.flavor, model.n_layers or model.vocab_size, or give another folder")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "key: there is no FOLDER/config.json: give the folder of a Hugging Face model"),
        ("{", "key: FOLDER/config.json is damaged (Expecting property name"),
        ("[]", "key: FOLDER/config.json is damaged ("),
        ('{"hidden_size": "64", "num_attention_heads": 4}', "key: FOLDER/config.json is damaged (unsupported operand"),
        ('{"model_type": "gpt2"}', 'key: FOLDER holds another model than this run\'s: model_type is "gpt2" there'),
    ],
)
def test_a_bad_config_is_a_sentence(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError) as error:
        load_hf(rowhouse_model(GROUPED), tmp_path, "key")
    assert str(error.value).startswith(message.replace("FOLDER", str(tmp_path)))


def test_weights_that_are_not_those_of_config_json_are_a_sentence(tmp_path: Path, one_rank: None) -> None:
    export_hf(rowhouse_model(GROUPED), tmp_path / "hf", torch.float32, None)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    one_layer = LlamaShape(64, 1, 4, 2, 96, vocab_size=128, head_dim=16, rope_theta=10000.0)
    with pytest.raises(UserError, match=r"the model has no model\.layers\.1\.input_layernorm\.weight, .* and 6 more: "):
        load_hf(rowhouse_model(one_layer), tmp_path / "hf")


# On several ranks


def sharded(shape: LlamaShape, seed: int, **degrees: int) -> Llama:
    parallelism = ParallelismConfig(**degrees)
    meshes = build_meshes(parallelism, CPU)
    with torch.device("meta"):
        model = Llama(shape, 48)
    parallelize_llama(
        model, meshes, parallelism=parallelism, float8=Float8Config(), compile=CompileConfig(),
        activation_checkpoint=ActivationCheckpointConfig(mode="none"), param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32, cpu_offload=False,
    )  # fmt: skip
    model.to_empty(device="cpu")
    model.init_weights(seed, CPU)
    return model


RANKS_SHAPES = {"debug": replace(FLAVORS["debugmodel"], n_layers=1, vocab_size=512), "tied": SHAPES["tied"]}
MESHES: dict[str, dict[str, int]] = {"FSDP 2": {}, "TP 2": {"tensor_parallel_degree": 2}}


def two_ranks(folder: Path) -> None:
    for mesh, degrees in MESHES.items():
        for name, shape in RANKS_SHAPES.items():
            model = sharded(shape, seed=2, **degrees)
            load_hf(model, folder / name)
            assert_equal(values(model), torch.load(folder / f"{name}.pt"))
            # After validation some units are left gathered, in bf16: what is exported are the float32 shards.
            with torch.no_grad():
                model(torch.zeros(2, 48, dtype=torch.int64))
            export_hf(model, folder / f"{name}, {mesh}", torch.float32, None)
            manager = CheckpointManager(CheckpointConfig(enable=True), folder / mesh, {"model": ModelState(model)})
            manager.save(list(RANKS_SHAPES).index(name), last=True)
    with pytest.raises(UserError, match=r"last_save_in_hf: .* cannot be written \(.*is no export"):
        export_hf(model, folder, torch.float32, None)
    safetensors_files.SHARD_BYTES, safetensors_files.sync = 50_000, disk_full
    with pytest.raises(UserError, match=r"last_save_in_hf: .* cannot be written \(\[Errno 28\] No space left"):
        export_hf(model, folder / "full", torch.float32, None)
    assert not list(folder.glob("full*"))


def disk_full(path: Path) -> None:
    raise OSError(28, "No space left on device")


def test_two_ranks_read_and_write_what_one_does(tmp_path: Path, one_rank: None) -> None:
    for name, shape in RANKS_SHAPES.items():
        model = rowhouse_model(shape, seed=1)
        export_hf(model, tmp_path / name, torch.float32, None)
        torch.save(values(model), tmp_path / f"{name}.pt")
    launch(two_ranks, 2, tmp_path)
    for mesh in MESHES:
        for name in RANKS_SHAPES:
            assert_same_files(tmp_path / name, tmp_path / f"{name}, {mesh}")
        # What two ranks saved, one process converts.
        config = tmp_path / "config.toml"
        config.write_text('[model]\nflavor = "debugmodel"\nn_layers = 1\nvocab_size = 512\n[training]\nseq_len = 48\n')
        step = tmp_path / mesh / "checkpoint" / "step-0"
        convert.to_hf(str(step), tmp_path / f"converted, {mesh}", str(config), torch.float32)
        assert_same_files(tmp_path / "debug", tmp_path / f"converted, {mesh}")


# (replicas, shards, TP). Rows and heads are not always whole on a rank, and the last ones of seven have none.
MORE_MESHES: list[tuple[int, int, int]] = [(1, 3, 1), (1, 7, 1), (1, 2, 2), (1, 3, 2), (2, 2, 1), (2, 1, 2)]


@pytest.mark.parametrize(("replicate", "shard", "tp"), MORE_MESHES)
def test_a_rank_reads_its_parts_and_no_more(
    replicate: int, shard: int, tp: int, tmp_path: Path, one_rank: None
) -> None:
    model = rowhouse_model(GROUPED, seed=1)
    export_hf(model, tmp_path / "hf", torch.float32, None)
    dist.destroy_process_group()
    for rank in range(replicate * shard * tp):
        expected = {n: share(n, w, tp, rank % tp, shard, rank // tp % shard) for n, w in values(model).items()}
        # Reading sends nothing, so that one rank can do it alone; in a process of its own, since DTensor keeps what it
        # has found out of its rank.
        child = fork.Process(target=load_as, args=(tmp_path / "hf", rank, replicate, shard, tp, expected))
        child.start()
        child.join()
        assert child.exitcode == 0, rank
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def share(name: str, weight: Tensor, tp: int, tp_rank: int, shards: int, shard: int) -> Tensor:
    """A rank's part: TP splits rows or columns or nothing, then FSDP rows, the last ranks having less or none."""
    if not name.endswith("norm.weight"):
        weight = weight.chunk(tp, dim=1 if name.endswith(("wo.weight", "w2.weight")) else 0)[tp_rank]
    rows = -(-weight.shape[0] // shards)
    return weight[shard * rows : (shard + 1) * rows]


def load_as(folder: Path, rank: int, replicate: int, shard: int, tp: int, expected: dict[str, Tensor]) -> None:
    """Loads as one rank of many, and compares what it holds, and how much it reads of the files."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=replicate * shard * tp)
    read: dict[str, int] = {}

    class Counting(SafetensorsFolder):
        def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
            tensor = super().read(name, part)
            read[name] = tensor.numel()
            return tensor

    hugging_face.SafetensorsFolder = Counting  # type: ignore[misc]
    part = sharded(GROUPED, seed=2, data_parallel_replicate_degree=replicate, tensor_parallel_degree=tp)
    load_hf(part, folder)
    state: dict[str, Any] = part.state_dict()
    assert_equal({name: local(weight) for name, weight in state.items()}, expected)
    for name, weight in expected.items():
        # The order of rows in wq and wk is within a head: of each, less than two heads more.
        more = 2 * GROUPED.head_dim * GROUPED.dim if name.endswith(("wq.weight", "wk.weight")) else 0
        assert weight.numel() <= read.get(hf_name(name), 0) <= weight.numel() + more
