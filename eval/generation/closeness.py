"""MAUVE: how close sampled text is to human text, beside what two halves of the human text reach.

The package mauve-text is GPL-3.0 and therefore an extra: it is imported when MAUVE is asked for. It gets
features computed here, one vector per text: from a sentence encoder (topical), or the last hidden state of
any language model (closer to the paper's GPT-2-large).

The score depends on the number of texts, so the ceiling is beside a score of the same size.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emo.common.errors import UserError

MIN_TEXTS = 100  # halves of 50 make five clusters; with fewer the score says nothing
MAX_TOKENS = 256  # of a text that is featurized, as in the paper
SETTINGS = {  # the paper's
    "mauve_scaling_factor": 5,
    "kmeans_num_redo": 5,
    "kmeans_max_iter": 500,
    "kmeans_explained_var": 0.9,
    "seed": 25,
}
BATCH = 16

Features = Callable[[Sequence[str]], np.ndarray]


def require_mauve() -> None:
    """Raises UserError where mauve-text is not installed."""
    if importlib.util.find_spec("mauve") is None:
        raise UserError(
            "MAUVE needs the package mauve-text (GPL-3.0, therefore not installed with this project): "
            "pip install 'emo-pipeline[mauve]'"
        )


def require_texts(human: int, sampled: int) -> None:
    """Raises UserError for fewer texts than MAUVE's clusters can tell apart."""
    if min(human, sampled) < MIN_TEXTS:
        raise UserError(
            f"MAUVE needs at least {MIN_TEXTS} human and {MIN_TEXTS} sampled texts for its clusters; "
            f"there are {human} and {sampled}; take more prefixes, or leave out --mauve"
        )


def featurizer(name: str, dtype: str = "auto") -> Features:
    """`minilm` or a sentence model's directory or id; else hidden states of a language model."""
    if (
        name == "minilm"
        or name.startswith("sentence-transformers/")
        or (Path(name) / "modules.json").is_file()
    ):
        from emo.eval.icl.encoder import Encoder

        return Encoder(name)
    from emo.eval.model import EvaluatedModel

    model = EvaluatedModel(name, dtype=dtype)
    return lambda texts: hidden_states(model, texts)


@torch.inference_mode()
def hidden_states(model: Any, texts: Sequence[str], limit: int = MAX_TOKENS) -> np.ndarray:
    """Last layer's state at the last of at most `limit` tokens of every text: float32 [n, H]."""
    body, tokenizer = model.model.base_model, model.tokenizer
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    rows = [list(tokenizer(text).input_ids)[:limit] or [start or 0] for text in texts]
    states = np.empty((len(rows), model.model.config.get_text_config().hidden_size), dtype=np.float32)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for part in (order[i : i + BATCH] for i in range(0, len(order), BATCH)):
        width = len(rows[part[-1]])
        ids = torch.tensor([rows[i] + [0] * (width - len(rows[i])) for i in part])
        mask = torch.tensor([[1] * len(rows[i]) + [0] * (width - len(rows[i])) for i in part])
        device = model.model.device
        out = body(
            input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False
        ).last_hidden_state
        last = out[torch.arange(len(part)), mask.sum(dim=1) - 1]
        states[part] = last.float().cpu().numpy()
    if not np.isfinite(states).all():
        raise UserError(f"{model.given}: hidden states that are not numbers (NaN or infinite weights?)")
    return states


def mauve(human: np.ndarray, sampled: np.ndarray) -> float:
    """MAUVE of two sets of features [n, d], with the paper's settings: from 0 to 1, 1 for equal ones."""
    import mauve as package

    sys.stderr.flush()
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)  # faiss warns there that clusters are small, which is how MAUVE wants them
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(package.compute_mauve(p_features=human, q_features=sampled, **SETTINGS).mauve)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


def halves(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two disjoint random halves of range(count), of equal size."""
    order = np.random.default_rng(seed).permutation(count)
    return order[: count // 2], order[count // 2 : count // 2 * 2]


def beside_ceiling(human: np.ndarray, sampled: Sequence[np.ndarray], splits: int = 5) -> dict[str, Any]:
    """MAUVE of each set of samples, and at half the size of both sides beside the ceiling.

    human: features [n, d]; sampled: sets of [n, d] that continue the same prefixes. `half` compares one half
    of the human texts with the samples after the other half's prefixes, `ceiling` compares the two halves.
    """
    score = [mauve(human, features) for features in sampled]
    parts = [halves(len(human), seed) for seed in range(splits)]
    ceiling = [mauve(human[a], human[b]) for a, b in parts]
    half = [[mauve(human[a], features[b]) for a, b in parts] for features in sampled]
    return {
        "score": score,
        "half": [float(np.mean(values)) for values in half],
        "ceiling": float(np.mean(ceiling)),
        "ceiling_std": float(np.std(ceiling, ddof=1)) if splits > 1 else None,
        "texts": len(human),
    }
