"""DEMD against a teacher's whole distribution (EMO, arXiv 2310.04691, eq. 15), for distillation.

With student q, teacher P and cost matrix C, one token's loss is  sum_i |q_i - P_i| (C P)_i.  C is never
formed: with unit embedding rows e_i,  (C P)_i = 1 - e_i . (sum_j P_j e_j),  two thin products a chunk.
For a one-hot P this is the DEMD of the target. With c'_i = sign(q_i - P_i) (C P)_i the gradient is

    dL/dz_i = q_i (c'_i - sum_j q_j c'_j).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from emo.pipeline.loss.cost import CostEmbedding, in_float32
from emo.pipeline.loss.rows import Chunk, Terms, Tokens, statistics_dtype


class Teacher(NamedTuple):
    """A teacher's side of a batch: its hidden states through its own head. Never differentiated."""

    hidden: Tensor  # [..., H'], one row per student row
    weight: Tensor  # [V, H']
    bias: Tensor | None = None  # [V]
    softcap: float | None = None
    logit_scale: float = 1.0  # below 1: a softer teacher

    def probabilities(self, order: Tensor) -> Tensor:
        """Return P [n, V] of the flat positions `order` [n], in the statistics' dtype."""
        hidden = self.hidden.detach().flatten(0, -2)[order]
        dtype = statistics_dtype(hidden.dtype)
        z = torch.mm(hidden, self.weight.detach().t()).to(dtype)
        z.mul_(self.logit_scale)
        if self.bias is not None:
            z.add_(self.bias.detach())
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return torch.softmax(z, 1, out=z)


def process_dense_chunk(
    logits: Tensor, chunk: Chunk, P: Tensor, cost: CostEmbedding, terms: Terms, gradient: bool
) -> Tokens:
    """Return the losses of a chunk of logits [n, V] against P [n, V]; with `gradient`, overwrite them by G.

    The reported DEMD is the dense one; the NLL is that of the labels.
    """
    V, y = logits.shape[1], chunk.labels[:, None]
    z = logits.to(P.dtype, copy=True)
    if chunk.bias is not None:
        z.add_(chunk.bias)
    if chunk.shift is not None:
        z.add_(chunk.shift.to(z.dtype)[:, None])
    z.scatter_(1, y, chunk.target_logit[:, None])
    slope = None
    if terms.softcap is not None:
        slope = 1 - torch.tanh_(z.div_(terms.softcap)).square()
        z.mul_(terms.softcap)
    lse = z.logsumexp(1)
    nll = (lse - z.gather(1, y)[:, 0]).clamp(min=0)
    z_mean = z.mean(1)
    q = torch.softmax(z, 1, out=z)

    rows = cost.rows
    direction = torch.mm(P.to(rows.dtype), rows)
    half = rows.dtype.itemsize == 2
    costs = (in_float32(direction, rows) if half else torch.mm(direction, rows.t())).to(P.dtype)
    # 1 - |e_i|^2: rounding for unit rows, and 1 for rows of length zero, whose cost to themselves is 0 too
    diagonal = 1 - torch.linalg.vecdot(rows, rows).to(P.dtype)
    costs = costs.neg_().add_(1).addcmul_(P, diagonal, value=-1).clamp_(min=0)  # C P, with c_ii = 0
    difference = q - P
    demd = torch.linalg.vecdot(difference.abs(), costs)
    smoothing = terms.label_smoothing
    loss = (1 - smoothing) * demd + smoothing * (lse - z_mean) + terms.z_loss * lse.square()
    ones = torch.ones_like(loss)
    tokens = Tokens(loss, nll, demd, row=ones, weight=ones)
    if gradient:
        signed = costs.mul_(difference.sign_())
        inner = torch.linalg.vecdot(q, signed)
        extra = smoothing + 2 * terms.z_loss * lse
        signed.sub_(inner[:, None]).mul_(1 - smoothing).add_(extra[:, None])
        q.mul_(signed).sub_(smoothing / V)
        logits.copy_(q if slope is None else q.mul_(slope))
    return tokens
