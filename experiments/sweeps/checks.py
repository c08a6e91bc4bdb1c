"""Checks of every combination of an experiment before its first run; nothing is trained."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path

from emo.common.cli.commands import parse_arguments
from emo.common.errors import UserError, nearest
from emo.data_prep.config import DataConfig, settings
from emo.data_prep.shards.format import is_prepared
from emo.data_prep.sources.inputs import open_inputs
from emo.eval.results import store
from emo.pipeline.batches.config import solve_batch
from emo.pipeline.config import RunConfig
from emo.pipeline.model.objective_config import COSTS

from .design import Experiment, Run, fill, split_command, validation_metrics
from .sweep import Sweep


def check(sweep: Sweep, local: bool) -> None:
    """Raise UserError naming the run that could not be trained, measured, or put beside those that are done.

    local: the runs shall begin on this machine; their files must be there, except what `before` makes.
    """
    from emo.pipeline.engine.ds_config import deepspeed_config
    from emo.pipeline.model.objectives import training_objective

    experiment, examined = sweep.experiment, set()  # what several runs have in common is looked at once
    sweep.before()
    for run in sweep.runs:
        config = sweep.config(run)
        training = config.model_dump(mode="json", include={"model", "objective", "deepspeed", "train"})
        training["train"] |= {"seed": None, "learning_rate": None}
        data = {"data": settings(config.data), "root": str(config.data.root)}
        try:
            _check_names(sweep, run, config)
            if (key := store.digest(training)) not in examined:
                train = config.train
                batch = solve_batch(train.global_batch_size, train.micro_batch_size, experiment.ranks)
                training_objective(config)
                deepspeed_config(config, batch)
                if local:
                    _check_model(experiment, config)
            if (data_key := store.digest(data)) not in examined and local:
                _check_data(experiment, config.data)
        except UserError as error:
            raise UserError(f"{run.name}: {error}") from None
        examined |= {key, data_key}
    sweep.refuse_changes()


def _check_names(sweep: Sweep, run: Run, config: RunConfig) -> None:
    """Refuse unknown names in commands and sources, and metrics that decide but are not measured."""
    experiment = sweep.experiment
    metrics = [metric for name in config.data.validation_sets for metric in validation_metrics(name)]
    for name, measure in experiment.measures.items():
        metrics += measure.read
        _check_command(split_command(measure.command, sweep.variables(run, run), f"measures.{name}"), name)
        fill(measure.read, sweep.variables(run), f"measures.{name}.read")
    for metric in [*experiment.decisive, *([experiment.choose.by] if experiment.choose else [])]:
        if metric not in metrics:
            raise UserError(f"nothing measures {metric}; {nearest(metric, metrics)}")


def _check_command(words: list[str], measure: str) -> None:
    """Refuse a measure by one of our evaluation's commands whose arguments that command does not take."""
    from emo.eval.cli import parser

    words = words[words.index("emo") + 1 :] if "emo" in words[:3] else []
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            top = parser()
            known = next(a.choices for a in top._actions if isinstance(a, argparse._SubParsersAction))
            if words and words[0] in known:
                parse_arguments(top, words)
    except SystemExit:
        reason = message.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"measures.{measure}: emo {words[0]}: {reason}", code="measure") from None


def _check_model(experiment: Experiment, config: RunConfig) -> None:
    """Refuse a model or cost embedding that is not there and that `before` does not make."""
    from emo.pipeline.loss.cost_files import load_cost
    from emo.pipeline.model.build import model_config

    path, cost = config.model.path, config.objective.cost
    if path is not None and _comes_later(experiment, path):
        return
    vocabulary = model_config(config.model).get_text_config().vocab_size
    if cost not in COSTS and not _comes_later(experiment, cost):
        try:
            load_cost(cost, vocabulary, revision=config.model.revision if cost == path else None)
        except UserError as error:
            raise UserError(f"objective.cost={cost}: {error}; or one of {', '.join(COSTS)}") from None


def _check_data(experiment: Experiment, data: DataConfig) -> None:
    """Refuse files to prepare that are not there; those of the hub and of other hosts are not asked for."""
    if is_prepared(data):
        return
    splits = data.splits[:1] if data.validation_fraction else data.splits
    sources = [
        source
        for split in splits
        for source in data.sources_of(split)
        if source.files is not None and "://" not in source.files
        if not _comes_later(experiment, str(data.root / source.files))
    ]
    if sources:
        open_inputs(data.model_copy(update={"sources": sources, "validation": []}))


def _comes_later(experiment: Experiment, name: str) -> bool:
    """Return whether a path does not exist yet and `before` may make it: in `out`, or where it says."""
    path = Path(name).expanduser()
    if path.exists() or not experiment.before:
        return False
    commands = (split_command(text, experiment.variables, "before") for text in experiment.before.values())
    paths = [Path(word.rpartition("=")[2]) for command in commands for word in command if "/" in word]
    return any(path.resolve().is_relative_to(parent.resolve()) for parent in (experiment.out, *paths))
