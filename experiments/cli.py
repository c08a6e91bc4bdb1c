"""emo sweep | table: run sweeps over recipes, and write their tables."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import string
import sys
from pathlib import Path

from emo.common.cli.commands import Parser, parse_arguments
from emo.common.errors import AGAIN, ExitCode, UserError, exit_code_of
from emo.common.io.files import replace_nonfinite, write_text

from .sweeps.design import PREPARE, RESULTS, Experiment, choose_runs, find_trials, read_experiment
from .sweeps.sweep import Sweep
from .sweeps.workers import StoppedError

ABOUT = "Run a sweep over the settings of a recipe, and write the table of its results."
TABLE = "table.md"
JOBS = {"slurm": "slurm.sbatch", "kubernetes": "kubernetes.yaml"}  # templates in jobs/


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand.

    Exit codes: 0 done, 1 a run failed, 2 invalid input (also of a run), 75 stopped, 130 interrupted.
    """
    command, *words = sys.argv[1:] if argv is None else argv
    parser = Parser(prog=f"emo {command}", description=ABOUT)
    parser.add_argument("file", type=Path, help="an experiment file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument(
        "--dry_run", action="store_true", help="print the runs and the estimated time, and exit"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs (%(default)s)")
    parser.add_argument(
        "--slurm", type=Path, metavar="FILE", help="write a Slurm array job instead of running"
    )
    parser.add_argument(
        "--kubernetes", type=Path, metavar="FILE", help="write a Kubernetes Indexed Job instead of running"
    )
    parser.add_argument(
        "--workers", type=int, default=8, help="number of workers in these jobs (%(default)s)"
    )
    args = parse_arguments(parser, words)
    work = _table if command == "table" else _run
    return exit_code_of(lambda: work(args, read_experiment(args.file, args.overrides)))


def _run(args: argparse.Namespace, experiment: Experiment) -> int:
    from .sweeps.checks import check_runs

    if args.jobs < 1 or args.workers < 1:
        raise UserError("--jobs and --workers must be at least 1")
    sweep = Sweep(experiment, lambda line: print(line, flush=True))
    starts = not (args.dry_run or args.slurm or args.kubernetes)
    check_runs(sweep, starts)
    _plan(sweep, args.jobs)
    for scheduler in JOBS:
        if (target := getattr(args, scheduler)) is not None:
            write_text(target, _job(scheduler, args, experiment.ranks))
    if not starts:
        return ExitCode.DONE
    # Parallel runs share the cores of a machine without a GPU.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // args.jobs)))
    try:
        sweep.commands.run_threads(sweep.work, args.jobs)
    except StoppedError:
        print(f"stopped; {AGAIN}", file=sys.stderr)
        return ExitCode.STOPPED
    return _table(args, experiment)


def _plan(sweep: Sweep, jobs: int) -> None:
    """Print the runs, how many are done, and the estimated time of the others."""
    experiment = sweep.experiment
    choose = sweep.experiment.choose
    tasks = sweep.tasks()
    done = [task for task in tasks if task.done]
    left = len(tasks) - len(done)
    print(f"{experiment.out}: {len(sweep.runs)} combinations; to do now {left} of {len(tasks)} runs")
    if choose is not None and left and len(tasks) == len(find_trials(experiment, sweep.runs)):
        reported = choose_runs(experiment, sweep.runs, dict.fromkeys((run.name for run in sweep.runs), 0.0))
        print(f"{choose.axis} is chosen by {choose.by} first; {len(reported)} runs are then reported")
    lines = [(stage.done, f"before: {stage.name}") for stage in sweep.before()]
    for is_done, name in [*lines, *((task in done, task.run.name) for task in tasks)]:
        print(f"  {'done ' if is_done else 'to do'}  {name}")
    minutes = experiment.minutes
    if done:
        stages = [stage for task in done for stage in task.stages if stage.name != PREPARE]
        minutes = sum(stage.seconds or 0 for stage in stages) / len(done) / 60
    if minutes is not None:
        print(f"about {minutes * left / jobs:.0f} minutes with {jobs} at a time ({minutes:.1f} a run)")


def _job(scheduler: str, args: argparse.Namespace, ranks: int) -> str:
    """Return the job file of workers with `ranks` GPUs each. Slurm uses this directory and this Python."""
    command = ["-m", "emo", "sweep", str(args.file), *args.overrides]
    template = (Path(__file__).with_name("jobs") / JOBS[scheduler]).read_text(encoding="utf-8")
    return string.Template(template).substitute(
        file=args.file,
        name=args.file.stem.lower().replace("_", "-"),
        workers=args.workers,
        ranks=ranks,
        directory=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        command=shlex.join(command),
        arguments=", ".join(map(json.dumps, command)),
    )


def _table(args: argparse.Namespace, experiment: Experiment) -> int:
    from .sweeps import report

    sweep = Sweep(experiment)
    sweep.reject_changes()
    results = replace_nonfinite(report.gather_results(sweep))
    table = report.sweep_document(results).markdown()
    write_text(experiment.out / RESULTS, json.dumps(results, indent=1))
    write_text(experiment.out / TABLE, table)
    print(table)
    print(f"{experiment.out / TABLE}; numbers: {experiment.out / RESULTS}")
    return ExitCode.DONE
