"""Texts and conversations -> token ids, in a worker process.

A worker parses a payload again (cheap), takes the rows that are assigned to the shard, and returns their ids
flat, so that little travels between processes. It imports no transformers, so it starts fast.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from emo.common.errors import UserError

from ..encoding.chat_templates import ChatTemplate
from ..encoding.chats import ChatEncoder
from ..encoding.templates import Chat, Conversation, render
from ..encoding.tokenizer import TokenizerFacts
from ..encoding.words import TextEncoder
from ..selection.contamination import Finder, load
from ..selection.plan import Part, Plan
from ..sources.inputs import AGAIN, Input
from ..sources.rows import Row, TokenIds, checksum, plain_text, take
from .format import token_dtype
from .reencode import Sampled, sample

NONE = np.zeros(0, np.int64)
SAMPLE_CHARS = 1000  # of a row that are compared

Sequences = list[tuple[np.ndarray, np.ndarray]]  # ids, and int64 [k, 2] the supervised ones among them


class EncodeSettings(NamedTuple):
    """All that the ids depend on, besides the rows."""

    directory: Path  # of the saved tokenizer
    tokenizer: TokenizerFacts
    template: str
    block: int  # instruct: longest example
    overlong: str  # instruct: drop, truncate or split longer ones
    grams: Path | None  # test rows to look for, see contamination.py
    by_words: bool = True  # see words.py
    chat: ChatTemplate | None = None  # instead of `template`


class Encoded(NamedTuple):
    """Sequences of a payload, flat."""

    ids: np.ndarray  # uint16 or uint32
    lengths: np.ndarray  # int64 [sequences]
    spans: list[np.ndarray]  # instruct: int64 [k, 2] supervised tokens of each sequence
    sources: np.ndarray  # uint64 [sequences]: a hash of the tokens of the row that each is of
    documents: int  # rows that went in
    counts: Counter[str]  # what was cut or dropped, by reason
    overlap: np.ndarray = NONE  # int64: grams of test rows that the rows contain
    overlapping: int = 0  # rows that contain one
    shard: int = 0  # that takes the rows, counted through all splits
    domain: str = ""  # of all rows
    sampled: Sequence[Sampled] = ()  # rows to be encoded again
    ends: frozenset[int] = frozenset()  # instruct: the tokens that end answers


class RowEncoder:
    """Encodes the rows of payloads."""

    def __init__(self, settings: EncodeSettings) -> None:
        self.settings = settings
        facts = settings.tokenizer
        self.dtype = token_dtype(facts.vocab_size)
        self.text = TextEncoder(settings.directory, self.dtype, settings.by_words)
        self.bos = np.array(facts.start, self.dtype).tobytes()
        self.eos = b"" if facts.eos_id is None else self.dtype.type(facts.eos_id).tobytes()
        self.chat = None if settings.chat is None else ChatEncoder(settings.directory, settings.chat)
        self.finder = None if settings.grams is None else Finder(load(settings.grams))

    def encode(self, part: Part) -> Encoded:
        """Return the rows of a payload that the shard takes, encoded as often as it takes them."""
        rows = _rows(part, part.copies)
        encoded = self.texts(rows, part.name) if part.spec.kind == "text" else self.conversations(rows)
        encoded = encoded._replace(shard=part.shard, domain=part.domain, sampled=sample(part))
        if self.finder is None:
            return encoded
        hits, overlapping = self.finder.overlap([plain_text(row) for row in rows])
        return encoded._replace(overlap=hits, overlapping=overlapping)

    def count(self, part: Part) -> np.ndarray:
        """Return the tokens of each row that the shard takes, of one copy: int64."""
        rows = _rows(part, part.copies > 0)
        if part.spec.kind == "text":
            return self.texts(rows, part.name).lengths
        examples = self._examples(rows, Counter(), set())
        return np.array([sum(len(ids) for ids, _ in example) for example in examples], np.int64)

    def texts(self, texts: Sequence[Row], name: str) -> Encoded:
        """Return each text as BOS, its tokens, EOS; tokens as they are. All are of the source `name`."""
        written = iter(self.text.encode([text for text in texts if isinstance(text, str)]))
        size, encoded = self.settings.tokenizer.vocab_size, []
        for text in texts:
            if not isinstance(text, TokenIds):
                encoded.append(self.bos + next(written) + self.eos)
                continue
            if max(text.ids) >= size:
                raise UserError(
                    f"{name}: token {max(text.ids)} is not one of the tokenizer's {size:,}; name the "
                    "tokenizer that these tokens are from"
                )
            encoded.append(np.array(text.ids, self.dtype).tobytes())
        lengths = np.array([self._count(ids) for ids in encoded], np.int64)
        return Encoded(self._array(b"".join(encoded)), lengths, [], _hashes(encoded), len(texts), Counter())

    def conversations(self, rows: Sequence[Row]) -> Encoded:
        """Return each conversation as BOS and its turns, each ended by EOS; spans cover responses and EOS."""
        counts: Counter[str] = Counter()
        ends: set[int] = set()
        examples = self._examples(rows, counts, ends)
        sequences = [sequence for example in examples for sequence in example]
        whole = _hashes([b"".join(ids.tobytes() for ids, _ in example) for example in examples])
        sources = np.repeat(whole, [len(example) for example in examples])
        lengths = np.array([len(ids) for ids, _ in sequences], np.int64)
        flat = np.concatenate([np.zeros(0, self.dtype), *(ids for ids, _ in sequences)])
        return Encoded(
            flat, lengths, [spans for _, spans in sequences], sources, len(rows), counts, ends=frozenset(ends)
        )

    def _examples(self, rows: Sequence[Row], counts: Counter[str], ends: set[int]) -> list[Sequences]:
        """Return the sequences of each conversation or chat; rows are all one or the other.

        Adds to `ends` the tokens that end supervised answers.

        Prompt and response are encoded apart, so that no token belongs to both, and training sees a prompt
        as the very ids that generation will give the model.
        """
        if self.chat is not None:
            chats = [self.chat.encode(row) for row in rows if isinstance(row, Chat)]
            ends.update(ids[stop - 1] for chat in chats for ids, spans in chat for _, stop in spans)
            return [
                [
                    sequence
                    for ids, spans in chat
                    for sequence in self._fit(np.array(ids, self.dtype), spans, counts)
                ]
                for chat in chats
            ]
        talks = [row for row in rows if isinstance(row, Conversation)]
        if talks and self.settings.tokenizer.eos_id is not None:
            ends.add(self.settings.tokenizer.eos_id)
        examples = [render(talk, self.settings.template) for talk in talks]
        turns = [turn for example in examples for turn in example]
        prompts = iter(self.text.encode([turn.text[: turn.start] for turn in turns]))
        responses = iter(self.text.encode([turn.text[turn.start :] for turn in turns], continuing=True))
        fitted = []
        for talk, example in zip(talks, examples, strict=True):
            ids, spans = bytearray(self.bos), []
            for number in range(len(example)):
                ids += next(prompts)
                begin = self._count(ids)
                ids += next(responses) + self.eos
                if number not in talk.unsupervised:
                    spans.append((begin, self._count(ids)))
            fitted.append(self._fit(self._array(ids), np.array(spans, np.int64), counts))
        return fitted

    def _count(self, ids: bytes | bytearray) -> int:
        return len(ids) // self.dtype.itemsize

    def _array(self, ids: bytes | bytearray) -> np.ndarray:
        return np.frombuffer(ids, self.dtype)

    def _fit(self, ids: np.ndarray, spans: np.ndarray, counts: Counter[str]) -> Sequences:
        """Return an example as sequences of at most `block` tokens, each with something supervised."""
        block, policy = self.settings.block, self.settings.overlong
        if len(ids) <= block:
            return [(ids, spans)]
        counts["overlong"] += 1
        if policy == "drop":
            counts["overlong_dropped"] += 1
            counts["overlong_tokens_lost"] += len(ids)
            return []
        fitted = []
        used = 0
        for start in range(0, len(ids) if policy == "split" else 1, block):
            piece = ids[start : start + block]
            inside = np.clip(spans - start, 0, len(piece))
            inside = inside[inside[:, 0] < inside[:, 1]]
            # A piece's first token is predicted by nothing: supervised alone, it teaches nothing.
            if len(inside) and inside[-1, 1] > 1:
                fitted.append((piece, inside))
                used += len(piece)
            elif policy == "split":
                counts["overlong_pieces_without_response"] += 1
        counts["overlong_tokens_lost"] += len(ids) - used
        if not fitted:
            counts["overlong_without_response"] += 1
        else:
            counts[{"truncate": "overlong_truncated", "split": "overlong_split"}[policy]] += 1
        return fitted


def _hashes(rows: list[bytes]) -> np.ndarray:
    """Return a hash of each row's tokens, uint64: parts and copies of a row are known by it."""
    digests = b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(digests, "<u8")


def _rows(part: Part, copies: np.ndarray) -> list[Row]:
    if checksum(part.payload) != part.check:
        raise UserError(f"{part.name} changed after it was scanned; {AGAIN}")
    return take(part.payload, part.spec, copies.tolist())


def encoding(settings: EncodeSettings) -> Callable[[Part], Encoded]:
    """Return the function of workers that encode."""
    return RowEncoder(settings).encode


def counting(settings: EncodeSettings) -> Callable[[Part], np.ndarray]:
    """Return the function of workers that only count tokens."""
    return RowEncoder(settings).count


def words_agree(settings: EncodeSettings, plan: Plan, inputs: list[Input]) -> bool:
    """Return whether a sample of real rows gets the same ids by words as from the tokenizer itself."""
    by_words = TextEncoder(settings.directory, token_dtype(settings.tokenizer.vocab_size))
    if by_words.words is None:
        return True
    whole = TextEncoder(by_words.directory, by_words.dtype, by_words=False)
    texts: dict[bool, list[str]] = {False: [], True: []}  # by whether they continue others
    for part in plan.once(inputs, plan.sample()):
        for row in _rows(part, part.copies):
            if isinstance(row, str):
                texts[False].append(row[:SAMPLE_CHARS])
            elif isinstance(row, Conversation):
                for turn in render(row, settings.template):
                    texts[False].append(turn.text[: turn.start][:SAMPLE_CHARS])
                    texts[True].append(turn.text[turn.start :][:SAMPLE_CHARS])
    return all(by_words.encode(texts[c], c) == whole.encode(texts[c], c) for c in texts if texts[c])
