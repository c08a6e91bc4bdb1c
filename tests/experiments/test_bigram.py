"""Bigram truths are what they claim to be, and MLE with counts finds them as samples grow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from emo.experiments.known_truth import bigram
from emo.experiments.known_truth.expected import Costs
from emo.pipeline.loss import get_objective

SEEDS = [0, 1, 2, 3]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def forward_kl(truth: bigram.Truth, q: Tensor) -> Tensor:
    rows = (torch.special.xlogy(truth.rows, truth.rows) - torch.special.xlogy(truth.rows, q)).sum(-1)
    return rows @ truth.contexts


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.97, 1.03), (0.5, 0.9, 0.97), (1.0, 0.7, 0.9)])
def test_a_geometric_truth_has_its_entropy_and_its_geometry(share: float, low: float, high: float) -> None:
    truth = bigram.geometric_truth(60, share, generator())
    entropy = -torch.special.xlogy(truth.rows, truth.rows).sum(-1)
    assert torch.allclose(entropy, torch.full_like(entropy, 0.5 * math.log(60)), atol=1e-6)
    assert torch.allclose(truth.contexts @ truth.rows, truth.contexts, atol=1e-9)
    # expected cost between two draws of the same context, against draws of any context
    costs = Costs(truth.embedding)
    within = (truth.rows * costs.apply(truth.rows)).sum(-1) @ truth.contexts
    marginal = truth.contexts @ truth.rows
    across = marginal @ costs.apply(marginal)
    spread = within / (1 - (truth.rows**2).sum(-1) @ truth.contexts)  # draws of two different tokens
    assert low < spread / across < high


def test_counts_are_samples_of_the_truth() -> None:
    truth = bigram.geometric_truth(10, 1.0, generator())
    counts = bigram.sample_counts(truth, 200_000, [3, 4])
    assert counts.shape == (2, 10, 10)
    assert (counts.sum((1, 2)) == 200_000).all()
    assert not torch.equal(counts[0], counts[1])
    joint = truth.contexts[:, None] * truth.rows
    assert (counts[0] / 200_000 - joint).abs().max() < 0.005


def test_mle_converges_to_the_truth_at_the_rate_of_counts() -> None:
    """The error of counts is (parameters) / (2 N) nats; the learner stays within a factor of it."""
    truth = bigram.geometric_truth(12, 1.0, generator())
    errors = []
    for tokens in (2_000, 20_000, 200_000):
        train = bigram.sample_counts(truth, tokens, SEEDS)
        dev = bigram.sample_counts(truth, tokens, [s + 100 for s in SEEDS])
        fitted = bigram.fit(train, dev, get_objective("mle"), Costs(torch.eye(12)), SEEDS, 1e-2, 800)
        errors.append(forward_kl(truth, torch.softmax(fitted.logits.double(), -1)).mean().item())
    assert errors[0] > 4 * errors[1] > 16 * errors[2]
    assert errors[2] < 5 * 12 * 11 / (2 * 200_000)


def test_runs_are_independent_and_repeatable() -> None:
    truth = bigram.geometric_truth(12, 0.5, generator())
    train, dev = bigram.sample_counts(truth, 2000, SEEDS), bigram.sample_counts(truth, 500, [9] * 4)
    costs = Costs(truth.embedding.float())
    together = bigram.fit(train, dev, get_objective("emo"), costs, SEEDS, 3e-3, 100)
    alone = bigram.fit(train[2:3], dev[2:3], get_objective("emo"), costs, SEEDS[2:3], 3e-3, 100)
    assert torch.allclose(together.logits[2], alone.logits[0], atol=1e-4)
    assert together.step[2] == alone.step[0]
