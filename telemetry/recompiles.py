"""Recompilations: a step that torch.compile works for once more takes seconds or minutes, and says nothing."""

import logging

from torch._dynamo.utils import counters, get_compilation_metrics

logger = logging.getLogger("rowhouse")


class Recompiles:
    """Counts the graphs that torch.compile makes in steps after the first one. A step costs a look at a counter."""

    def __init__(self) -> None:
        self.seen = self.graphs()
        self.is_first = True
        self.count = 0
        self.reason = ""
        self.warned = False

    def graphs(self) -> int:
        """What torch.compile has made in this process."""
        return counters["stats"]["unique_graphs"]

    def step(self) -> None:
        """A training step has ended."""
        made = self.graphs() - self.seen
        if made and not self.is_first:
            self.count += made
            reason = get_compilation_metrics()[-1].recompile_reason
            self.reason = " ".join(reason.split()) if reason else "torch gives no reason"
        self.skip()
        self.is_first = False

    def skip(self) -> None:
        """What has been compiled since the last step is of no step: a validation, say."""
        self.seen = self.graphs()

    def warn(self, step: int) -> None:
        """Once."""
        if not self.warned:
            logger.warning(
                "up to step %d torch.compile has compiled %d time(s) more than in the first step (%s): recompiles in "
                "metrics.jsonl counts on, and TORCH_LOGS=recompiles tells each",
                step, self.count, self.reason,
            )  # fmt: skip
        self.warned = True
