"""The histogram of the objective's weights that comes with the sums."""

from __future__ import annotations

import math

import pytest
import torch

from emo.pipeline.loss import fused as loss_sums
from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.fused import fused_linear_loss
from tests.loss.test_fused import inputs
from tests.loss.test_objectives import make


def counts_of(*weights: float, cap: float | None = None) -> list[float]:
    return loss_sums.histogram(torch.tensor(weights), cap).tolist()


def test_quantiles_of_known_weights() -> None:
    """To a quarter of an octave, whatever the size."""
    counts = counts_of(*(2.0 ** (k / 10) for k in range(-100, 101)))
    for share, exponent in ((0.5, 0.0), (0.99, 9.8), (1.0, 10.0)):
        assert math.log2(loss_sums.quantile(counts, share)) == pytest.approx(exponent, abs=0.13)


def test_nan_counts_as_the_largest_weight() -> None:
    """A step that is going to be skipped does not end the run in the histogram."""
    assert loss_sums.quantile(counts_of(1.0, math.nan), 1.0) == 2.0**loss_sums.HIGHEST
    h, w, labels, E = inputs()
    with torch.no_grad():
        h[1] = math.nan
    sums = fused_linear_loss(h, w, labels, make("emo"), CostEmbedding.from_weight(E))
    assert math.isnan(sums.loss.item())


def test_normalised_weights_are_divided_by_their_mean() -> None:
    """MiLe's histogram is that of the weights after the division by their mean."""
    h, w, labels, _ = inputs(dtype=torch.float64)
    log_p = (h @ w.T).log_softmax(-1)[labels != -100].detach()
    weight = 1 - (log_p.exp() * log_p).sum(-1)
    sums = fused_linear_loss(h, w, labels, make("mile"))
    for share in (0.1, 0.5, 1.0):
        want = (weight / weight.mean()).quantile(share).item()
        assert loss_sums.quantile(sums.weights.tolist(), share) == pytest.approx(want, rel=0.2)


def test_histogram_of_the_fused_loss() -> None:
    """Median and share at the cap are those of m / D, token by token."""
    h, w, labels, E = inputs(dtype=torch.float64)
    cost = CostEmbedding.from_weight(E.double())
    valid = labels != -100
    log_p = (h @ w.T).log_softmax(-1)[valid]
    m = -log_p.gather(1, labels[valid][:, None])[:, 0]
    ratio = m / (log_p.exp() * cost.costs(labels[valid])).sum(1)
    sums = fused_linear_loss(h, w, labels, make("emo", ratio_cap=3.0), cost, memory_mb=16 * 53 * 8 / 2**20)
    assert int(sums.weights[:-1].sum()) == int(valid.sum())
    assert int(sums.weights[-1]) == int((ratio >= 3.0).sum()) > 0
    median = ratio.detach().clamp(max=3.0).median().item()
    assert loss_sums.quantile(sums.weights.tolist(), 0.5) == pytest.approx(median, rel=0.1)
