"""Exact measures of next-token distributions: entropies, divergences, tails, matching temperatures.

The functions take log-probabilities from `log_probs`, float64 [..., V], and return float64 [...] in nats. P
is the truth or the reference, and Q is the model. The log of a zero probability is -inf, and 0 log 0 = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from scipy import optimize
from torch import Tensor

RARE = 1e-4  # a token less likely than this under P belongs to its tail
ROWS = 256  # at a time, so that intermediate values stay in the processor's cache


def by_rows(measure: Callable[..., dict[str, Tensor]], *rows: Tensor) -> dict[str, Tensor]:
    """Return the values [n, ...] by name that `measure` computes for rows [n, V], a few rows at a time."""
    parts = [measure(*part) for part in zip(*(each.split(ROWS) for each in rows), strict=True)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def log_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits / temperature) in float64, whatever the dtype of the logits."""
    return (logits.double() / temperature).log_softmax(dim=-1)


def cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the forward cross-entropy -sum p log q, infinite if q is zero for a token that p has."""
    p = log_p.exp()
    return -torch.where(p > 0, p * log_q, 0.0).sum(dim=-1)


def entropy(log_p: Tensor) -> Tensor:
    """Return -sum p log p."""
    return cross_entropy(log_p, log_p)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the divergence sum p log(p / q) of Q from P."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)


def js(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return half the sum of the divergences of P and Q from their mean, from 0 to log 2."""
    middle = torch.logaddexp(log_p, log_q) - math.log(2)
    return (kl(log_p, middle) + kl(log_q, middle)) / 2


def measures(log_p: Tensor, log_q: Tensor) -> dict[str, Tensor]:
    """Return all measures of Q relative to P by name, each [...].

    tv: half the sum of absolute differences, from 0 to 1. tail_mass: probability under Q of tokens less
    likely than RARE under P.
    """
    p = log_p.exp()
    q = log_q.exp()
    return {
        "kl_pq": kl(log_p, log_q),
        "kl_qp": kl(log_q, log_p),
        "js": js(log_p, log_q),
        "tv": (p - q).abs().sum(dim=-1) / 2,
        "tail_mass": torch.where(p < RARE, q, 0.0).sum(dim=-1),
        "entropy_p": entropy(log_p),
        "entropy_q": entropy(log_q),
        "forward_ce": cross_entropy(log_p, log_q),
        "reverse_ce": cross_entropy(log_q, log_p),
    }


def solve_temperature(mean_entropy: Callable[[float], float], target: float) -> float:
    """Return the temperature at which `mean_entropy` equals `target`, by Brent's method on its logarithm.

    mean_entropy: the entropy of softmax(logits / T), averaged over contexts. It increases with T. Raises
    ValueError when no temperature between 0.001 and 1000 reaches the target.
    """

    def gap(log_t: float) -> float:
        return mean_entropy(math.exp(log_t)) - target

    if abs(gap(0.0)) < 1e-12:  # also if the entropy hardly depends on T
        return 1.0
    for bound in (2.0, 1e3):  # near 1 first, because the entropy is flat far away
        a = math.log(1 / bound)
        b = math.log(bound)
        if gap(a) <= 0 <= gap(b):
            return math.exp(optimize.brentq(gap, a, b, xtol=1e-12, rtol=1e-14))
    raise ValueError(f"no temperature between 0.001 and 1000 gives an entropy of {target:g} nats")


def matching_temperature(logits: Tensor, target: float) -> float:
    """Return the temperature at which the mean entropy of rows of logits [n, V] is `target` nats."""

    def mean_entropy(t: float) -> float:
        return float(by_rows(lambda z: {"entropy": entropy(log_probs(z, t))}, logits)["entropy"].mean())

    return solve_temperature(mean_entropy, target)
