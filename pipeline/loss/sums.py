"""Results of a loss call: sums over its tokens, and a histogram of the weights that the objective gives them.

EMO's w = m / D has no bound: where the model favours a token that costs next to nothing from the target, D
vanishes and w explodes. Neither loss nor perplexity shows that; the weights do. Histograms add up over
chunks, micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.loss.rowwise import Tokens, statistics_dtype
from pipeline.loss.spec import Spec

LOWEST, HIGHEST, PER_OCTAVE = -20, 20, 4  # weights from 2^-20 to 2^20, in steps of a quarter of an octave
BINS = (HIGHEST - LOWEST) * PER_OCTAVE + 1


class LossSums(NamedTuple):
    """Sums over the valid tokens; divide by the global batch's token count for means."""

    loss: Tensor  # scalar float32 (float64 for a float64 model), the only differentiable one
    nll: Tensor  # negative log-likelihood, nats; detached
    demd: Tensor  # earth mover distance; detached, NaN without a cost embedding
    tokens: Tensor  # int64 count
    weights: Tensor  # [BINS + 1] histogram of the objective's weights, float64
    by_token: Tensor  # [2, N] loss and NLL of every label, 0 where it is ignored; [2, 0] unless asked for


class Totals:
    """Sums over the chunks of one call."""

    def __init__(self, spec: Spec, labels: int, like: Tensor) -> None:
        """Start at zero. labels: how many the call has, valid or not; like: hidden states or logits."""
        self.spec, device = spec, like.device
        self.dtype = statistics_dtype(like.dtype)
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, nll, demd, weight
        self.tokens = 0
        self.weights = torch.zeros(BINS + 1, dtype=torch.float64, device=device)
        self.by_token = torch.zeros(2, labels if spec.by_token else 0, dtype=self.dtype, device=device)

    def add(self, tokens: Tokens, positions: Tensor) -> None:
        """Add a chunk, whose tokens stand at these positions [n] of the flat batch."""
        self.sums += torch.stack(
            (tokens.loss.sum(), tokens.nll.sum(), tokens.demd.sum(), tokens.weight.sum())
        )
        self.tokens += len(tokens.loss)
        self.weights += histogram(tokens.weight, self.spec.terms.objective.cap)
        if self.spec.by_token:
            self.by_token[:, positions] = torch.stack((tokens.loss, tokens.nll))

    def finish(self, training: bool) -> tuple[LossSums, Tensor | None]:
        """Return the sums, and the factor of the loss that its gradient lacks: one over the mean weight.

        The factor is None (1) unless the objective is normalised. While `training` the mean is over the
        tokens of all ranks, which then call together.
        """
        factor = None
        if self.spec.terms.objective.normalised:
            counts = torch.stack((torch.full_like(self.sums[3], self.tokens), self.sums[3]))
            if training and dist.is_available() and dist.is_initialized():
                dist.all_reduce(counts)
            tokens, weight = counts.unbind()
            factor = torch.where(weight > 0, tokens / weight, 1.0)
        loss, nll, demd, _ = self.sums.to(self.dtype).unbind()
        if factor is not None:
            loss = loss * factor.to(self.dtype)
            self.by_token[0] *= factor.to(self.dtype)
            self.weights = rescaled(self.weights, factor)
        if self.spec.cost is None:
            demd = torch.full_like(nll, torch.nan)
        count = torch.full((), self.tokens, dtype=torch.int64, device=loss.device)
        return LossSums(loss, nll, demd, count, self.weights, self.by_token), factor


def histogram(weight: Tensor, cap: float | None) -> Tensor:
    """Return counts [BINS + 1] of the sizes of weights [n], float64; the last counts those at the cap.

    NaN counts as the largest: the step is going to be skipped, and the histogram then shows the reason.
    """
    counts = torch.zeros(BINS + 1, dtype=torch.float64, device=weight.device)
    size = weight.detach().double().abs().nan_to_num(nan=2.0**HIGHEST)
    size = size.clamp(min=2.0**LOWEST, max=2.0**HIGHEST)
    index = ((size.log2() - LOWEST) * PER_OCTAVE).round().long()
    counts.scatter_add_(0, index, torch.ones_like(size))
    if cap is not None:
        counts[BINS] = (weight >= cap).sum()
    return counts


def rescaled(counts: Tensor, factor: Tensor) -> Tensor:
    """Return the histogram [BINS + 1] of the same weights times the scalar `factor`, to a bin."""
    shift = (factor.double().log2() * PER_OCTAVE).round().long()
    shifted = torch.zeros_like(counts)
    index = (torch.arange(BINS, device=counts.device) + shift).clamp(0, BINS - 1)
    shifted.scatter_add_(0, index, counts[:BINS])
    shifted[BINS] = counts[BINS]
    return shifted


def quantile(counts: Sequence[float], share: float) -> float:
    """Return the weight that `share` of all tokens do not exceed, to a quarter of an octave.

    NaN without tokens; 0 in the lowest bin.
    """
    total = sum(counts[:BINS])
    passed = 0.0
    for index, count in enumerate(counts[:BINS]):
        passed += count
        if count and passed >= share * total:
            return float(2.0 ** (LOWEST + index / PER_OCTAVE)) if index else 0.0
    return float("nan")


def summary(counts: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and largest weight, and the share of tokens at the cap.

    Empty where all weights are 1.
    """
    total = sum(counts[:BINS])
    if counts[-LOWEST * PER_OCTAVE] == total:
        return {}
    result = {
        "weight_p50": quantile(counts, 0.5),
        "weight_p99": quantile(counts, 0.99),
        "weight_max": quantile(counts, 1.0),
    }
    if counts[BINS]:
        result["weight_capped"] = counts[BINS] / total
    return result
