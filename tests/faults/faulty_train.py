"""train.py, one rank of which has an accident: python -m tests.faults.faulty_train KIND RANK STEP FLAGS..."""

import ctypes
import errno
import os
import resource
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import folders
from errors import leave
from parallelisms.fsdp import local
from train import main
from trainer import Trainer

KIND, RANK, STEP = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class FaultyTrainer(Trainer):
    def train_step(self, inputs: Tensor, labels: Tensor) -> None:
        if self.step == STEP and self.rank == RANK:
            ACCIDENTS[KIND](self)
        super().train_step(inputs, labels)

    def forward_backward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hook = None
        if KIND == "nan in a block" and self.rank == RANK and self.step == STEP:
            hook = self.model.norm.register_forward_pre_hook(spoil_gradient)
        result = super().forward_backward(inputs, labels)
        if hook is not None:
            hook.remove()
        if KIND == "nan" and self.rank == RANK and self.step == STEP:
            local(next(iter(self.model.parameters())).grad)[0] = float("nan")
        return result


def spoil_gradient(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
    """One NaN in what goes back to the last block."""
    args[0].register_hook(lambda g: torch.where(torch.arange(g.numel()).view_as(g) == 7, float("nan"), g))


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def two_signals(trainer: Trainer) -> None:
    """The second one comes while the main thread waits in a collective that the other rank never joins."""
    send(signal.SIGTERM)

    def later() -> None:
        time.sleep(2.5)
        send(signal.SIGTERM)

    threading.Thread(target=later, daemon=True).start()
    dist.barrier()


def killed_in_the_commit(trainer: Trainer) -> None:
    folders.mark = lambda *_: send(signal.SIGKILL)


def killed_before_pruning(trainer: Trainer) -> None:
    remove = folders.remove

    def kill(fs: object, path: str) -> None:
        if path.endswith(("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")):
            send(signal.SIGKILL)
        remove(fs, path)

    folders.remove = kill


def disk_full(trainer: Trainer) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))


def read_only(trainer: Trainer) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    folders.begin = refuse


def loader_killed(trainer: Trainer) -> None:
    thread = ctypes.c_ulong(trainer.loader.thread.ident)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))


def out_of_memory(trainer: Trainer) -> None:
    torch.empty(2**50)


def exception(trainer: Trainer) -> None:
    raise ValueError("something unforeseen")


ACCIDENTS = {
    "SIGTERM": lambda _: send(signal.SIGTERM),
    "SIGUSR1": lambda _: send(signal.SIGUSR1),
    "SIGINT": lambda _: send(signal.SIGINT),
    "SIGKILL": lambda _: send(signal.SIGKILL),
    "SIGSTOP": lambda _: send(signal.SIGSTOP),
    "two signals": two_signals,
    "killed in the commit": killed_in_the_commit,
    "killed before pruning": killed_before_pruning,
    "GIL held": lambda _: ctypes.PyDLL(None).sleep(1000),
    "exception": exception,
    "nan": lambda _: None,
    "nan in a block": lambda _: None,
    "disk full": disk_full,
    "read-only": read_only,
    "loader killed": loader_killed,
    "out of memory": out_of_memory,
    "none": lambda _: None,
}

if __name__ == "__main__":
    leave(main(sys.argv[4:], FaultyTrainer))
