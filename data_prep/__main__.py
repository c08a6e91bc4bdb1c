"""python -m data_prep prepare | inspect | verify | world"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are the parallelism; see parallel.py

from data_prep.config import UserError, load_data_config


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 2 a mistake in the input or damaged data."""
    parser = argparse.ArgumentParser(prog="python -m data_prep", description="Text to token shards.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="make the shards of a recipe; run it again to go on")
    prepare.add_argument("recipe", type=Path)
    prepare.add_argument("overrides", nargs="*", metavar="key=value")
    prepare.add_argument("--shard", type=_job, default=(0, 1), metavar="i/n", help="job i of n, from 0")
    prepare.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    prepare.add_argument("--finish", action="store_true", help="only write the manifests")
    prepare.add_argument("--force", action="store_true", help="discard what is there and start over")
    world = commands.add_parser("world", help="write the eight tasks of the embedded world")
    world.add_argument("directory", type=Path)
    world.add_argument("--train", type=int, default=400, help="rows of a train split")
    world.add_argument("--test", type=int, default=100, help="rows of a test split")
    world.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        {"prepare": _prepare, "world": _world}[args.command](args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _prepare(args: argparse.Namespace) -> None:
    from data_prep.prepare import prepare

    config = load_data_config(args.recipe, args.overrides)
    prepare(config, args.shard, args.workers, args.force, args.finish, lambda line: print(line, flush=True))


def _world(args: argparse.Namespace) -> None:
    from data_prep import world

    world.write_tasks(args.directory, args.train, args.test, args.seed)


def _job(text: str) -> tuple[int, int]:
    index, _, jobs = text.partition("/")
    try:
        i, n = int(index), int(jobs)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must read i/n, for example 0/8") from None
    if not 0 <= i < n:
        raise argparse.ArgumentTypeError(f"{text!r}: i must be in 0..{n - 1}")
    return i, n


if __name__ == "__main__":
    sys.exit(main())
