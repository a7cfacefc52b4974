"""`train.py --dry-run`: plans a step instead of training."""

import argparse
import json
from pathlib import Path

from config import load_config
from errors import ExitStatus, UserError
from planning.advice import advise
from planning.hardware import GPUS, hardware
from planning.plan import as_json, make_plan
from planning.text import advice_text, plan_text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py --dry-run",
        usage="train.py --config FILE --dry-run [--world-size N] [--gpu NAME] [--json FILE] [--section.key VALUE ...]",
        description="Plans a step, without GPUs: memory, communication, an estimate of the time, and whether it fits.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--dry-run", action="store_true", help="plan, do not train")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks to plan for (default: 1)")
    add_hardware(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the same for machines")
    return parser


def add_hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", default="H100", metavar="NAME", help=f"{', '.join(GPUS)} (default: H100)")
    parser.add_argument("--device-memory", metavar="SIZE", help="such as 80GiB (default: that of --gpu)")
    parser.add_argument(
        "--network-gbps", type=float, metavar="GBPS", help="of one GPU between nodes, in Gb/s (default: 400)"
    )


def dry_run(argv: list[str]) -> ExitStatus:
    """Status 0 where the plan fits, 1 where it does not. Raises UserError for what a run would have refused."""
    try:
        arguments, flags = make_parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}; see train.py --help") from error
    if arguments.world_size < 1:
        raise UserError(f"--world-size: {arguments.world_size} ranks train nothing; give 1 or more")
    gpu = hardware(arguments.gpu, arguments.device_memory, arguments.network_gbps)
    config = load_config(flags, arguments.world_size)
    plan = make_plan(config, arguments.world_size, gpu)
    print(plan_text(plan), flush=True)
    content = as_json(plan)
    if not plan.fits:
        changes = advise(config, arguments.world_size, gpu)
        print("\n" + advice_text(changes))
    if arguments.json is not None:
        write(arguments.json, content)
    return ExitStatus.DONE if plan.fits else ExitStatus.FAILED


def write(path: Path, content: dict) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--json: {path} cannot be written ({error.strerror}): choose another") from error
