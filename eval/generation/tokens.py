"""Token ids of prefixes and texts: where a model begins, where it ends, how far it reaches."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from emo.common.errors import UserError, one_line
from emo.common.untrusted import read_json
from emo.eval.model import EvaluatedModel


def prompt_ids(model: EvaluatedModel, prefix: str) -> list[int]:
    """Token ids of a prefix, without an end token; an empty one begins with BOS (or EOS)."""
    tokenizer = model.tokenizer
    ids = _without_end(tokenizer, prefix)
    if ids:
        return ids
    start = _first(tokenizer)
    if start is None:
        raise UserError(f"{model.given}: its tokenizer has no BOS or EOS to begin with; give --prefix TEXT")
    return [start]


def end_ids(model: EvaluatedModel) -> frozenset[int]:
    """Ids that end a text, by the tokenizer and by the model's generation settings."""
    settings = getattr(model.model, "generation_config", None)
    configured = getattr(settings, "eos_token_id", None)
    ids = [model.tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    return frozenset(i for i in ids if i is not None)


def identity_of(model: EvaluatedModel, decoding: Any, batch: int | None) -> dict[str, Any]:
    """Return all that decides what a loaded model writes after a prompt and a seed.

    batch: texts at a time, where it may decide close calls (in half precision, see `sampling`).
    """
    return {
        "weights": model.digest,
        "generation_config": model.generation_digest,
        "dtype": str(model.model.dtype),
        "tokenizer": model.tokenizer_digest,
        "ends": sorted(end_ids(model)),
        "decoding": asdict(decoding),
        "batch": batch if model.model.dtype.itemsize < 4 else None,
    }


def context_of(model: EvaluatedModel) -> int | None:
    """Longest sequence of a model in tokens, if its configuration says so."""
    try:
        config = read_json(model.path / "config.json")
        config = config.get("text_config", config)
        length = config.get("max_position_embeddings") or config.get("n_positions")
        return None if length is None else int(length)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{model.path / 'config.json'} is damaged: {one_line(error, 120)}") from None


def split_ids(tokenizer: Any, prefix: str, text: str) -> tuple[list[int], list[int]]:
    """Ids of prefix + text, in those of the prefix (at least one: BOS, or the first token) and the rest."""
    whole, start = list(tokenizer(prefix + text).input_ids), _without_end(tokenizer, prefix)
    first = _first(tokenizer)
    if not start and first is not None and whole[:1] != [first]:
        whole = [first, *whole]
    common = next((i for i, (a, b) in enumerate(zip(whole, start, strict=False)) if a != b), len(start))
    common = max(1, min(common, len(whole)))
    return whole[:common], whole[common:]


def text_after(tokenizer: Any, start: list[int], ids: list[int]) -> str:
    """The text of `ids` where it follows the ids of a prompt, special tokens left out."""
    before = tokenizer.decode(start, skip_special_tokens=True)
    return tokenizer.decode([*start, *ids], skip_special_tokens=True)[len(before) :]


def _without_end(tokenizer: Any, text: str) -> list[int]:
    ids = list(tokenizer(text).input_ids) if text else []
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids


def _first(tokenizer: Any) -> int | None:
    """BOS, or what stands for it."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
