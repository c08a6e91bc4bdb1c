"""What a model's configuration and a few prompts say about how it may be scored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from emo.eval.icl.layout import MIN_CONTEXT, Item
from emo.eval.icl.settings import NotFiniteError

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


def made_up_items(vocabulary: int) -> list[Item]:
    """Return small items of every shape: with a shared beginning, tails of different lengths, one tail."""
    ids = (np.arange(MIN_CONTEXT + 24) * 7919 + 13) % vocabulary
    start = ids[: MIN_CONTEXT + 4]
    shared = [
        Item(np.concatenate([start, ids[-8 - j : -4 - j]]), [ids[3:6], ids[8:9], ids[1:5]], "probe")
        for j in range(4)
    ]
    far = Item(ids[:9], [ids[4:20], ids[7:30], ids[2:22], ids[11:20]])
    alone = [Item(ids[j : 6 + 2 * j], [ids[9:12]], "alone") for j in range(4)]
    return [*shared, far, Item(ids[:9], [ids[4:6], ids[7:10]]), Item(ids[5:6], [ids[9:12]]), *alone]


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
