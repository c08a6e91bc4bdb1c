"""Sampled text: what a model says when nothing is cut from its distribution.

Top-k 0, top-p 1, temperature 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from eval import store
from eval.model import EvaluatedModel
from eval.results import MODELS, SAMPLES

if TYPE_CHECKING:
    import torch


def sample(
    model: EvaluatedModel, prefixes: list[str], count: int, tokens: int, seed: int
) -> list[dict[str, Any]]:
    """`count` continuations of every prefix ("" begins a text), at most `tokens` tokens each.

    Every continuation has its own seed, so that the first of ten equals the first of a hundred.
    UserError when a text would not fit into the model's context.
    """
    import torch
    from transformers import GenerationConfig

    require_counts(count, tokens)
    tokenizer, lm = model.tokenizer, model.model
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
    lm.generation_config = settings  # the checkpoint's own defaults may truncate
    samples = []
    for prefix in prefixes:
        ids = prompt_ids(model, prefix)
        _require_room(model, prefix, ids.shape[1], tokens)
        for number in range(count):
            torch.manual_seed(seed * 1_000_003 + number)
            with torch.inference_mode():
                out = lm.generate(ids, attention_mask=torch.ones_like(ids))
            new = out[0, ids.shape[1] :].tolist()
            ended = tokenizer.eos_token_id in new
            whole = tokenizer.decode(out[0], skip_special_tokens=True)
            start = tokenizer.decode(ids[0], skip_special_tokens=True)
            samples.append(
                {"prefix": prefix, "text": whole[len(start) :], "ended": ended, "tokens": len(new)}
            )
    return samples


def prompt_ids(model: EvaluatedModel, prefix: str) -> torch.Tensor:
    """Token ids [1, T] of a prefix, without an end token; an empty one begins with BOS (or EOS)."""
    import torch

    tokenizer = model.tokenizer
    ids = tokenizer(prefix).input_ids if prefix else []
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    if not ids:
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if start is None:
            raise UserError(
                f"{model.given}: its tokenizer has no BOS or EOS to begin with; give --prefix TEXT"
            )
        ids = [start]
    return torch.tensor([ids], device=model.model.device)


def require_counts(count: int, tokens: int) -> None:
    """UserError unless there is something to sample."""
    for option, value in (("--samples", count), ("--tokens", tokens)):
        if value < 1:
            raise UserError(f"{option} must be at least 1")


def _require_room(model: EvaluatedModel, prefix: str, length: int, tokens: int) -> None:
    context = model.context_length()
    if context is not None and length + tokens > context:
        raise UserError(
            f"prefix {prefix[:40]!r} has {length} tokens and --tokens {tokens} exceed "
            f"the model's context of {context}"
        )


def write_samples(
    model: EvaluatedModel, out: Path, prefixes: list[str], count: int, tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Sample and keep the text in OUT/models/NAME/samples.json, for the report."""
    samples = sample(model, prefixes, count, tokens, seed)
    record = {"weights": model.digest, "seed": seed, "max_tokens": tokens, "samples": samples}
    store.replace(out / MODELS / model.name / SAMPLES, store.dump(record))
    return samples
