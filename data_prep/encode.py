"""Texts and conversations -> token ids, in a worker process.

A worker parses a payload again (cheap), takes the rows that the plan gave to the shard, and returns their ids
flat, so that little travels between processes. It imports no transformers, so it starts fast.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import UserError
from data_prep.contamination import Finder, load
from data_prep.rows import checksum, plain_text, take
from data_prep.scan import Part
from data_prep.shards import token_dtype
from data_prep.templates import Conversation, render
from data_prep.tokenizer import TokenizerFacts
from data_prep.words import TextEncoder

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
        facts = settings.tokenizer
        self.dtype = token_dtype(facts.vocab_size)
        self.text = TextEncoder(settings.place, self.dtype)
        self.bos = b"" if facts.bos_id is None else self.dtype.type(facts.bos_id).tobytes()
        self.eos = b"" if facts.eos_id is None else self.dtype.type(facts.eos_id).tobytes()
        self.finder = None if settings.grams is None else Finder(load(settings.grams))

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
        found = [self.bos + ids + self.eos for ids in self.text.encode(texts)]
        lengths = np.array([self._count(ids) for ids in found], np.int64)
        return Encoded(self._array(b"".join(found)), lengths, [], len(texts), Counter(), NONE, 0)

    def conversations(self, conversations: list[Conversation]) -> Encoded:
        """Each conversation as BOS and its turns, each ended by EOS; spans cover responses and EOS.

        Prompt and response are encoded apart, so that no token belongs to both, and training sees a prompt
        as the very ids that generation will give the model.
        """
        examples = [render(c, self.settings.template) for c in conversations]
        turns = [turn for example in examples for turn in example]
        prompts = iter(self.text.encode([turn.text[: turn.start] for turn in turns]))
        responses = iter(self.text.encode([turn.text[turn.start :] for turn in turns], continuing=True))
        counts: Counter[str] = Counter()
        sequences: list[tuple[np.ndarray, np.ndarray]] = []
        for example in examples:
            ids, spans = bytearray(self.bos), []
            for _ in example:
                ids += next(prompts)
                begin = self._count(ids)
                ids += next(responses) + self.eos
                spans.append((begin, self._count(ids)))
            sequences += self._fit(self._array(ids), np.array(spans, np.int64), counts)
        lengths = np.array([len(ids) for ids, _ in sequences], np.int64)
        flat = np.concatenate([np.zeros(0, self.dtype), *(ids for ids, _ in sequences)])
        return Encoded(flat, lengths, [s for _, s in sequences], len(conversations), counts, NONE, 0)

    def _count(self, ids: bytes | bytearray) -> int:
        return len(ids) // self.dtype.itemsize

    def _array(self, ids: bytes | bytearray) -> np.ndarray:
        return np.frombuffer(ids, self.dtype)

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
