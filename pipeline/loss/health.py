"""How an objective weighs its tokens: a histogram that adds up over chunks, micro-batches and ranks.

EMO's w = m / D has no bound: where the model favours a token that costs next to nothing from the target, D
vanishes and w explodes. Neither loss nor perplexity shows that; the weights do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.loss.cost import CostEmbedding

LOWEST, HIGHEST, PER_OCTAVE = -20, 20, 4  # weights from 2^-20 to 2^20, in steps of a quarter of an octave
BINS = (HIGHEST - LOWEST) * PER_OCTAVE + 1
TWIN_COST = 1e-3  # of two tokens that are one to the costs
USUAL_TWINS = 0.75  # of tokens; in real heads about half have a twin, as tokens that never occur stay alike
SAMPLE = 1024  # tokens that are looked at


def histogram(weight: Tensor, cap: float | None) -> Tensor:
    """Counts [BINS + 1] of the sizes of weights [n], float64; the last is the number of those at the cap.

    What is not a number counts as the largest: the step is going to be skipped, and here is why.
    """
    found = torch.zeros(BINS + 1, dtype=torch.float64, device=weight.device)
    size = weight.detach().double().abs().nan_to_num(nan=2.0**HIGHEST)
    size = size.clamp(min=2.0**LOWEST, max=2.0**HIGHEST)
    place = ((size.log2() - LOWEST) * PER_OCTAVE).round().long()
    found.scatter_add_(0, place, torch.ones_like(size))
    if cap is not None:
        found[BINS] = (weight >= cap).sum()
    return found


def scaled(counts: Tensor, factor: Tensor) -> Tensor:
    """The histogram of the same weights times `factor`, to a bin."""
    moved = (factor.double().log2() * PER_OCTAVE).round().long()
    shifted = torch.zeros_like(counts)
    places = (torch.arange(BINS, device=counts.device) + moved).clamp(0, BINS - 1)
    shifted.scatter_add_(0, places, counts[:BINS])
    shifted[BINS] = counts[BINS]
    return shifted


def quantile(counts: Sequence[float], share: float) -> float:
    """The weight that `share` of all tokens do not exceed, to a quarter of an octave; NaN of no tokens.

    What is below the lowest bin counts as 0.
    """
    total = sum(counts[:BINS])
    passed = 0.0
    for place, count in enumerate(counts[:BINS]):
        passed += count
        if count and passed >= share * total:
            return float(2.0 ** (LOWEST + place / PER_OCTAVE)) if place else 0.0
    return float("nan")


def summary(counts: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile, largest weight, and the share of tokens at the cap; empty where all are 1."""
    total = sum(counts[:BINS])
    if counts[-LOWEST * PER_OCTAVE] == total:
        return {}
    found = {"weight_p50": quantile(counts, 0.5), "weight_p99": quantile(counts, 0.99)}
    found["weight_max"] = quantile(counts, 1.0)
    if counts[BINS]:
        found["weight_capped"] = counts[BINS] / total
    return found


def twins(cost: CostEmbedding) -> tuple[int, int]:
    """(tokens with another at a cost below TWIN_COST, tokens looked at), at most SAMPLE of them."""
    apart = max(1, cost.vocab_size // SAMPLE)
    ids = torch.arange(0, cost.vocab_size, apart, device=cost.rows.device)[:SAMPLE]
    found = 0
    for part in ids.split(64):
        costs = cost.costs(part).scatter(1, part[:, None], torch.inf)
        found += int((costs.amin(1) < TWIN_COST).sum())
    return found, len(ids)
