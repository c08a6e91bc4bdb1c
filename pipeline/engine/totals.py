"""The sums of a step over all ranks, and the vector in which one all-reduce adds them up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..loss.fused import BINS, LossSums

STOP = 4  # index of the stop flag among the scalars below
SCALARS = 7  # loss, NLL, DEMD, supervised tokens, stop flag, divergence, KL from the base


class DomainTotals(NamedTuple):
    """Sums over the supervised tokens of one domain."""

    tokens: float  # the sum of their weights
    loss: float
    nll: float


class StepTotals(NamedTuple):
    """Sums over the supervised tokens of a global batch, the same on every rank."""

    loss: float
    nll: float
    demd: float  # NaN without a cost embedding
    tokens: int
    stop: bool  # whether any rank got a stop request
    applied: bool = True  # whether the optimizer step updated the weights
    weights: tuple[float, ...] = ()  # histogram of the objective's weights, see loss/fused.py
    domains: tuple[DomainTotals, ...] = ()  # empty with a single domain
    divergence: float = math.nan  # from a teacher, unweighted
    kl_from_base: float = math.nan  # from the model before training, if it was measured
    seconds: tuple[float, ...] = ()  # by rank: compute without waiting for others, in the previous step
    grad_norm: float = math.nan  # before clipping
    weight: float | None = None  # sum of the tokens' weights. None: each counts once

    @property
    def divisor(self) -> float:
        """Return what the sums are divided by for means."""
        return self.tokens if self.weight is None else self.weight


class TotalsVector:
    """Adds up micro-batches on the device, in one float64 vector.

    Layout: the SCALARS, the histogram [BINS + 1], losses [domains], NLLs [domains], seconds [ranks].
    """

    def __init__(self, device: torch.device, domains: Sequence[float] = (), ranks: int = 0) -> None:
        """Start at zero.

        Args:
            device: Device of the losses.
            domains: Weight of the supervised tokens of each domain in the global batch. Empty: do not
                separate domains.
            ranks: Number of ranks that report their own time, 0 for none.
        """
        self.domains = domains
        self._losses = SCALARS + BINS + 1  # index of the first domain's loss
        self._seconds = self._losses + 2 * len(domains)
        self.values = torch.zeros(self._seconds + ranks, dtype=torch.float64, device=device)

    def request_stop(self) -> None:
        """Ask all ranks to stop after this step."""
        self.values[STOP] = 1.0

    def set_seconds(self, rank: int, seconds: float) -> None:
        """Report the time that `rank` computed without waiting, in seconds."""
        self.values[self._seconds + rank] = seconds

    def add(self, sums: LossSums, domain: Tensor | None = None) -> None:
        """Add a micro-batch; `domain` [b] holds the domain of each row."""
        stop = torch.zeros_like(sums.nll)
        kl = (
            sums.by_token[2:].sum(1, dtype=torch.float64).sum() if len(sums.by_token) > 2 else stop + math.nan
        )
        scalars = (sums.loss.detach(), sums.nll, sums.demd, sums.tokens, stop, sums.divergence, kl)
        by_domain = torch.zeros(2, len(self.domains), dtype=torch.float64, device=sums.weights.device)
        if domain is not None:
            by_row = sums.by_token.view(2, len(domain), -1).sum(2, dtype=torch.float64)
            by_domain.index_add_(1, domain, by_row)
        parts = (torch.stack([x.to(torch.float64) for x in scalars]), sums.weights, by_domain.flatten())
        self.values[: self._seconds] += torch.cat(parts)

    def reduce(self) -> StepTotals:
        """Add up the vectors of all ranks; all ranks must call."""
        dist.all_reduce(self.values)
        values = self.values.tolist()
        loss, nll, demd, tokens, stop, divergence, kl = values[:SCALARS]
        losses = values[self._losses : self._losses + len(self.domains)]
        nlls = values[self._losses + len(self.domains) : self._seconds]
        return StepTotals(
            loss=loss,
            nll=nll,
            demd=demd,
            tokens=int(tokens),
            stop=stop > 0,
            weights=tuple(values[SCALARS : self._losses]),
            domains=tuple(map(DomainTotals, self.domains, losses, nlls)),
            divergence=divergence,
            kl_from_base=kl,
            seconds=tuple(values[self._seconds :]),
        )
