"""python -m pipeline plan | preflight: before a cluster is booked, and before it is used."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from common.errors import UserError
from common.recipe import parse_arguments
from pipeline.config import load_config


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit codes: 0 well, 1 it does not fit or a check failed, 2 a mistake in the input."""
    args = parse_arguments(_parser(), argv)
    for noisy in ("httpx", "DeepSpeed", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        return {"plan": _plan, "preflight": _preflight}[args.command](args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipeline", description="Look before you train.")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # deepspeed adds it
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="memory, step time and hours of a recipe on given GPUs")
    plan.add_argument("recipe", type=Path)
    plan.add_argument("overrides", nargs="*", metavar="key=value")
    plan.add_argument("--gpus", required=True, metavar="NxKIND", help="for example 8xA100-80G")
    plan.add_argument(
        "--network", type=float, default=1600, metavar="GBIT", help="Gbit/s of a node (%(default)s)"
    )
    preflight = commands.add_parser("preflight", help="is every host fit to train? under any launcher")
    preflight.add_argument("recipe", type=Path)
    preflight.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


def _plan(args: argparse.Namespace) -> int:
    from pipeline.planning.plan import parse_cluster, print_plan

    cluster = parse_cluster(args.gpus, args.network)
    return 0 if print_plan(load_config(args.recipe, args.overrides), cluster.gpus, cluster) else 1


def _preflight(args: argparse.Namespace) -> int:
    from pipeline.planning.preflight import preflight

    return preflight(load_config(args.recipe, args.overrides))


if __name__ == "__main__":
    sys.exit(main())
