"""What would stop an experiment, told before its first run: every combination is looked at, none trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError, nearest
from data_prep.config import DataConfig, Source, settings
from data_prep.shards import is_prepared
from data_prep.sources import open_inputs
from experiments.design import VALIDATION, Experiment, Run, fill, reported, set_of, words
from experiments.work import Work
from pipeline.config import Batch, RunConfig, solve_batch

COSTS = ("pretrained", "permuted", "live", "constant", "numbers")  # that name no other model


def check(work: Work, here: bool) -> None:
    """Raises UserError naming the run that could not be trained, measured, or put beside those that are done.

    here: the runs shall begin on this machine, so that their files must be there, except what `before` makes.
    """
    seen: set[str] = set()

    def once(look: Callable[..., None], *arguments: Any, key: Any) -> None:
        """`look` at what many runs have in common a single time."""
        text = json.dumps([look.__name__, key], sort_keys=True, default=str)
        if text not in seen:
            seen.add(text)
            look(*arguments)

    work.before()
    looked_at = []
    for run in work.runs:  # mistakes in keys first, which take no time to find
        config = work.config(run)
        try:
            batch = solve_batch(config.train.batch, config.train.micro_batch, work.experiment.ranks)
            _check_sets(work.experiment, config.data.validation_sets)
            _check_measures(work, run)
        except UserError as error:
            raise UserError(f"{run.name}: {error}") from None
        looked_at.append((run, config, batch))
    for run, config, batch in looked_at:
        model, objective = (part.model_dump(mode="json") for part in (config.model, config.objective))
        try:
            once(_check_objective, config, key=objective)
            trained = config.train.model_dump(mode="json", exclude={"seed", "lr"})
            once(_check_deepspeed, config, batch, key=[str(config.deepspeed), model, trained])
            if here:
                once(_check_model, work.experiment, config, key=[model, objective["cost"]])
                once(_check_data, work, config.data, key=[settings(config.data), config.data.root])
        except UserError as error:
            raise UserError(f"{run.name}: {error}") from None
    work.refuse_others()


def _check_sets(experiment: Experiment, sets: Sequence[str]) -> None:
    """Refuse a number that decides and that no validation set of a run reports."""
    for wanted in experiment.decisive:
        name = set_of(wanted)
        if name is not None and name not in sets:
            known = [reported(VALIDATION, one) for one in sets]
            raise UserError(f"its data have no validation set for {wanted}; {nearest(wanted, known)}")


def _check_measures(work: Work, run: Run) -> None:
    """Every name in commands and in the places of numbers must be known."""
    for name, measure in work.experiment.measures.items():
        words(measure.command, work.places(run, run), f"measures.{name}")
        for number, given in measure.read.items():
            for place in [given] if isinstance(given, str) else given:
                fill(place, work.places(run), f"measures.{name}.read.{number}")


def _check_objective(config: RunConfig) -> None:
    from pipeline.model import training_objective

    training_objective(config)


def _check_deepspeed(config: RunConfig, batch: Batch) -> None:
    from pipeline.planning.ds_file import deepspeed_config

    deepspeed_config(config, batch)


def _check_model(experiment: Experiment, config: RunConfig) -> None:
    """The model and the cost embedding must be there."""
    from pipeline.loss.cost_files import load_cost
    from pipeline.model import model_config

    path, cost = config.model.path, config.objective.cost
    if path is not None and _comes_later(experiment, path):
        return
    found = model_config(config.model)
    if cost in COSTS or _comes_later(experiment, cost):
        return
    revision = config.model.revision if cost == path else None
    try:
        load_cost(cost, found.get_text_config().vocab_size, revision=revision)
    except UserError as error:
        raise UserError(f"objective.cost={cost}: {error}; one of a kind: {', '.join(COSTS)}") from None


def _check_data(work: Work, data: DataConfig) -> None:
    """Files that are to be prepared must be there; those of the hub and of other hosts are not asked for."""
    if is_prepared(data):
        return
    experiment = work.experiment

    def at_hand(sources: list[Source]) -> list[Source]:
        local = [one for one in sources if one.files is not None and "://" not in one.files]
        return [one for one in local if not _comes_later(experiment, str(data.root / str(one.files)))]

    splits = data.splits[:1] if data.validation_fraction else data.splits
    every = [one for split in splits for one in at_hand(data.sources_of(split))]
    if every:
        open_inputs(data.model_copy(update={"sources": every, "validation": []}))


def _comes_later(experiment: Experiment, path: str) -> bool:
    """Return whether a path does not exist yet and `before` may make it: in `out`, or where it says."""
    place = Path(path).expanduser()
    if place.exists() or not experiment.before:
        return False
    named = [word for text in experiment.before.values() for word in words(text, experiment.places, "before")]
    above = [experiment.out, *(Path(word.rpartition("=")[2]) for word in named if "/" in word)]
    return any(place.resolve().is_relative_to(one.resolve()) for one in above)
