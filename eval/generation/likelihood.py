"""Likelihoods of texts under a model, and two models' next-token distributions side by side.

Nats, summed in float64. A model that gives anything but numbers is refused.
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
from emo.data_prep.encoding.tokenizer import text_ids

from ..icl.settings import NotFiniteError
from ..model import EvaluatedModel
from ..prefix_scorer import Item, PrefixScorer, batches
from ..results.stats import Estimate, ratio

LOGITS_CPU, LOGITS_GPU = 64 << 20, 512 << 20  # bytes of logits alive at once, per model
TAILS = 8  # continuations that share the keys and values of their prefix in one row, at most
CACHED = 2 << 20  # bytes of logits whose temporaries stay in a processor's cache

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a prompt and of its continuation


class Likelihood(NamedTuple):
    """nll: sums of -log p, float64 [n]; tokens: int64 [n]."""

    nll: np.ndarray
    tokens: np.ndarray

    @property
    def per_token(self) -> float:
        """Return the mean over all tokens; NaN where there is none."""
        return self.estimate(range(len(self.nll))).value

    def estimate(self, clusters: Sequence[int]) -> Estimate:
        """Return the mean over all tokens, texts in clusters [n]; NaN where there is no token."""
        return ratio(self.nll.tolist(), self.tokens.tolist(), clusters)


def continuations(model: EvaluatedModel, pairs: Sequence[Pair]) -> Likelihood:
    """Return -log p of every continuation after its prompt; a long prompt is fed once."""
    limit, longest = model.context, max((len(p) + len(c) for p, c in pairs), default=0)
    if limit is not None and longest > limit:
        raise UserError(
            f"a text of {longest} tokens is longer than the context of {model.given}, {limit} tokens; "
            "generate shorter ones (--max_new_tokens), or take another model",
            code="context",
        )
    scorer = model.scorer
    try:
        with show_activity(f"{model.name}: scoring {counted(len(pairs), 'text')}"):
            nll = continuation_nll(scorer, pairs)
    except NotFiniteError as error:
        raise UserError(f"{model.given}: {error}") from None
    return Likelihood(nll, np.array([len(c) for _, c in pairs], dtype=np.int64))


def continuation_nll(scorer: PrefixScorer, pairs: Sequence[Pair]) -> np.ndarray:
    """Return the same by a loaded model's scorer: float64 [n]."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (prompt, _) in enumerate(pairs):
        groups.setdefault(tuple(prompt), []).append(i)
    parts, items = [], []
    for prompt, members in groups.items():
        # So many continuations share a row with their prompt; long rows cost more than they save.
        step = int(min(TAILS, max(1, len(prompt) // max(1, *(len(pairs[i][1]) for i in members)))))
        for part in (members[i : i + step] for i in range(0, len(members), step)):
            tails = [np.array(pairs[i][1], dtype=np.int64) for i in part]
            parts.append(part)
            items.append(Item(np.array(prompt, dtype=np.int64), tails))
    nll = np.zeros(len(pairs))
    for part, score in zip(parts, scorer.score(items), strict=True):
        nll[part] = score.tails
    return nll


def texts(model: EvaluatedModel, rows: Sequence[str]) -> Likelihood:
    """Return -log p of whole texts; one longer than the context is cut into windows of it."""
    limit = model.context or 1 << 30
    pairs: list[Pair] = []
    owner = []
    for number, row in enumerate(rows):
        first, continuation = (ids := text_ids(model.tokenizer, row))[:1], ids[1:]
        for i in range(0, len(continuation), limit - 1):
            pairs.append(((first if i == 0 else [continuation[i - 1]]), continuation[i : i + limit - 1]))
            owner.append(number)
    if not pairs:
        raise UserError("no text has a token that can be predicted")
    nll, tokens = (np.bincount(owner, values, len(rows)) for values in continuations(model, pairs))
    return Likelihood(nll, tokens.astype(np.int64))


def cross_entropies(p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return forward -sum p log q and reverse -sum q log p of rows of logits [n, V], float64 [n].

    The same as `distributions.measures` gives, from float32 terms summed in float64: half the time.
    """
    means, logs = [], []
    weights = torch.empty_like(p_logits)
    for logits, other in ((p_logits, q_logits), (q_logits, p_logits)):
        largest = logits.amax(dim=-1, keepdim=True)
        torch.sub(logits, largest, out=weights).exp_()
        mass = weights.sum(dim=-1, dtype=torch.float64)
        means.append(weights.mul_(other).sum(dim=-1, dtype=torch.float64) / mass)
        logs.append(largest[:, 0].double() + mass.log())
    return logs[1] - means[0], logs[0] - means[1]


@torch.inference_mode()
def side_by_side(p_model: Any, q_model: Any, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the cross-entropies of two models after every token of rows of ids but the last, float64 [2, n].

    Each is averaged over the positions of its row. Rows have at least two tokens.
    """
    device = next(p_model.parameters()).device
    on_cpu = device.type == "cpu"
    vocabulary = max(model.get_output_embeddings().weight.shape[0] for model in (p_model, q_model))
    room = (LOGITS_CPU if on_cpu else LOGITS_GPU) // (4 * vocabulary)
    counts = [len(row) - 1 for row in rows]
    totals = np.zeros((2, len(rows)))
    for part in batches({i: len(row) for i, row in enumerate(rows)}, room, device):
        # Padding is on the right, where a causal model does not see it: no mask is needed.
        lengths = [counts[i] for i in part]
        width = max(lengths)
        batch = torch.tensor([[*rows[i][:-1], *[0] * (width - counts[i])] for i in part], device=device)
        valid = torch.arange(width) < torch.tensor(lengths)[:, None]
        p, q = (m(input_ids=batch, use_cache=False).logits.flatten(0, 1) for m in (p_model, q_model))
        shared = min(p.shape[-1], q.shape[-1])  # heads may be padded beyond the tokenizer
        step = max(1, CACHED // (4 * p.shape[-1])) if on_cpu else len(p)
        both = [
            torch.stack(cross_entropies(p[positions, :shared].float(), q[positions, :shared].float()))
            for positions in valid.flatten().nonzero()[:, 0].to(device).split(step)
        ]
        owner = np.repeat(part, lengths)
        for total, values in zip(totals, torch.cat(both, dim=1).cpu().numpy(), strict=True):
            total += np.bincount(owner, values, len(rows))
    if not np.isfinite(totals).all():
        raise UserError("a model gives probabilities that are not numbers (NaN or infinite weights?)")
    return totals / np.array(counts)
