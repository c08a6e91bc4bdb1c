"""emo advise: find a recipe on the map of known truths, and report what is known there.

The map (`known_truth/map.json`, from experiments/configs/known-truth.yaml) has three axes:

    vocabulary  tokens
    draws       supervised tokens per token of the vocabulary
    share       of geometry: how well the costs predict which tokens the model confuses

Costs predict confusions if the probability that the model does not give to the target y is closer to y
(D) than the model's mean distribution over all positions t (D'):

    fit = 1 - sum_t D_t / sum_t D'_t,    D_t = sum_i q_ti c(y_t, i)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from emo.common.causal_lm import IGNORE
from emo.common.errors import ExitCode, UserError
from emo.common.report.numbers import format_interval, formatted
from emo.data_prep.shards.format import TokenDataset, open_prepared
from emo.pipeline.config import RunConfig
from emo.pipeline.loss.expected import CostOperator

from .known_truth import bigram
from .sweeps.statistics import MapRow

MAP = Path(__file__).parent / "known_truth" / "map.json"
POSITIONS = 1024  # of held-out text, at which the model's confusions are measured
BEYOND = 1.5  # factor by which a run may lie outside of an axis
SHARES = np.linspace(0, 1, 11)  # of the known truths whose fit is compared
TRUTHS = 2  # of each share


class MapPosition(NamedTuple):
    """A position on the map."""

    V: int
    draws: float
    share: float


def advise(config: RunConfig) -> int:
    """Print the advice for a recipe with prepared data and a pretrained model."""
    assert config.model.path is not None
    data, held_out = open_prepared(config.data)
    cells = json.loads(MAP.read_text(encoding="utf-8"))
    V = data.manifest.vocab_size
    tokens = data.manifest.valid_tokens
    if not is_on_map(cells["rows"], V, tokens / V):
        print(advise_off_map(cells["rows"], V, tokens / V))
        return ExitCode.DONE
    name, text = next(((n, rows) for n, rows in held_out.items() if len(rows)), ("training data", data))
    print(f"reading {POSITIONS:,} tokens of {name} with the model", file=sys.stderr, flush=True)
    fit = measure_recipe_fit(config, text)
    cost = config.objective.cost
    largest = max(row["V"] for row in cells["rows"])
    position = MapPosition(V, tokens / V, find_share(fit, min(V, largest)))
    begins = cost == "pretrained" or Path(cost).resolve() == Path(config.model.path).resolve()
    row = find_nearest_cell(cells["rows"], position)
    print(advise_sentence(row, begins))
    share = f"like known truths with a share of geometry of {position.share:.2f}"
    print(f"data   {tokens:,} supervised tokens, {position.draws:,.1f} per token of the vocabulary ({V:,})")
    print(f"costs  {cost}: fit {fit:.3f} on {name}, {share}")
    print(f"map    {len(cells['rows'])} cells at commit {cells['code']}, with simultaneous intervals")
    print("\n".join(describe_cell(row, begins)))
    return ExitCode.DONE


def advise_off_map(rows: list[MapRow], V: int, draws: float) -> str:
    """Return the advice for data that are not on the map."""
    sizes = [row["V"] for row in rows]
    counts = [row["draws"] for row in rows]
    return (
        f"Whether EMO beats MLE here is not known. Your data have a vocabulary of {V:,} tokens and "
        f"{draws:,.0f} supervised tokens for each; the studies cover {min(sizes)} to {max(sizes)} tokens "
        f"with {min(counts):,} to {max(counts):,} each. Compare both on part of your data (docs/evidence.md)."
    )


def advise_sentence(row: MapRow, begins: bool) -> str:
    """Return the advice in a sentence. `begins`: see `describe_cell`."""
    answer = row["verdicts"]["begins" if begins else "beyond-sharpening"]["answer"]
    if answer == "yes":
        return "EMO is expected to beat MLE here, even if MLE's distributions are sharpened equally."
    if answer == "no":
        return "EMO is not expected to beat MLE here if MLE's distributions are sharpened equally."
    return "Whether EMO beats MLE here is not known: compare both objectives on a part of your data."


def describe_cell(row: MapRow, begins: bool) -> list[str]:
    """Describe a cell of the map in lines.

    begins: whether the head is initialised with the embedding of the costs.
    """
    lines = [f"cell   {row['V']} tokens, {row['draws']:,} draws, share {row['share']:g}"]
    names = {"geometry": "true costs beat constant and permuted ones"}
    names |= {"begins" if begins else "beyond-sharpening": "EMO beats MLE of the same entropy"}
    for name, text in names.items():
        verdict = row["verdicts"][name]
        effect = formatted(verdict["effect"], "{:+.4f}")
        limits = format_interval(verdict["low"], verdict["high"], "{:.4f}")
        lines.append(f"       {text}: {verdict['answer']}, {effect} ({limits}) in {verdict['outcome']}")
    return lines


def is_on_map(rows: list[MapRow], V: int, draws: float) -> bool:
    """Return whether the studies cover a vocabulary and a number of draws."""
    sizes = [row["V"] for row in rows]
    counts = [row["draws"] for row in rows]
    return (
        min(sizes) / BEYOND <= V <= max(sizes) * BEYOND
        and min(counts) / BEYOND <= draws <= max(counts) * BEYOND
    )


def find_nearest_cell(rows: list[MapRow], position: MapPosition) -> MapRow:
    """Return the cell that is nearest by vocabulary, then draws, then share."""

    def distance(row: MapRow) -> tuple[float, float, float]:
        size, draws = row["V"] / position.V, row["draws"] / position.draws
        return abs(math.log(size)), abs(math.log(draws)), abs(row["share"] - position.share)

    return min(rows, key=distance)


def measure_recipe_fit(config: RunConfig, text: TokenDataset) -> float:
    """Return how well a recipe's costs predict its model's confusions in a text."""
    from emo.pipeline.engine.device.devices import on_gpu, usable_attention
    from emo.pipeline.loss import CostEmbedding, get_objective
    from emo.pipeline.model.build import check_fits, load_pretrained, model_config
    from emo.pipeline.model.objective.build import load_losses

    hf_config = model_config(config.model)
    check_fits(hf_config, config.model, text.manifest)
    cost = load_losses(config, get_objective("emo"), hf_config.get_text_config().vocab_size).cost
    if not isinstance(cost, CostEmbedding):
        problem = f"objective.cost={config.objective.cost} is not known before training"
        raise UserError(problem, code="live-cost")
    attn = usable_attention(config.model, hf_config)
    model: Any = load_pretrained(
        *config.initial_weights(), config.model.dtype, attn, rope=config.model.rope
    ).eval()
    if on_gpu():
        model.cuda()
    q, y = _predict(model, text)
    return measure_cost_fit(q, y, lambda tokens: cost.costs(tokens).float())


def _predict(model: Any, text: TokenDataset) -> tuple[Tensor, Tensor]:
    """Return a model's distributions [n, V] and the targets [n] at the first n <= POSITIONS positions."""
    probabilities = []
    targets = []
    for row in range(len(text)):
        arrays = {key: torch.from_numpy(array) for key, array in text.batch(np.array([row])).items()}
        inputs = {key: arrays[key].to(model.device) for key in ("input_ids", "position_ids")}
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[0].float().cpu()
        labels = arrays["labels"][0]
        supervised = labels != IGNORE
        probabilities.append(logits[supervised].softmax(-1))
        targets.append(labels[supervised])
        if sum(map(len, targets)) >= POSITIONS:
            break
    return torch.cat(probabilities)[:POSITIONS], torch.cat(targets)[:POSITIONS]


def measure_cost_fit(q: Tensor, targets: Tensor, costs: Callable[[Tensor], Tensor]) -> float:
    """Return 1 - sum D / sum D' of distributions q [n, V] at targets [n]. costs: rows [u, V] of tokens."""
    mean = q.mean(0)
    distances = 0.0
    spread = 0.0
    for rows, tokens in zip(q.split(64), targets.split(64), strict=True):
        c = costs(tokens)
        at_target = rows.gather(1, tokens[:, None])[:, 0]
        distances += float((rows * c).sum())
        spread += float(((1 - at_target) * (c @ mean) / (1 - mean[tokens])).sum())
    return 1 - distances / spread


def find_share(fit: float, V: int) -> float:
    """Return the share of geometry, between 0 and 1, at which known truths over V tokens have this fit."""
    fits = []
    for share in tqdm(SHARES, "known truths", leave=False):
        generator = torch.Generator().manual_seed(V)
        truths = [bigram.geometric_truth(V, float(share), generator) for _ in range(TRUTHS)]
        fits.append(np.mean([compute_truth_fit(truth) for truth in truths]))
    return float(np.interp(fit, np.maximum.accumulate(fits), SHARES))


def compute_truth_fit(truth: bigram.Truth) -> float:
    """Return the expected `measure_cost_fit` if the model equals the truth."""
    costs = CostOperator(truth.embedding)
    mean = truth.contexts @ truth.rows
    distances = truth.contexts @ (truth.rows * costs.apply(truth.rows)).sum(-1)
    confused = truth.rows * (1 - truth.rows)  # P_xy (1 - P_xy), summed over contexts below
    spread = truth.contexts @ confused @ (costs.apply(mean[None])[0] / (1 - mean))
    return 1 - float(distances / spread)
