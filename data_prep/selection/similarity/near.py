"""Near duplicates: MinHash signatures of rows, compared if they agree in a complete band.

A text has one signature. An instruction row has two, of the prompts and of the responses, and both must be
similar. Rows that share a system message, a passage or examples are no duplicates if they teach other
responses. A response of fewer than MIN_WORDS words is too short to compare: then the prompts must be equal.
A system message or a tool's result of at least MIN_WORDS words belongs to the prompt, as it may be the
passage. A shorter one, such as "Be brief.", does not count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

import numpy as np
import pyarrow as pa

from ...encoding.chat_templates import REASONING
from ...encoding.templates import Chat, Conversation
from ...sources.rows import plain_text
from ...sources.spec import Row
from ..arrow import bytes_of, lists_of
from .grams import WORD, mixed, split

PERMUTATIONS = 128
SHINGLE = 5  # words
MIN_WORDS = 10
UNLIMITED = 1 << 40  # words in a shingle that is a complete text
# Factors, odd, and summands, uint64 [PERMUTATIONS, 2].
_PERMUTED = mixed(np.arange(1, 2 * PERMUTATIONS + 1, dtype=np.uint64)).reshape(-1, 2)
_PERMUTED[:, 0] |= np.uint64(1)


def signatures(rows: Sequence[Row], kind: str) -> np.ndarray:
    """Return MinHash signatures of rows: uint32 [rows, 1 (text) or 2 (instruct), PERMUTATIONS]."""
    if kind == "text":
        return _signatures([plain_text(row) for row in rows], SHINGLE)[:, None]
    prompts, responses = zip(*map(_prompt_and_response, rows), strict=True) if rows else ((), ())
    comparable = split(responses).totals(len(rows)) >= MIN_WORDS * WORD
    signed = _signatures(prompts, np.where(comparable, SHINGLE, UNLIMITED))
    return np.stack([signed, _signatures(responses, SHINGLE, salt=1)], axis=1)


def _prompt_and_response(row: Row) -> tuple[str, str]:
    """Return the text before the answers and the text of the assistant in an instruction row."""
    if isinstance(row, Conversation):
        prompts = [f"{exchange.prompt}\n{exchange.input}" for exchange in row.exchanges]
        responses = "\n".join(exchange.response for exchange in row.exchanges)
        return "\n".join(_passages([row.system]) + prompts), responses
    assert isinstance(row, Chat)
    texts: dict[str, list[str]] = {"user": [], "assistant": []}
    for message in json.loads(row.messages):
        parts = [message.get(key) for key in (*REASONING, "content", "tool_calls")]
        texts.setdefault(message["role"], []).extend(
            part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part
        )
    others = [text for role, said in texts.items() if role not in ("user", "assistant") for text in said]
    return "\n".join(_passages(others) + texts["user"]), "\n".join(texts["assistant"])


def _passages(texts: Sequence[str]) -> list[str]:
    """Return the texts that are long enough to be what a question is about."""
    if not any(texts):
        return []
    long = split(texts).totals(len(texts)) >= MIN_WORDS * WORD
    return [text for text, is_long in zip(texts, long, strict=True) if is_long]


def _signatures(texts: Sequence[str], words: int | np.ndarray, salt: int = 0) -> np.ndarray:
    """Return the MinHash of each text's runs of `words` words, uint32 [texts, PERMUTATIONS]."""
    hashes, text = split(texts, punctuation=True).grams(words, short=True)
    hashes = mixed(hashes + np.uint64(salt))
    minima = np.full((len(texts), PERMUTATIONS), 2**32 - 1, np.uint32)
    if len(hashes):
        owners, begins = np.unique(text, return_index=True)
        for number, (factor, summand) in enumerate(_PERMUTED):
            values = ((hashes * factor + summand) >> np.uint64(32)).astype(np.uint32)
            minima[owners, number] = np.minimum.reduceat(values, begins)
    return minima


def band_keys(signed: np.ndarray, threshold: float) -> np.ndarray:
    """Return a hash of each band of rows, uint64 [rows, bands].

    The salt makes the shingles of prompts and responses different, so the minimum of both signatures is the
    signature of both together.
    """
    both = np.min(signed, axis=1)
    bands, width = band_shape(threshold)
    keys = np.zeros((len(both), bands), np.uint64)
    for number in range(width):
        keys = mixed((keys ^ both[:, number : bands * width : width]) + np.uint64(0x9E3779B97F4A7C15))
    return keys


def near_columns(signed: np.ndarray, usable: np.ndarray, threshold: float) -> dict[str, pa.Array]:
    """Return the columns by which rows are compared, empty for rows that are not usable.

    signed: signatures of the usable rows; usable: bool [rows].
    """
    keys = band_keys(signed, threshold)
    before = np.append(0, np.cumsum(usable))
    return {
        "signature": bytes_of(before * signed[:1].nbytes, signed.tobytes()),
        "bands": lists_of(before * keys.shape[1], keys.ravel()),
    }


@cache
def band_shape(threshold: float) -> tuple[int, int]:
    """Return the number of bands, and of values in each, with the fewest wrong and missed candidates.

    A pair of similarity s agrees in a band with probability 1 - (1 - s**width)**bands. The error is
    integrated on both sides of the threshold, with all similarities equally likely.
    """
    below = (np.arange(0, threshold, 0.001) + 0.0005)[:, None]
    above = (np.arange(threshold, 1, 0.001) + 0.0005)[:, None]
    best = (np.inf, 1, PERMUTATIONS)
    for bands in range(1, PERMUTATIONS + 1):
        widths = np.arange(1, PERMUTATIONS // bands + 1)
        wrong = (1 - (1 - below**widths) ** bands).sum(axis=0)
        missed = ((1 - above**widths) ** bands).sum(axis=0)
        index = int(np.argmin(wrong + missed))
        best = min(best, (float((wrong + missed)[index]), bands, int(widths[index])))
    return best[1:]
