"""The command line: read the configuration, then train.

    python train.py --config debug.toml
    torchrun --nproc-per-node 8 train.py --config llama8b_fp8.toml --training.seq_len 4096

Exit status: 0 when the run has reached its end, 2 when something that the user can mend stands in the way.
"""

import logging
import os
import sys

import torch.distributed as dist

from config import load_config
from errors import UserError
from parallelisms.mesh import init_process_group
from trainer import Trainer


def main() -> int:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    # It tells of collectives that it makes of a gradient norm or a checkpoint: nothing that a user can change.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    rank = int(os.environ.get("RANK", "0"))
    try:
        config = load_config(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1")))
        trainer = Trainer(config, init_process_group(config.comm))
        trainer.train()
        trainer.close()
        dist.destroy_process_group()
    except UserError as error:
        # Every rank finds the same; one tells.
        if rank == 0:
            print(f"train.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
