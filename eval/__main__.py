"""python -m eval run | generate | report: score models in context, sample text, write the report."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

EXIT_OK, EXIT_REGRESSION, EXIT_ERROR, EXIT_RETRY = 0, 1, 2, 75


def parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    top = argparse.ArgumentParser(prog="python -m eval", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="score one model on tasks")
    _model_arguments(run)
    _evaluation_arguments(run)

    generate = commands.add_parser(
        "generate", help="sample text from a model, without truncating its distribution"
    )
    _model_arguments(generate)
    generate.add_argument("--samples", type=int, default=8, help="texts per prefix (8)")
    generate.add_argument(
        "--prefix", action="append", help="text to continue; repeatable; default: begin a text"
    )
    generate.add_argument("--tokens", type=int, default=80, help="longest continuation in tokens (80)")
    generate.add_argument("--seed", type=int, default=0)

    report = commands.add_parser("report", help="write report.html, report.md and results.json")
    report.add_argument("results", nargs="+", type=Path, help="directories given as --out to `run`")
    report.add_argument("--out", type=Path, help="where to write (the first results directory)")
    report.add_argument(
        "--run", action="append", default=[], metavar="NAME=DIR", help="training run of a model"
    )
    report.add_argument("--baseline", help="model that the others are compared with (the first)")
    report.add_argument("--title", default="")
    report.add_argument("--notice", default="", help="a sentence that stands at the top")
    return top


def _model_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", required=True, help="model directory (an export) or hub id")
    command.add_argument("--name", help="how results call it (its directory)")
    command.add_argument(
        "--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16"
    )
    command.add_argument("--out", type=Path, default=Path("runs/eval"), help="results directory (runs/eval)")


def _evaluation_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tasks", default="all", help="all, or names or task files, comma-separated")
    command.add_argument("--data", required=True, help="directory of <task>/<split>.jsonl[.zst], or `hub`")
    command.add_argument("--prompts", default="paper", help="prompt version: paper (default) or released")
    command.add_argument(
        "--retriever", default="minilm", help="minilm, or a sentence-transformers id or directory"
    )
    command.add_argument("--shots", type=int, help="demonstrations per prompt (the task's own number)")
    command.add_argument("--limit", type=int, help="evenly spaced test rows per task (all)")
    command.add_argument(
        "--score", default="openicl_ppl", help="what decides: openicl_ppl, suffix_sum, suffix_mean"
    )
    command.add_argument("--max-tokens", type=int, help="longest prompt (the model's context)")
    command.add_argument("--budget", type=int, default=8192, help="tokens per batch, padding included (8192)")


def _run(args: argparse.Namespace) -> int:
    from eval.job import Settings, run_all
    from eval.model import EvaluatedModel
    from eval.tasks import select_tasks

    tasks = select_tasks(args.tasks, args.prompts)
    settings = Settings(
        data=args.data,
        retriever=args.retriever,
        shots=args.shots,
        limit=args.limit,
        score=args.score,
        max_tokens=args.max_tokens,
        budget=args.budget,
    )
    model = EvaluatedModel(args.model, args.name, args.dtype)
    results = run_all(model, tasks, settings, args.out, say)
    mean = sum(r["accuracy"] for r in results) / len(results)
    say(f"{model.name}: mean accuracy {100 * mean:.1f} on {len(results)} tasks; results in {args.out}")
    return EXIT_OK


def _generate(args: argparse.Namespace) -> int:
    from eval.generate import write_samples
    from eval.job import claim_name
    from eval.model import EvaluatedModel

    model = EvaluatedModel(args.model, args.name, args.dtype)
    claim_name(model, args.out, say)
    for item in write_samples(model, args.out, args.prefix or [""], args.samples, args.tokens, args.seed):
        say(f"{model.name}: {item['prefix']}{item['text']}".replace("\n", " ⏎ "))
    return EXIT_OK


def _report(args: argparse.Namespace) -> int:
    from data_prep.config import UserError
    from eval.report import gather, write

    runs = {}
    for given in args.run:
        name, equals, directory = given.partition("=")
        if not equals:
            raise UserError(f"--run {given!r} must read NAME=DIR")
        runs[name] = Path(directory)
    report = gather(args.results, runs, args.baseline, args.title, args.notice)
    target = args.out or args.results[0]
    write(report, target)
    say(f"report of {len(report.models)} models on {len(report.tasks)} tasks: {target / 'report.html'}")
    return EXIT_OK


def say(text: str) -> None:
    """A line for the human, above any bar."""
    from tqdm import tqdm

    tqdm.write(text)
    sys.stdout.flush()


def main() -> int:
    """Run a command; a user's mistake is one line on stderr."""
    args = parser().parse_args()
    # Evaluations are started many at a time: none of them may take all cores for its tokenizer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from data_prep.config import UserError
    from eval.quiet import quiet_libraries

    quiet_libraries()
    commands = {"run": _run, "generate": _generate, "report": _report}
    try:
        return commands[args.command](args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
