"""Divergences of a student's distribution q from a teacher's p, with exact gradients; mathematics alone.

A divergence L(p, q) is a function of those fields of `Pair` that its parameters name, and of its options as
keyword-only parameters. It returns L and u_i = q_i dL/dq_i, from which the gradient for the student's logits
follows (softmax):

    dL/dz_i = u_i - q_i sum_j u_j

so that adding to dL/dq_i what is the same for all entries changes nothing, and such terms are left out. All
are computed from logarithms: an entry that one side all but rules out stays finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emo.common.errors import UserError

EPS = 1e-10  # keeps the detached ratio of `emo_dense` finite


class Pair(NamedTuple):
    """Distributions of n tokens over K entries, each [n, K]."""

    log_p: Tensor  # the teacher's
    log_q: Tensor  # the student's
    q: Tensor
    p: Tensor
    # (C p)_i = sum_j C_ij p_j: what it costs to bring the teacher's mass to entry i; None: not asked for
    Cp: Tensor | None = None


class Gap(NamedTuple):
    """A divergence of n tokens."""

    loss: Tensor  # [n]
    u: Tensor  # [n, K]: q_i dL/dq_i


Divergence = Callable[..., Gap]


def kl(log_p: Tensor, log_q: Tensor, p: Tensor) -> Gap:
    """Forward KL (arXiv 1503.02531): L = sum_i p_i log(p_i / q_i); dL/dz = q - p."""
    return Gap(_dot(p, log_p, log_q), -p)


def reverse_kl(log_p: Tensor, log_q: Tensor, q: Tensor) -> Gap:
    """Reverse KL (MiniLLM, arXiv 2306.08543): L = sum_i q_i log(q_i / p_i)."""
    u = q * (log_q - log_p)
    return Gap(u.sum(1), u)


def jsd(log_p: Tensor, log_q: Tensor, p: Tensor, q: Tensor, *, beta: float = 0.5) -> Gap:
    """Generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649): with m = beta p + (1 - beta) q,

    L = beta KL(p, m) + (1 - beta) KL(q, m). beta is in (0, 1); near 0 it is KL(p, q) times beta.
    """
    if not 0 < beta < 1:
        cure = "the limits are kl and reverse_kl"
        raise UserError(
            f"objective.params: beta must be in (0, 1); {cure} (given: {beta:g})", code="option-range"
        )
    log_m = _mixture(log_p, log_q, beta)
    u = (1 - beta) * q * (log_q - log_m)
    return Gap(beta * _dot(p, log_p, log_m) + u.sum(1), u)


def skew_kl(log_p: Tensor, log_q: Tensor, p: Tensor, q: Tensor, *, alpha: float = 0.1) -> Gap:
    """Skew KL (DistiLLM, arXiv 2402.03898): L = KL(p, m) with m = alpha p + (1 - alpha) q."""
    if not 0 <= alpha < 1:
        raise UserError(f"objective.params: alpha must be in [0, 1) (given: {alpha:g})", code="option-range")
    log_m = _mixture(log_p, log_q, alpha)
    # dL/dq = -(1 - alpha) p / m; with 1 - alpha added it loses no digits where the two agree
    return Gap(_dot(p, log_p, log_m), (1 - alpha) ** 2 * torch.exp(log_q - log_m) * (q - p))


def tv(p: Tensor, q: Tensor) -> Gap:
    """Total variation (arXiv 2307.15190): L = sum_i |q_i - p_i| / 2."""
    difference = q - p
    return Gap(0.5 * difference.abs().sum(1), 0.5 * q * difference.sign())


def demd_dense(p: Tensor, q: Tensor, Cp: Tensor) -> Gap:
    """DEMD between two distributions (EMO, arXiv 2310.04691, eq. 15): L = sum_i |q_i - p_i| (C p)_i.

    For a one-hot p it is the DEMD of that target.
    """
    difference = q - p
    return Gap(torch.linalg.vecdot(difference.abs(), Cp), difference.sign_().mul_(Cp).mul_(q))


def emo_dense(log_p: Tensor, log_q: Tensor, p: Tensor, q: Tensor, Cp: Tensor) -> Gap:
    """EMO (eq. 19) between two distributions: L = (KL(p, q) + sg[w] D) / 2, w = KL / (D + eps), D of eq. 15.

    For a one-hot p it is `emo`.
    """
    near, far = kl(log_p, log_q, p), demd_dense(p, q, Cp)
    w = near.loss / (far.loss + EPS)
    return Gap(0.5 * (near.loss + w * far.loss), (far.u * w[:, None] + near.u) * 0.5)


DIVERGENCES: dict[str, Divergence] = {
    f.__name__: f for f in (kl, reverse_kl, jsd, skew_kl, tv, demd_dense, emo_dense)
}


@dataclass(frozen=True)
class Comparison:
    """A divergence with its options bound."""

    function: Divergence
    takes: tuple[str, ...]  # fields of Pair
    options: dict[str, Any]

    @property
    def needs_costs(self) -> bool:
        """Return whether it reads (C p)."""
        return "Cp" in self.takes

    def of(self, pair: Pair) -> Gap:
        """Return the divergence of a pair."""
        return self.function(*(getattr(pair, name) for name in self.takes), **self.options)


def _dot(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum_i p_i (log p_i - log q_i), [n]; an entry that p rules out adds nothing."""
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(1)


def _mixture(log_p: Tensor, log_q: Tensor, share: float) -> Tensor:
    """Return log(share p + (1 - share) q), [n, K]."""
    if share == 0:
        return log_q
    return torch.logaddexp(log_p + math.log(share), log_q + math.log(1 - share))
