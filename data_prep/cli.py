"""emo prepare | plan --data | inspect | verify | sniff | world"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are the parallelism, see parallel.py

from emo.common.cli.commands import (
    Parser,
    add_recipe,
    announce,
    parse_arguments,
    parse_directory,
    parse_shard,
)
from emo.common.cli.progress import make_console
from emo.common.cli.submit import add_schedulers, apply_job, check_schedulers, submit_array
from emo.common.config.recipe import Section, dump_recipe, read_recipe
from emo.common.errors import DiskFullError, ExitCode, UserError, exit_code_of
from emo.common.io.objects import in_store, shown
from emo.common.text import counted, printable

from .config import DataConfig, load_data_config

JOBS = 4  # of a scheduler


def main(argv: list[str] | None = None, recipe: type[Section] | None = None) -> int:
    """Run a command and return its exit code. `recipe`: the model of all sections, see load_data_config."""
    args = parse_arguments(make_parser(recipe), argv)
    return exit_code_of(lambda: _run(args, recipe))


def make_parser(recipe: type[Section] | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands on data. `recipe`: the model of all sections."""
    parser = Parser(prog="emo")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_prepare(commands, recipe or DataConfig)
    _add_plan(commands, recipe or DataConfig)
    inspect = commands.add_parser(
        "inspect",
        description="Show rows of prepared data as the trainer reads them, with the supervised tokens in "
        "colour.",
        examples=["emo inspect runs/quickstart/data/pretrain --rows 1"],
    )
    about = "prepared directory or its address, or one split of a directory"
    inspect.add_argument("directory", type=parse_directory, metavar="DIR", help=about)
    inspect.add_argument("--rows", type=_natural, default=3, help="number of rows to show (%(default)s)")
    inspect.add_argument("--seed", type=_natural, default=0, help="seed for drawing the rows (%(default)s)")
    text = "show these rows instead, for example of bad_batches.jsonl in a run directory"
    inspect.add_argument("--at", type=_parse_row, nargs="+", default=[], metavar="FILE:ROW", help=text)
    verify = commands.add_parser(
        "verify",
        description="Check prepared data: the hashes and counts of all shards, the settings, the tokenizer "
        "and every row. The beginnings of a few documents of each shard are encoded again and compared. The "
        "source files are not read, because each prepare job compares their hashes.",
        examples=["emo verify runs/quickstart/data/pretrain"],
        notes={ExitCode.MISTAKE: "the data are damaged, or invalid input"},
    )
    verify.add_argument("directory", type=parse_directory, metavar="DIR", help=about)
    sniff = commands.add_parser(
        "sniff",
        description="Detect the format of a data file, show how three of its rows are parsed, and print the "
        "data section of a recipe for it.",
        examples=["emo sniff chat.jsonl --tokenizer openai-community/gpt2"],
    )
    sniff.add_argument("files", metavar="FILES", help="file, pattern or URL, as in data.sources.0.files")
    about = "hub id, directory or .model file. The rows are then shown as tokens instead of characters"
    sniff.add_argument("--tokenizer", help=about)
    world = commands.add_parser(
        "world",
        description="Write the data of the eight evaluation tasks for the generated toy data, which the "
        "quickstart trains on.",
        examples=["emo world runs/quickstart/tasks"],
    )
    world.add_argument("directory", type=Path, metavar="DIR", help="directory for TASK/SPLIT.jsonl files")
    world.add_argument(
        "--train", type=_positive, metavar="N", help="largest number of training rows per task"
    )
    world.add_argument("--test", type=_positive, metavar="N", help="largest number of test rows per task")
    return parser


def _add_prepare(commands: Any, section: type[Section]) -> None:
    parser = commands.add_parser(
        "prepare",
        description="Tokenize the data of a recipe into shards. Run the same command again to make the "
        "shards that are missing. The directory is data.dir of the recipe.",
        examples=[
            "emo prepare launch/recipes/quickstart-pretrain.yaml",
            "emo prepare launch/recipes/quickstart-pretrain.yaml data.seed=1 data.dir=runs/other --workers 2",
        ],
    )
    add = add_recipe(parser, section)
    text = "make only the shards of job I of N, counted from 0. Every job must finish, in any order"
    add("--shard", type=parse_shard, default=(0, 1), metavar="I/N", help=text)
    add("--workers", type=_positive, metavar="N", help="number of processes (all CPUs)")
    add("--finish", action="store_true", help="only write the manifests of existing shards")
    add("--force", action="store_true", help="delete the prepared data and start from scratch")
    add_schedulers(add)
    text = f"number of jobs of --on slurm or --on kubernetes ({JOBS})"
    add("--jobs", type=_positive, metavar="N", help=text)


def _add_plan(commands: Any, section: type[Section]) -> None:
    parser = commands.add_parser(
        "plan",
        description="Predict the duration and the memory of preparation from a sample of the sources. If the "
        "data are prepared, what the jobs measured is printed next to it.",
        examples=["emo plan --data launch/recipes/quickstart-pretrain.yaml --machines 4 --workers 16"],
    )
    add = add_recipe(parser, section)
    add("--data", action="store_true", required=True, help="predict preparation instead of training")
    add("--machines", type=_positive, default=1, metavar="N", help="number of jobs (%(default)s)")
    add("--workers", type=_positive, default=_cpus(), metavar="N", help="processes of each job (all CPUs)")


def _cpus() -> int:
    """Return how many CPUs this process may use. A batch system may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(args: argparse.Namespace, recipe: type[Section] | None) -> int:
    """Run the chosen command. Each imports its modules after it has printed its first line."""
    if args.command == "prepare":
        _prepare(args, load_data_config(args.recipe, args.overrides, recipe))
    elif args.command == "plan":
        config = load_data_config(args.recipe, args.overrides, recipe)
        announce(args.recipe)
        from .forecast import print_forecast

        print_forecast(config, args.machines, args.workers, _say)
    elif args.command == "inspect":
        announce(shown(args.directory))
        from .shards.format import copy_prepared
        from .shards.inspect import inspect
        from .shards.verify import data_sets

        copy_prepared(args.directory)
        for split in data_sets(args.directory)[: 1 if args.at else None]:
            inspect(split, args.rows, args.seed, make_console(), args.at)
    elif args.command == "verify":
        announce(shown(args.directory))
        from .shards.format import copy_prepared
        from .shards.verify import verify

        copy_prepared(args.directory, again=True)
        correct, faults = verify(args.directory)
        for line in correct:
            _say(line)
        for fault in faults[1:]:
            print(printable(fault), file=sys.stderr)
        if faults:
            others = f" (and {counted(len(faults) - 1, 'more fault')}, above)" if len(faults) > 1 else ""
            raise UserError(faults[0] + others, code="damaged-data")
    elif args.command == "sniff":
        announce(args.files)
        from .sniff import sniff

        sniff(args.files, args.tokenizer, make_console())
    else:
        announce(args.directory)
        from .sources import world

        world.write_tasks(args.directory, args.train, args.test)
    return ExitCode.DONE


def _prepare(args: argparse.Namespace, config: DataConfig) -> None:
    """Run one job here, or all jobs on a scheduler."""
    check_schedulers(args)
    if args.jobs and args.on not in ("slurm", "kubernetes"):
        raise UserError("--jobs needs --on slurm or --on kubernetes", code="option-needs")
    if args.on in ("slurm", "kubernetes") and args.force:
        raise UserError(f"--on {args.on} cannot be combined with --force. Remove it", code="options-clash")
    if args.on in ("slurm", "kubernetes"):
        _submit(args, config)
        return
    announce(args.recipe)
    workers = args.workers or _cpus()
    if args.on == "ray":
        from .on_ray import prepare_on_ray

        prepare_on_ray(config, workers, args.force, _say)
    else:
        from .prepare import prepare

        prepare(config, args.shard, workers, args.force, args.finish, _say)


def _submit(args: argparse.Namespace, config: DataConfig) -> None:
    """Submit the jobs of a preparation to Slurm or Kubernetes."""
    jobs = args.jobs or JOBS
    if args.on == "slurm":
        words = [str(args.recipe), *args.overrides]
        options = ["--cpus-per-task", str(args.workers)] if args.workers else []
        array, last = submit_array("prepare.sbatch", words, jobs, options)
        _say(f"submitted: job {array} of {counted(jobs, 'task')}, then job {last} completes the data")
        _say(f"train after it: sbatch --dependency afterok:{last} launch/slurm/train.sbatch ...")
        _say(f"see its progress: emo top {shown(config.dir)}")
        return
    text = dump_recipe(read_recipe(args.recipe, args.overrides))
    shared = [] if in_store(config.dir) else [config.dir]
    for line in apply_job(args.overlay, "prepare", jobs, {}, text, shared, args.workers):
        _say(line)


def _say(line: str) -> None:
    """Print a line. Names of files and sources cannot control the terminal."""
    try:
        print(printable(line), flush=True)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise DiskFullError("no space left for standard output") from None


def _parse_row(text: str) -> tuple[str, int]:
    """Parse FILE:ROW. Raises ArgumentTypeError."""
    file, _, row = text.rpartition(":")
    if not (file and row.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be FILE:ROW, for example shard-00000-of-00004.arrow:12"
        )
    return file, int(row)


def _positive(text: str) -> int:
    return _natural(text, 1)


def _natural(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least}")
    return int(text)
