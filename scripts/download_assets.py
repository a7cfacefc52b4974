"""Fetches a model's tokenizer from the Hugging Face hub, and on request its weights, to a folder for Rowhouse.

    python -m scripts.download_assets --repo meta-llama/Llama-3.1-8B                # the tokenizer
    python -m scripts.download_assets --repo meta-llama/Llama-3.1-8B --weights      # and the safetensors files

Prints where they are, and the flags of train.py that use them. The same command again fetches what is missing: whole
files are kept, one that was cut off begins anew. HF_TOKEN, HF_ENDPOINT and the other variables of huggingface_hub hold.
Exit status: 0, or 2 with a sentence on what to do.
"""

import argparse
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from data.tokenizer import load_tokenizer
from errors import ExitStatus, UserError
from hugging_face import open_weights, read_config
from models.llama.hf import shape_of
from models.llama.shapes import FLAVORS, LlamaShape
from scripts.convert import on_meta

TOKENIZER = ("tokenizer.json", "tokenizer.model")  # One of them is needed; the first is preferred.
TOKENIZER_TOO = ("tokenizer_config.json", "special_tokens_map.json")
CONFIG = "config.json"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def download(repo: str, folder: Path, weights: bool, token: str | None) -> list[str]:
    """Fetches what is missing in `folder`. Returns the flags of train.py that use it.

    Raises UserError where the files cannot be had, are not whole, or are not what Rowhouse reads.
    """
    try:
        info = HfApi(token=token).model_info(repo, files_metadata=True)
    except Exception as error:  # The hub's, its client's, the system's: no common base.
        raise UserError(sentence(repo, error)) from error
    sizes = {file.rfilename: file.size for file in info.siblings or []}
    tokenizer = next((name for name in TOKENIZER if name in sizes), None)
    if tokenizer is None:
        raise UserError(
            f"--repo: {repo} has neither {' nor '.join(TOKENIZER)}: give the repository of a model that has"
        )
    files = [tokenizer, *(name for name in TOKENIZER_TOO if name in sizes)]
    of_weights = [name for name in sizes if WEIGHTS.fullmatch(name)]
    if weights and not (CONFIG in sizes and of_weights):
        raise UserError(f"--weights: {repo} has no {CONFIG} with model.safetensors files: give a repository that has")
    fetch(repo, info.sha, folder, {name: sizes[name] for name in [*files, *([CONFIG] if weights else [])]}, token)
    load_tokenizer(str(folder))
    place = shlex.quote(str(folder))
    if not weights:
        return [f"--model.tokenizer_path {place}"]
    # Before hours are spent on weights that cannot be trained.
    config = read_config(folder, "--weights")
    try:
        shape = shape_of(config)
        flags = flags_of(shape)
    except ValueError as error:
        raise UserError(f"--weights: {repo} is not a Llama that Rowhouse trains: {error}") from error
    fetch(repo, info.sha, folder, {name: sizes[name] for name in of_weights}, token)
    open_weights(folder, "--weights", on_meta(shape, max_seq_len=1))
    return [
        *flags,
        f"--model.tokenizer_path {place}",
        "--checkpoint.enable",
        f"--checkpoint.initial_load_path {place}",
        "--checkpoint.initial_load_in_hf",
    ]


def flags_of(shape: LlamaShape) -> list[str]:
    """Raises ValueError where no flavor has the shape."""
    for flavor, its in FLAVORS.items():
        if replace(its, n_layers=shape.n_layers, vocab_size=shape.vocab_size) == shape:
            flags = [f"--model.flavor {flavor}"]
            for key in ("n_layers", "vocab_size"):
                if getattr(its, key) != getattr(shape, key):
                    flags.append(f"--model.{key} {getattr(shape, key)}")
            return flags
    raise ValueError(f"no flavor has its shape, {shape}")


def fetch(repo: str, revision: str | None, folder: Path, sizes: dict[str, int | None], token: str | None) -> None:
    """The files of `sizes` (name -> bytes) to the folder. Raises UserError where one is not there in full after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output: {folder} cannot be made ({error.strerror}): give another folder") from error
    total = sum(size or 0 for size in sizes.values())
    print(f"{repo}: {len(sizes)} files, {total / 1e9:,.2f} GB, to {folder}", file=sys.stderr)
    try:
        snapshot_download(repo, revision=revision, local_dir=folder, allow_patterns=list(sizes), token=token)
    except Exception as error:
        raise UserError(sentence(repo, error)) from error
    # Where the hub is not reached, what is there counts as enough to it.
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file} has not been fetched: see that this machine reaches {host()}, and run this again")
        if size is not None and file.stat().st_size != size:
            has = f"has {file.stat().st_size} bytes instead of {size}"
            raise UserError(f"{file} {has}: remove it, and run this again")


def host() -> str:
    return constants.ENDPOINT


def sentence(repo: str, error: Exception) -> str:
    """What is wrong, and what to do."""
    if isinstance(error, GatedRepoError):
        return (
            f"--repo: {repo} is gated: ask for access at {host()}/{repo}, and give a token of that account "
            "(--token, HF_TOKEN, or hf auth login)"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"--repo: {host()} shows no {repo}: correct the name, or give a token that may read it (--token, HF_TOKEN)"
        )
    if isinstance(error, HFValidationError):
        return f'--repo: "{repo}" is no name of a repository: it is written owner/name'
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if status in (401, 403):
        return f"--token: {host()} does not take the token ({status}): give another, or none"
    reason = " ".join(str(error).split()) or type(error).__name__
    return (
        f"{repo} cannot be fetched ({reason}): see that this machine reaches {host()} and has room; the same command "
        "again fetches the rest"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="download_assets", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repo", required=True, metavar="OWNER/NAME", help="the model's repository on the hub")
    parser.add_argument("--weights", action="store_true", help="fetch config.json and the safetensors files too")
    parser.add_argument("--output", metavar="DIR", type=Path, help="the folder (default: assets/NAME)")
    parser.add_argument("--token", help="for gated and private repositories (default: HF_TOKEN, or hf auth login's)")
    args = parser.parse_args()
    folder = args.output or Path("assets", args.repo.rpartition("/")[2])
    try:
        flags = download(args.repo, folder, args.weights, args.token)
    except UserError as error:
        print(f"download_assets: {error}", file=sys.stderr)
        return ExitStatus.USER_ERROR
    print(f"{args.repo} is in {folder}; for train.py:\n    " + " \\\n    ".join(flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())
