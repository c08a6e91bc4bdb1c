"""Gradients of one fused call: collected chunk by chunk, scaled once when they are handed out."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.loss.padding import padded_width
from pipeline.loss.products import BLOCK, widens, with_rows
from pipeline.loss.rowwise import statistics_dtype

BLOCKS = 8  # of the head on an accelerator

Blocks = list[Tensor]  # consecutive rows of a gradient
Gradients = tuple[Blocks | None, Blocks | None, Blocks | None]  # of hidden, weight and bias
Needs = tuple[bool, bool, bool]  # which of them anybody wants


class Accumulator:
    """Sums over chunks, in float32 (float64) for head and bias.

    In half precision the head's sum is kept in blocks of rows: each is given up as it is rounded, so that the
    sum and its rounded copy are never both there whole.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, needs: Needs) -> None:
        self.hidden, self.weight = hidden, weight
        V, stats = len(weight), statistics_dtype(hidden.dtype)
        self.d_hidden = torch.zeros_like(hidden) if needs[0] else None
        self.d_bias = torch.zeros(V, dtype=stats, device=hidden.device) if needs[2] else None
        self.rows = V
        if hidden.dtype != stats:
            self.rows = padded_width(-(-V // BLOCKS)) if hidden.is_cuda else BLOCK
        self.blocks: Blocks | None = [] if needs[1] else None

    def add(self, G: Tensor, row: Tensor, order: Tensor, scale: float) -> None:
        """Use up one chunk: G [n, V] in the model's dtype, its row factors [n], its positions [n]."""
        factor = (row * scale)[:, None]
        if self.d_hidden is not None:
            product = with_rows(G, self.weight) if widens(G) else torch.mm(G, self.weight)
            self.d_hidden[order] = (product * factor).to(G.dtype)
        if self.blocks is not None:
            self._add_weight(G, (self.hidden[order] * factor).to(G.dtype), self.blocks)
        if self.d_bias is not None:
            for start in range(0, len(self.weight), BLOCK):
                block = slice(start, start + BLOCK)
                self.d_bias[block] += torch.mv(G[:, block].t().to(row.dtype), row)

    def _add_weight(self, G: Tensor, scaled: Tensor, blocks: Blocks) -> None:
        """d_weight += G^T scaled."""
        stats = statistics_dtype(G.dtype)
        mixed = (
            G.is_cuda and G.dtype != stats
        )  # half-precision factors, float32 sum: only there a product can
        first, widened = not blocks, widens(G)
        scaled = scaled.to(stats) if widened else scaled
        for place, start in enumerate(range(0, G.shape[1], self.rows)):
            part = G[:, start : start + self.rows].t()
            part = part.to(stats) if widened else part
            if first:
                made = torch.mm(part, scaled, out_dtype=stats) if mixed else torch.mm(part, scaled).to(stats)
                blocks.append(made)
            elif part.dtype == stats:
                blocks[place].addmm_(part, scaled)
            elif mixed:
                torch.addmm(blocks[place], part, scaled, out_dtype=stats, out=blocks[place])
            else:
                blocks[place] += torch.mm(part, scaled)

    def finish(self) -> Gradients:
        """The three gradients of the loss sum; all zero if no chunk came."""
        if self.blocks is not None and not self.blocks:
            stats = statistics_dtype(self.weight.dtype)
            self.blocks.append(torch.zeros_like(self.weight, dtype=stats))
        d_hidden, d_bias = ([x] if x is not None else None for x in (self.d_hidden, self.d_bias))
        return d_hidden, self.blocks, d_bias


def scaled(blocks: Blocks | None, dtype: torch.dtype | None, factor: Tensor) -> Tensor | None:
    """The gradient in `blocks` times `factor`, in `dtype`; uses the blocks up.

    In place where there is one of the right dtype, else block by block, each freed as it has been rounded.
    """
    if blocks is None or dtype is None:
        return None
    if len(blocks) == 1 and blocks[0].dtype == dtype:
        return blocks.pop().mul_(factor)
    rows = sum(len(block) for block in blocks)
    out = blocks[0].new_empty((rows, *blocks[0].shape[1:]), dtype=dtype)
    blocks.reverse()
    start = 0
    while blocks:
        block = blocks.pop()
        for first in range(0, len(block), BLOCK):  # no second float32 copy of a large one
            part = block[first : first + BLOCK]
            out[start + first : start + first + len(part)] = part.mul_(factor)
        start += len(block)
    return out
