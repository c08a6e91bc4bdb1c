"""Checks of all runs of an experiment before the first one starts."""

from __future__ import annotations

import argparse
import contextlib
import functools
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
from emo.pipeline.model.objective.config import COSTS

from .design import KL, Experiment, RunSpec, fill_variables, split_command, validation_metrics
from .sweep import Sweep


def check_runs(sweep: Sweep, local: bool) -> None:
    """Raise UserError if a run cannot be trained or measured, or contradicts finished runs.

    local: whether the runs start on this machine, so that all files must exist that `before` does not make.
    """
    from emo.pipeline.engine.ds_config import deepspeed_config
    from emo.pipeline.model.objective.build import training_objective

    experiment = sweep.experiment
    checked = set()  # digests of the settings that were checked for an earlier run
    readers: dict[str, str] = {}  # run by the files that its measures read
    sweep.before()
    for run in sweep.runs:
        config = sweep.config(run)
        training = config.model_dump(mode="json", include={"model", "objective", "deepspeed", "train"})
        training["train"] |= {"seed": None, "learning_rate": None}
        data = {"data": settings(config.data), "root": str(config.data.root)}
        try:
            _check_names(sweep, run, config)
            _check_files(sweep, run, readers)
            if (key := store.digest_json(training)) not in checked:
                train = config.train
                sizes = (train.global_batch_size, train.micro_batch_size, experiment.ranks)
                batch = solve_batch(*sizes, train.sequence_parallel)
                training_objective(config)
                deepspeed_config(config, batch)
                if local:
                    _check_model(experiment, config)
            if (data_key := store.digest_json(data)) not in checked and local:
                _check_data(experiment, config.data)
        except UserError as error:
            raise UserError(f"{run.name}: {error}", code=error.code) from None
        checked |= {key, data_key}
    sweep.reject_changes()


def _check_names(sweep: Sweep, run: RunSpec, config: RunConfig) -> None:
    """Reject unknown names in commands and sources, and decisive metrics that are not measured."""
    experiment = sweep.experiment
    metrics = [metric for name in config.data.validation_sets for metric in validation_metrics(name)]
    for name, measure in experiment.measures.items():
        metrics += measure.read
        _check_command(split_command(measure.command, sweep.variables(run, run), f"measures.{name}"), name)
    for metric in experiment.decisive:
        if metric not in metrics:
            raise UserError(f"no measure reads {metric}; {nearest(metric, metrics)}", code="unknown-name")
        if metric.split(":")[0] == KL and not config.measures_kl:
            raise UserError(f"{metric} is not measured. Set train.kl_from_base", code="not-measured")


def _check_files(sweep: Sweep, run: RunSpec, readers: dict[str, str]) -> None:
    """Reject a measure that reads a file of another run, and add the run's files to `readers`."""
    for name, measure in sweep.experiment.measures.items():
        read = fill_variables(measure.read, sweep.variables(run), f"measures.{name}.read")
        for file in (source.rpartition(":")[0] for sources in read.values() for source in sources):
            if (other := readers.setdefault(file, run.name)) != run.name:
                problem = f"measures.{name}.read: {file} is also read for the run {other}"
                raise UserError(f"{problem}. Use {{run}} in its name", code="shared-files")


def _check_command(words: list[str], measure: str) -> None:
    """Reject a measure with invalid arguments of an evaluation command."""
    words = words[words.index("emo") + 1 :] if "emo" in words[:3] else []
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            top = _evaluation_parser()
            known = next(a.choices for a in top._actions if isinstance(a, argparse._SubParsersAction))
            if words and words[0] in known:
                parse_arguments(top, words)
    except SystemExit:
        reason = message.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"measures.{measure}: emo {words[0]}: {reason}", code="measure") from None


@functools.cache
def _evaluation_parser() -> argparse.ArgumentParser:
    """Return the parser of evaluation commands, which takes long to build."""
    from emo.eval.cli import make_parser

    return make_parser()


def _check_model(experiment: Experiment, config: RunConfig) -> None:
    """Reject a missing model or cost embedding, unless `before` makes it."""
    from emo.pipeline.loss.cost_files import load_cost
    from emo.pipeline.model.build import model_config

    path = config.model.path
    cost = config.objective.cost
    if path is not None and _is_made_before(experiment, path):
        return
    vocabulary = model_config(config.model).get_text_config().vocab_size
    if cost not in COSTS and not _is_made_before(experiment, cost):
        try:
            load_cost(cost, vocabulary, revision=config.model.revision if cost == path else None)
        except UserError as error:
            raise UserError(
                f"objective.cost={cost}: {error}. Or set one of {', '.join(COSTS)}", code="cost-missing"
            ) from None


def _check_data(experiment: Experiment, data: DataConfig) -> None:
    """Reject missing data files. Files on the Hub and on other hosts are not checked."""
    if is_prepared(data):
        return
    splits = data.splits[:1] if data.validation_fraction else data.splits
    sources = [
        source
        for split in splits
        for source in data.sources_of(split)
        if source.files is not None and "://" not in source.files
        if not _is_made_before(experiment, str(data.root / source.files))
    ]
    if sources:
        open_inputs(data.model_copy(update={"sources": sources, "validation": []}))


def _is_made_before(experiment: Experiment, name: str) -> bool:
    """Return whether a path is missing and `before` may make it, in `out` or at a path in its commands."""
    path = Path(name).expanduser()
    if path.exists() or not experiment.before:
        return False
    commands = (split_command(text, experiment.variables, "before") for text in experiment.before.values())
    paths = [Path(word.rpartition("=")[2]) for command in commands for word in command if "/" in word]
    return any(path.resolve().is_relative_to(parent.resolve()) for parent in (experiment.out, *paths))
