"""Against a hub of this machine: a small HTTP server with the API and the files that huggingface_hub asks for."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from checkpoint import safetensors_files
from config import load_config
from data.tokenizer import load_tokenizer, stdlib_tokenizer
from hugging_face import load_hf, write_hf
from models.llama.shapes import FLAVORS
from scripts import download_assets
from tests.models.llama.test_hf import rowhouse_model
from tests.test_hugging_face import assert_equal, values

ROOT = Path(__file__).parents[2]
SHAPE = replace(FLAVORS["debugmodel"], n_layers=1, vocab_size=512)
SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One repository, me/llama, and what became of it."""

    files: dict[str, bytes]
    gated: bool = False
    """Files need the token "right"."""
    cut: dict[str, int] = field(default_factory=dict)
    """File -> byte at which the connection ends."""
    cuts: int = 0
    """How often it does that."""
    requests: list[tuple[str, int]] = field(default_factory=list)
    """(file, first byte) of all that was asked for."""
    url: str = ""


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if token == "wrong":
                self.reply(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
            elif not path.startswith(("/api/models/me/llama", "/me/llama/resolve/")):
                self.reply(404, {"X-Error-Code": "RepoNotFound"})
            elif path.startswith("/api/models/me/llama/tree/"):
                self.reply(200, {}, json.dumps([
                    {"type": "file", "path": name, "size": len(content), "oid": etag(content)}
                    for name, content in hub.files.items()
                ]).encode())  # fmt: skip
            elif path.startswith("/api/"):
                siblings = [{"rfilename": name, "size": len(content)} for name, content in hub.files.items()]
                self.reply(200, {}, json.dumps({"id": "me/llama", "sha": SHA, "siblings": siblings}).encode())
            elif hub.gated and token != "right":
                self.reply(403 if token else 401, {"X-Error-Code": "GatedRepo"})
            else:
                self.send_file(path.removeprefix(f"/me/llama/resolve/{SHA}/"), with_body)

        def send_file(self, name: str, with_body: bool) -> None:
            content, wanted = hub.files[name], self.headers.get("Range")
            begin = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
            self.send_response(206 if wanted else 200)
            self.send_header("ETag", f'"{etag(content)}"')
            self.send_header("X-Repo-Commit", SHA)
            self.send_header("Content-Length", str(len(content) - begin))
            if wanted:
                self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if with_body:
                hub.requests.append((name, begin))
                self.close_connection = name in hub.cut and hub.cuts > 0
                hub.cuts -= self.close_connection
                self.wfile.write(content[begin : hub.cut[name] if self.close_connection else None])

        def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for key, value in (
                {"Content-Length": str(len(body)), "Content-Type": "application/json"} | headers
            ).items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in three safetensors files, its tokenizer, and what else lies in repositories."""
    folder = tmp_path_factory.mktemp("hub")
    tokenizer = stdlib_tokenizer(300, folder / "tokenizers")
    model = rowhouse_model(SHAPE, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_files, "SHARD_BYTES", 2 * 10**6)
        write_hf(folder / "hf", model, model.state_dict().items(), torch.float32, tokenizer)
    files = {file.name: file.read_bytes() for file in sorted((folder / "hf").iterdir())}
    assert len([name for name in files if name.endswith("-of-00003.safetensors")]) == 3
    others = ("original/consolidated.00.pth", "original/tokenizer.model", "pytorch_model.bin", "README.md")
    return files | dict.fromkeys(others, b"large")


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub(dict(files))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    # What HF_ENDPOINT would have set before the import.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # Between attempts.
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in a folder of its own: (exit status, stdout, the last line of stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["download_assets", *arguments])
        status = download_assets.main()
        out, err = capsys.readouterr()
        return status, out, err.splitlines()[-1]

    return call


def flags_in(out: str) -> list[str]:
    """As a shell reads them."""
    return shlex.split(out.partition("for train.py:")[2].replace("\\\n", ""))


def fetched(folder: Path) -> set[str]:
    return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file() and ".cache" not in f.parts}


def test_the_tokenizer_alone(run: Any, hub: Hub) -> None:
    status, out, _ = run("--repo", "me/llama")
    assert status == 0
    folder = Path("assets/llama")
    assert fetched(folder) == {"tokenizer.json"}
    config = load_config(["--config", "debug.toml", *flags_in(out)], 1)
    assert config.model.tokenizer_path == str(folder)
    assert load_tokenizer(config.model.tokenizer_path).vocab_size <= 300


def test_weights_and_the_flags_that_train_from_them(run: Any, hub: Hub) -> None:
    status, out, _ = run("--repo", "me/llama", "--weights", "--output", "my assets")
    assert status == 0
    folder = Path("my assets")
    assert fetched(folder) == set(hub.files) - {name for name, content in hub.files.items() if content == b"large"}
    config = load_config(
        ["--config", "debug.toml", "--checkpoint.enable", "false", *flags_in(out)[0:0], *flags_in(out)], 1
    )
    assert config.model.shape() == SHAPE and config.checkpoint.initial_load_in_hf
    model = rowhouse_model(config.model.shape(), seed=4)
    load_hf(model, Path(str(config.checkpoint.initial_load_path)))
    assert_equal(values(model), values(rowhouse_model(SHAPE, seed=3)))


def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    run: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    name = "model-00002-of-00003.safetensors"
    half = len(hub.files[name]) // 2
    hub.cut, hub.cuts = {name: half}, 1
    assert run("--repo", "me/llama", "--weights")[0] == 0
    first, second = (begin for file, begin in hub.requests if file == name)
    assert first == 0 and half - (1 << 16) <= second <= half
    assert (Path("assets/llama") / name).read_bytes() == hub.files[name]


def test_the_same_command_goes_on_after_the_last_whole_file(run: Any, hub: Hub) -> None:
    name = "model-00002-of-00003.safetensors"
    hub.cut, hub.cuts = {name: 1000}, 1000
    status, _, error = run("--repo", "me/llama", "--weights")
    assert status == 2 and "the same command again fetches the rest" in error
    there = fetched(Path("assets/llama"))
    assert there >= {"config.json", "tokenizer.json"} and name not in there
    hub.cuts, hub.requests = 0, []
    assert run("--repo", "me/llama", "--weights")[0] == 0
    assert {file for file, _ in hub.requests} == fetched(Path("assets/llama")) - there
    hub.requests = []
    assert run("--repo", "me/llama", "--weights")[0] == 0
    assert hub.requests == []


def test_gated_repositories_need_the_token(run: Any, hub: Hub) -> None:
    hub.gated = True
    for arguments in ([], ["--token", "another"]):
        status, _, error = run("--repo", "me/llama", *arguments)
        assert status == 2
        assert error.startswith(
            f"download_assets: --repo: me/llama is gated: ask for access at {hub.url}/me/llama, and"
        )
    assert run("--repo", "me/llama", "--token", "right")[0] == 0


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, "--repo me/lama", "--repo: http://127.0.0.1:"),
        (
            {},
            "--repo me/llama/again/",
            '--repo: "me/llama/again/" is no name of a repository: it is written owner/name',
        ),
        ({}, "--repo me/llama --token wrong", "does not take the token (401): give another, or none"),
        ({"tokenizer.json": None}, "--repo me/llama", "me/llama has neither tokenizer.json nor tokenizer.model: give"),
        ({"tokenizer.json": b"{}"}, "--repo me/llama", "assets/llama/tokenizer.json cannot be read as a tokenizer ("),
        (
            {"config.json": None},
            "--repo me/llama --weights",
            "me/llama has no config.json with model.safetensors files",
        ),
        ({"config.json": b"{"}, "--repo me/llama --weights", "--weights: assets/llama/config.json is damaged ("),
        ({"model_type": "qwen3"}, "--repo me/llama --weights", "is not a Llama that Rowhouse trains: model_type is"),
        ({"hidden_size": 300}, "--repo me/llama --weights", "is not a Llama that Rowhouse trains: "),
        ({}, "--repo me/llama --output file", "--output: file cannot be made (File exists): give another folder"),
    ],
)
def test_a_mistake_is_a_sentence(run: Any, hub: Hub, changes: dict[str, Any], arguments: str, message: str) -> None:
    Path("file").touch()
    for name, content in changes.items():
        if content is None:
            del hub.files[name]
        elif isinstance(content, bytes):
            hub.files[name] = content
        else:
            hub.files["config.json"] = json.dumps(json.loads(hub.files["config.json"]) | {name: content}).encode()
    status, out, error = run(*arguments.split())
    assert (status, out) == (2, "")
    assert error.startswith("download_assets: ") and message in error
    assert not list(Path().rglob("*.safetensors"))


def test_weights_that_are_not_those_of_their_configuration(run: Any, hub: Hub) -> None:
    del hub.files["model-00002-of-00003.safetensors"]
    status, out, error = run("--repo", "me/llama", "--weights")
    assert (status, out) == (2, "")
    message = "--weights: assets/llama: model-00002-of-00003.safetensors is missing: fetch the folder again"
    assert error.startswith(f"download_assets: {message}")


def test_a_file_that_is_cut_short_on_the_disk_is_told(run: Any, hub: Hub) -> None:
    assert run("--repo", "me/llama")[0] == 0
    os.truncate("assets/llama/tokenizer.json", 100)
    size = len(hub.files["tokenizer.json"])
    message = f"assets/llama/tokenizer.json has 100 bytes instead of {size}: remove it, and run this again"
    assert run("--repo", "me/llama")[::2] == (2, f"download_assets: {message}")


def test_no_network_is_told_also_where_files_are(run: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--repo", "me/llama")[0] == 0
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    status, _, error = run("--repo", "me/llama")
    assert status == 2 and "see that this machine reaches http://127.0.0.1:9 and has room" in error


def test_as_a_user_runs_it(hub: Hub, tmp_path: Path) -> None:
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "right", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    hub.gated = True
    command = [sys.executable, "-m", "scripts.download_assets", "--repo", "me/llama"]
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "me/llama is in assets/llama; for train.py:\n    --model.tokenizer_path assets/llama\n"
