"""Which way of scoring a model can be trusted with, found by comparing with the model's own forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from emo.eval.icl.head import own_nll
from emo.eval.icl.layout import MIN_CONTEXT, Item, ItemScore
from emo.eval.icl.scores import NotFiniteError

# Rounding that is forgiven, per token and per nat of a sum.
ROUNDING = {torch.float32: 3e-5, torch.float64: 3e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
WINDOWS = (
    "sliding_window",
    "window_size",
    "attention_window_size",
    "attention_chunk_size",
    "local_attention",
)
LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary embeddings that change with the longest row of a batch


def expected(items: Sequence[Item], alone: Callable[[Item], ItemScore]) -> list[dict[int, ItemScore]]:
    """Return what the first and the last tail of every item must score; `alone` scores one whole prompt."""
    scores = []
    for item in items:
        by_tail = {}
        for k in {0, len(item.tails) - 1} if item.tails else ():
            by_tail[k] = alone(Item(item.prefix, [item.tails[k]], None, [item.unscored(k)]))
        scores.append(by_tail or {-1: alone(item)})
    return scores


def own_score(model: Any, item: Item, ignored: int | None = None) -> ItemScore:
    """The score of an item by the model's own forward, one prompt at a time: nothing is assumed."""
    return ItemScore.of_prompts(item, [own_nll(model, ids, ignored) for ids in item.prompts()])


def agree(
    items: Sequence[Item],
    actual: Sequence[ItemScore],
    reference: Sequence[dict[int, ItemScore]],
    dtype: torch.dtype,
) -> bool:
    """Return whether every sum equals the reference up to rounding; NaN never does."""
    for item, ours, by_tail in zip(items, actual, reference, strict=True):
        for k, score in by_tail.items():
            pairs = [(len(item.prefix), ours.prefix, score.prefix)]
            if k >= 0:
                pairs.append((len(item.tails[k]), ours.tails[k], score.tails[0]))
            for tokens, value, other in pairs:
                if not abs(value - other) <= ROUNDING[dtype] * (tokens + abs(other)):
                    return False
    return True


def made_up_items(vocabulary: int) -> list[Item]:
    """Small items of every shape: with a shared beginning, tails of different lengths, one tail, padding."""
    ids = (np.arange(MIN_CONTEXT + 24) * 7919 + 13) % vocabulary
    start = ids[: MIN_CONTEXT + 4]
    shared = [
        Item(np.concatenate([start, ids[-8 - j : -4 - j]]), [ids[3:6], ids[8:9], ids[1:5]], "probe")
        for j in range(4)
    ]
    far = Item(ids[:9], [ids[4:20], ids[7:30], ids[2:22], ids[11:20]])
    alone = [Item(ids[j : 6 + 2 * j], [ids[9:12]], "alone") for j in range(4)]
    return [*shared, far, Item(ids[:9], [ids[4:6], ids[7:10]]), Item(ids[5:6], [ids[9:12]]), *alone]


def samples_of(items: Sequence[Item]) -> list[Item]:
    """The longest and the shortest of real items."""
    longest = max(range(len(items)), key=lambda i: items[i].longest)
    shortest = min(range(len(items)), key=lambda i: items[i].longest)
    return [items[i] for i in sorted({longest, shortest})]


def attends_everywhere(config: Any) -> bool:
    """Return whether every layer sees all earlier tokens.

    Windows are built into 2-D masks, which a 4-D one replaces, and are longer than what a probe can afford.
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds:
        return set(kinds) <= {"full_attention", "attention", "global"}
    return not any(
        getattr(config, name, None) and getattr(config, f"use_{name}", True) is not False for name in WINDOWS
    )


def depends_on_length(config: Any) -> bool:
    """Return whether a prompt's scores depend on how long other prompts of its batch are."""
    return any(f"'{kind}'" in str(config.to_dict()) for kind in LENGTH_DEPENDENT)


@torch.inference_mode()
def is_causal(model: Any) -> bool:
    """Return whether scores depend on earlier tokens only. Raises NotFiniteError when they are NaN."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(8, device=next(model.parameters()).device) * 7919 + 13) % vocabulary
    changed = ids.clone()
    changed[-1] = (ids[-1] + 1) % vocabulary
    logits = [model(input_ids=row[None], use_cache=False).logits[0].float() for row in (ids, changed)]
    if not all(bool(scores.isfinite().all()) for scores in logits):
        raise NotFiniteError("its logits are not finite (NaN or infinite)")
    # The same arithmetic twice: where only the past counts there is hardly any rounding to forgive.
    forgiven = ROUNDING[model.dtype] / 10 * float(logits[0].abs().max())
    return float((logits[0] - logits[1])[:-1].abs().max()) <= forgiven
