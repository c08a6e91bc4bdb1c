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

from emo.common.causal_lm import IGNORE
from emo.common.errors import UserError
from emo.data_prep.encoding.tokenizer import load_tokenizer
from emo.data_prep.shards.format import TokenDataset

from ...config import RunConfig
from ...loss import CostEmbedding, LiveCost, Objective, get_objective, load_cost, number_cost, weighted_sum
from ...loss.cost import NumberCost, find_twins
from ...loss.fused import check_extra_terms
from ...loss.schedule import Ramp, Spaced, Weight
from .config import ObjectiveConfig, PartConfig, RampConfig, TeacherConfig

log = logging.getLogger(__name__)

TWIN_ROWS = 64  # rows of the data that `warn_of_twins` reads
TWIN_TOKENS = 1024  # most frequent tokens in them that it compares
USUAL_TWINS = 0.01  # largest share of occurring tokens without a warning


def as_schedule(weight: float | RampConfig) -> Ramp:
    """Return a weight of a recipe as a function of the step."""
    if isinstance(weight, RampConfig):
        return Ramp(weight.first, weight.to, weight.steps)
    return Ramp(weight, weight, 1)


class Losses(NamedTuple):
    """The objective, and the transport costs of training and validation."""

    objective: Objective
    cost: CostEmbedding | LiveCost | None  # None if the objective has no transport part
    measure: CostEmbedding | LiveCost | None  # validation reports DEMD for every objective


def objective_parts(config: RunConfig) -> list[Objective]:
    """Return the objective of a recipe, or the objectives of its sum."""
    chosen: Sequence[PartConfig | ObjectiveConfig] = config.objective.sum or [config.objective]
    return [get_objective(part.name, **part.params) for part in chosen]


def training_objective(config: RunConfig, parts: Sequence[Objective] | None = None) -> Objective:
    """Return what a recipe minimises.

    `parts` are the result of `objective_parts`, if it is known already. Raises UserError for a teacher or
    scores that are missing or not used, and for settings that exclude each other.
    """
    chosen = config.objective
    parts = parts or objective_parts(config)
    pairs = list(zip(parts, _weights(config), strict=True)) if chosen.sum else []
    objective = weighted_sum(pairs) if pairs else parts[0]
    teacher = chosen.resolved_teacher
    if bool(objective.divergences) != (teacher is not None):
        cure = "Set objective.teacher to {model: PATH}, {scores: NAME}, {ema: DECAY} or base."
        problem = (
            f"needs a teacher. {cure}" if objective.divergences else "has none: remove objective.teacher"
        )
        raise UserError(f"objective {objective.name} {problem}", code="needs-teacher")
    if chosen.on_policy is not None and pairs:
        _check_parts_of_steps(pairs, as_schedule(chosen.on_policy.share))
    has_scores = isinstance(teacher, TeacherConfig) and teacher.scores
    if has_scores and any(comparison.needs_costs for _, comparison in objective.divergences):
        problem = "needs all probabilities of its teacher, but only the largest ones are stored"
        raise UserError(f"objective {objective.name} {problem}. Set teacher.model.", code="needs-teacher")
    if "stored" in objective.needs and chosen.scores is None:
        cure = "Run `emo score RECIPE --model MODEL --name NAME` and set objective.scores=NAME."
        raise UserError(
            f"objective {objective.name} needs the log-probabilities of another model. {cure}",
            code="needs-stored",
        )
    if chosen.scores is not None and "stored" not in objective.needs:
        raise UserError(
            f"objective {objective.name} reads no scores. Remove objective.scores.", code="needs-stored"
        )
    _check_measured(config, objective)
    check_extra_terms(objective, chosen.z_loss, chosen.label_smoothing)
    return objective


def _check_measured(config: RunConfig, objective: Objective) -> None:
    """Raise UserError if a checkpoint would be chosen by a number that is not measured or not comparable."""
    stopping = config.train.early_stopping
    metrics = (config.train.keep_best, None if stopping is None else stopping.metric)
    measures = {metric.rpartition("/")[2] for metric in metrics if metric is not None}
    if "loss" in measures and _weights_change(config):
        problem = "a weight of objective.sum changes, so losses of different steps cannot be compared"
        raise UserError(f"{problem}. Choose nll instead of loss", code="not-measured")
    if "demd" in measures and not measures_demd(config, objective):
        problem = f"demd is not measured with a new model and objective.name={objective.name}"
        raise UserError(f"{problem}. Set objective.cost to a model, or choose nll", code="not-measured")


def _weights_change(config: RunConfig) -> bool:
    """Return whether the objective that validation measures changes during the run."""
    weights = _weights(config)
    shares = [w.share for w in weights if isinstance(w, Spaced)]
    ramps = [w.weight if isinstance(w, Spaced) else w for w in weights]
    return any(isinstance(w, Ramp) for w in ramps) or any(s.first != s.last for s in shares)


def measures_demd(config: RunConfig, objective: Objective) -> bool:
    """Return whether validation measures DEMD. With the initial weights of a new model it means nothing."""
    from_weights = config.objective.cost in ("pretrained", "permuted")
    return objective.needs_cost or not from_weights or config.model.path is not None


def _check_parts_of_steps(pairs: Sequence[tuple[Objective, Weight]], generated: Ramp) -> None:
    """Raise UserError if a part of a sum would never train, or steps with generated text had no loss."""
    judging = [weight for part, weight in pairs if part.divergences]
    others = [(part.name, weight) for part, weight in pairs if not part.divergences]
    problem = ""
    if judging and all(isinstance(weight, Spaced) for weight in judging):
        problem = "all divergences have a share, so steps with generated text may have no loss. "
        problem += "Remove one share, because on_policy.share chooses the steps"
    elif others and min(generated.first, generated.last) == 1:
        problem = f"{others[0][0]} needs text from the data, but on_policy.share is 1. Lower it"
    elif spaced := [name for name, weight in others if isinstance(weight, Spaced)]:
        problem = f"{spaced[0]} pauses in steps with generated text, which may be all steps of its share. "
        problem += "Remove its share, because on_policy.share chooses the steps"
    if problem:
        raise UserError(f"objective.sum: {problem}", code="sum-part")


def judged_objective(config: RunConfig) -> Objective:
    """Return the divergences of a recipe's objective. They can judge any text, not only the data's."""
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

    The embedding is read from the weights before training, also on resume, because costs are given a priori
    (section 3.1). A new model's initial weights mean nothing, so validation does not measure DEMD with them
    unless the objective has costs.
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
    elif measures_demd(config, objective):
        source, revision = config.initial_weights()
        cost = load_cost(source, vocab_size, revision=revision)
        cost = cost.permuted(config.objective.cost_seed) if kind == "permuted" else cost
    if isinstance(cost, CostEmbedding):
        cost = cost.cached(config.objective.cost_cache_mb)
    return Losses(objective, cost if objective.needs_cost else None, cost)


def warn_of_twins(cost: CostEmbedding | LiveCost | None, data: TokenDataset) -> None:
    """Warn if many tokens of the data have equal embeddings, as new rows of a resized embedding have.

    If a model confuses such tokens, the transport cost D is close to 0 and the weight m / D is unbounded.
    """
    if not isinstance(cost, CostEmbedding) or isinstance(cost, NumberCost):
        return
    labels = data.batch(np.linspace(0, len(data) - 1, min(len(data), TWIN_ROWS)).astype(np.int64))["labels"]
    tokens, counts = np.unique(labels[labels != IGNORE], return_counts=True)
    if not len(tokens):
        return
    frequent = np.argsort(-counts, kind="stable")[:TWIN_TOKENS]
    equal = find_twins(cost, torch.from_numpy(tokens[frequent])).numpy()
    share = counts[frequent][equal].sum() / counts.sum()
    if share > USUAL_TWINS:
        problem = "objective.cost does not separate %d tokens (%.0f %% of the data), so weights may explode"
        cure = "Set it to a model that knows them, or to constant."
        log.warning(f"{problem}. {cure}", equal.sum(), 100 * share)


@contextlib.contextmanager
def measuring(model: nn.Module, losses: Losses, step: int = 0) -> Iterator[None]:
    """Make the fused head report DEMD for any objective, and losses by token, within the block.

    The objective is that of an optimizer step, counted from 0. It does not depend on whether this step is
    on-policy or has parts that apply in a share of the steps.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    training = head.spec
    terms = dataclasses.replace(training.terms, objective=losses.objective.at(step, spaced=False))
    head.spec = dataclasses.replace(training, terms=terms, cost=losses.measure, by_token=True)
    try:
        yield
    finally:
        head.spec = training
