"""emo prepare | inspect | verify | sniff | world"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are the parallelism, see parallel.py

from emo.common.cli.commands import Parser, announce, parse_arguments
from emo.common.cli.progress import make_console
from emo.common.config.recipe import Section
from emo.common.errors import DiskFullError, ExitCode, UserError, exit_code_of
from emo.common.text import counted, printable

from .config import load_data_config


def main(argv: list[str] | None = None, recipe: type[Section] | None = None) -> int:
    """Run a command and return its exit code. `recipe`: the model of all sections, see load_data_config.

    Exit codes: 0 success, 1 system failure, 2 input error or damaged data, 130 interrupted.
    """
    parser = _parser()
    args = parse_arguments(parser, argv)
    return exit_code_of(lambda: _run(args, recipe))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="emo", description="Text to token shards.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser(
        "prepare", help="make the shards of a recipe. Run it again to make missing shards"
    )
    prepare.add_argument("recipe", type=Path)
    prepare.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    prepare.add_argument("--shard", type=_job, default=(0, 1), metavar="i/n", help="job i of n, from 0")
    # A batch system may allow fewer CPUs than the machine has.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    prepare.add_argument("--workers", type=_positive, default=cpus, help="processes (%(default)s)")
    prepare.add_argument("--finish", action="store_true", help="only write the manifests, make no shards")
    prepare.add_argument("--force", action="store_true", help="discard prepared data and start over")
    inspect = commands.add_parser("inspect", help="show prepared data")
    inspect.add_argument("directory", type=Path, help="prepared directory, or one split of it")
    inspect.add_argument("--samples", type=int, default=3, help="rows to show (%(default)s)")
    inspect.add_argument("--seed", type=int, default=0, help="seed for drawing the rows")
    verify = commands.add_parser(
        "verify",
        help="check a prepared directory: hashes, counts, every row, and the tokens of a sample",
        description="Checks hashes of all shards, counts and sums, settings, the tokenizer, and every row as "
        "in training. The beginnings of a few documents of each shard are encoded again and compared. The "
        "sources are not read: prepare compares their hashes in every job.",
    )
    verify.add_argument("directory", type=Path, help="the prepared directory, or one split of it")
    sniff = commands.add_parser(
        "sniff", help="show how a file is parsed, with examples and a recipe to paste"
    )
    sniff.add_argument("files", help="file, pattern or address, as in data.sources.0.files")
    sniff.add_argument("--tokenizer", help="hub id, directory or .model file, to show examples as tokens")
    world = commands.add_parser("world", help="write the eight tasks of the embedded world")
    world.add_argument("directory", type=Path)
    world.add_argument("--train", type=_positive, help="most rows of a train split")
    world.add_argument("--test", type=_positive, help="most rows of a test split")
    return parser


def _run(args: argparse.Namespace, recipe: type[Section] | None) -> int:
    """Run the chosen command. Each imports its modules after it has printed its first line."""
    if args.command == "prepare":
        config = load_data_config(args.recipe, args.overrides, recipe)
        announce(args.recipe)
        from .prepare import prepare

        prepare(config, args.shard, args.workers, args.force, args.finish, _say)
    elif args.command == "inspect":
        announce(args.directory)
        from .shards.inspect import inspect
        from .shards.verify import data_sets

        for split in data_sets(args.directory):
            inspect(split, args.samples, args.seed, make_console())
    elif args.command == "verify":
        announce(args.directory)
        from .shards.verify import verify

        correct, faults = verify(args.directory)
        for line in correct:
            _say(line)
        for fault in faults[1:]:
            print(printable(fault), file=sys.stderr)
        if faults:
            others = f" (and {counted(len(faults) - 1, 'more fault')}, above)" if len(faults) > 1 else ""
            raise UserError(faults[0] + others)
    elif args.command == "sniff":
        announce(args.files)
        from .sniff import sniff

        sniff(args.files, args.tokenizer, make_console())
    else:
        announce(args.directory)
        from .sources import world

        world.write_tasks(args.directory, args.train, args.test)
    return ExitCode.DONE


def _say(line: str) -> None:
    """Print a line. Names of files and sources cannot control the terminal."""
    try:
        print(printable(line), flush=True)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise DiskFullError("no space left for standard output") from None


def _job(text: str) -> tuple[int, int]:
    index, _, jobs = text.partition("/")
    if not (index.isdecimal() and jobs.isdecimal() and int(index) < int(jobs)):
        raise argparse.ArgumentTypeError(f"{text!r} must be i/n with i from 0 to n - 1, for example 0/8")
    return int(index), int(jobs)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return int(text)
