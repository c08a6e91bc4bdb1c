"""The commands `emo plan`, `preflight`, `score`, `export-model`, `top` and `report`.

Heavy modules are imported after the arguments were checked.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from emo.common.cli.commands import Parser, announce, parse_arguments
from emo.common.cli.progress import show_activity
from emo.common.errors import ExitCode, UserError, exit_code_of
from emo.common.text import printable

from .config import load_config
from .engine.hardware import parse_cluster
from .monitor.console import Console

log = logging.getLogger(__name__)


def leave(code: int) -> NoReturn:
    """Exit this process with `code` without finalizing the interpreter.

    Threads of libraries may still run. If one does while its C++ object is destroyed, it calls `terminate`,
    and exit code 75 becomes a SIGABRT.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(argv: list[str]) -> NoReturn:
    """Run a command and exit."""
    leave(main(argv))


def main(argv: list[str]) -> int:
    """Run `emo plan | preflight | score | export-model | top | report`.

    Exit codes: 0 success, 1 does not fit or a check failed, 2 a mistake in the input, 3 a regression.
    """
    args = parse_arguments(_parser(), argv)
    silence_libraries()
    if is_first_of_host() and args.command != "top":
        announce(args.command)
    return exit_code_of(lambda: args.work(args), alone=is_first_of_host())


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="emo")
    commands = parser.add_subparsers(dest="command", required=True)

    about = "Memory, step time and hours of a recipe on given GPUs."
    add = add_recipe_arguments(commands.add_parser("plan", description=about), _plan)
    add("--gpus", required=True, metavar="NxKIND", help="for example 8xA100-80G")
    add("--network", type=float, default=1600, metavar="GBIT", help="Gbit/s of a node (%(default)s)")
    about = "mean length of the documents (default: as in the prepared data)"
    add("--document_tokens", type=int, metavar="N", help=about)
    add("--best", action="store_true", help="search for the fastest settings that surely fit")
    add("--write", type=Path, metavar="FILE", help="with --best: write a recipe with the best settings")

    about = "Is every host fit to train? Under any launcher."
    add_recipe_arguments(commands.add_parser("preflight", description=about), _preflight)

    about = "A model's log-probability of every token of a recipe's data, written once beside them. "
    about += "Run the same command again to resume; several jobs share the work with --part."
    add = add_recipe_arguments(commands.add_parser("score", description=about), _score)
    add("--model", required=True, help="directory or hub id of the model that reads the data")
    add("--revision", help="commit of the hub model")
    add("--name", default="reference", help="what objective.scores calls them (%(default)s)")
    add("--top-k", type=int, metavar="K", help="of the K likeliest tokens in its place, for a teacher")
    add("--part", default="0/1", metavar="I/N", help="every N-th shard from the I-th (%(default)s)")
    add("--force", action="store_true", help="write again what is there")

    about = "What the ranks of a run do right now, or did last, from the files in its directory."
    top = commands.add_parser("top", description=about)
    top.set_defaults(work=_top)
    top.add_argument("run", type=Path, metavar="RUN_DIR")

    about = (
        "Export a checkpoint as a Hugging Face model, on the CPU. It may have been saved without an export."
    )
    export = commands.add_parser("export-model", description=about)
    export.set_defaults(work=_export_model)
    about = "run directory, whose newest checkpoint is exported, or a checkpoint in it"
    export.add_argument("checkpoint", type=Path, metavar="RUN_DIR[/step-N]", help=about)
    export.add_argument("target", type=Path, metavar="OUT", help="directory to create")

    about = "One or several runs as one page: curves, launches, the plan beside what was measured, "
    about += "sampled text. Also while they train."
    report = commands.add_parser("report", description=about)
    report.set_defaults(work=_report)
    add = report.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR")
    forms = "directory, or file.html, .md or .json (the first RUN_DIR); - is Markdown on stdout"
    add("--output_path", metavar="PATH", help=forms)
    over = "what curves go over: steps or supervised tokens"
    add("--over", choices=("step", "tokens"), default="step", help=over)
    add("--json", metavar="FILE", help="also what was gained and lost, as numbers; - is stdout")
    risen = "exit with 3 when the NLL of one of these validation sets has surely risen since step 0"
    add("--fail_on_regression", metavar="SET[,SET]", help=risen)
    return parser


def add_recipe_arguments(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], int] | None = None
) -> Callable[..., argparse.Action]:
    """Add the arguments of a command on a recipe. Return the function that adds more."""
    parser.set_defaults(work=work)
    parser.add_argument("recipe", type=Path)
    # Without a default argparse says that it is required.
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    return parser.add_argument


def is_first_of_host() -> bool:
    """Return whether this process is the first rank of its host."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def silence_libraries() -> None:
    """Hide warnings of libraries that are imported from now on."""
    quieten()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings(
        "ignore", module=r"(transformers|torch|deepspeed|peft|accelerate|huggingface_hub)\b"
    )


def quieten() -> None:
    """Hide information that libraries log."""
    for noisy in ("httpx", "DeepSpeed", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _plan(args: argparse.Namespace) -> int:
    if args.write and not args.best:
        raise UserError("--write needs --best")
    if args.document_tokens is not None and args.document_tokens < 1:
        raise UserError("--document_tokens must be a whole number from 1", code="document-tokens")
    cluster = parse_cluster(args.gpus, args.network)
    config = load_config(args.recipe, args.overrides)
    if args.write and (args.write.exists() or not args.write.parent.is_dir()):
        problem = f"--write {args.write}: give a new name in an existing directory"
        raise UserError(problem, code="write-target")
    with show_activity("planning"):
        from .planning.plan import print_best, print_plan, write_recipe

        if not args.best:
            fits = print_plan(config, cluster.gpus, cluster, document_tokens=args.document_tokens)
            return ExitCode.DONE if fits else ExitCode.FAILURE
        best = print_best(config, cluster, args.document_tokens)
        if args.write:
            write_recipe(args.write, args.recipe, args.overrides, best, cluster)
            print(f"written: {args.write}")
    return ExitCode.DONE


def _preflight(args: argparse.Namespace) -> int:
    config = load_config(args.recipe, args.overrides)
    with show_activity("preflight") if is_first_of_host() else contextlib.nullcontext():
        from .planning.preflight import preflight

        return preflight(config)


def _score(args: argparse.Namespace) -> int:
    index, _, count = args.part.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UserError(f"--part {args.part}: give I/N with 0 <= I < N, for example 0/4", code="part")
    settings = [f"model.path={args.model}", "model.architecture=null", "model.lora=null", "objective={}"]
    settings.append(f"model.revision={args.revision or 'null'}")
    logging.basicConfig(level=logging.INFO, handlers=[Console()])
    config = load_config(args.recipe, [*args.overrides, *settings])
    with show_activity("loading the model"):
        from .planning.score import score

        complete = score(config, args.name, (int(index), int(count)), args.force, args.top_k)
    state = f"part {args.part} is complete, others are missing"
    if complete:
        key = "objective.scores=" if args.top_k is None else "objective.teacher.scores="
        state = f"complete; use them with {key}{args.name}"
    print(f"scores {args.name}: {state}")
    return ExitCode.DONE


def _export_model(args: argparse.Namespace) -> int:
    with show_activity("exporting"):
        from transformers.utils.logging import disable_progress_bar

        from .checkpoint.export import export_checkpoint

        disable_progress_bar()
        checkpoint = export_checkpoint(args.checkpoint, args.target)
    print(f"exported {checkpoint.name}: {args.target}")
    return ExitCode.DONE


def _top(args: argparse.Namespace) -> int:
    from .report.top import show_ranks

    with contextlib.suppress(KeyboardInterrupt):  # the way to leave it
        show_ranks(args.run)
    return ExitCode.DONE


def _report(args: argparse.Namespace) -> int:
    from emo.common.io.files import write_text
    from emo.common.report.document import STDOUT, folder_of

    from .report.page import build_run_report
    from .report.runs import read_runs, regressions

    runs = read_runs(args.runs)
    names = args.fail_on_regression
    verdicts = regressions(runs, [] if names is None else names.split(","))
    out = args.output_path or str(runs[0].path)
    page = build_run_report(runs, args.over, folder_of(out).absolute())
    lines = [line for _, line in verdicts]
    if args.json == STDOUT:
        print(page.json(), end="")
    elif args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(args.json), page.json())
        lines.insert(0, f"written: {args.json}")
    if (written := page.write(out)) is not None:
        lines = [f"written: {written}", page.answer[0], *lines]
    for line in lines:
        print(printable(line), file=sys.stderr if STDOUT in (out, args.json) else sys.stdout)
    return ExitCode.REGRESSION if any(lost for lost, _ in verdicts) else ExitCode.DONE
