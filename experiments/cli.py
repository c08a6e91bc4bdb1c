"""emo sweep | table | advise: run sweeps over recipes, write their tables, and predict results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import string
import sys
from pathlib import Path

from emo.common.cli.commands import ALWAYS, Parser, add_recipe, announce, parse_arguments
from emo.common.cli.submit import submit_file
from emo.common.errors import AGAIN, ExitCode, UserError, exit_code_of
from emo.common.io.files import replace_nonfinite, write_text
from emo.eval.results import store
from emo.pipeline.cli import silence_libraries
from emo.pipeline.config import RunConfig, load_config

from .sweeps.design import PREPARE, RESULTS, Experiment, choose_runs, find_trials, read_experiment
from .sweeps.sweep import Sweep
from .sweeps.workers import StoppedError

TABLE = "table.md"
FRONTS = "fronts.svg"
JOBS = {"slurm": "slurm.sbatch", "kubernetes": "kubernetes.yaml"}  # templates in jobs/


def main(argv: list[str] | None = None) -> int:
    """Run `emo sweep | table | advise` and return the exit code."""
    command, *words = sys.argv[1:] if argv is None else argv
    args = parse_arguments(make_parsers()[command], words)
    silence_libraries()
    if command == "advise":
        return exit_code_of(lambda: _advise(args))
    work = _table if command == "table" else _run
    return exit_code_of(lambda: work(args, read_experiment(args.experiment, args.overrides)))


def make_parsers() -> dict[str, Parser]:
    """Return the parser of each command."""
    example = "experiments/configs/replay.yaml"
    sweep = Parser(
        prog="emo sweep",
        description="Train and evaluate every combination of settings in an experiment file, and write the "
        "table of the results. Combinations that are done are skipped, so the same command resumes.",
        examples=[f"emo sweep {example} --dry_run", f"emo sweep {example} --slurm replay.sbatch --workers 4"],
        codes=(*ALWAYS, ExitCode.STOPPED),
        notes={ExitCode.FAILURE: "a run failed. The same command resumes"},
    )
    add = add_recipe(sweep, noun="experiment")
    add("--dry_run", action="store_true", help="print the runs and the estimated time, and exit")
    add("--jobs", type=int, default=1, metavar="N", help="number of parallel runs (%(default)s)")
    add("--slurm", type=Path, metavar="FILE", help="write a Slurm array job instead of running")
    text = "write a Kubernetes Indexed Job instead of running"
    add("--kubernetes", type=Path, metavar="FILE", help=text)
    add("--on", choices=[*JOBS], help="submit such a job, which is written to the experiment's directory")
    add("--workers", type=int, default=8, metavar="N", help="number of workers in these jobs (%(default)s)")
    table = Parser(
        prog="emo table",
        description="Print the table of an experiment whose runs are done, and write it to the "
        "experiment's directory, with a figure of its fronts if it has any.",
        examples=[f"emo table {example}"],
    )
    add_recipe(table, noun="experiment")
    advise = Parser(
        prog="emo advise",
        description="Predict whether EMO will beat MLE for a recipe. It measures with the recipe's model "
        "how well the cost embedding predicts which tokens the model confuses on the prepared data, and "
        "looks up the result of the most similar study with a known true distribution.",
        examples=["emo advise launch/recipes/quickstart-continue.yaml"],
    )
    add_recipe(advise, RunConfig)
    return {"sweep": sweep, "table": table, "advise": advise}


def _advise(args: argparse.Namespace) -> int:
    config = load_config(args.recipe, args.overrides)
    if config.model.path is None:
        raise UserError(
            "set model.path: an untrained model has no confusions to measure", code="fresh-weights"
        )
    announce("advise")
    from .advise import advise

    return advise(config)


def _run(args: argparse.Namespace, experiment: Experiment) -> int:
    from .sweeps.checks import check_runs

    if args.jobs < 1 or args.workers < 1:
        raise UserError("--jobs and --workers must be at least 1", code="option-value")
    sweep = Sweep(experiment, lambda line: print(line, flush=True))
    starts = not (args.dry_run or args.slurm or args.kubernetes or args.on)
    check_runs(sweep, starts)
    _plan(sweep, args.jobs)
    for scheduler, name in JOBS.items():
        submits = args.on == scheduler and not args.dry_run
        target = getattr(args, scheduler) or (experiment.out / name if submits else None)
        if target is None:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, _job(scheduler, args, experiment.ranks))
        if submits:
            print(*submit_file(scheduler, target), sep="\n")
    if not starts:
        return ExitCode.DONE
    # Parallel runs share the cores of a machine without a GPU.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // args.jobs)))
    if sweep.pending():
        sweep.commands.divide_gpus(args.jobs)
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
    """Return the job file of workers with `ranks` GPUs each.

    Slurm uses this directory and this Python. Jobs of Kubernetes cannot be changed, so their names depend on
    their settings.
    """
    command = ["-m", "emo", "sweep", str(args.experiment), *args.overrides]
    template = (Path(__file__).with_name("jobs") / JOBS[scheduler]).read_text(encoding="utf-8")
    return string.Template(template).substitute(
        digest=store.digest_json([template, command, args.workers, ranks])[:8],
        file=args.experiment,
        name=args.experiment.stem.lower().replace("_", "-"),
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
    if experiment.fronts:
        write_text(experiment.out / FRONTS, report.draw_fronts(results["fronts"]))
    print(table)
    print(f"{experiment.out / TABLE}; numbers: {experiment.out / RESULTS}")
    return ExitCode.DONE
