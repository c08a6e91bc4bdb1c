"""Checks of every combination of an experiment before its first run; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from emo.common.errors import UserError, nearest
from emo.data_prep.config import DataConfig, settings
from emo.data_prep.inputs import open_inputs
from emo.data_prep.shards import is_prepared
from emo.eval import store
from emo.experiments.design import (
    VALIDATION,
    Experiment,
    Run,
    fill,
    split_command,
    validation_metric,
    validation_set,
)
from emo.experiments.sweep import Sweep
from emo.pipeline.config import Batch, RunConfig, solve_batch

COSTS = ("pretrained", "permuted", "live", "constant", "numbers")  # that name no other model


def check(sweep: Sweep, local: bool) -> None:
    """Raise UserError naming the run that could not be trained, measured, or put beside those that are done.

    local: the runs shall begin on this machine; their files must be there, except what `before` makes.
    """
    experiment = sweep.experiment
    sweep.before()
    looks: dict[str, tuple[Run, Callable[[], object]]] = {}  # by what they look at, which runs have in common
    for run in sweep.runs:  # mistakes in keys first, which take no time to find
        config = sweep.config(run)
        try:
            train = config.train
            batch = solve_batch(train.global_batch_size, train.micro_batch_size, experiment.ranks)
            _check_measures(sweep, run, config)
        except UserError as error:
            raise UserError(f"{run.name}: {error}") from None
        training = config.model_dump(mode="json", include={"model", "objective", "deepspeed", "train"})
        training["train"] |= {"seed": None, "learning_rate": None}
        looks.setdefault(store.digest(training), (run, partial(_check_training, config, batch)))
        if local:
            model = [training["model"], config.objective.cost]
            looks.setdefault(store.digest(model), (run, partial(_check_model, experiment, config)))
            data = [settings(config.data), str(config.data.root)]
            looks.setdefault(store.digest(data), (run, partial(_check_data, experiment, config.data)))
    for run, look in looks.values():
        try:
            look()
        except UserError as error:
            raise UserError(f"{run.name}: {error}") from None
    sweep.refuse_changes()


def _check_measures(sweep: Sweep, run: Run, config: RunConfig) -> None:
    """Refuse unknown names in commands and sources, and a decisive metric that no validation set reports."""
    sets = config.data.validation_sets
    for metric in sweep.experiment.decisive:
        if (dataset := validation_set(metric)) is not None and dataset not in sets:
            metrics = [validation_metric(VALIDATION, name) for name in sets]
            raise UserError(f"its data have no validation set for {metric}; {nearest(metric, metrics)}")
    for name, measure in sweep.experiment.measures.items():
        split_command(measure.command, sweep.variables(run, run), f"measures.{name}")
        for metric, sources in measure.read.items():
            for source in sources:
                fill(source, sweep.variables(run), f"measures.{name}.read.{metric}")


def _check_training(config: RunConfig, batch: Batch) -> None:
    """Refuse objectives and DeepSpeed files that a trainer would refuse."""
    from emo.pipeline.model import training_objective
    from emo.pipeline.planning.ds_file import deepspeed_config

    training_objective(config)
    deepspeed_config(config, batch)


def _check_model(experiment: Experiment, config: RunConfig) -> None:
    """Refuse a model or cost embedding that is not there and that `before` does not make."""
    from emo.pipeline.loss.cost_files import load_cost
    from emo.pipeline.model import model_config

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
    sources = []
    for source in (source for split in splits for source in data.sources_of(split)):
        hosted = source.files is None or "://" in source.files
        if not hosted and not _comes_later(experiment, str(data.root / str(source.files))):
            sources.append(source)
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
