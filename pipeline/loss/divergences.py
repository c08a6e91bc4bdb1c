"""Divergences of a student's distribution q from a teacher's p, with exact gradients.

A divergence L(p, q) is a function whose positional parameters name fields of `Distributions` and whose
keyword-only parameters are its options. It returns L and u_i = q_i dL/dq_i, from which the gradient for the
student's logits follows (softmax):

    dL/dz_i = u_i - q_i sum_j u_j

A term of dL/dq_i that is the same for all entries cancels there, and such terms are left out. Everything is
computed from logarithms, so that entries with a probability near 0 stay finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from emo.common.errors import UserError

EPS = 1e-10  # keeps the detached ratio of `emo_dense` finite


class Distributions(NamedTuple):
    """Distributions of n tokens over K entries, each [n, K]."""

    log_p: Tensor  # the teacher's
    log_q: Tensor  # the student's
    q: Tensor
    p: Tensor
    Cp: Tensor | None = None  # sum_j C_ij p_j: the cost of moving the teacher's mass to entry i


class DivergenceTerms(NamedTuple):
    """A divergence of n tokens and the terms of its gradient."""

    loss: Tensor  # [n]
    u: Tensor  # [n, K]: q_i dL/dq_i


Divergence = Callable[..., DivergenceTerms]


def kl(log_p: Tensor, log_q: Tensor, p: Tensor) -> DivergenceTerms:
    """Forward KL (arXiv 1503.02531): L = sum_i p_i log(p_i / q_i); dL/dz = q - p."""
    return DivergenceTerms(kl_sum(p, log_p, log_q), -p)


def reverse_kl(log_p: Tensor, log_q: Tensor, q: Tensor) -> DivergenceTerms:
    """Reverse KL (MiniLLM, arXiv 2306.08543): L = sum_i q_i log(q_i / p_i)."""
    u = q * (log_q - log_p)
    return DivergenceTerms(u.sum(1), u)


def jsd(log_p: Tensor, log_q: Tensor, p: Tensor, q: Tensor, *, beta: float = 0.5) -> DivergenceTerms:
    """Generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649), with m = beta p + (1 - beta) q.

    L = beta KL(p, m) + (1 - beta) KL(q, m). beta is in (0, 1). Near 0 it is KL(p, q) times beta.
    """
    if not 0 < beta < 1:
        problem = f"beta must be in (0, 1) (got: {beta:g}); the limits are kl and reverse_kl"
        raise UserError(f"objective.params: {problem}", code="option-range")
    log_m = _log_mixture(log_p, log_q, beta)
    u = (1 - beta) * q * (log_q - log_m)
    return DivergenceTerms(beta * kl_sum(p, log_p, log_m) + u.sum(1), u)


def skew_kl(log_p: Tensor, log_q: Tensor, p: Tensor, q: Tensor, *, alpha: float = 0.1) -> DivergenceTerms:
    """Skew KL (DistiLLM, arXiv 2402.03898): L = KL(p, m) with m = alpha p + (1 - alpha) q."""
    if not 0 <= alpha < 1:
        raise UserError(f"objective.params: alpha must be in [0, 1) (got: {alpha:g})", code="option-range")
    log_m = _log_mixture(log_p, log_q, alpha)
    # dL/dq = -(1 - alpha) p / m; adding 1 - alpha avoids cancellation where p and q agree
    return DivergenceTerms(kl_sum(p, log_p, log_m), (1 - alpha) ** 2 * torch.exp(log_q - log_m) * (q - p))


def tv(p: Tensor, q: Tensor) -> DivergenceTerms:
    """Total variation (arXiv 2307.15190): L = sum_i |q_i - p_i| / 2."""
    difference = q - p
    return DivergenceTerms(0.5 * difference.abs().sum(1), 0.5 * q * difference.sign())


def demd_dense(p: Tensor, q: Tensor, Cp: Tensor) -> DivergenceTerms:
    """DEMD between two distributions (EMO, arXiv 2310.04691, eq. 15): L = sum_i |q_i - p_i| (C p)_i.

    For a one-hot p it is the DEMD of that target.
    """
    difference = q - p
    return DivergenceTerms(torch.linalg.vecdot(difference.abs(), Cp), difference.sign_().mul_(Cp).mul_(q))


def emo_dense(log_p: Tensor, log_q: Tensor, p: Tensor, q: Tensor, Cp: Tensor) -> DivergenceTerms:
    """EMO (eq. 19) between two distributions: L = (KL(p, q) + sg[w] D) / 2, w = KL / (D + eps), D of eq. 15.

    For a one-hot p it is `emo`.
    """
    forward = kl(log_p, log_q, p)
    demd = demd_dense(p, q, Cp)
    w = forward.loss / (demd.loss + EPS)
    return DivergenceTerms(0.5 * (forward.loss + w * demd.loss), (demd.u * w[:, None] + forward.u) * 0.5)


DIVERGENCES: dict[str, Divergence] = {
    f.__name__: f for f in (kl, reverse_kl, jsd, skew_kl, tv, demd_dense, emo_dense)
}


@dataclass(frozen=True)
class BoundDivergence:
    """A named divergence with its options bound."""

    name: str
    fields: tuple[str, ...]  # the fields of Distributions that it reads
    options: dict[str, float]

    @property
    def needs_costs(self) -> bool:
        """Return whether it reads (C p)."""
        return "Cp" in self.fields

    def compute(self, distributions: Distributions) -> DivergenceTerms:
        """Return the divergence and the terms of its gradient."""
        arguments = (getattr(distributions, name) for name in self.fields)
        return DIVERGENCES[self.name](*arguments, **self.options)


def kl_sum(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum_i p_i (log p_i - log q_i), [n]; entries with p_i = 0 add nothing."""
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(1)


def _log_mixture(log_p: Tensor, log_q: Tensor, share: float) -> Tensor:
    """Return log(share p + (1 - share) q), [n, K]."""
    if share == 0:
        return log_q
    return torch.logaddexp(log_p + math.log(share), log_q + math.log(1 - share))
