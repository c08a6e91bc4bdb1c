"""One rank of a run: `deepspeed --module emo.launch.rank RECIPE`, or `deepspeed launch/continual.sh RECIPE`.

Arguments, logging and exit codes. Heavy modules are imported after the arguments were checked.
"""

from __future__ import annotations

import emo.common.packages  # noqa: F401 - before all others

# isort: split
from emo.pipeline.control.events import log_event
from emo.pipeline.control.stop import CALLED, HARDWARE, REPORTS, RESUME, SignalWatch

if __name__ == "__main__":
    # Before imports that take seconds, and before any other thread: threads inherit the blocked signals.
    watch = SignalWatch()

# isort: split
from emo.launch.starting import STARTING

# isort: split
import argparse
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from emo.common.cli.commands import Parser, add_recipe, announce, parse_arguments
from emo.common.cli.progress import show_activity
from emo.common.errors import ExitCode, UserError, exit_code_of, one_line
from emo.common.text import duration
from emo.pipeline.cli import is_first_of_host, leave, quieten, silence_libraries
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.monitor.console import Chatter, Console, Kind, split_output

log = logging.getLogger(__name__)

SCRIPTS = ("continual", "instruct")  # in launch/


def run_recipe(watch: SignalWatch, argv: list[str] | None = None) -> int:
    """Run one rank of `deepspeed launch/continual.sh RECIPE`. Return its exit code."""
    _set_environment()
    try:
        code = _report_errors(lambda: _train(watch, argv), watch)
    except SystemExit as end:  # argparse
        code = end.code if isinstance(end.code, int) else ExitCode.FAILURE
    watch.report_exit(code)
    if code != ExitCode.DONE and _is_main():
        print(f"exit code {code}", file=sys.stderr, flush=True)  # not every launcher passes it on
    return code


def _set_environment() -> None:
    """Set variables that libraries read when they are imported, unless the user has set them."""
    # Threads that spin while they wait take a busy CPU from threads that compute.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Rows and chunks differ in size, so that freed blocks rarely fit again.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Without a threshold, pinned buffers of checkpoints are rounded up to a power of two.
        settings = "expandable_segments:True,pinned_max_round_threshold_mb:64"
        os.environ.setdefault("PYTORCH_ALLOC_CONF", settings)
    # Hosts may share a home directory, but Triton's cache needs a local disk that no other user can write to.
    if "TRITON_CACHE_DIR" not in os.environ:
        cache = Path(tempfile.gettempdir()) / f"triton-{os.getuid()}"
        cache.mkdir(mode=0o700, exist_ok=True)
        if cache.lstat().st_uid == os.getuid() and not cache.is_symlink():
            os.environ["TRITON_CACHE_DIR"] = str(cache)


def _train(watch: SignalWatch, argv: list[str] | None) -> int:
    """Parse the arguments, join the other ranks and train."""
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
            from emo.pipeline.control import world as ranks
            from emo.pipeline.engine.start import start_world
            from emo.pipeline.trainer import Trainer

        started = time.perf_counter()
        finished = False
        ranks.record_collectives(config.output_dir)
        world = start_world()
        watch.enter_group()
        if reason := ranks.first_reason(watch.reason):
            log_event(f"stopped before the run was opened ({reason}); {RESUME}", "stopped", reason=reason)
        else:
            finished = Trainer(config, world, watch, console).run(STARTING.close)
        log.info("this launch took %s", duration(time.perf_counter() - started))
        ranks.end_world()
        return ExitCode.DONE if finished else ExitCode.STOPPED
    except Exception as error:
        if is_first_of_host() and not isinstance(error, UserError):
            console.close()
            chatter.show()
        raise
    finally:
        STARTING.close()
        console.close()


def _dry_run(config: RunConfig, ranks: int | None) -> None:
    """Check and plan a run: on this host with as many ranks as it starts, or elsewhere with `ranks`."""
    silence_libraries()
    announce("dry run")
    with show_activity("dry run"):
        from deepspeed.accelerator import get_accelerator

        from emo.pipeline.planning.plan import print_plan

        count = ranks or int(os.environ.get("WORLD_SIZE") or get_accelerator().device_count() or 1)
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(count))
        print_plan(config, count, here=ranks is None)


def recipe_arguments(script: str, argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments of a training command. Exits if they are wrong or ask for help.

    script: the name of the script in launch/, without its ending.
    """
    path = f"launch/{script}.sh" if script in SCRIPTS else "--module emo.launch.rank"
    called = os.environ.get(CALLED) or (f"./{path}" if REPORTS in os.environ else f"deepspeed {path}")
    return parse_arguments(make_parser(called), argv)


def _count(text: str) -> int:
    """Return the number of ranks that an option names."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a whole number from 1")
    return int(text)


def make_parser(called: str = "emo train") -> Parser:
    """Return the parser of a training command. called: the command's name in the help."""
    options = "RECIPE [key=value ...] [--dry_run] [--ranks N] [--quiet | --json]"
    launcher = f"options of deepspeed go first, followed by --: {called} --num_gpus 8 -- RECIPE"
    deepspeed = (
        "num_gpus num_nodes num_accelerators hostfile include exclude master_port master_addr node_rank"
    )
    parser = Parser(
        prog=called,
        usage=f"{called.removeprefix('deepspeed ')} [options of deepspeed --] {options}",
        description="Train a recipe with DeepSpeed on all GPUs of this host. If the run was stopped or "
        "failed, the same command resumes it from its newest valid checkpoint. The options of the deepspeed "
        "command go first, followed by --, for example to use fewer GPUs or several hosts.",
        examples=[
            f"{called} launch/recipes/quickstart-pretrain.yaml --dry_run",
            f"{called} launch/recipes/quickstart-pretrain.yaml train.seed=1 output_dir=runs/seed-1",
            f"{called} --num_gpus 2 -- launch/recipes/quickstart-pretrain.yaml",
        ],
        codes=(ExitCode.DONE, ExitCode.FAILURE, ExitCode.MISTAKE, ExitCode.STOPPED),
        notes={
            ExitCode.DONE: "the run is finished",
            ExitCode.MISTAKE: "invalid input, or an error before the first step. Retrying cannot help",
        },
        hints=dict.fromkeys(deepspeed.split(), launcher)
        | dict.fromkeys(("config", "config_file", "recipe"), f"the recipe needs no option: {called} RECIPE"),
    )
    add = add_recipe(parser, RunConfig)
    add("--dry_run", action="store_true", help="check the recipe and plan the run without training")
    about = "with --dry_run: plan for this many ranks on other hosts"
    add("--ranks", type=_count, metavar="N", help=about)
    add("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # deepspeed adds it
    add = parser.add_mutually_exclusive_group().add_argument
    add("--quiet", action="store_true", help="print only warnings, errors and how the run ended")
    add("--json", action="store_true", help="print every event and record as a line of JSON")
    return parser


def _report_errors(run: Callable[[], int], watch: SignalWatch) -> int:
    """Return the exit code of `run`. Print expected errors as one line, others with their traceback."""

    def work() -> int:
        try:
            return run()
        except UserError as error:
            if error.code == HARDWARE:
                watch.blame_node()
            raise
        except Exception as error:
            from emo.pipeline.control.world import broken_device, explain

            if broken_device(error):
                watch.blame_node()
            code, line = explain(error, watch.advanced)
            if line is None:
                traceback.print_exc()
                line = f"{type(error).__name__}: {one_line(error)}"
                if code == ExitCode.MISTAKE:
                    line += " (before the first step: another try would fail the same way)"
                line += " [crash]"
            print(f"error: {line}\nexit code {code}", file=sys.stderr, flush=True)
            watch.report_exit(code)
            leave(code)  # the other ranks may be waiting for this one in a collective

    def reports(error: UserError) -> bool:
        """Return whether this rank prints an error. Before the ranks meet, each host prints its own."""
        return _is_main() or (is_first_of_host() and (error.local or not watch.is_in_group))

    return exit_code_of(work, alone=reports)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _open_console(args: argparse.Namespace, chatter: Chatter) -> Console:
    """Return the console, which handles all logging. Ranks other than 0 report only errors."""
    able = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    kind: Kind = "json" if args.json else "quiet" if args.quiet else "terminal" if able else "lines"
    console = Console(kind, colour=able and not os.environ.get("NO_COLOR"), chatter=chatter)
    console.setLevel(logging.INFO if _is_main() else logging.ERROR)
    logging.basicConfig(level=console.level, handlers=[console])
    logging.getLogger("DeepSpeed").addHandler(console)
    quieten()
    if not args.dry_run:  # a dry run loads no weights
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    return console


if __name__ == "__main__":
    leave(run_recipe(watch))
