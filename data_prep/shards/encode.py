"""Texts and conversations -> token ids, in a worker process.

A worker parses a payload again, which is cheap, takes the rows of the shard, and returns their ids as flat
arrays, which are fast to send between processes. It does not import transformers, so it starts fast.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from emo.common.errors import UserError

from ..config import LONG
from ..encoding.chat_templates import ChatTemplate
from ..encoding.chats import ChatEncoder
from ..encoding.pack import SPAN
from ..encoding.templates import Chat, Conversation, render
from ..encoding.tokenizer import TokenizerFacts
from ..encoding.weights import AnswerWeights, weighted_answer
from ..encoding.words import TextEncoder, special_pattern
from ..selection.plan import Plan, ShardPart
from ..selection.similarity.contamination import Finder, load
from ..sources.files import AGAIN
from ..sources.reader import SourceReader
from ..sources.rows import checksum, plain_text, take
from ..sources.spec import Row, TokenIds
from .format import token_dtype
from .reencode import Sampled, sample

NONE = np.zeros(0, np.int64)
SAMPLE_CHARS = 1000  # compared characters of a row
SHORT = "short_documents"  # counted among the losses
SPECIAL = "documents_with_special_tokens"  # in their text

Sequences = list[tuple[np.ndarray, np.ndarray]]  # ids, and SPAN [k] their supervised spans


class EncodeSettings(NamedTuple):
    """Everything but the rows that decides the ids."""

    directory: Path  # of the saved tokenizer
    tokenizer: TokenizerFacts
    template: str
    block: int  # instruct: longest example
    overlong: str  # instruct: drop, truncate or split longer ones
    grams: Path | None  # n-grams of test rows, see contamination.py
    by_words: bool = True  # see words.py
    chat: ChatTemplate | None = None  # instead of `template`
    min_tokens: int = 1  # text: shorter documents are left out


class Encoded(NamedTuple):
    """The sequences of a payload as flat arrays."""

    ids: np.ndarray  # uint16 or uint32
    lengths: np.ndarray  # int64 [sequences]
    spans: list[np.ndarray]  # instruct: SPAN [k] of each sequence
    sources: np.ndarray  # uint64 [sequences]: a hash of the tokens of each sequence's row
    documents: int  # input rows
    counts: Counter[str]  # what was cut or dropped, by reason
    overlap: np.ndarray = NONE  # int64: n-grams of test rows in the rows
    overlapping: int = 0  # rows with such an n-gram
    shard: int = 0  # counted through all splits
    domain: str = ""  # of all rows
    sampled: Sequence[Sampled] = ()  # rows to encode again
    ends: frozenset[int] = frozenset()  # instruct: the tokens that end answers


class RowEncoder:
    """Encodes the rows of payloads."""

    def __init__(self, settings: EncodeSettings) -> None:
        self.settings = settings
        facts = settings.tokenizer
        self.dtype = token_dtype(facts.vocab_size)
        self.text = TextEncoder(settings.directory, self.dtype, settings.by_words)
        self.special = special_pattern(settings.directory)
        self.bos = np.array(facts.start, self.dtype).tobytes()
        self.eos = b"" if facts.eos_id is None else self.dtype.type(facts.eos_id).tobytes()
        self.chat = None if settings.chat is None else ChatEncoder(settings.directory, settings.chat)
        self.finder = None if settings.grams is None else Finder(load(settings.grams))

    def encode(self, part: ShardPart) -> Encoded:
        """Return the encoded rows of a part, each as often as the shard takes it."""
        rows = _rows(part, part.copies)
        is_text = part.spec.kind == "text"
        encoded = self.texts(rows, part.name) if is_text else self.conversations(rows)
        encoded = encoded._replace(shard=part.shard, domain=part.domain, sampled=sample(part))
        if self.finder is None:
            return encoded
        if is_text:
            rows = [row for row, length in zip(rows, encoded.lengths, strict=True) if length]
        hits, overlapping = self.finder.overlap([plain_text(row) for row in rows])
        return encoded._replace(overlap=hits, overlapping=overlapping)

    def count(self, part: ShardPart) -> np.ndarray:
        """Return the number of tokens of each row that the shard takes, int64, for one copy."""
        rows = _rows(part, part.copies > 0)
        if part.spec.kind == "text":
            return self.texts(rows, part.name).lengths
        examples = self._examples(rows, Counter(), set())
        return np.array([sum(len(ids) for ids, _ in example) for example in examples], np.int64)

    def texts(self, texts: Sequence[Row], name: str) -> Encoded:
        """Return each text as BOS, its tokens and EOS. A text that is left out has no tokens.

        Token ids are unchanged. `name`: the source, for errors.
        """
        plain = [text for text in texts if isinstance(text, str)]
        written = iter(self.text.encode(plain))
        size = self.settings.tokenizer.vocab_size
        encoded = []
        for text in texts:
            if not isinstance(text, TokenIds):
                encoded.append(self.bos + next(written) + self.eos)
                continue
            if max(text.ids) >= size:
                raise UserError(
                    f"{name}: token {max(text.ids)} is not among the {size:,} tokens of the tokenizer. Set "
                    "the tokenizer that made these tokens",
                    code="token-range",
                )
            encoded.append(np.array(text.ids, self.dtype).tobytes())
        lengths = np.array([self._count(ids) for ids in encoded], np.int64)
        short = lengths < self.settings.min_tokens
        counts = Counter({SHORT: int(short.sum()), f"{SHORT}_tokens": int(lengths[short].sum())})
        counts[SPECIAL] = sum(self.special.search(text) is not None for text in plain)
        lengths[short] = 0
        encoded = [ids if length else b"" for ids, length in zip(encoded, lengths.tolist(), strict=True)]
        return Encoded(self._array(b"".join(encoded)), lengths, [], _hashes(encoded), len(texts), counts)

    def conversations(self, rows: Sequence[Row]) -> Encoded:
        """Return each conversation as BOS and its turns, each with EOS. Spans cover responses and EOS."""
        counts: Counter[str] = Counter()
        ends: set[int] = set()
        examples = self._examples(rows, counts, ends)
        sequences = [sequence for example in examples for sequence in example]
        hashes = _hashes([b"".join(ids.tobytes() for ids, _ in example) for example in examples])
        sources = np.repeat(hashes, [len(example) for example in examples])
        lengths = np.array([len(ids) for ids, _ in sequences], np.int64)
        flat = np.concatenate([np.zeros(0, self.dtype), *(ids for ids, _ in sequences)])
        return Encoded(
            flat, lengths, [spans for _, spans in sequences], sources, len(rows), counts, ends=frozenset(ends)
        )

    def _examples(self, rows: Sequence[Row], counts: Counter[str], ends: set[int]) -> list[Sequences]:
        """Return the sequences of each row. All rows are conversations, or all are chats.

        Adds losses to `counts`, and the tokens that end supervised answers to `ends`. Prompt and response are
        encoded separately: no token belongs to both, and a prompt has the same ids in training and
        generation.
        """
        if self.chat is not None:
            chats = [self.chat.encode(row) for row in rows if isinstance(row, Chat)]
            ends.update(end for chat in chats for example in chat for end in example.ends)
            return [
                [
                    sequence
                    for ids, spans, _ in chat
                    for sequence in self._fit(np.array(ids, self.dtype), np.array(spans, SPAN), counts)
                ]
                for chat in chats
            ]
        conversations = [row for row in rows if isinstance(row, Conversation)]
        if conversations and self.settings.tokenizer.eos_id is not None:
            ends.add(self.settings.tokenizer.eos_id)
        examples = [render(row, self.settings.template) for row in conversations]
        turns = [turn for example in examples for turn in example]
        prompts = iter(self.text.encode([turn.text[: turn.start] for turn in turns]))
        responses = iter(self.text.encode([turn.text[turn.start :] for turn in turns], continuing=True))
        fitted = []
        for row, example in zip(conversations, examples, strict=True):
            ids = bytearray(self.bos)
            spans: list[tuple[int, int, float]] = []
            for number, turn in enumerate(example):
                ids += next(prompts)
                begin = self._count(ids)
                ids += next(responses) + self.eos
                if number not in row.unsupervised:
                    weights = row.weights[number] if row.weights else None
                    spans += self._weighted(turn.text[turn.start :], weights, begin, self._count(ids))
            fitted.append(self._fit(self._array(ids), np.array(spans, SPAN), counts))
        return fitted

    def _weighted(
        self, response: str, weights: AnswerWeights | None, begin: int, stop: int
    ) -> list[tuple[int, int, float]]:
        """Return the supervised spans of a response with the tokens [begin, stop)."""
        if weights is None:
            return [(begin, stop, 1.0)]
        encoding = self.text.continuing.encode(response, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        return weighted_answer(begin, stop, starts, weights.by_character(len(response), 0, len(response)))

    def _count(self, ids: bytes | bytearray) -> int:
        return len(ids) // self.dtype.itemsize

    def _array(self, ids: bytes | bytearray) -> np.ndarray:
        return np.frombuffer(ids, self.dtype)

    def _fit(self, ids: np.ndarray, spans: np.ndarray, counts: Counter[str]) -> Sequences:
        """Return an example as sequences of at most `block` tokens, each with supervised tokens."""
        block = self.settings.block
        policy = self.settings.overlong
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
            inside = spans.copy()
            for bound in ("start", "stop"):
                inside[bound] = np.clip(spans[bound] - start, 0, len(piece))
            inside = inside[inside["start"] < inside["stop"]]
            # Nothing predicts the first token of a piece, so more than that must be supervised.
            if len(inside) and inside["stop"][-1] > 1:
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


def split_by_length(part: Encoded, tokens: int | None) -> Iterator[Encoded]:
    """Yield the documents of a part, and then those of at least `tokens` tokens in their own domain.

    Both are one part if `tokens` is None or all documents are shorter.
    """
    is_long = np.zeros(len(part.lengths), bool) if tokens is None else part.lengths >= tokens
    if not is_long.any():
        yield part
        return
    for chosen in (~is_long, is_long):
        number = np.cumsum(chosen) - 1
        yield part._replace(
            ids=part.ids[np.repeat(chosen, part.lengths)],
            lengths=part.lengths[chosen],
            sources=part.sources[chosen],
            documents=int(chosen.sum()),
            sampled=[(int(number[row]), text) for row, text in part.sampled if chosen[row]],
        )
        part = part._replace(
            domain=part.domain + LONG, counts=Counter(), overlap=NONE, overlapping=0, ends=frozenset()
        )


def _hashes(rows: list[bytes]) -> np.ndarray:
    """Return a hash of each row's tokens, uint64, which identifies parts and copies of a row."""
    digests = b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(digests, "<u8")


def _rows(part: ShardPart, copies: np.ndarray) -> list[Row]:
    if checksum(part.payload) != part.check:
        raise UserError(f"{part.name} changed after it was scanned; {AGAIN}", code="source-changed")
    return take(part.payload, part.spec, copies.tolist())


def encoding(settings: EncodeSettings) -> Callable[[ShardPart], Encoded]:
    """Return the function of encoding workers."""
    return RowEncoder(settings).encode


def counting(settings: EncodeSettings) -> Callable[[ShardPart], np.ndarray]:
    """Return the function of workers that only count tokens."""
    return RowEncoder(settings).count


def words_agree(settings: EncodeSettings, plan: Plan, inputs: list[SourceReader]) -> bool:
    """Return whether a sample of rows has the same ids with the word cache and with the tokenizer alone."""
    by_words = TextEncoder(settings.directory, token_dtype(settings.tokenizer.vocab_size))
    if by_words.words is None:
        return True
    plain = TextEncoder(by_words.directory, by_words.dtype, by_words=False)
    texts: dict[bool, list[str]] = {False: [], True: []}  # True: they continue other texts
    for part in plan.read_once(inputs, plan.sample()):
        for row in _rows(part, part.copies):
            if isinstance(row, str):
                texts[False].append(row[:SAMPLE_CHARS])
            elif isinstance(row, Conversation):
                for turn in render(row, settings.template):
                    texts[False].append(turn.text[: turn.start][:SAMPLE_CHARS])
                    texts[True].append(turn.text[turn.start :][:SAMPLE_CHARS])
    return all(by_words.encode(texts[c], c) == plain.encode(texts[c], c) for c in texts if texts[c])
