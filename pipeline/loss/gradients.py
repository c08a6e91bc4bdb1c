"""Gradients of one fused call: collected chunk by chunk, scaled once when they are handed out."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.loss.rowwise import statistics_dtype

BLOCK = 1024  # rows of the head at a time in half precision: the product stays in the cache

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight and bias
Needs = tuple[bool, bool, bool]  # which of them anybody wants


class Accumulator:
    """Sums over chunks, in float32 (float64) for head and bias."""

    def __init__(self, hidden: Tensor, weight: Tensor, needs: Needs) -> None:
        self.hidden, self.weight = hidden, weight
        stats = statistics_dtype(hidden.dtype)
        self.d_hidden = torch.zeros_like(hidden) if needs[0] else None
        self.wants_weight = needs[1]
        self.d_weight: Tensor | None = None
        self.d_bias = torch.zeros(len(weight), dtype=stats, device=hidden.device) if needs[2] else None

    def add(self, G: Tensor, row: Tensor, order: Tensor, scale: float) -> None:
        """Use up one chunk: G [n, V] in the model's dtype, its row factors [n], its positions [n]."""
        factor = (row * scale)[:, None]
        if self.d_hidden is not None:
            self.d_hidden[order] = (torch.mm(G, self.weight) * factor).to(G.dtype)
        if self.wants_weight:
            self._add_weight(G, (self.hidden[order] * factor).to(G.dtype))
        if self.d_bias is not None:
            for start in range(0, len(self.weight), BLOCK):
                block = slice(start, start + BLOCK)
                self.d_bias[block] += torch.mv(G[:, block].t().to(row.dtype), row)

    def _add_weight(self, G: Tensor, scaled: Tensor) -> None:
        """d_weight += G^T scaled."""
        first = self.d_weight is None
        if self.d_weight is None:
            stats = statistics_dtype(G.dtype)
            make = torch.zeros if G.is_cuda else torch.empty
            self.d_weight = make(self.weight.shape, dtype=stats, device=G.device)
        if G.dtype == self.d_weight.dtype:
            self.d_weight.addmm_(G.t(), scaled, beta=0.0 if first else 1.0)
            return
        if G.is_cuda:  # half-precision factors, float32 sum: only there a product can do that
            torch.addmm(self.d_weight, G.t(), scaled, out_dtype=self.d_weight.dtype, out=self.d_weight)
            return
        for start in range(0, len(self.weight), BLOCK):
            block = slice(start, start + BLOCK)
            part = torch.mm(G[:, block].t(), scaled)
            if first:
                self.d_weight[block] = part
            else:
                self.d_weight[block] += part

    def finish(self) -> Gradients:
        """The three gradients of the loss sum; all zero if no chunk came."""
        if self.wants_weight and self.d_weight is None:
            stats = statistics_dtype(self.weight.dtype)
            self.d_weight = torch.zeros_like(self.weight, dtype=stats)
        return self.d_hidden, self.d_weight, self.d_bias


def scaled(gradient: Tensor | None, dtype: torch.dtype | None, factor: Tensor) -> Tensor | None:
    """`gradient * factor` in `dtype`; in place where the dtype is right, else block by block."""
    if gradient is None or dtype is None:
        return None
    if gradient.dtype == dtype:
        return gradient.mul_(factor)
    out = torch.empty_like(gradient, dtype=dtype)
    for start in range(0, len(gradient), BLOCK):
        block = slice(start, start + BLOCK)
        out[block] = gradient[block].mul_(factor)
    return out
