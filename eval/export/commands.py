"""emo export: write results in the formats of other tools. `watch` does so for every checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emo.common.cli.commands import announce
from emo.common.errors import ExitCode, UserError, nearest

from ..results.directory import Model, Say, find_model, read_models

HARNESS, HUB, WANDB = FORMATS = ("lm-eval", "hf", "wandb")


def add_arguments(subparsers: Any) -> None:
    """Add the command `export` with its arguments."""
    command = subparsers.add_parser(
        "export",
        description="Write results of `emo eval` in the format of lm-evaluation-harness, as a model card "
        "with results for the Hub, or into a run of Weights & Biases.",
        examples=[
            "emo export runs/quickstart/results --format lm-eval --output_path runs/lm-eval",
            "emo export runs/eval --format hf --name mine --output_path runs/mine/export",
            "emo export runs/mine/eval --format wandb --output_path runs/mine",
        ],
    )
    add = command.add_argument
    text = "directories that eval or watch wrote as --output_path"
    add("results", nargs="+", type=Path, metavar="RESULTS", help=text)
    add("--format", required=True, help=f"one of {', '.join(FORMATS)}")
    out_help = "directory to write to. hf: that of the model, wandb: that of the training run"
    add("--output_path", required=True, type=Path, metavar="DIR", help=out_help)
    add("--name", help="export only the model with this name (all)")
    text = "lm-eval: also write samples, with the rows of this --data of `emo eval`"
    add("--data", metavar="DIR", help=text)
    text = "lm-eval: task files that you passed to `emo eval`"
    add("--tasks", default="", metavar="FILE[,FILE]", help=text)


@dataclass(frozen=True)
class Export:
    """A format and its directory. watched: models are exported one by one, the hub's files to OUT/NAME."""

    format: str
    out: Path
    data: str | None = None  # source of the rows, for samples
    tasks: str = ""
    watched: bool = True

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(
                f"--format {self.format!r} is not known. {nearest(self.format, FORMATS)}", code="option-value"
            )

    def __str__(self) -> str:
        return f"{self.format}={self.out}"

    def export(self, models: Sequence[Model], cards: Mapping[str, str], say: Say) -> dict[str, Exception]:
        """Export models independently of each other, and return the errors by name.

        cards: model cards to extend, by name.
        """
        failed: dict[str, Exception] = {}
        if self.format == WANDB:
            from .tracking import send

            try:
                return dict(send(models, self.out, say))
            except Exception as error:
                return {model.name: error for model in models}
        if self.format == HARNESS:
            from .harness import describe_all_lost, write_harness

            if lost := describe_all_lost(models):
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


def parse_exports(texts: Sequence[str], run_dir: Path, data: str | None, tasks: str) -> list[Export]:
    """Return the exports of --export FORMAT=DIR, or `wandb`."""
    exports = []
    for text in texts:
        name, _, target = text.partition("=")
        if (name == WANDB) == bool(target):
            raise UserError(
                f"--export {text!r} must be {HARNESS}=DIR, {HUB}=DIR or {WANDB} (for the watched run)",
                code="option-value",
            )
        exports.append(Export(name, Path(target) if target else run_dir, data, tasks))
    return exports


def run(args: argparse.Namespace, say: Say) -> int:
    """Run the command `export`."""
    announce("export")
    export = Export(args.format, args.output_path, args.data, args.tasks, watched=False)
    models = read_models(args.results)
    finished = [model for model in models if model.results or model.measures or model.unreadable]
    models = [find_model(models, args.name)] if args.name else finished
    if not models or (export.format == HUB and len(models) > 1):
        names = ", ".join(model.name for model in models) or "none has finished results"
        raise UserError(
            f"choose a model with --name (--format hf exports a single one): {names}", code="option-needs"
        )
    for error in export.export(models, {}, say).values():
        raise error
    if export.format == HARNESS and not export.data:
        say("no samples were written. They contain rows and prompts, so set --data to write them.")
    return ExitCode.DONE
