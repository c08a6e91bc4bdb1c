"""A sample of what was written, encoded again by the tokenizer's own library and compared.

Nothing here goes by words.py: the tokenizer is loaded from the bytes of its file, gets whole texts, and
remembers nothing. What the way of encoding for speed gets wrong is noticed here before a shard is sealed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from emo.common.errors import UserError
from emo.data_prep.plan import Part
from emo.data_prep.rows import Row, TokenIds, checksum, plain_text, take
from emo.data_prep.shards import Manifest, Shard
from emo.data_prep.templates import Chat, Conversation, render
from emo.data_prep.templates.chat import ChatTemplate
from emo.data_prep.templates.chat import render as render_chat
from emo.data_prep.tokenizer import TokenizerFacts

CHARS = 2000  # of a text that are encoded again; of instructions eight times as many, or none
ROWS = 4  # of a shard's first part that are encoded again
DOCUMENTS = 8  # of a shard that `verify` encodes again
TOKENS = 1 << 14  # of a document at most, there
EDGE = 8  # tokens at either end of a stretch whose text may get other ids alone than in its document
STRETCH = 512  # tokens of a stretch at most
MARGIN = 16  # tokens at the end of a text's beginning, which may depend on what follows
Example = tuple[list[int], list[tuple[int, int]]]  # ids, and start and end of what is supervised
Whole = tuple[list[int], list[int]]  # ids of a whole text, after those that it continues


class PlainEncoder:
    """A tokenizer as its own library applies it to a text."""

    def __init__(self, backend: Tokenizer, facts: TokenizerFacts) -> None:
        self.backend, self.facts = backend, facts
        backend.no_padding()
        backend.no_truncation()
        self.bos = [] if facts.bos_id is None else [facts.bos_id]
        self.eos = [] if facts.eos_id is None else [facts.eos_id]
        added = backend.get_added_tokens_decoder().items()
        self.specials = {number: token.content for number, token in added if token.special}
        self.specials |= {number: str(backend.id_to_token(number)) for number in (*self.bos, *self.eos)}

    def unsure(self, text: str) -> bool:
        """Return whether a text names a special token that is also a piece of the vocabulary.

        Such a name is encoded in pieces that its own library would not give it, see words.py.
        """
        for number, special in self.specials.items():
            around = (special, f" {special} ", f"x{special}x")
            if special in text and any(number in self.ids(spelled) for spelled in around):
                return True
        return False

    def ids(self, text: str, continuing: bool = False, markup: bool = False) -> list[int]:
        """Return the ids of a text; `continuing` an earlier one, or with special tokens as `markup` in it."""
        with self._without_prefix() if continuing else nullcontext():
            self.backend.encode_special_tokens = not markup
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
            return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        text: str = self.backend.decode(ids, skip_special_tokens=False)
        return text

    @contextmanager
    def _without_prefix(self) -> Iterator[None]:
        """Let the tokenizer put no space before a text in this block."""
        before = self.backend.normalizer, self.backend.pre_tokenizer
        try:
            if before[0] is not None:
                self.backend.normalizer = _plain_part(before[0], normalizers.Sequence([]))
            if before[1] is not None:
                self.backend.pre_tokenizer = _plain_part(before[1], pre_tokenizers.Sequence([]))
            yield
        finally:
            self.backend.normalizer, self.backend.pre_tokenizer = before


def _plain_part(part: Any, empty: Any) -> Any:
    """Return a normalizer or pre-tokenizer that does the same but for a prefix; `empty` becomes it."""
    tree = json.loads(part.__getstate__())
    inner = tree.get("normalizers") or tree.get("pretokenizers") or [tree]
    steps = [step for step in inner if step["type"] != "Prepend"]
    for step in steps:
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
        elif "add_prefix_space" in step:
            step["add_prefix_space"] = False
    key = "normalizers" if isinstance(empty, normalizers.Normalizer) else "pretokenizers"
    empty.__setstate__(json.dumps({"type": "Sequence", key: steps}).encode())
    return empty


class Sampled(NamedTuple):
    """A row of a part that is encoded again."""

    number: int  # among the rows that the part gives, copies counted
    row: Row


def sample(part: Part, number: int) -> list[Sampled]:
    """Return rows to encode again of part `number` of a shard: ROWS of its first, one of 1, 2, 4, 8 ..."""
    used = np.flatnonzero(part.copies)
    if number & (number - 1) or not len(used) or checksum(part.payload) != part.check:
        return []  # that the payload changed, a worker says
    chosen = np.unique(used[(part.check + np.arange(1 if number else ROWS) * len(used) // ROWS) % len(used)])
    copies = np.zeros_like(part.copies)
    copies[chosen] = 1
    rows = take(part.payload, part.spec, copies.tolist())
    before = np.cumsum(part.copies, dtype=np.int64) - part.copies
    return [Sampled(*pair) for pair in zip(before[chosen].tolist(), rows, strict=True)]


class ShardCheck:
    """A comparison of some rows of a shard with what is in its file."""

    def __init__(
        self, plain: PlainEncoder, template: str, block: int, overlong: str, chat: ChatTemplate | None
    ) -> None:
        self.plain, self.template, self.block, self.overlong = plain, template, block, overlong
        self.chat = chat
        self._texts: list[tuple[int, int, int, str | TokenIds]] = []  # domain, first token, tokens
        self._examples: list[tuple[int, Example]] = []
        self._tokens: Counter[int] = Counter()  # of each domain, so far

    def add(self, domain: int, ids: np.ndarray, lengths: np.ndarray, rows: list[Sampled]) -> None:
        """Take note of what a part became, and of those of its rows that are to be compared."""
        for number, row in rows:
            if isinstance(row, str | TokenIds):
                start = self._tokens[domain] + int(lengths[:number].sum())
                self._texts.append((domain, start, int(lengths[number]), row))
                continue
            text = plain_text(row)
            if isinstance(row, Chat):
                unsure = any(special in text for special in self.plain.specials.values())
            else:
                unsure = self.plain.unsure(text)
            if len(text) <= 8 * CHARS and not unsure:
                example = self._chat(row) if isinstance(row, Chat) else self._conversation(row)
                self._examples += [(domain, piece) for piece in self._fitted(*example)]
        self._tokens[domain] += len(ids)

    def compare(self, part: Path, kind: str, path: Path) -> None:
        """Raise UserError unless the rows are in the file `part`, which becomes the shard at `place`."""
        shard = Shard(part, kind)
        if not all(self._has_text(shard, *text) for text in self._texts) or not all(
            _has_example(shard, domain, *example) for domain, example in self._examples
        ):
            raise UserError(
                f"{path} is not made: the tokenizer itself gives other ids for a row of it than were to be "
                "written; this is an error of this program or its libraries, please report it",
                code="not-as-tokenized",
            )

    def _has_text(self, shard: Shard, domain: int, start: int, count: int, text: str | TokenIds) -> bool:
        """Return whether a text's tokens are where they belong, as far as their rows were written."""
        rows = np.flatnonzero(shard.domain == domain)
        used = rows[start // self.block : -(-(start + count) // self.block)].tolist()
        if not used:
            return True
        tokens = np.concatenate([shard.row(row)[0] for row in used]).tolist()
        written = tokens[start % self.block : start % self.block + count]
        if isinstance(text, TokenIds):
            return written == list(text.ids)[: len(written)]
        if len(text) > CHARS:  # a beginning, if that settles it
            ids = [*self.plain.bos, *self.plain.ids(text[:CHARS])][:-MARGIN]
            if written[: len(ids)] == ids[: len(written)]:
                return True
        ids = [*self.plain.bos, *self.plain.ids(text), *self.plain.eos]
        return (len(ids) == count and written == ids[: len(written)]) or self.plain.unsure(text)

    def _conversation(self, row: Conversation) -> Example:
        ids, spans = [*self.plain.bos], []
        for number, turn in enumerate(render(row, self.template)):
            ids += self.plain.ids(turn.text[: turn.start])
            begin = len(ids)
            ids += [*self.plain.ids(turn.text[turn.start :], continuing=True), *self.plain.eos]
            if number not in row.unsupervised:
                spans.append((begin, len(ids)))
        return ids, spans

    def _chat(self, row: Chat) -> Example:
        assert self.chat is not None
        text, answers = render_chat(row, self.chat)
        ids: list[int] = []
        spans = []
        done, end = 0, ""
        for number, (start, stop) in enumerate(answers):
            ids += self.plain.ids(end + text[done:start], markup=True)[bool(end) :]
            begin = len(ids)
            ids += self.plain.ids(text[start:stop], continuing=True, markup=True)
            if number not in row.unsupervised:
                spans.append((begin, len(ids)))
            done, end = stop, next((token for token in self.chat.specials if text[:stop].endswith(token)), "")
        return ids, spans

    def _fitted(self, ids: list[int], spans: list[tuple[int, int]]) -> list[Example]:
        """Return the rows that an example becomes: itself, or what data.overlong makes of it."""
        if len(ids) > self.block and self.overlong == "drop":
            return []
        pieces = []
        for start in range(0, len(ids) if self.overlong == "split" else 1, self.block):
            inside = [(max(a - start, 0), min(b - start, self.block)) for a, b in spans]
            inside = [(a, b) for a, b in inside if a < b]
            if inside and (len(ids) <= self.block or inside[-1][1] > 1):
                pieces.append((ids[start : start + self.block], inside))
        return pieces


def _has_example(shard: Shard, domain: int, ids: list[int], spans: list[tuple[int, int]]) -> bool:
    """Return whether a segment of a shard is this example."""
    row = 0
    for (offsets, tokens), (counts, lengths) in zip(
        shard.columns["input_ids"], shard.columns["segment_lengths"], strict=True
    ):
        starts = np.cumsum(lengths, dtype=np.int64) - lengths  # rows follow each other, as segments do
        alike = np.flatnonzero(lengths == len(ids))
        for position in range(0, min(len(ids), MARGIN)):
            alike = alike[tokens[starts[alike] + position] == ids[position]]
        for segment in alike.tolist():
            number = int(np.searchsorted(counts, segment, side="right")) - 1
            start = int(starts[segment])
            if tokens[start : start + len(ids)].tolist() == ids and shard.domain[row + number] == domain:
                within = start - int(offsets[number])
                pairs = shard.row(row + number)[2].reshape(-1, 2).astype(np.int64) - within
                if [(a, b) for a, b in pairs.tolist() if a >= 0 and b <= len(ids)] == spans:
                    return True
        row += len(counts) - 1
    return False


def written_again(shard: Shard, manifest: Manifest, plain: PlainEncoder) -> Iterator[bool]:
    """Yield, for some whole documents or examples of a shard, whether their text gets the ids that they have.

    Yields nothing where that cannot be answered: ids that were given, a chat_template, a tokenizer that does
    not give back the text.
    """
    sources = json.dumps(manifest.config.get("sources")) + json.dumps(manifest.config.get("validation"))
    if '"format": "tokens"' in sources or (manifest.template or "").startswith("chat_template"):
        return
    last = len(shard.valid) - 1
    for row in np.unique(np.linspace(0, last, DOCUMENTS).astype(np.int64)).tolist() if last >= 0 else ():
        tokens, segments, *spans = (column.tolist() for column in shard.row(row))
        ends = np.cumsum(segments).tolist()
        if spans:
            pairs = list(zip(spans[0][::2], spans[0][1::2], strict=True))
            texts = _turns(tokens, ends, pairs, plain)
        else:
            pairs = list(pairwise([0, *ends]))
            texts = _document(shard, row, plain)
        same = [_same(plain, *text) for text in texts] or [None]
        if None in same:  # nothing whole that gives back its text: the longest stretch of the row
            start, end = max(pairs, key=lambda pair: pair[1] - pair[0])
            same = [_same_within(plain, _bare(tokens[start:end], plain)[:STRETCH])]
        if None not in same:
            yield all(same)


def _bare(ids: list[int], plain: PlainEncoder) -> list[int]:
    """Return ids without BOS and EOS at their ends."""
    ids = ids[len(plain.bos) :] if plain.bos and ids[: len(plain.bos)] == plain.bos else ids
    return ids[: -len(plain.eos)] if plain.eos and ids[-len(plain.eos) :] == plain.eos else ids


def _document(shard: Shard, row: int, plain: PlainEncoder) -> list[Whole]:
    """Return the whole document that begins within a row of text, if one does; it may end rows later."""
    ends = np.cumsum(shard.row(row)[1]).tolist()
    if len(ends) < 2:
        return []
    start, *following = ends
    ids: list[int] = shard.row(row)[0][start : following[0]].tolist()
    whole = len(following) > 1 or (bool(plain.eos) and ids[-1] == plain.eos[0])
    if not whole and not plain.eos:
        return []  # nothing tells where it ends
    while not whole:
        row += 1
        if row == len(shard.valid) or shard.domain[row] != shard.domain[row - 1] or len(ids) > TOKENS:
            return []
        tokens, segments = shard.row(row)[:2]
        ids += tokens[: segments[0]].tolist()
        whole = len(segments) > 1 or ids[-1] == plain.eos[0]
    inner = ids[len(plain.bos) : len(ids) - len(plain.eos)]
    return [([], inner)] if inner and ids == [*plain.bos, *inner, *plain.eos] else []


def _turns(
    tokens: list[int], ends: list[int], spans: list[tuple[int, int]], plain: PlainEncoder
) -> list[Whole]:
    """Return the prompts and responses of the last example of a row, if it is a whole one."""
    start = ([0, *ends])[len(ends) - 1]
    position = start + len(plain.bos)
    texts: list[Whole] = []
    if not plain.bos or tokens[start:position] != plain.bos:
        return []  # it may be the end of one that was split
    for begin, end in spans:
        if begin >= start:
            prompt, response = tokens[position:begin], tokens[begin : end - 1]
            if tokens[end - 1] != plain.eos[0] or plain.eos[0] in prompt:
                return []  # cut short, or with an answer that is not supervised
            texts += [([], prompt), (prompt, response)]
            position = end
    return texts if position == len(tokens) else []


def _same(plain: PlainEncoder, before: list[int], ids: list[int]) -> bool | None:
    """Return whether ids after others are those of their own text; None where that has no answer."""
    continuing = bool(before)
    prefix = plain.decode(before) if continuing else ""
    text = plain.decode(before + ids)
    if "\ufffd" in text or not text.startswith(prefix) or not plain.specials.keys().isdisjoint(ids):
        return None
    again = plain.ids(text[len(prefix) :], continuing)
    if again == ids:
        return True
    return False if plain.decode(before + again) == text and not plain.unsure(text) else None


def _same_within(plain: PlainEncoder, ids: list[int]) -> bool | None:
    """Return whether a stretch has the ids of its text, but for its ends; None where that has no answer.

    It has none for a tokenizer whose ids depend on text that is far away: then not even the ids that it has
    just given keep within a stretch.
    """
    if len(ids) < 4 * EDGE or not plain.specials.keys().isdisjoint(ids):
        return None
    decoded = plain.decode(ids)
    text = decoded.strip("\ufffd")
    # An end that cuts a run of bytes decodes to a replacement character a byte; a text's own has 3 bytes.
    left = 3 * (len(decoded) - len(decoded.lstrip("\ufffd")))
    right = 3 * (len(decoded) - len(decoded.rstrip("\ufffd")))
    middle = ids[left + EDGE : max(len(ids) - right - EDGE, 0)]
    if len(middle) < EDGE:
        return None
    again = plain.ids(text, continuing=True)
    if _contains(again, middle):
        return True
    if len(again) < 4 * EDGE or plain.unsure(text):
        return None
    repeated = plain.ids(plain.decode(again[EDGE:-EDGE]), continuing=True)
    return False if _contains(repeated, again[2 * EDGE : -2 * EDGE]) else None


def _contains(ids: list[int], middle: list[int]) -> bool:
    return any(ids[start : start + len(middle)] == middle for start in range(len(ids)))
