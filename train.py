"""The command line: read the configuration, then train.

    python train.py --config debug.toml
    torchrun --nproc-per-node 8 train.py --config llama8b_fp8.toml --training.seq_len 4096

Exit status: errors.ExitStatus.
"""

import contextlib
import faulthandler
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from config import JobConfig, load_config
from ending import is_out_of_memory, memory_advice
from errors import ExitStatus, UserError, leave
from parallelisms.mesh import init_process_group
from stopping import StopRequests
from telemetry.run_lock import lock_run
from telemetry.watch import Watch, record_collectives
from trainer import Trainer

PATIENCE_WITH_THE_TELLER = 3.0  # Seconds by which ranks read their configuration apart from each other.


def main(argv: list[str], trainer_class: type[Trainer] = Trainer) -> ExitStatus:
    """One rank: reads the configuration and trains. What goes wrong is told once, by one rank."""
    faulthandler.enable()  # A crash inside of a library says where.
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    # It tells of collectives that it makes of a gradient norm or a checkpoint: nothing that a user can change.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        if "--dry-run" in argv:
            from planning.command import dry_run  # Runs that train need none of what it imports of the compiler.

            return dry_run(argv)
        config = load_config(argv, int(os.environ.get("WORLD_SIZE", "1")))
        record_collectives(Path(config.job.dump_folder))
        device = init_process_group(config.comm)
        lock = lock_for_all_ranks(Path(config.job.dump_folder))
    except UserError as error:
        # Every rank finds the same; one tells. The others wait: torchrun ends all ranks as soon as one has ended.
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"train.py: {error}", file=sys.stderr)
        else:
            time.sleep(PATIENCE_WITH_THE_TELLER)
        return ExitStatus.USER_ERROR
    with lock:
        return train(config, device, trainer_class)


def lock_for_all_ranks(folder: Path) -> contextlib.AbstractContextManager[object]:
    """Rank 0 locks the run's folder. Raises on all ranks the UserError that it meets."""
    lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    refusal: list[UserError | None] = [None]
    if dist.get_rank() == 0:
        try:
            lock = lock_run(folder)
        except UserError as error:
            refusal = [error]
    dist.broadcast_object_list(refusal)
    if refusal[0] is not None:
        raise refusal[0]
    return lock


def train(config: JobConfig, device: torch.device, trainer_class: type[Trainer]) -> ExitStatus:
    watch = Watch(
        Path(config.job.dump_folder), dist.get_rank(), dist.get_world_size(), _get_default_store(),
        config.comm.init_timeout_seconds,
    )  # fmt: skip
    stop = StopRequests(config.training.max_time)
    try:
        with stop.listening():
            trainer = trainer_class(config, device, watch, stop)
            status = trainer.train()
            trainer.close()
        dist.barrier()
        watch.close()
        dist.destroy_process_group()
    except Exception as error:
        if is_out_of_memory(error):
            error = UserError(memory_advice(config, error))
        # Not an orderly exit: that may wait for threads which wait for other ranks.
        os._exit(watch.fail(error))
    return status


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
