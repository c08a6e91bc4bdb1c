"""Likelihoods of texts under a model, and cross-entropies between the distributions of two models.

Values are in nats and summed in float64. A model with NaN or infinite outputs raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from emo.common.cli.progress import show_activity
from emo.common.errors import UserError
from emo.common.text import counted
from emo.data_prep.encoding.tokenizer import added_ids, text_ids

from ..models.base import Item, NotFiniteError
from ..models.model import EvaluatedModel
from ..models.prefix_scorer import PrefixScorer, batches
from ..results.stats import Estimate, ratio

# Bytes of logits in memory at once, per model.
LOGITS_CPU = 64 << 20
LOGITS_GPU = 512 << 20
TAILS = 8  # most continuations that share the keys and values of their prefix in a row
CACHED = 2 << 20  # bytes of logits whose temporaries fit into a processor's cache

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a prompt and of its continuation


class Likelihood(NamedTuple):
    """nll: sums of -log p, float64 [n]. tokens: int64 [n]. split: texts in more than one window."""

    nll: np.ndarray
    tokens: np.ndarray
    split: int = 0

    @property
    def per_token(self) -> float:
        """The mean over all tokens, or NaN if there is none."""
        return self.estimate(range(len(self.nll))).value

    def estimate(self, clusters: Sequence[int]) -> Estimate:
        """Return the mean over all tokens, with texts in clusters [n]."""
        return ratio(self.nll.tolist(), self.tokens.tolist(), clusters)


def continuations(model: EvaluatedModel, pairs: Sequence[Pair]) -> Likelihood:
    """Return -log p of every continuation after its prompt. A long prompt is computed once."""
    limit = model.context
    longest = max((len(p) + len(c) for p, c in pairs), default=0)
    if limit is not None and longest > limit:
        raise UserError(
            f"a text of {longest} tokens exceeds the context of {model.source}, {limit} tokens. Lower "
            "--max_new_tokens, or use another model.",
            code="context",
        )
    scorer = model.scorer
    try:
        with show_activity(f"{model.name}: scoring {counted(len(pairs), 'text')}"):
            nll = continuation_nll(scorer, pairs)
    except NotFiniteError as error:
        raise UserError(f"{model.source}: {error}", code="not-finite") from None
    return Likelihood(nll, np.array([len(c) for _, c in pairs], dtype=np.int64))


def continuation_nll(scorer: PrefixScorer, pairs: Sequence[Pair]) -> np.ndarray:
    """Return -log p of every continuation, float64 [n]."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (prompt, _) in enumerate(pairs):
        groups.setdefault(tuple(prompt), []).append(i)
    parts = []
    items = []
    for prompt, members in groups.items():
        # Continuations that share a row with their prompt. Long rows cost more than they save.
        step = int(min(TAILS, max(1, len(prompt) // max(1, *(len(pairs[i][1]) for i in members)))))
        for part in (members[i : i + step] for i in range(0, len(members), step)):
            tails = [np.array(pairs[i][1], dtype=np.int64) for i in part]
            parts.append(part)
            items.append(Item(np.array(prompt, dtype=np.int64), tails))
    nll = np.zeros(len(pairs))
    for part, score in zip(parts, scorer.score(items), strict=True):
        nll[part] = score.tails
    return nll


def score_texts(model: EvaluatedModel, texts: Sequence[str]) -> Likelihood:
    """Return -log p of full texts. A text that exceeds the context is split into windows.

    Every window begins like a text, for example with BOS, and with one token of the window before.
    """
    start, _ = added_ids(model.tokenizer.backend_tokenizer)
    limit = model.context or 1 << 30
    size = limit - len(start) - 1  # predicted tokens of a later window
    pairs: list[Pair] = []
    owner = []
    for number, text in enumerate(texts):
        ids = text_ids(model.tokenizer, text)
        if len(ids) > 1:
            pairs.append((ids[:1], ids[1:limit]))
            owner.append(number)
        for i in range(limit, len(ids), size):
            pairs.append(([*start, ids[i - 1]], ids[i : i + size]))
            owner.append(number)
    if not pairs:
        raise UserError("no text has a token to predict", code="no-text")
    scored = continuations(model, pairs)
    nll, tokens = (np.bincount(owner, values, len(texts)) for values in scored[:2])
    return Likelihood(nll, tokens.astype(np.int64), int((np.bincount(owner) > 1).sum()))


def cross_entropies(p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return forward -sum p log q and reverse -sum q log p of rows of logits [n, V], float64 [n].

    `distributions.measures` returns the same. Float32 terms summed in float64 take half the time.
    """
    means = []
    logs = []
    weights = torch.empty_like(p_logits)
    for logits, other in ((p_logits, q_logits), (q_logits, p_logits)):
        largest = logits.amax(dim=-1, keepdim=True)
        torch.sub(logits, largest, out=weights).exp_()
        mass = weights.sum(dim=-1, dtype=torch.float64)
        means.append(weights.mul_(other).sum(dim=-1, dtype=torch.float64) / mass)
        logs.append(largest[:, 0].double() + mass.log())
    return logs[1] - means[0], logs[0] - means[1]


@torch.inference_mode()
def mean_cross_entropies(p_model: Any, q_model: Any, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the forward and reverse cross-entropies of two models on rows of ids, float64 [2, n].

    Each is averaged over all positions of a row but the last. Rows have at least two tokens.
    """
    device = next(p_model.parameters()).device
    vocabulary = max(model.get_output_embeddings().weight.shape[0] for model in (p_model, q_model))
    budget = (LOGITS_CPU if device.type == "cpu" else LOGITS_GPU) // (4 * vocabulary)
    totals = np.zeros((2, len(rows)))
    for part in batches({i: len(row) for i, row in enumerate(rows)}, budget, device):
        values = _batch_cross_entropies(p_model, q_model, [rows[i][:-1] for i in part])
        owner = np.repeat(part, [len(rows[i]) - 1 for i in part])
        for total, value in zip(totals, values, strict=True):
            total += np.bincount(owner, value, len(rows))
    if not np.isfinite(totals).all():
        raise UserError(
            "a model produced NaN or infinite probabilities. Check its weights.", code="not-finite"
        )
    return totals / np.array([len(row) - 1 for row in rows])


def _batch_cross_entropies(p_model: Any, q_model: Any, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the cross-entropies after every token of a batch of rows, float64 [2, tokens]."""
    device = next(p_model.parameters()).device
    lengths = [len(row) for row in rows]
    width = max(lengths)
    # Padding on the right is invisible to a causal model, so no mask is needed.
    batch = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    p, q = (m(input_ids=batch, use_cache=False).logits.flatten(0, 1) for m in (p_model, q_model))
    shared = min(p.shape[-1], q.shape[-1])  # heads may be padded beyond the tokenizer
    step = max(1, CACHED // (4 * p.shape[-1])) if device.type == "cpu" else len(p)
    parts = [
        torch.stack(cross_entropies(p[positions, :shared].float(), q[positions, :shared].float()))
        for positions in valid.flatten().nonzero()[:, 0].to(device).split(step)
    ]
    return torch.cat(parts, dim=1).cpu().numpy()
