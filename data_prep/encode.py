"""Texts and conversations -> token ids, in a worker process.

A worker parses a payload again (cheap), takes the rows that the plan gave to the shard, and returns their ids
flat, so that little travels between processes. It imports no transformers, so it starts fast.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from data_prep.config import UserError
from data_prep.contamination import Finder, load
from data_prep.plan import Part
from data_prep.rows import checksum, plain_text, take
from data_prep.shards import token_dtype
from data_prep.templates import Conversation, render
from data_prep.tokenizer import TokenizerFacts, encoder

NONE = np.zeros(0, np.int64)


class EncodeSettings(NamedTuple):
    """All that the ids depend on, besides the rows."""

    place: Path  # of the saved tokenizer
    tokenizer: TokenizerFacts
    template: str
    block: int  # instruct: longest example
    overlong: str  # instruct: drop, truncate or split longer ones
    grams: Path | None  # test rows to look for, see contamination.py


class Encoded(NamedTuple):
    """Sequences of a payload, flat."""

    ids: np.ndarray  # uint16 or uint32
    lengths: np.ndarray  # int64 [sequences]
    spans: list[np.ndarray]  # instruct: int64 [k, 2] supervised tokens of each sequence
    documents: int  # rows that went in
    counts: Counter[str]  # what was cut or dropped, by reason
    overlap: np.ndarray  # int64: grams of test rows that stand in the rows
    overlapping: int  # rows in which one stands


class Encoder:
    """Encodes the rows of payloads."""

    def __init__(self, settings: EncodeSettings) -> None:
        self.settings = settings
        self.tokenizer = encoder(settings.place)
        facts = settings.tokenizer
        self.dtype = token_dtype(facts.vocab_size)
        self.bos = [] if facts.bos_id is None else [facts.bos_id]
        self.eos = [] if facts.eos_id is None else [facts.eos_id]
        self.finder = None if settings.grams is None else Finder(load(settings.grams))

    @cached_property
    def continuing(self) -> Tokenizer:
        """For text that goes on from earlier text; only instructions need it."""
        return encoder(self.settings.place, continuing=True)

    def encode(self, part: Part) -> Encoded:
        """Encode the rows of a payload that the shard takes, copies next to each other."""
        if checksum(part.payload) != part.check:
            raise UserError(f"{part.name} changed since it was planned; run prepare with --force")
        rows = take(part.payload, part.spec, part.copies.tolist())
        if part.spec.kind == "text":
            encoded = self.texts([row for row in rows if isinstance(row, str)])
        else:
            encoded = self.conversations([row for row in rows if isinstance(row, Conversation)])
        if self.finder is None:
            return encoded
        hits, texts = self.finder.overlap([plain_text(row) for row in rows])
        return encoded._replace(overlap=hits, overlapping=texts)

    def texts(self, texts: list[str]) -> Encoded:
        """Each text as BOS, its tokens, EOS."""
        found = self._encode(self.tokenizer, texts)
        around = len(self.bos) + len(self.eos)
        lengths = np.array([len(ids) + around for ids in found], np.int64)
        parts = chain.from_iterable((self.bos, ids, self.eos) for ids in found)
        flat = np.fromiter(chain.from_iterable(parts), self.dtype, lengths.sum())
        return Encoded(flat, lengths, [], len(texts), Counter(), NONE, 0)

    def conversations(self, conversations: list[Conversation]) -> Encoded:
        """Each conversation as BOS and its turns, each ended by EOS; spans cover responses and EOS.

        Prompt and response are encoded apart, so that no token belongs to both, and training sees a prompt
        as the very ids that generation will give the model.
        """
        examples = [render(c, self.settings.template) for c in conversations]
        turns = [turn for example in examples for turn in example]
        prompts = iter(self._encode(self.tokenizer, [turn.text[: turn.start] for turn in turns]))
        responses = iter(self._encode(self.continuing, [turn.text[turn.start :] for turn in turns]))
        counts: Counter[str] = Counter()
        sequences: list[tuple[np.ndarray, np.ndarray]] = []
        for example in examples:
            ids, spans = list(self.bos), []
            for _ in example:
                ids += next(prompts)
                begin = len(ids)
                ids += next(responses) + self.eos
                spans.append((begin, len(ids)))
            sequences += self._fit(np.array(ids, self.dtype), np.array(spans, np.int64), counts)
        lengths = np.array([len(ids) for ids, _ in sequences], np.int64)
        flat = np.concatenate([np.zeros(0, self.dtype), *(ids for ids, _ in sequences)])
        return Encoded(flat, lengths, [s for _, s in sequences], len(conversations), counts, NONE, 0)

    def _encode(self, tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        return [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _fit(
        self, ids: np.ndarray, spans: np.ndarray, counts: Counter[str]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """An example as sequences of at most `block` tokens, each with something supervised."""
        block, policy = self.settings.block, self.settings.overlong
        if len(ids) <= block:
            return [(ids, spans)]
        counts["overlong"] += 1
        if policy == "drop":
            counts["overlong_dropped"] += 1
            counts["overlong_tokens_lost"] += len(ids)
            return []
        fitted = []
        kept = 0
        for start in range(0, len(ids) if policy == "split" else 1, block):
            piece = ids[start : start + block]
            own = np.clip(spans - start, 0, len(piece))
            own = own[own[:, 0] < own[:, 1]]
            # A piece's first token is predicted by nothing: supervised alone, it teaches nothing.
            if len(own) and own[-1, 1] > 1:
                fitted.append((piece, own))
                kept += len(piece)
            elif policy == "split":
                counts["overlong_pieces_without_response"] += 1
        counts["overlong_tokens_lost"] += len(ids) - kept
        if not fitted:
            counts["overlong_without_response"] += 1
        else:
            counts[{"truncate": "overlong_truncated", "split": "overlong_split"}[policy]] += 1
        return fitted


_ENCODER: Encoder | None = None


def set_up(settings: EncodeSettings) -> None:
    """Make this process's encoder; the first thing that a worker does."""
    global _ENCODER
    _ENCODER = Encoder(settings)


def encode_part(part: Part) -> Encoded:
    """Encode with this process's encoder."""
    assert _ENCODER is not None, "set_up comes first"
    return _ENCODER.encode(part)
