"""python -m experiments run | table: sweeps over recipes, and what came of them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from common.commands import offer_completion, parse_arguments, program
from common.errors import UserError
from common.exit_codes import ExitCode
from common.outcome import AGAIN, outcome
from experiments.crew import StoppedError, stoppable
from experiments.design import RESULTS, Experiment, chosen, read_experiment, trials
from experiments.work import Work

ABOUT = "Sweeps over recipes: runs that differ in a few settings, and the table of what came of them."


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit codes: see common/exit_codes.py.

    0 done, 1 a run failed, 2 a mistake in the input or a run that ended so, 75 stopped, 130 interrupted.
    """
    parser = _parser()
    offer_completion(parser)
    args = parse_arguments(parser, argv)
    command = _table if args.command == "table" else _run
    return outcome(lambda: command(args, read_experiment(args.file, args.overrides)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("emo-experiments", "python -m experiments"), description=ABOUT
    )
    parser.add_argument("command", choices=("run", "table"), help="do the runs, or gather their table")
    parser.add_argument("file", type=Path, help="an experiment file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and the time; run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="runs beside each other (%(default)s)")
    parser.add_argument("--slurm", type=Path, metavar="FILE", help="write an array job instead of running")
    parser.add_argument("--kubernetes", type=Path, metavar="FILE", help="write an Indexed Job instead")
    parser.add_argument("--workers", type=int, default=8, help="of those jobs (%(default)s)")
    return parser


def _run(args: argparse.Namespace, experiment: Experiment) -> int:
    from experiments import checks, schedulers

    if args.jobs < 1 or args.workers < 1:
        raise UserError("--jobs and --workers must be at least 1")
    work = Work(experiment, lambda line: print(line, flush=True))
    here = not (args.dry_run or args.slurm is not None or args.kubernetes is not None)
    checks.check(work, here)
    _plan(work, args.jobs)
    if args.slurm is not None:
        schedulers.slurm(args.file, args.overrides, args.workers, experiment.ranks, args.slurm)
    if args.kubernetes is not None:
        schedulers.kubernetes(args.file, args.overrides, args.workers, experiment.ranks, args.kubernetes)
    if not here:
        return ExitCode.DONE
    # Runs beside each other share the cores of a machine without a GPU.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // args.jobs)))
    try:
        with stoppable():
            work.crew.together(work.work, args.jobs)
    except StoppedError:
        print(f"stopped; {AGAIN}", file=sys.stderr)
        return ExitCode.STOPPED
    return _table(args, experiment)


def _plan(work: Work, jobs: int) -> None:
    """Print the runs, how many are done, and how long the others will take."""
    tasks, choose = work.tasks(), work.experiment.choose
    left = [task for task in tasks if not task.done]
    print(f"{work.experiment.out}: {len(work.runs)} combinations; to do now {len(left)} of {len(tasks)} runs")
    if choose is not None and len(tasks) == len(trials(work.experiment, work.runs)) and left:
        then = len(chosen(work.experiment, work.runs, dict.fromkeys((run.name for run in work.runs), 0.0)))
        print(f"{choose.axis} is chosen by {choose.by} first; {then} runs are then reported")
    for stage in work.before():
        print(f"  {'done ' if stage.done else 'to do'}  before: {stage.name}")
    for task in tasks:
        print(f"  {'done ' if task.done else 'to do'}  {task.run.name}")
    taken = list(work.seconds())
    each = sum(taken) / len(taken) / 60 if taken else work.experiment.minutes
    if each is not None:
        print(f"about {each * len(left) / jobs:.0f} minutes with {jobs} at a time ({each:.1f} a run)")


def _table(args: argparse.Namespace, experiment: Experiment) -> int:
    from experiments.table import write

    work = Work(experiment)
    work.refuse_others()
    path = write(work)
    print(path.read_text(encoding="utf-8"))
    print(f"{path}; numbers: {path.with_name(RESULTS)}")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
