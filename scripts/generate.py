"""Text from a trained model.

    python -m scripts.generate --checkpoint outputs/debug --prompt "def main("
    python -m scripts.generate --checkpoint llama3-8b --temperature 0 --prompt "The capital of France is" --prompt "2 +"
    torchrun --nproc-per-node 2 -m scripts.generate --checkpoint outputs/llama70b --prompt "Once upon a time"

--checkpoint takes a run's folder, one of its step-N, or a Hugging Face folder (scripts/trained_model.py). Prompts are
read as training reads documents, with the token that begins a text in front; several are one batch. One prompt's text
appears as it is made. torchrun splits the model over its ranks (tensor parallel). Text goes to standard output, all
else to standard error. Exit status: 0, or 2 with a sentence on what the user can mend.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from data.tokenizer import Tokenizer
from errors import UserError, leave
from models.llama.generate import choose_token, generate
from scripts.trained_model import build_tensor_parallel, default_dtype, find_trained, run_on_ranks

NEW_TOKENS = 128


def write(arguments: argparse.Namespace, device: torch.device) -> None:
    """Finds the model, and writes on from the prompts."""
    check(arguments)
    trained = find_trained(arguments.checkpoint)
    tokenizer = trained.tokenizer
    ids = tokenizer.encode_batch(arguments.prompt)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompts = [bos + prompt for prompt in ids]
    longest = max(map(len, prompts))
    new_tokens = room(longest, arguments.max_new_tokens, trained.max_seq_len)
    dtype = default_dtype(device) if arguments.dtype is None else getattr(torch, arguments.dtype)
    model = build_tensor_parallel(trained, device, dtype, longest + new_tokens)
    choose = chooser(arguments, tokenizer.vocab_size, device)
    began, tells, streams = time.perf_counter(), dist.get_rank() == 0, len(prompts) == 1
    written: list[list[int]] = [[] for _ in prompts]
    shown = ""
    for step in generate(model, prompts, new_tokens, trained.stop_ids, choose):
        for row, token in zip(written, step, strict=True):
            row += [] if token is None else [token]
        if tells and streams:
            shown = show_more(arguments.prompt[0] + continuation(tokenizer, ids[0], written[0]), shown)
    if not tells:
        return
    seconds = time.perf_counter() - began
    more = (continuation(tokenizer, before, after) for before, after in zip(ids, written, strict=True))
    texts = [prompt + text for prompt, text in zip(arguments.prompt, more, strict=True)]
    if streams:
        print(texts[0][len(shown) :])
    else:
        for i, text in enumerate(texts, start=1):
            print(f"--- {i} of {len(texts)}\n{text}")
    count, precision = sum(map(len, written)), str(dtype).removeprefix("torch.")
    print(
        f"{count} tokens in {seconds:.1f} s ({count / seconds:,.0f} a second); {trained.path} in {precision} on "
        f"{dist.get_world_size()} x {device.type}",
        file=sys.stderr,
    )


def chooser(arguments: argparse.Namespace, vocab_size: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """What chooses the next tokens, the same ones on every rank: they have the same logits and random numbers."""
    temperature, top_k = arguments.temperature, arguments.top_k
    generator = torch.Generator(device).manual_seed(arguments.seed or 0)
    # A model may have more rows than its tokenizer has tokens: what is no token is not chosen.
    return lambda logits: choose_token(logits[:, :vocab_size], temperature, top_k, generator)


def show_more(text: str, shown: str) -> str:
    """Prints what the text has more than what is shown, and returns what is shown now."""
    if text.endswith("\ufffd"):  # The first bytes of a character, which the next token may complete.
        return shown
    print(text[len(shown) :], end="", flush=True)
    return text


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for what is no request, and for what would have no effect."""
    if not all(arguments.prompt):
        raise UserError("--prompt: it is empty: give the text to go on from")
    if arguments.max_new_tokens is not None and arguments.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: {arguments.max_new_tokens} make no text: give 1 or more")
    if not 0 <= arguments.temperature < float("inf"):
        raise UserError(f"--temperature: {arguments.temperature} is none: give 0 (the most probable token) or more")
    if arguments.top_k is not None and arguments.top_k < 1:
        raise UserError(f"--top-k: {arguments.top_k} leaves nothing to choose from: give 1 or more")
    if arguments.seed is not None and not 0 <= arguments.seed < 2**63:
        raise UserError(f"--seed: {arguments.seed} is no seed: give 0 to 2**63 - 1")
    for flag, value in {"--top-k": arguments.top_k, "--seed": arguments.seed}.items():
        if arguments.temperature == 0 and value is not None:
            raise UserError(f"{flag}: nothing is drawn at --temperature 0: raise that, or leave {flag} out")


def room(longest: int, asked: int | None, max_seq_len: int) -> int:
    """How many new tokens there are at most. Raises UserError where prompt and new tokens do not fit the model."""
    left = max_seq_len - longest
    if left < 1:
        raise UserError(
            f"--prompt: the longest has {longest} tokens, and the model reads {max_seq_len} with the new ones: shorten "
            "it"
        )
    if asked is not None and asked > left:
        raise UserError(
            f"--max-new-tokens: {asked} after a prompt of {longest} are more than the {max_seq_len} tokens that the "
            f"model reads: give up to {left}"
        )
    return min(NEW_TOKENS, left) if asked is None else asked


def continuation(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    """The text of the new tokens. With the prompt before them, as the first token of all may lose its space."""
    return tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]


def main() -> int:
    parser = argparse.ArgumentParser(prog="generate", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="RUN", help="a run's folder, a step-N, or a Hugging Face folder")
    add("--prompt", required=True, action="append", metavar="TEXT", help="what to go on from; may be given again")
    text = f"new tokens at most (default: {NEW_TOKENS}, or as many as the model still reads)"
    add("--max-new-tokens", type=int, metavar="N", help=text)
    text = "0 takes the most probable token; higher is more varied (default: 1)"
    add("--temperature", type=float, default=1.0, metavar="T", help=text)
    add("--top-k", type=int, metavar="K", help="draw among the K most probable tokens (default: all)")
    add("--seed", type=int, metavar="N", help="of what is drawn (default: 0)")
    text = "precision to compute in (default: bfloat16 on a GPU, float32 on a CPU)"
    add("--dtype", choices=["float32", "bfloat16"], help=text)
    arguments = parser.parse_args()
    return run_on_ranks("generate", lambda device: write(arguments, device))


if __name__ == "__main__":
    leave(main())
