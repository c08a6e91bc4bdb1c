"""emo eval | watch | tasks | report | compare | export | generate | chat | quality | answer | judge"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emo.common.cli.commands import ALWAYS, Parser, announce, parse_arguments, parse_shard
from emo.common.cli.progress import show_activity
from emo.common.cli.submit import KUBERNETES, add_schedulers, apply_job, check_schedulers, submit_array
from emo.common.errors import ExitCode, FailureError, UserError, exit_code_of, one_line
from emo.common.report.numbers import join_words
from emo.common.text import align, counted, on_one_line, printable

from . import chat
from .export import commands as exporting
from .generation import commands as generation
from .generation.commands import OUT, Add
from .harness.tasks import LENGTHS, PREFIX, select_all
from .icl.settings import INFERENCERS, Settings
from .icl.tasks import DIRECTORY, ForeignTask, Task, select_tasks
from .judging import commands as judging
from .models.base import BUDGET
from .models.model import EvaluatedModel, quiet_libraries
from .results.directory import TaskResult

EXPORT_HELP = "also export each result: lm-eval=DIR, hf=DIR (in DIR/NAME) or wandb (in the run); repeatable"
GATED = (*ALWAYS, ExitCode.REGRESSION)
GATE = ("fail_on_regression", "max_drop")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = Parser(prog="emo")
    commands = top.add_subparsers(dest="command", required=True)

    command = commands.add_parser(
        "eval",
        description="Score a model on classification tasks and store the results. Finished parts are kept, "
        "so the same command resumes, and several processes share the work. With --on, each task is a part "
        "that runs on its own, and the report is written at the end.",
        examples=[
            "emo eval --model runs/quickstart/emo/export --name emo --data runs/quickstart/tasks",
            "emo eval --model openai-community/gpt2 --tasks sst2,ag_news --data hub --limit 200",
            "emo eval --model runs/quickstart/emo/export --data runs/quickstart/tasks --on slurm",
        ],
        codes=GATED,
    )
    add = command.add_argument
    generation.add_model(add)
    _add_evaluation_arguments(add)
    add_schedulers(add)
    text = "evaluate only tasks I, I + N, ... of --tasks, counted from 0. The last part writes the report"
    add("--shard", type=parse_shard, metavar="I/N", help=text)
    add("--finish", action="store_true", help="evaluate nothing, only write the report of all tasks")
    _add_watch(commands)
    commands.add_parser(
        "tasks",
        description="List the tasks that `emo eval --tasks` accepts: their name, what they ask, the number "
        "of classes, the metric, and the source of their data.",
        examples=["emo tasks"],
    )

    generation.add_arguments(commands)
    chat.add_arguments(commands)
    judging.add_arguments(commands)
    _add_report(commands)
    exporting.add_arguments(commands)

    command = commands.add_parser(
        "compare",
        description="Compare the task results of two models with paired tests and confidence intervals.",
        examples=["emo compare mle emo --results runs/quickstart/results --fail_on_regression"],
        codes=GATED,
    )
    add = command.add_argument
    add("a", metavar="A", help="name of the baseline, as in --name of `emo eval`")
    add("b", metavar="B", help="name of the other model")
    add("--results", nargs="+", type=Path, default=[OUT], metavar="DIR", help=f"results directories ({OUT})")
    gate_help = "exit with code 3 if B is worse than A, on these tasks only if any are named"
    add("--fail_on_regression", nargs="?", const="", metavar="TASK[,TASK]", help=gate_help)
    _add_max_drop(add)
    return top


def _add_watch(commands: Any) -> None:
    command = commands.add_parser(
        "watch",
        description="Score each complete checkpoint of a training run exactly once, as soon as it is saved, "
        "and update the report.",
        examples=["emo watch runs/quickstart/emo --data runs/quickstart/tasks --until_finished"],
        codes=GATED,
        notes={ExitCode.FAILURE: "some checkpoints could not be evaluated, or a failure that may pass"},
    )
    add = command.add_argument
    about = "output_dir of the run's recipe, with step-*/hf, checkpoint-* or export directories"
    add("run_dir", type=Path, metavar="RUN_DIR", help=about)
    add("--output_path", type=Path, metavar="DIR", help="results directory (RUN_DIR/eval)")
    add("--once", action="store_true", help="exit after one pass, for cron and other schedulers")
    add("--poll", type=float, default=30.0, metavar="SECONDS", help="time between passes (30)")
    add("--until_finished", action="store_true", help="exit when the final export of the run is evaluated")
    add("--no_report", action="store_true", help="do not update the report after a pass")
    add("--export", action="append", default=[], metavar="FORMAT=DIR", help=EXPORT_HELP)
    _add_evaluation_arguments(add)


def _add_report(commands: Any) -> None:
    command = commands.add_parser(
        "report",
        description="Write a report on evaluations that compares all models with their baselines: "
        "report.html, report.md and results.json.",
        examples=["emo report runs/quickstart/results --run emo=runs/quickstart/emo --baseline base"],
    )
    add = command.add_argument
    about = "directories that eval or watch wrote as --output_path"
    add("results", nargs="+", type=Path, metavar="RESULTS", help=about)
    out_help = "directory, or file.html, .md or .json (the first RESULTS); - prints Markdown on stdout"
    add("--output_path", metavar="PATH", help=out_help)
    several: dict[str, Any] = {"action": "append", "default": []}
    add("--run", metavar="NAME=RUN_DIR", help="training run of a model; repeatable", **several)
    about = "show the mean and spread of models that differ only in their seed, as one row; repeatable"
    add("--repeats", metavar="LABEL=NAME,NAME", help=about, **several)
    about = "baseline of the other models (the first model). Repeat it for one table per baseline"
    add("--baseline", metavar="NAME", help=about, **several)
    add("--title", default="", help="title of the report")
    add("--notice", default="", metavar="TEXT", help="a note at the end of the report")


def _add_evaluation_arguments(add: Add) -> None:
    about = (
        f"names or task files (all), {PREFIX}NAME, positions:FILE and passkey:FILE; `emo tasks` lists them"
    )
    add("--tasks", default="all", metavar="TASK[,TASK]", help=about)
    about = (
        f"directory with TASK/SPLIT.jsonl[.zst] files, or hub to download the data. {PREFIX}NAME needs none"
    )
    add("--data", metavar="DIR", help=about)
    add("--prompts", default="paper", help="version of the prompts: paper (default) or released")
    generation.add_dtype(add)
    retrievers = "random, bm25 or topk (OpenICL's)"
    about = f"selects the demonstrations: minilm (default), a sentence model's id or directory, {retrievers}"
    add("--retriever", default="minilm", help=about)
    about = "sentence model of OpenICL's dense retrievers (minilm)"
    add("--encoder", default="minilm", metavar="MODEL", help=about)
    about = f"how prompts are scored: {INFERENCERS[0]} (default) or {INFERENCERS[1]} (OpenICL's)"
    add("--inferencer", default="prefix", help=about)
    about = "build prompts and count tokens exactly as OpenICL does, including its bugs"
    add("--faithful", action="store_true", help=about)
    about = "number of demonstrations per prompt (the task's default)"
    add("--num_fewshot", type=int, metavar="N", help=about)
    about = "evaluate only N evenly spaced test rows per task (all)"
    add("--limit", type=int, metavar="N", help=about)
    scores = "openicl_ppl (default), suffix_sum, suffix_mean, channel, calibrated"
    add("--score", default="openicl_ppl", help=f"score that decides the predicted class: {scores}")
    about = "longest prompt or text in tokens (the model's context length)"
    add("--max_tokens", type=int, metavar="N", help=about)
    text = f"prompts of full length per batch, or auto for {BUDGET} tokens per batch (auto)"
    add("--batch_size", default="auto", metavar="N", help=text)
    text = "exit with code 3 if the model is worse than this model in --output_path"
    add("--fail_on_regression", metavar="NAME", help=text)
    _add_max_drop(add)


def _add_max_drop(add: Add) -> None:
    text = "with --fail_on_regression: largest allowed drop in mean accuracy, in points"
    add("--max_drop", type=float, metavar="POINTS", help=text)


def _list_tasks(_: argparse.Namespace) -> int:
    rows = [("name", "task", "classes", "metric", "data")]
    for task in select_tasks("all"):
        spec = task.spec
        about = f"{spec.title}: {spec.about}"
        rows.append(
            (task.name, about, str(len(task.labels)), spec.metric, spec.hub.path if spec.hub else "-")
        )
    print("\n".join(align(rows)))
    print(
        "\n`--data hub` downloads these data sets. `--data DIR` reads DIR/NAME/SPLIT.jsonl."
        f"\n--tasks also accepts task files, for example {DIRECTORY / 'sst2.yaml'}."
        "\nTo add a task, see docs/how-to/add-a-task.md."
        f"\n{PREFIX}NAME runs a task of lm-evaluation-harness, for example {PREFIX}hellaswag. It needs the "
        "package lm-eval. `lm_eval ls tasks` lists the names."
        "\npositions:FILE and passkey:FILE measure long contexts on your texts, for example long.jsonl."
    )
    return ExitCode.DONE


def _check_drop(args: argparse.Namespace) -> None:
    if args.max_drop is not None and not (args.max_drop >= 0 and args.fail_on_regression is not None):
        raise UserError(
            "--max_drop must be 0 or more points, and needs --fail_on_regression", code="option-needs"
        )


def _tasks(args: argparse.Namespace, names: str) -> Sequence[Task | ForeignTask]:
    tasks = select_all(names, args.prompts)
    _require_data(args, [task.name for task in tasks if isinstance(task, Task)])
    return tasks


def _require_data(args: argparse.Namespace, tasks: Sequence[str]) -> None:
    if tasks and args.data is None:
        raise UserError(f"--data is required for {', '.join(tasks)}", code="option-needs")


def _settings(args: argparse.Namespace) -> Settings:
    if args.fail_on_regression == "":
        raise UserError("--fail_on_regression needs the name of a model", code="option-value")
    _check_drop(args)
    size = args.batch_size
    if size != "auto" and (not size.isdecimal() or int(size) < 1):
        raise UserError(
            f"--batch_size {size} must be auto or a number of prompts above 0", code="option-value"
        )
    same = ("retriever", "encoder", "inferencer", "faithful", "limit", "score", "max_tokens")
    return Settings(
        data=args.data or "",
        **{name: getattr(args, name) for name in same},
        shots=args.num_fewshot,
        batch_size=None if size == "auto" else int(size),
    )


def _run(args: argparse.Namespace) -> int:
    check_schedulers(args)
    settings = _settings(args)
    if args.fail_on_regression and (_is_part(args) or args.on == KUBERNETES):
        problem = "--fail_on_regression needs all tasks, so --shard and --on kubernetes exclude it"
        raise UserError(f"{problem}. Run `emo compare` afterwards", code="options-clash")
    if args.on == KUBERNETES:
        return _apply(args)
    tasks = _tasks(args, args.tasks)
    model = EvaluatedModel(args.model, args.name, args.dtype)
    if args.fail_on_regression:
        from .results.directory import find_model, read_models

        find_model(read_models([args.output_path]), args.fail_on_regression)  # before the work
    if args.on:
        _check_inputs(tasks, settings)
    if args.on == "slurm":
        return _submit(args, tasks)
    say(f"{model.name}: {counted(len(tasks), 'task')}")
    results = _evaluate(args, model, tasks, settings)
    from .icl.job import mean_accuracy

    say(f"{model.name}: {mean_accuracy(results)[1]}; results in {args.output_path}")
    return _gate(args, model.name) if args.fail_on_regression else ExitCode.DONE


def _is_part(args: argparse.Namespace) -> bool:
    return args.shard is not None and not args.finish


def _check_inputs(tasks: Sequence[Task | ForeignTask], settings: Settings) -> None:
    """Raise UserError if a part could not read its rows or its sentence model."""
    from .icl.lengths import LengthTask
    from .icl.task_data import load_data, require_hub
    from .models.encoder import encoder_path

    if settings.sentence_model is not None and any(isinstance(task, Task) for task in tasks):
        encoder_path(settings.sentence_model)
    for task in tasks:
        if isinstance(task, LengthTask):
            task.load()
        elif not isinstance(task, Task):
            continue  # lm-eval may download its data
        elif settings.data == "hub":  # the parts download the rows
            require_hub(task)
        else:
            rows = load_data(task, settings.data, settings.limit, settings.shots).rows
            if "channel" in settings.extras:
                task.channel().require_text(rows["test"])


def _apply(args: argparse.Namespace) -> int:
    """Apply a job to Kubernetes with a pod for each task. Only the pods read files with absolute paths."""
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    own = [name for name in names if name.startswith("/")]
    texts = [name for name in names if name.startswith(tuple(f"{kind}/" for kind in LENGTHS))]
    known = ",".join(name for name in names if name not in (*own, *texts))
    tasks = [task.name for task in _tasks(args, known)] if known or not names else []
    tasks += [*(Path(name).stem for name in own), *texts]
    if len({*tasks}) < len(tasks):
        raise UserError(f"--tasks contains a task twice: {args.tasks}", code="task")
    _require_data(args, own)
    if not args.model:
        raise UserError("--model is empty", code="no-model")
    files = [name.partition(":")[2] for name in texts]
    inputs = map(Path, (args.model, args.data or "", args.retriever, args.encoder, *own, *files))
    # Relative paths are names, or files of the checkout in the image.
    shared = [args.output_path, *filter(Path.is_absolute, inputs)]
    values = {"ARGUMENTS": shlex.join(_words(args))}
    for line in apply_job(args.overlay, "eval", len(tasks), values, shared=shared):
        say(line)
    return ExitCode.DONE


def _submit(args: argparse.Namespace, tasks: Sequence[Task | ForeignTask]) -> int:
    """Submit an array of jobs to Slurm, one for each task, and a job that writes the report."""
    options = ["--gpus-per-task", "1"]
    array, last = submit_array("eval.sbatch", _words(args), len(tasks), options, _words(args, GATE))
    say(f"submitted: job {array} of {counted(len(tasks), 'part')}, then job {last} writes the report")
    return ExitCode.DONE


def _evaluate(
    args: argparse.Namespace, model: EvaluatedModel, tasks: Sequence[Task | ForeignTask], settings: Settings
) -> list[TaskResult]:
    """Return the results of all tasks, or of this part. The last part writes the report."""
    if args.on or args.finish:
        return _finish(args, model.name, tasks, settings)
    from .icl.job import run_all

    if not _is_part(args):
        return run_all(model, tasks, settings, args.output_path, say)
    from .parts import read_results, write_report

    number, parts = args.shard
    results = run_all(model, tasks[number::parts], settings, args.output_path, say)
    if read_results(model.name, tasks, args.output_path) is not None:
        write_report(args.output_path)
    return results


def _gate(args: argparse.Namespace, name: str) -> int:
    """Compare a model with the baseline of --fail_on_regression and return the exit code."""
    from .report.compare import find_regression, gate  # a known result does not need them
    from .results.directory import find_model, read_models

    models = read_models([args.output_path])
    baseline, evaluated = (find_model(models, known) for known in (args.fail_on_regression, name))
    verdict = find_regression(baseline, evaluated, args.max_drop)
    say(verdict.summary)
    return gate([verdict])


def _finish(
    args: argparse.Namespace, name: str, tasks: Sequence[Task | ForeignTask], settings: Settings
) -> list[TaskResult]:
    """Write the report of all parts and return their results. With --on ray, evaluate the parts first."""
    from .parts import Evaluation, evaluate_on_ray, require_results, write_report

    out = args.output_path
    parts = Evaluation(args.model, args.name, args.dtype, tasks, settings, out, Path.cwd())
    if args.on:
        evaluate_on_ray(parts, say)
    results = require_results(parts, name)
    say(f"report: {write_report(out)}")
    return results


def _words(args: argparse.Namespace, only: Sequence[str] = ()) -> list[str]:
    """Return the options of `emo eval` that are not at their defaults, as words of a part's command.

    only: their names. By default all but those of the scheduler and of the gate.
    """
    defaults = vars(make_parser().parse_args(["eval", "--model", ""]))
    chosen = only or defaults.keys() - {*GATE, "on", "overlay"}
    changed = [item for item in vars(args).items() if item[0] in chosen and item[1] != defaults[item[0]]]
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in changed]


def _watch(args: argparse.Namespace) -> int:
    tasks = _tasks(args, args.tasks)
    settings = _settings(args)
    if not args.poll > 0:
        raise UserError("--poll must be a positive number of seconds", code="option-value")
    if not args.run_dir.is_dir():
        raise UserError(f"run directory {args.run_dir} does not exist", code="no-run")
    out = args.output_path or args.run_dir / "eval"
    exports = exporting.parse_exports(args.export, args.run_dir, args.data, args.tasks)
    say(f"{args.run_dir}: {counted(len(tasks), 'task')}")
    from .report.compare import gate
    from .report.gather import Report
    from .report.page import FILES, document
    from .results.directory import find_model, read_models
    from .watch import FAILED, TROUBLED, UNEXPORTED, UNSENT, WAITING, RunWatcher

    if args.fail_on_regression:
        find_model(read_models([out]), args.fail_on_regression)  # before the work
    watch = RunWatcher(args.run_dir, tasks, settings, out, args.dtype, say, exports)
    while True:
        with show_activity(f"{args.run_dir}: looking for checkpoints"):
            evaluated = watch.run_once()
        if evaluated and not args.no_report:
            document(Report([out])).write(f"{out}/", FILES)
        if args.once or watch.names_in(TROUBLED) or (args.until_finished and watch.finished()):
            break
        time.sleep(0 if evaluated else args.poll)
    verdicts = watch.verdicts(args.fail_on_regression, args.max_drop) if args.fail_on_regression else []
    for verdict in verdicts:
        if verdict.regressions:
            say(verdict.summary)
    say(watch.summary())
    failed = watch.names_in(FAILED, TROUBLED, UNEXPORTED, UNSENT)
    if args.fail_on_regression and (not verdicts or watch.names_in(WAITING)):
        say(f"{args.run_dir}: no verdict yet on the newest checkpoint. Run the same command again.")
        failed = failed or [args.run_dir.name]
    return gate(verdicts) or (ExitCode.FAILURE if failed else ExitCode.DONE)


def _report(args: argparse.Namespace) -> int:
    announce("report")
    from .report.gather import Report
    from .report.page import FILES, document

    runs = {name: Path(value) for name, value in _pairs("--run", args.run).items()}
    seeds = {label: names.split(",") for label, names in _pairs("--repeats", args.repeats).items()}
    report = Report(args.results, runs, args.baseline, args.title, args.notice, seeds)
    page = document(report)
    if (path := page.write(args.output_path or f"{args.results[0]}/", FILES)) is not None:
        judged = f", {counted(len(report.judgements), 'judgement')}" if report.judgements else ""
        models = counted(len(report.models), "model")
        tasks = [counted(len(report.tasks), "task")] if report.tasks or not report.measured else []
        say(f"report of {models} on {join_words([*tasks, *report.measured])}{judged}: {path}")
        say(page.answer[0])
    for remark in report.remarks:
        print(on_one_line(remark), file=sys.stderr)
    return ExitCode.DONE


def _compare(args: argparse.Namespace) -> int:
    announce("compare")
    from .report.compare import find_regression, format_table, gate
    from .results.directory import find_model, read_models

    _check_drop(args)
    models = read_models(args.results)
    a = find_model(models, args.a)
    b = find_model(models, args.b)
    only = tuple(args.fail_on_regression.split(",")) if args.fail_on_regression else ()
    print(format_table(a, b, only))
    verdict = find_regression(a, b, args.max_drop, only)
    print(on_one_line(verdict.summary))
    return ExitCode.DONE if args.fail_on_regression is None else gate([verdict])


def _pairs(option: str, texts: list[str]) -> dict[str, str]:
    """Return ["A=x", ...] as a dictionary."""
    pairs = {name: value for name, _, value in (text.partition("=") for text in texts)}
    if not all(pairs) or not all(pairs.values()):
        raise UserError(f"{option} {' '.join(texts)} must be NAME=VALUE", code="option-value")
    return pairs


def say(text: str) -> None:
    """Print a line above any progress bar, without control characters."""
    from tqdm import tqdm

    tqdm.write(printable(text))
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code. Errors are one line on stderr, except bugs."""
    args = parse_arguments(make_parser(), argv)
    # Many evaluations may run at once, so none may use all cores for its tokenizer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Before torch is imported: spinning threads make a token 20 times slower on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    quiet_libraries()

    def work() -> int:
        # These commands wait for checkpoints or messages, so they show progress only while they work.
        waits = args.command in ("watch", "chat")
        with contextlib.nullcontext() if waits else show_activity(f"{args.command}: working"):
            return _dispatch(args)

    return exit_code_of(work)


def _dispatch(args: argparse.Namespace) -> int:
    commands = {"eval": _run, "tasks": _list_tasks, "watch": _watch, "report": _report, "compare": _compare}
    others = {"answer": judging.run, "chat": chat.run, "judge": judging.run, "export": exporting.run}
    try:
        if args.command in commands:
            return commands[args.command](args)
        return others.get(args.command, generation.run)(args, say)
    except Exception as error:
        # Memory that other processes use on the GPU may become free.
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
            raise
        advice = "Lower --batch_size, or run" if hasattr(args, "batch_size") else "Run"
        raise FailureError(
            f"out of memory ({one_line(error, 120)}). {advice} the same command again.",
            code="out-of-memory",
        ) from error
