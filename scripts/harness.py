"""The tasks of lm-evaluation-harness (the package lm_eval), by the three methods with which it asks a model.

A context begins with the token that begins a text in training. Where it is too long for the model its beginning is left
out, with a warning; so does the harness with the models that it loads itself. Generation is greedy.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError
from models.llama.generate import choose_token, generate
from models.llama.model import Llama
from scripts.trained_model import Trained

logger = logging.getLogger("rowhouse")

TOKENS_AT_ONCE = 4096  # All of their logits exist at once.
PROMPTS_AT_ONCE = 16
NEW_TOKENS = 256  # The harness's own number, where a task gives none.


def run_tasks(names: list[str], model: Llama, trained: Trained) -> str:
    """The harness's table of results. For all ranks at once: they hold one tensor parallel model, and ask it the same.

    `names`: of tasks, groups or tags, or YAML files. Raises UserError where lm_eval knows no such task, or cannot get
    its data.
    """
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    class HarnessModel(TaskModel, LM):
        """A TaskModel of the class that the harness asks for."""

    manager = TaskManager()
    for name in names:
        if name not in manager.all_tasks and not (name.endswith(".yaml") and Path(name).is_file()):
            raise UserError(
                f'--tasks: lm_eval has no "{name}": choose of what `lm_eval ls tasks` lists, or a YAML file'
            )
    try:
        results = lm_eval.simple_evaluate(HarnessModel(model, trained), tasks=names, task_manager=manager)
    except (OSError, ImportError) as error:  # Of its data, and of what some tasks need besides.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"--tasks: {','.join(names)} cannot be run ({reason}): see that this machine reaches huggingface.co, or "
            "has the data in its cache, and install what is missing"
        ) from error
    if results is None:  # On other ranks than the first.
        return ""
    tables = [make_table(results)] + ([make_table(results, "groups")] if results.get("groups") else [])
    return "\n".join(tables)


class TaskModel:
    """Answers requests, in their order. Each method's docstring begins with what the `args` of a request are."""

    def __init__(self, model: Llama, trained: Trained):
        super().__init__()
        self.model, self.length = model, model.max_seq_len
        self.text, self.stop_ids = trained.tokenizer, trained.stop_ids
        start = self.text.eos_id if self.text.bos_id is None else self.text.bos_id
        if start is None:
            raise UserError(f"--tasks: {self.text.path} names no token that begins or ends a text: give one that does")
        self.start = start

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(context, continuation) -> (the continuation's log-probability in nats, whether greedy decoding gives it)."""
        pairs = [split_before_space(*request.args) for request in requests]
        contexts = self.text.encode_batch([context for context, _ in pairs])
        texts = self.text.encode_batch([context + continuation for context, continuation in pairs])
        # As the harness has it: the continuation's tokens are those of both together, after as many as the context has.
        continuations = [text[len(context) :] for text, context in zip(texts, contexts, strict=True)]
        return self.score([([self.start, *a, *b], len(b)) for a, b in zip(contexts, continuations, strict=True)])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """(text,) -> its log-probability in nats; one longer than the model in several windows."""
        texts = self.text.encode_batch([request.args[0] for request in requests])
        windows = [(i, window) for i, ids in enumerate(texts) for window in self.windows(ids)]
        totals = [0.0] * len(texts)
        for (i, _), (score, _) in zip(windows, self.score([window for _, window in windows]), strict=True):
            totals[i] += score
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """(context, settings) -> the text that follows, up to one of the strings settings["until"], to the end of the
        text, or to settings["max_gen_toks"] tokens."""
        contexts = self.text.encode_batch([request.args[0] for request in requests])
        order = sorted(range(len(requests)), key=lambda i: -len(contexts[i]))
        texts = [""] * len(requests)
        for begin in range(0, len(order), PROMPTS_AT_ONCE):
            batch = order[begin : begin + PROMPTS_AT_ONCE]
            settings = [requests[i].args[1] for i in batch]
            found = self.complete([[self.start, *contexts[i]] for i in batch], settings)
            for i, text in zip(batch, found, strict=True):
                texts[i] = text
        return texts

    def score(self, sequences: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Of each (tokens, n): the log-probability of the last n, and whether each of these is the most probable."""
        self.warn([len(ids) - 1 for ids, _ in sequences], self.length)
        rows = [(ids[-self.length - 1 :], min(n, self.length)) for ids, n in sequences]
        scores = [(0.0, True)] * len(rows)
        order = sorted((i for i, (_, n) in enumerate(rows) if n > 0), key=lambda i: -len(rows[i][0]))
        while order:
            size = max(1, TOKENS_AT_ONCE // len(rows[order[0]][0]))
            batch, order = order[:size], order[size:]
            for i, score in zip(batch, self.score_batch([rows[i] for i in batch]), strict=True):
                scores[i] = score
        return scores

    @torch.no_grad()
    def score_batch(self, rows: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """The same for rows that fit the model, the longest first."""
        device, longest = self.model.freqs_cis.device, len(rows[0][0]) - 1
        # What fills a row up stands behind it, where none of its tokens looks.
        inputs = torch.tensor([ids[:-1] + [0] * (longest + 1 - len(ids)) for ids, _ in rows], device=device)
        logits = self.model(inputs).view(len(rows), longest, -1)
        sums, greedy = [], []
        for row, (ids, n) in zip(logits, rows, strict=True):
            labels = torch.tensor(ids[-n:], device=device)
            predicted = row[len(ids) - 1 - n : len(ids) - 1].float()
            sums.append(predicted.log_softmax(dim=1).gather(1, labels[:, None]).double().sum())
            greedy.append((predicted.argmax(dim=1) == labels).all())
        return list(zip(torch.stack(sums).tolist(), torch.stack(greedy).tolist(), strict=True))

    def windows(self, ids: list[int]) -> Iterator[tuple[list[int], int]]:
        """(tokens, how many of the last to predict): each token once, after as many others as the model reads."""
        for begin in range(0, len(ids), self.length):
            end = min(begin + self.length, len(ids))
            first = max(end - self.length, 0)
            yield [ids[first - 1] if first else self.start, *ids[first:end]], end - begin

    def complete(self, prompts: list[list[int]], settings: list[dict[str, Any]]) -> list[str]:
        """What follows each prompt, greedily."""
        if any(each.get("do_sample") for each in settings):
            raise UserError("--tasks: a task asks for samples (do_sample), and generation is greedy here: leave it out")
        untils = [[until] if isinstance(until := each.get("until", []), str) else until for each in settings]
        limits = [each.get("max_gen_toks", NEW_TOKENS) for each in settings]
        room = self.length - max(limits)
        if room < 1:
            raise UserError(
                f"--tasks: a task asks for {max(limits)} tokens of a model that reads {self.length}: leave it out"
            )
        self.warn([len(prompt) for prompt in prompts], room)
        prompts = [prompt[-room:] for prompt in prompts]
        before = [len(self.text.decode(prompt)) for prompt in prompts]
        written: list[list[int]] = [[] for _ in prompts]
        texts, is_done = [""] * len(prompts), [False] * len(prompts)
        for step in generate(self.model, prompts, max(limits), self.stop_ids, self.choose):
            for i, token in enumerate(step):
                if token is None or is_done[i]:
                    is_done[i] = True
                    continue
                written[i].append(token)
                text = self.text.decode(prompts[i] + written[i])[before[i] :]
                ends = [at for until in untils[i] if until and (at := text.find(until)) >= 0]
                texts[i] = text[: min(ends, default=len(text))]
                is_done[i] = bool(ends) or len(written[i]) == limits[i]
            if all(is_done):
                break
        return texts

    def choose(self, logits: Tensor) -> Tensor:
        return choose_token(logits[:, : self.text.vocab_size], temperature=0)

    def warn(self, lengths: list[int], most: int) -> None:
        too_long = sum(length > most for length in lengths)
        if too_long and dist.get_rank() == 0:
            logger.warning("--tasks: of %d requests %d are cut to their last %d tokens", len(lengths), too_long, most)


def split_before_space(context: str, continuation: str) -> tuple[str, str]:
    """Spaces at the context's end belong to the continuation: tokens begin with them."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation
