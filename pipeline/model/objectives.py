"""The objective of a recipe, with the cost embedding that it uses."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from emo.common.errors import UserError
from emo.common.labels import IGNORE
from emo.data_prep.encoding.tokenizer import load_tokenizer
from emo.data_prep.shards.format import TokenDataset

from ..config import RunConfig
from ..loss import CostEmbedding, LiveCost, Objective, get_objective, load_cost, number_cost, weighted_sum
from ..loss.cost import NumberCost, find_twins
from ..loss.schedule import Ramp, Spaced, Weight
from .objective_config import ObjectiveConfig, PartConfig, RampConfig, TeacherConfig

log = logging.getLogger(__name__)

TWIN_ROWS = 64  # of the data, in which `warn_of_twins` looks
TWIN_TOKENS = 1024  # the most frequent of their tokens
USUAL_TWINS = 0.01  # of the tokens that occur; a trained head tells them apart


def as_schedule(weight: float | RampConfig) -> Ramp:
    """Return a weight of a recipe as a function of the step; a number is constant."""
    if isinstance(weight, RampConfig):
        return Ramp(weight.first, weight.to, weight.steps)
    return Ramp(weight, weight, 1)


class Losses(NamedTuple):
    """The objective, and the transport costs that training and validation use."""

    objective: Objective
    cost: CostEmbedding | LiveCost | None  # None where the objective has no transport part
    # In validation DEMD is reported for every objective, to compare them.
    measure: CostEmbedding | LiveCost | None


def objective_parts(config: RunConfig) -> list[Objective]:
    """Return the objective that a recipe names, or those of its sum."""
    chosen: Sequence[PartConfig | ObjectiveConfig] = config.objective.sum or [config.objective]
    return [get_objective(part.name, **part.params) for part in chosen]


def training_objective(config: RunConfig, parts: Sequence[Objective] | None = None) -> Objective:
    """Return what a recipe minimises, of its `parts` where they are made already."""
    chosen = config.objective
    parts = parts or objective_parts(config)
    objective = parts[0]
    if chosen.sum:
        objective = weighted_sum(list(zip(parts, _weights(config), strict=True)))
    if bool(objective.divergences) != (chosen.compared is not None):
        cure = "set objective.teacher to {model: PATH}, {scores: NAME} or base"
        problem = (
            f"needs a teacher; {cure}" if objective.divergences else "has none: leave objective.teacher out"
        )
        raise UserError(f"objective {objective.name} {problem}", code="needs-teacher")
    stored = isinstance(chosen.compared, TeacherConfig) and chosen.compared.scores
    if stored and any(comparison.needs_costs for _, comparison in objective.divergences):
        problem = "needs every probability of its teacher, and the stored ones are the largest"
        raise UserError(f"objective {objective.name} {problem}; give teacher.model", code="needs-teacher")
    if "stored" in objective.needs and chosen.scores is None:
        cure = "run `emo score RECIPE --model MODEL --name NAME` and set objective.scores=NAME"
        raise UserError(f"objective {objective.name} needs another model's log-probabilities; {cure}")
    if chosen.scores is not None and "stored" not in objective.needs:
        raise UserError(f"objective {objective.name} reads no scores; leave out objective.scores")
    return objective


def judged_objective(config: RunConfig) -> Objective:
    """Return the divergences among what a recipe minimises, which judge any text, not only the data's."""
    parts = objective_parts(config)
    if not config.objective.sum:
        return parts[0]
    return weighted_sum([pair for pair in zip(parts, _weights(config), strict=True) if pair[0].divergences])


def _weights(config: RunConfig) -> list[Weight]:
    """Return the weights of the parts of a sum."""
    weights: list[Weight] = []
    for part in config.objective.sum or ():
        weight = as_schedule(part.weight) if isinstance(part.weight, RampConfig) else part.weight
        weights.append(weight if part.share == 1 else Spaced(weight, as_schedule(part.share)))
    return weights


def load_losses(config: RunConfig, objective: Objective, vocab_size: int) -> Losses:
    """Return the objective with its cost embedding.

    The embedding is read from the weights before training, also on resume: costs are given a priori (section
    3.1). A new model's first weights mean nothing, so an objective without costs is not measured with them.
    """
    kind = config.objective.cost
    cost: CostEmbedding | LiveCost | None = None
    if kind == "live":
        cost = LiveCost()
    elif kind == "constant":
        cost = CostEmbedding.constant(vocab_size)
    elif kind == "numbers":
        tokenizer = load_tokenizer(str(config.data.dir / "tokenizer"))
        pieces = [str(tokenizer.convert_ids_to_tokens(token)) for token in range(len(tokenizer))]
        cost = number_cost(pieces, vocab_size)
    elif kind not in ("pretrained", "permuted"):
        cost = load_cost(kind, vocab_size)
    elif config.model.path is not None or objective.needs_cost:
        source, revision = config.initial_weights()
        cost = load_cost(source, vocab_size, revision=revision)
        cost = cost.permuted(config.objective.cost_seed) if kind == "permuted" else cost
    if isinstance(cost, CostEmbedding):
        cost = cost.cached(config.objective.cost_cache_mb)
    return Losses(objective, cost if objective.needs_cost else None, cost)


def warn_of_twins(cost: CostEmbedding | LiveCost | None, data: TokenDataset) -> None:
    """Warn where costs do not tell tokens of the data apart: rows that were added to a model begin alike.

    Where a model confuses such tokens D is close to 0, and the weight m / D has no bound.
    """
    if not isinstance(cost, CostEmbedding) or isinstance(cost, NumberCost):
        return
    labels = data.batch(np.linspace(0, len(data) - 1, min(len(data), TWIN_ROWS)).astype(np.int64))["labels"]
    tokens, counts = np.unique(labels[labels != IGNORE], return_counts=True)
    if not len(tokens):
        return
    frequent = np.argsort(-counts, kind="stable")[:TWIN_TOKENS]
    alike = find_twins(cost, torch.from_numpy(tokens[frequent])).numpy()
    share = counts[frequent][alike].sum() / counts.sum()
    if share > USUAL_TWINS:
        line = "objective.cost does not tell %d tokens (%.0f %% of the data) from others: weights may explode"
        cure = "set it to a model that knows them, or to constant"
        log.warning(f"{line}; {cure}", alike.sum(), 100 * share)


@contextlib.contextmanager
def measuring(model: nn.Module, losses: Losses) -> Iterator[None]:
    """Let the fused head report DEMD within the block, whatever the objective, and its losses by token."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    training = head.spec
    head.spec = dataclasses.replace(training, cost=losses.measure, by_token=True)
    try:
        yield
    finally:
        head.spec = training
