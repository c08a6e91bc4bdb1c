"""emo eval | watch | report | compare | export | generate | chat | quality | answer | judge

Exit codes: 0 done, or nothing to do; 1 a failure that may pass, run the same command again to resume, or
checkpoints that cannot be evaluated (watch); 2 a mistake that stays until something is changed, also
--fail_on_regression without all results; 3 a regression (--fail_on_regression); 130 interrupted (Ctrl-C), run
the same command again; 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emo.common.cli.commands import Parser, announce, parse_arguments
from emo.common.cli.progress import show_activity
from emo.common.errors import ExitCode, FailureError, UserError, exit_code_of, one_line
from emo.common.text import counted, on_one_line, printable

from . import chat
from .export import commands as exporting
from .generation import commands as generation
from .icl.settings import BUDGET, INFERENCERS, Settings
from .icl.tasks import select_tasks
from .judging import commands as judging
from .model import DTYPES, EvaluatedModel, quiet_libraries

EXPORT_HELP = "export each: lm-eval=DIR, hf=DIR (DIR/NAME each) or wandb (into the run); may be repeated"


def parser() -> argparse.ArgumentParser:
    """Return all commands and their arguments."""
    top = Parser(
        prog="emo",
        description="What a model can do, and whether it is better: tasks, samples, judges, reports.",
    )
    commands = top.add_subparsers(dest="command", required=True)

    add = commands.add_parser("eval", help="score one model on tasks").add_argument
    add("--model", required=True, help="model directory (an export) or hub id")
    add("--name", help="how results call it (its directory)")
    add("--output_path", type=Path, default=Path("runs/eval"), help="results directory (runs/eval)")
    _evaluation_arguments(add)

    summary = "score every complete checkpoint of a run, each exactly once"
    add = commands.add_parser("watch", help=summary).add_argument
    add("run_dir", type=Path, help="run directory: step-*/ with hf/, checkpoint-*/, export/")
    add("--output_path", type=Path, help="results directory (RUN_DIR/eval)")
    add("--once", action="store_true", help="one pass, for cron and other schedulers")
    add("--poll", type=float, default=30.0, help="seconds between passes (30)")
    add("--until_finished", action="store_true", help="end when the run's export is evaluated")
    add("--no_report", action="store_true", help="do not rewrite the report after a pass")
    add("--export", action="append", default=[], metavar="FORMAT=DIR", help=EXPORT_HELP)
    _evaluation_arguments(add)

    generation.add_arguments(commands)
    chat.add_arguments(commands)
    judging.add_arguments(commands)

    add = commands.add_parser("report", help="write report.html, report.md and results.json").add_argument
    add("results", nargs="+", type=Path, help="directories given as --output_path to eval or watch")
    out_help = "directory, or file.html, .md or .json (the first results directory); - is Markdown on stdout"
    add("--output_path", metavar="PATH", help=out_help)
    several: dict[str, Any] = {"action": "append", "default": []}
    add("--run", metavar="NAME=DIR", help="a model's training run", **several)
    add("--seeds", metavar="LABEL=NAME,NAME", help="aggregate models", **several)
    baseline_help = "the others are compared with it (the first); again: another one, in a table of its own"
    add("--baseline", metavar="NAME", help=baseline_help, **several)
    add("--title", default="")
    add("--notice", default="", help="a sentence shown at the end")

    exporting.add_arguments(commands)

    add = commands.add_parser("compare", help="two models side by side, with paired tests").add_argument
    add("a", help="name of the baseline")
    add("b", help="name of the other model")
    add("--results", nargs="+", type=Path, default=[Path("runs/eval")])
    gate_help = "exit with 3 when B is worse than A; on these tasks alone, if any are named"
    add("--fail_on_regression", nargs="?", const="", metavar="TASK[,TASK]", help=gate_help)
    add("--max_drop", type=float, help="points that the mean may fall at most")
    return top


def _evaluation_arguments(add: Callable[..., Any]) -> None:
    add("--tasks", default="all", help="all, or names or task files, comma-separated")
    add("--data", required=True, help="directory of <task>/<split>.jsonl[.zst], or `hub`")
    add("--prompts", default="paper", help="prompt version: paper (default) or released")
    add("--dtype", default="auto", help=f"auto (the checkpoint's), {', '.join(DTYPES[1:])}")
    retrievers = "random, bm25, topk, votek, dpp, mdl (OpenICL's)"
    add("--retriever", default="minilm", help=f"minilm, a sentence model's id or directory, {retrievers}")
    add("--encoder", default="minilm", help="sentence model of OpenICL's dense retrievers (minilm)")
    add("--inferencer", default="prefix", help=f"{INFERENCERS[0]} (ours) or {INFERENCERS[1]} (OpenICL's own)")
    add("--faithful", action="store_true", help="prompts and counts exactly as OpenICL's, faults included")
    add("--num_fewshot", type=int, help="demonstrations per prompt (the task's own number)")
    add("--limit", type=int, help="evenly spaced test rows per task (all)")
    scores = "openicl_ppl (default), suffix_sum, suffix_mean, channel, calibrated"
    add("--score", default="openicl_ppl", help=f"what decides: {scores}")
    add("--extra_scores", default="", help="also compute: channel, calibrated (comma-separated)")
    add("--max_tokens", type=int, help="longest prompt (the model's context)")
    help_text = f"prompts of the full length per batch at most, or auto: {BUDGET} tokens per batch"
    add("--batch_size", default="auto", help=help_text)
    add(
        "--fail_on_regression", metavar="NAME", help="exit with 3 when worse than this model of --output_path"
    )
    add("--max_drop", type=float, help="points that the mean may fall at most")


def _check_drop(args: argparse.Namespace) -> None:
    if args.max_drop is not None and not (args.max_drop >= 0 and args.fail_on_regression is not None):
        raise UserError("--max_drop must be a number of points, not below 0, beside --fail_on_regression")


def _settings(args: argparse.Namespace) -> Settings:
    _check_drop(args)
    size = args.batch_size
    if size != "auto" and (not size.isdecimal() or int(size) < 1):
        raise UserError(f"--batch_size {size} must be auto or a number of prompts above 0")
    same = ("data", "retriever", "encoder", "inferencer", "faithful", "limit", "score", "max_tokens")
    return Settings(
        **{name: getattr(args, name) for name in same},
        shots=args.num_fewshot,
        extra=tuple(name for name in args.extra_scores.split(",") if name),
        batch_size=None if size == "auto" else int(size),
    )


def _run(args: argparse.Namespace) -> int:
    tasks, settings = select_tasks(args.tasks, args.prompts), _settings(args)
    model = EvaluatedModel(args.model, args.name, args.dtype)
    from .icl.job import run_all
    from .results.directory import pick, read_models

    if args.fail_on_regression:
        pick(read_models([args.output_path]), args.fail_on_regression)  # before the work, not after it
    say(f"{model.name}: {counted(len(tasks), 'task')}")
    results = run_all(model, tasks, settings, args.output_path, say)
    mean = 100 * sum(r["accuracy"] for r in results) / len(results)
    over = counted(len(results), "task")
    say(f"{model.name}: mean accuracy {mean:.1f} on {over}; results in {args.output_path}")
    if not args.fail_on_regression:
        return ExitCode.DONE
    from .results.compare import gate, regression  # which a known result does not need

    models = read_models([args.output_path])
    verdict = regression(pick(models, args.fail_on_regression), pick(models, model.name), args.max_drop)
    say(verdict.summary)
    return gate([verdict])


def _watch(args: argparse.Namespace) -> int:
    tasks, settings = select_tasks(args.tasks, args.prompts), _settings(args)
    if not args.poll > 0:
        raise UserError("--poll must be a positive number of seconds")
    if not args.run_dir.is_dir():
        raise UserError(f"run directory {args.run_dir} does not exist")
    out = args.output_path or args.run_dir / "eval"
    exports = exporting.of_watch(args.export, args.run_dir, args.data, args.tasks)
    say(f"{args.run_dir}: {counted(len(tasks), 'task')}")
    from .report.gather import Report
    from .report.page import FILES, document
    from .results.compare import gate
    from .watch import FAILED, TROUBLED, UNEXPORTED, Watch

    watch = Watch(args.run_dir, tasks, settings, out, args.dtype, say, exports)
    while True:
        with show_activity(f"{args.run_dir}: looking for checkpoints"):
            evaluated = watch.once()
        if evaluated and not args.no_report:
            document(Report([out])).write(f"{out}/", FILES)
        if args.once or watch.among(TROUBLED) or (args.until_finished and watch.finished()):
            break
        time.sleep(0 if evaluated else args.poll)
    verdicts = watch.verdicts(args.fail_on_regression, args.max_drop) if args.fail_on_regression else []
    for verdict in verdicts:
        if verdict.regressions:
            say(verdict.summary)
    say(watch.summary())
    failed = watch.among(FAILED, TROUBLED, UNEXPORTED)
    return gate(verdicts) or (ExitCode.FAILURE if failed else ExitCode.DONE)


def _report(args: argparse.Namespace) -> int:
    announce("report")
    from .report.gather import Report
    from .report.page import FILES, document

    runs = {name: Path(value) for name, value in _pairs("--run", args.run).items()}
    seeds = {label: names.split(",") for label, names in _pairs("--seeds", args.seeds).items()}
    report = Report(args.results, runs, args.baseline, args.title, args.notice, seeds)
    page = document(report)
    if (written := page.write(args.output_path or f"{args.results[0]}/", FILES)) is not None:
        judged = f", {counted(len(report.judgements), 'comparison')} by judges" if report.judgements else ""
        models, tasks = counted(len(report.models), "model"), counted(len(report.tasks), "task")
        say(f"report of {models} on {tasks}{judged}: {written}")
        say(page.answer[0])
    for remark in report.remarks:
        print(on_one_line(remark), file=sys.stderr)
    return ExitCode.DONE


def _compare(args: argparse.Namespace) -> int:
    announce("compare")
    from .results.compare import gate, regression, table
    from .results.directory import pick, read_models

    _check_drop(args)
    models = read_models(args.results)
    a, b = pick(models, args.a), pick(models, args.b)
    only = tuple(args.fail_on_regression.split(",")) if args.fail_on_regression else ()
    print(table(a, b, only))
    verdict = regression(a, b, args.max_drop, only)
    print(on_one_line(verdict.summary))
    return ExitCode.DONE if args.fail_on_regression is None else gate([verdict])


def _pairs(option: str, texts: list[str]) -> dict[str, str]:
    """Return ["A=x", ...] as a dictionary."""
    pairs = {name: value for name, _, value in (text.partition("=") for text in texts)}
    if not all(pairs) or not all(pairs.values()):
        raise UserError(f"{option} {' '.join(texts)} must read NAME=VALUE")
    return pairs


def say(text: str) -> None:
    """Print a line above any bar; text from data cannot act on the terminal."""
    from tqdm import tqdm

    tqdm.write(printable(text))
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; what ends it early is one line on stderr, but for bugs."""
    args = parse_arguments(parser(), argv)
    # Evaluations are started many at a time: none of them may take all cores for its tokenizer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Before torch is imported: threads that spin while they wait slow a token down 20 times on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    quiet_libraries()

    def work() -> int:
        # These wait for hours, for checkpoints or for messages: they show their work alone.
        waits = args.command in ("watch", "chat")
        with contextlib.nullcontext() if waits else show_activity(f"{args.command}: working"):
            return dispatch()

    def dispatch() -> int:
        commands = {"eval": _run, "watch": _watch, "report": _report, "compare": _compare}
        others = {"answer": judging.run, "chat": chat.run, "judge": judging.run, "export": exporting.run}
        try:
            if args.command in commands:
                return commands[args.command](args)
            return others.get(args.command, generation.run)(args, say)
        except Exception as error:
            # Other people's use of the GPU's memory may pass.
            if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
                raise
            raise FailureError(
                f"out of memory ({one_line(error, 120)}); lower --batch_size, or run the same command again",
                code="out-of-memory",
            ) from error

    return exit_code_of(work)
