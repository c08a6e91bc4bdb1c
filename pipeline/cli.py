"""The commands of this room: what launch/*.sh run on every rank, and `emo`.

Arguments, logging and exit codes. Whatever is heavy is imported after the arguments are known to be right.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from emo.common.cli.commands import Parser, first_word, parse_arguments
from emo.common.cli.progress import at_work
from emo.common.errors import ExitCode, UserError, one_line, outcome
from emo.common.text import printable

from .config import RunConfig, load_config
from .control.stop import CALLED, HARDWARE, REPORTS, RESUME, Watch
from .engine.hardware import parse_cluster
from .monitor.console import Chatter, Console, Kind, duration, split_output

log = logging.getLogger(__name__)


def run_recipe(watch: Watch, argv: list[str] | None = None) -> int:
    """Run one rank of `deepspeed launch/continual.sh RECIPE`; return its exit code."""
    _set_environment()
    try:
        code = _reported(lambda: _run(watch, argv), watch)
    except SystemExit as end:  # argparse
        code = end.code if isinstance(end.code, int) else ExitCode.FAILURE
    watch.ended(code)
    if code != ExitCode.DONE and _is_main():
        print(f"exit code {code}", file=sys.stderr, flush=True)  # not every launcher passes it on
    return code


def _set_environment() -> None:
    """Set what libraries read as they are imported, unless the user has set it."""
    # Threads that spin for long while they wait take a busy CPU from those that work.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Rows differ in how many tokens they hold and chunks in size: what is freed is then of no use as it lies.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Hosts may share a home directory, and Triton's cache is for a local disk. Nobody else may write to it.
    if "TRITON_CACHE_DIR" not in os.environ:
        cache = Path(tempfile.gettempdir()) / f"triton-{os.getuid()}"
        cache.mkdir(mode=0o700, exist_ok=True)
        if cache.lstat().st_uid == os.getuid() and not cache.is_symlink():
            os.environ["TRITON_CACHE_DIR"] = str(cache)


def leave(code: int) -> NoReturn:
    """End this rank with `code`, without an orderly end of the interpreter.

    All is written and the process group is left. What remains are the libraries' own threads: one that still
    runs when its C++ object is taken down calls `terminate`, and exit code 75 becomes a SIGABRT.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(argv: list[str]) -> NoReturn:
    """Run a command of this room as a process of its own."""
    leave(main(argv))


def main(argv: list[str]) -> int:
    """Run `emo plan | preflight | score | top | report`: what is done before, beside and after training.

    Exit codes: 0 well, 1 it does not fit or a check failed, 2 a mistake in the input, 3 a regression.
    """
    args = parse_arguments(_parser(), argv)
    _silence_libraries()
    if _is_first_of_host() and args.command != "top":
        first_word(args.command)
    return outcome(lambda: args.work(args), alone=_is_first_of_host())


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="emo")
    commands = parser.add_subparsers(dest="command", required=True)

    about = "Memory, step time and hours of a recipe on given GPUs."
    add = _recipe_command(commands.add_parser("plan", description=about), _plan)
    add("--gpus", required=True, metavar="NxKIND", help="for example 8xA100-80G")
    add("--network", type=float, default=1600, metavar="GBIT", help="Gbit/s of a node (%(default)s)")
    about = "mean length of the documents (default: as in the prepared data)"
    add("--document_tokens", type=int, metavar="N", help=about)
    add("--best", action="store_true", help="search for the fastest settings that surely fit")
    add("--write", type=Path, metavar="FILE", help="with --best: write a recipe with the best settings")

    about = "Is every host fit to train? Under any launcher."
    _recipe_command(commands.add_parser("preflight", description=about), _preflight)

    about = "A model's log-probability of every token of a recipe's data, written once beside them. "
    about += "Run the same command again to resume; several jobs share the work with --part."
    add = _recipe_command(commands.add_parser("score", description=about), _score)
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


def _recipe_command(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], int] | None = None
) -> Callable[..., argparse.Action]:
    """Add what every command on a recipe takes; return the function that adds more."""
    parser.set_defaults(work=work)
    parser.add_argument("recipe", type=Path)
    # Without a default argparse says that it is required.
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    return parser.add_argument


def _run(watch: Watch, argv: list[str] | None) -> int:
    """Parse, check, join the other ranks and train."""
    chatter = split_output()
    args = recipe_arguments(Path(sys.argv[0]).stem, argv)
    console = _open_console(args, chatter)
    try:
        config = load_config(args.recipe, args.overrides)
        if args.dry_run:
            if _is_main():
                _dry_run(config, args.ranks)
            return ExitCode.DONE
        with console.compiling():  # DeepSpeed logs to what is standard output when it is imported
            from .control import world as ranks
            from .engine import engine
            from .trainer import train

        started, finished = time.perf_counter(), False
        ranks.record_collectives(config.output_dir)
        world = engine.start_world()
        watch.joined()
        if reason := ranks.first_reason(watch.reason):
            event = {"event_fields": {"event": "stopped", "reason": reason}}
            log.info("stopped before the run was opened (%s); %s", reason, RESUME, extra=event)
        else:
            finished = train(config, world, watch, console)
        log.info("this launch took %s", duration(time.perf_counter() - started))
        ranks.end_world()
        return ExitCode.DONE if finished else ExitCode.STOPPED
    except Exception as error:
        if _is_first_of_host() and not isinstance(error, UserError):
            console.close()
            chatter.show()
        raise
    finally:
        console.close()


def _dry_run(config: RunConfig, ranks: int | None) -> None:
    """Check and plan a run: on this host with the ranks that it starts, or on other hosts with `ranks`."""
    _silence_libraries()
    first_word("dry run")
    with at_work("dry run"):
        from deepspeed.accelerator import get_accelerator

        from .planning.plan import print_plan

        count = ranks or int(os.environ.get("WORLD_SIZE") or get_accelerator().device_count() or 1)
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(count))
        print_plan(config, count, here=ranks is None)


def recipe_arguments(script: str, argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments of launch/SCRIPT.sh. Ends the program when they are wrong, or ask for help."""
    path = f"launch/{script}.sh"
    called = os.environ.get(CALLED) or (f"./{path}" if REPORTS in os.environ else f"deepspeed {path}")
    options = "recipe [key=value ...] [--dry_run] [--ranks RANKS] [--quiet | --json]"
    parser = Parser(
        prog=called,
        usage=f"{called.removeprefix('deepspeed ')} [options of the launcher, as --num_gpus 2, --] {options}",
        description="Train a recipe. Run the same command again to resume.",
        epilog="Exit codes: 0 finished, 1 a failure, 2 a mistake in the input or a failure before the first "
        "step, 75 stopped and saved; docs/operations.md says which launchers pass them on.",
    )
    add = _recipe_command(parser)
    add("--dry_run", action="store_true", help="resolve, check and plan; train nothing")
    about = "with --dry_run: plan for this many ranks on other hosts, whatever this host lacks"
    add("--ranks", type=int, help=about)
    add("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # deepspeed adds it
    add = parser.add_mutually_exclusive_group().add_argument
    add("--quiet", action="store_true", help="show warnings, errors and the end alone")
    add("--json", action="store_true", help="show every event and record as a line of JSON")
    return parser.parse_intermixed_args(argv)


def _reported(run: Callable[[], int], watch: Watch) -> int:
    """Return the exit code of `run`; expected errors become one line each, others keep their traceback."""

    def work() -> int:
        try:
            return run()
        except UserError as error:
            if error.code == HARDWARE:
                watch.blame_node()
            raise
        except Exception as error:
            from .control.world import broken_device, explain

            if broken_device(error):
                watch.blame_node()
            code, line = explain(error, watch.advanced)
            if line is None:
                traceback.print_exc()
                line = f"{type(error).__name__}: {one_line(error)}"
                if code == ExitCode.MISTAKE:
                    line += " (before the first step: trying again would end alike)"
            print(f"error: {line}\nexit code {code}", file=sys.stderr, flush=True)
            watch.ended(code)
            leave(code)  # the other ranks may be waiting for this one in a collective

    # hosts differ until they are joined
    return outcome(work, alone=lambda: _is_main() or (_is_first_of_host() and not watch.is_joined))


def _is_first_of_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _open_console(args: argparse.Namespace, chatter: Chatter) -> Console:
    """Return the console, which has all logging. Ranks other than 0 report errors only."""
    able = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    kind: Kind = "json" if args.json else "quiet" if args.quiet else "terminal" if able else "lines"
    console = Console(kind, colour=able and not os.environ.get("NO_COLOR"), chatter=chatter)
    console.setLevel(logging.INFO if _is_main() else logging.ERROR)
    logging.basicConfig(level=console.level, handlers=[console])
    logging.getLogger("DeepSpeed").addHandler(console)
    _quieten()
    if not args.dry_run:  # which loads no weights, and answers sooner
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    return console


def _silence_libraries() -> None:
    """Hide warnings of libraries that are imported from now on; this program checks for itself."""
    _quieten()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings(
        "ignore", module=r"(transformers|torch|deepspeed|peft|accelerate|huggingface_hub)\b"
    )


def _quieten() -> None:
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
    with at_work("planning"):
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
    with at_work("preflight") if _is_main() else contextlib.nullcontext():
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
    with at_work("loading the model"):
        from .planning.score import score

        complete = score(config, args.name, (int(index), int(count)), args.force, args.top_k)
    state = f"part {args.part} is complete, others are missing"
    if complete:
        key = "objective.scores=" if args.top_k is None else "objective.teacher.scores="
        state = f"complete; use them with {key}{args.name}"
    print(f"scores {args.name}: {state}")
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

    runs, names = read_runs(args.runs), args.fail_on_regression
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
