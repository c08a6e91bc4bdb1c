"""emo export: results as other tools read them. `watch` does the same for every checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emo.common.cli.commands import announce
from emo.common.errors import ExitCode, UserError, nearest

from ..results.directory import Model, Say, pick, read_models

HARNESS, HUB, WANDB = FORMATS = ("lm-eval", "hf", "wandb")
EXAMPLE = """examples:
  emo export --format lm-eval runs/eval --data TASKS --output_path runs/lm-eval
  emo export --format hf runs/eval --name EMO --output_path runs/mine/export
  emo export --format wandb runs/mine/eval --output_path runs/mine"""


def add_arguments(subparsers: Any) -> None:
    """Add the command `export` with its arguments."""
    command = subparsers.add_parser(
        "export",
        help="results for lm-evaluation-harness' tools, the hub, Weights & Biases",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("results", nargs="+", type=Path, help="directories given as --output_path to eval or watch")
    add("--format", required=True, help=f"one of {', '.join(FORMATS)}")
    out_help = "a directory; hf: the model's; wandb: the training run's"
    add("--output_path", required=True, type=Path, help=out_help)
    add("--name", help="only the model that results call so (all)")
    add("--data", help="lm-eval: where the rows are, as for eval; without it there are no samples")
    add("--tasks", default="", help="lm-eval: task files of your own, comma-separated")


@dataclass(frozen=True)
class Export:
    """A format and the directory for it. watched: models come one by one, the hub's files go to OUT/NAME."""

    format: str
    out: Path
    data: str | None = None  # where samples can be read again, as `eval` has it, and so with the tasks
    tasks: str = ""
    watched: bool = True

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"--format {self.format!r}; {nearest(self.format, FORMATS)}")

    def __str__(self) -> str:
        return f"{self.format}={self.out}"

    def each(self, models: Sequence[Model], cards: Mapping[str, str], say: Say) -> dict[str, Exception]:
        """Export models of a run, whatever happens to the others; return what failed, by name.

        cards: model cards to add to, by name.
        """
        failed: dict[str, Exception] = {}
        if self.format == WANDB:
            from .tracking import send

            try:
                return dict(send(models, self.out, say))
            except Exception as error:
                return {model.name: error for model in models}
        if self.format == HARNESS:
            from .harness import lost_demonstrations, write_harness

            if lost := lost_demonstrations(models):
                say(lost)
        for model in models:
            try:
                if self.format == HUB:
                    from .hub import write_hub

                    directory = self.out / model.name if self.watched else self.out
                    write_hub(model, directory, say, cards.get(model.name))
                    say(f"{model.name}: model card and evaluation results in {directory}")
                else:
                    say(f"{model.name}: {write_harness(model, self.out, self.data, self.tasks)}")
            except Exception as error:
                failed[model.name] = error
        return failed


def of_watch(texts: Sequence[str], run_dir: Path, data: str, tasks: str) -> list[Export]:
    """Return the exports of --export FORMAT=DIR, or `wandb`; UserError for a wrong one."""
    exports = []
    for text in texts:
        name, _, target = text.partition("=")
        if (name == WANDB) == bool(target):
            raise UserError(
                f"--export {text!r} must read {HARNESS}=DIR, {HUB}=DIR or {WANDB} (the run that is watched)"
            )
        exports.append(Export(name, Path(target) if target else run_dir, data, tasks))
    return exports


def run(args: argparse.Namespace, say: Say) -> int:
    """Run the command `export`."""
    announce("export")
    export = Export(args.format, args.output_path, args.data, args.tasks, watched=False)
    models = read_models(args.results)
    finished = [model for model in models if model.results or model.unreadable]
    models = [pick(models, args.name)] if args.name else finished
    if not models or (export.format == HUB and len(models) > 1):
        names = ", ".join(model.name for model in models) or "none has finished results"
        raise UserError(f"choose a model with --name, for --format hf a single one: {names}")
    for error in export.each(models, {}, say).values():
        raise error
    if export.format == HARNESS and not export.data:
        say("without samples: they hold the rows and their prompts, which --data gives")
    return ExitCode.DONE
