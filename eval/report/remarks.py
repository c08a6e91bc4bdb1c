"""What a reader should know before trusting a report's numbers, a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.errors import UserError
from common.recipe import read_written
from eval.results import Model, only_answer
from pipeline.run_dir import CONFIG


def remarks(models: Sequence[Model], tasks: Sequence[str], runs: Mapping[str, Path]) -> list[str]:
    """Tasks on which models always give one answer, and models that are not of the runs given for them."""
    return [*_degenerate(models, tasks), *_foreign(models, runs)]


def _degenerate(models: Sequence[Model], tasks: Sequence[str]) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        for model in (m for m in models if task in m.results):
            answer = only_answer(model.results[task])
            if answer is not None:
                found.setdefault((model.results[task]["title"], answer), []).append(model.name)
    return [
        f"{title}: {', '.join(names)} answer{'s' if len(names) == 1 else ''} {answer} only, whatever the row"
        for (title, answer), names in found.items()
    ]


def _foreign(models: Sequence[Model], runs: Mapping[str, Path]) -> list[str]:
    return [
        f"--run {model.name}={runs[model.name]}: {model.name} seems to be of another run "
        f"({model.facts.get('run') or model.description['path']}); the training shown is that of "
        f"{runs[model.name]}"
        for model in models
        if model.name in runs and not _is_of(model, runs[model.name])
    ]


def _is_of(model: Model, run: Path) -> bool:
    """Whether anything recorded says that the run made the model: runs are moved, copied and renamed."""
    if Path(model.description["path"]).resolve().is_relative_to(run.resolve()):
        return True
    made_in = model.facts.get("run")
    if made_in is None:
        return False
    try:
        recorded = read_written(run / CONFIG).get("run_dir")  # as the trainer wrote it into the export, too
    except (OSError, ValueError, AttributeError, UserError):
        recorded = None
    return made_in == recorded or Path(made_in).name == run.resolve().name
