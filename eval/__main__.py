"""python -m eval run | watch | compare | report | generate | quality: evaluation of language models.

Exit codes: 0 done, or nothing to do; 2 a mistake that stays until something is changed; 3 a regression
(--fail-on-regression); 75 a trouble that may pass, run the same command again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from eval.generation import commands as generation

RETRIEVER_HELP = "minilm, a sentence model's id or directory, random, bm25, topk, votek, dpp, mdl (OpenICL's)"
SCORE_HELP = "what decides: openicl_ppl (default), suffix_sum, suffix_mean, channel, calibrated"
EXIT_OK, EXIT_ERROR, EXIT_REGRESSION, EXIT_RETRY = 0, 2, 3, 75


def parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    top = argparse.ArgumentParser(
        prog="python -m eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="score one model on tasks")
    run.add_argument("--model", required=True, help="model directory (an export) or hub id")
    run.add_argument("--name", help="how results call it (its directory)")
    run.add_argument("--out", type=Path, default=Path("runs/eval"), help="results directory (runs/eval)")
    _evaluation_arguments(run)

    watch = commands.add_parser("watch", help="score every complete checkpoint of a run, each exactly once")
    watch.add_argument("run_dir", type=Path, help="run directory: step-*/ with hf/, checkpoint-*/, export/")
    watch.add_argument("--out", type=Path, help="results directory (RUN_DIR/eval)")
    watch.add_argument("--once", action="store_true", help="one pass, for cron and other schedulers")
    watch.add_argument("--poll", type=float, default=30.0, help="seconds between passes (30)")
    watch.add_argument("--until-finished", action="store_true", help="end when the run's export is evaluated")
    watch.add_argument("--no-report", action="store_true", help="do not rewrite the report after a pass")
    _evaluation_arguments(watch)

    generation.add_arguments(commands)

    report = commands.add_parser("report", help="write report.html, report.md and results.json")
    report.add_argument("results", nargs="+", type=Path, help="directories given as --out to run or watch")
    report.add_argument("--out", type=Path, help="where to write (the first results directory)")
    report.add_argument(
        "--run", action="append", default=[], metavar="NAME=DIR", help="a model's training run"
    )
    report.add_argument(
        "--seeds", action="append", default=[], metavar="LABEL=NAME,NAME", help="aggregate models"
    )
    report.add_argument("--baseline", help="model that the others are compared with (the first)")
    report.add_argument("--title", default="")
    report.add_argument("--notice", default="", help="a sentence that stands at the top")

    compare = commands.add_parser("compare", help="two models side by side, with paired tests")
    compare.add_argument("a", help="name of the baseline")
    compare.add_argument("b", help="name of the other model")
    compare.add_argument("--results", nargs="+", type=Path, default=[Path("runs/eval")])
    compare.add_argument(
        "--fail-on-regression", action="store_true", help="exit with 3 when B is worse than A"
    )
    compare.add_argument("--max-drop", type=float, help="points that the mean may fall at most")
    return top


def _evaluation_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--tasks", default="all", help="all, or names or task files, comma-separated")
    add("--data", required=True, help="directory of <task>/<split>.jsonl[.zst], or `hub`")
    add("--prompts", default="paper", help="prompt version: paper (default) or released")
    add("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16")
    add("--retriever", default="minilm", help=RETRIEVER_HELP)
    add("--encoder", default="minilm", help="sentence model of OpenICL's dense retrievers (minilm)")
    add("--inferencer", default="prefix", help="prefix (ours) or ppl (OpenICL's own)")
    add("--faithful", action="store_true", help="prompts and counts exactly as OpenICL's, faults included")
    add("--shots", type=int, help="demonstrations per prompt (the task's own number)")
    add("--limit", type=int, help="evenly spaced test rows per task (all)")
    add("--score", default="openicl_ppl", help=SCORE_HELP)
    add("--extra-scores", default="", help="also compute: channel, calibrated (comma-separated)")
    add("--max-tokens", type=int, help="longest prompt (the model's context)")
    add("--budget", type=int, default=8192, help="tokens per batch, padding included (8192)")
    add(
        "--fail-on-regression",
        metavar="NAME",
        help="exit with 3 when worse than this model of the same --out",
    )
    add("--max-drop", type=float, help="points that the mean may fall at most")


def _settings(args: argparse.Namespace) -> Any:
    from eval.icl.job import Settings

    return Settings(
        data=args.data,
        retriever=args.retriever,
        encoder=args.encoder,
        inferencer=args.inferencer,
        faithful=args.faithful,
        shots=args.shots,
        limit=args.limit,
        score=args.score,
        extra=tuple(name for name in args.extra_scores.split(",") if name),
        max_tokens=args.max_tokens,
        budget=args.budget,
    )


def _run(args: argparse.Namespace) -> int:
    from eval.compare import pick, read_models, regression
    from eval.icl.job import run_all
    from eval.icl.tasks import select_tasks
    from eval.model import EvaluatedModel
    from eval.quiet import quiet_libraries

    quiet_libraries()
    tasks, settings = select_tasks(args.tasks, args.prompts), _settings(args)
    model = EvaluatedModel(args.model, args.name, args.dtype)
    if args.fail_on_regression:
        pick(read_models([args.out]), args.fail_on_regression)  # before the work, not after it
    results = run_all(model, tasks, settings, args.out, say)
    mean = sum(r["accuracy"] for r in results) / len(results)
    say(f"{model.name}: mean accuracy {100 * mean:.1f} on {len(results)} tasks; results in {args.out}")
    if args.fail_on_regression:
        models = read_models([args.out])
        verdict = regression(pick(models, args.fail_on_regression), pick(models, model.name), args.max_drop)
        say(verdict.summary)
        return EXIT_REGRESSION if verdict.regressions else EXIT_OK
    return EXIT_OK


def _watch(args: argparse.Namespace) -> int:
    from eval.icl.tasks import select_tasks
    from eval.quiet import quiet_libraries
    from eval.report.gather import gather, write
    from eval.watch import Watch

    quiet_libraries()
    tasks, settings = select_tasks(args.tasks, args.prompts), _settings(args)
    out = args.out or args.run_dir / "eval"
    watch = Watch(args.run_dir, tasks, settings, out, args.dtype, say)
    while True:
        count = watch.once()
        if count and not args.no_report:
            write(gather([out], {}), out)
        if args.once or (args.until_finished and watch.finished()):
            break
        time.sleep(0 if count else args.poll)
    worse = watch.regressions(args.fail_on_regression, args.max_drop) if args.fail_on_regression else []
    for sentence in worse:
        say(sentence)
    say(f"{args.run_dir}: {len(watch.evaluated)} evaluated, {watch.waiting} not ready or held elsewhere")
    return EXIT_REGRESSION if worse else EXIT_OK


def _generation(args: argparse.Namespace) -> int:
    from eval.quiet import quiet_libraries

    quiet_libraries()
    return generation.run(args, say)


def _report(args: argparse.Namespace) -> int:
    from eval.report.gather import gather, write

    runs = {name: Path(value) for name, value in _pairs("--run", args.run).items()}
    seeds = {label: names.split(",") for label, names in _pairs("--seeds", args.seeds).items()}
    report = gather(args.results, runs, args.baseline, args.title, args.notice, seeds)
    target = args.out or args.results[0]
    write(report, target)
    say(f"report of {len(report.models)} models on {len(report.tasks)} tasks: {target / 'report.html'}")
    return EXIT_OK


def _compare(args: argparse.Namespace) -> int:
    from eval.compare import pick, read_models, regression, table

    models = read_models(args.results)
    a, b = pick(models, args.a), pick(models, args.b)
    print(table(a, b))
    verdict = regression(a, b, args.max_drop)
    print(verdict.summary)
    return EXIT_REGRESSION if args.fail_on_regression and verdict.regressions else EXIT_OK


def _pairs(option: str, given: list[str]) -> dict[str, str]:
    """["A=x", ...] as a dictionary."""
    from common.errors import UserError

    pairs = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise UserError(f"{option} {text!r} must read NAME=VALUE")
        pairs[name] = value
    return pairs


def say(text: str) -> None:
    """A line for the human, above any bar."""
    from tqdm import tqdm

    tqdm.write(text)
    sys.stdout.flush()


def main() -> int:
    """Run a command; a mistake or a passing trouble is one line on stderr."""
    args = parser().parse_args()
    # Evaluations are started many at a time: none of them may take all cores for its tokenizer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from common.errors import UserError
    from eval.store import StoreConflictError

    commands = {
        "run": _run,
        "watch": _watch,
        "generate": _generation,
        "quality": _generation,
        "report": _report,
        "compare": _compare,
    }
    try:
        return commands[args.command](args)
    except (UserError, StoreConflictError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except Exception as error:
        # A full disk or a lost mount may pass, and so may other people's use of the GPU's memory.
        if not isinstance(error, OSError) and type(error).__name__ != "OutOfMemoryError":
            raise
        print(f"error: {type(error).__name__}: {error}; it may pass, run the command again", file=sys.stderr)
        return EXIT_RETRY


if __name__ == "__main__":
    sys.exit(main())
