"""From logits to tokens: which token a random number picks, and whether rounding could have picked another.

A token is found by walking down a binary tree over the vocabulary: at every node a uniform number of its own
decides between the halves by their probabilities (float64 sums of float32 weights). That is sampling from the
distribution, like one search in the cumulated distribution, but with log2(V) comparisons instead of V
boundaries: the chance that a comparison is closer than rounding error can decide does not grow with the
vocabulary.

Logits of the same row differ in their last digits with the shape of the batch. `close` marks the rows where
that could change the token; the sampler decides them anew from a forward of the row alone, so that a text
depends on its seed only.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.generation.decoding import Decoding

# Larger than the difference between two batch shapes, relative to the largest logit; see `tolerance`.
ROUNDING = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-13}


def levels(vocabulary: int) -> int:
    """Uniform numbers that one token takes: the depth of the tree."""
    return max(1, math.ceil(math.log2(vocabulary)))


def uniforms(seed: Any, tokens: int, depth: int) -> Tensor:
    """float64 [tokens, depth] in [0, 1): the random numbers of one continuation.

    seed: any JSON value. A counter-based generator is keyed with its digest, so that continuations are
    independent, and a longer one begins like a shorter one.
    """
    key = hashlib.sha256(json.dumps(seed).encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    return torch.from_numpy(generator.random((tokens, depth)))


def tolerance(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how far logits [B, V] of one row may differ between batch shapes: float32 [B]."""
    largest = logits.masked_fill(logits.isinf(), 0).abs().amax(dim=-1)
    return ROUNDING[dtype] * largest.clamp_min(1.0)


def choose(logits: Tensor, decoding: Decoding, random: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and whether each was a close decision: int64 [B], bool [B].

    logits: float32 [B, V]; random: float64 [B, levels(V)]; rounding: [B], see `tolerance`. A row with a NaN,
    or without any finite logit, raises FloatingPointError.
    """
    if decoding.greedy:
        best = logits.topk(min(2, logits.shape[-1]), dim=-1)
        _require_numbers(best.values[:, 0])
        gap = best.values[:, 0] - best.values[:, -1]
        return best.indices[:, 0], gap <= 2 * rounding
    rounding = rounding / decoding.temperature
    weights = (logits - logits.amax(dim=-1, keepdim=True)) / decoding.temperature
    weights, close = _truncated(weights, decoding, rounding)
    tokens, near = _descend(weights.exp_(), random, rounding)
    return tokens, close | near


def _require_numbers(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise FloatingPointError("logits that are not numbers")


def _truncated(scores: Tensor, decoding: Decoding, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (log weights) with -inf for tokens that top-k and top-p leave out, and close rows."""
    close = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    vocabulary = scores.shape[-1]
    if 0 < decoding.top_k < vocabulary:
        _require_numbers(scores.amax(dim=-1))
        best = scores.topk(decoding.top_k + 1, dim=-1)
        close |= best.values[:, -2] - best.values[:, -1] <= 2 * rounding
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best.indices[:, :-1], True)
        scores = scores.masked_fill(~mask, -math.inf)
    if decoding.top_p < 1:
        _require_numbers(scores.amax(dim=-1))
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        total = ordered.double().softmax(dim=-1).cumsum(dim=-1)
        count = (
            (total < decoding.top_p).sum(dim=-1, keepdim=True).clamp_max(vocabulary - 1)
        )  # last that is kept
        border = (total - decoding.top_p).abs().amin(dim=-1) <= rounding
        after = (count + 1).clamp_max(vocabulary - 1)
        gap = (ordered.gather(1, count) - ordered.gather(1, after))[:, 0]
        close |= border | ((gap <= 2 * rounding) & (after > count)[:, 0])
        mask = torch.arange(vocabulary, device=scores.device) <= count
        scores = scores.masked_fill(~torch.zeros_like(mask).scatter_(1, order, mask), -math.inf)
    return scores, close


def _descend(weights: Tensor, random: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Walk down the tree over weights [B, V]: tokens [B], close rows [B]."""
    rows, vocabulary = weights.shape
    sums = torch.zeros(rows, vocabulary + 1, dtype=torch.float64, device=weights.device)
    torch.cumsum(weights, dim=-1, dtype=torch.float64, out=sums[:, 1:])
    _require_numbers(sums[:, -1])
    left = torch.zeros(rows, 1, dtype=torch.int64, device=weights.device)
    below, above = sums[:, :1], sums[:, -1:]  # what lies left of the node, and of its right end
    margin = torch.full_like(below, math.inf)
    half = 1 << levels(vocabulary)
    for level in range(levels(vocabulary)):
        half >>= 1
        middle = left + half
        split = sums.gather(1, middle.clamp_max(vocabulary))
        # u < L / (L + R) without the quotient
        cut = random[:, level : level + 1] * (above - below) - (split - below)
        margin = torch.minimum(margin, cut.abs() / (above - below))
        right = cut >= 0
        left = torch.where(right, middle, left)
        below, above = torch.where(right, split, below), torch.where(right, above, split)
    return left[:, 0], margin[:, 0] <= rounding
