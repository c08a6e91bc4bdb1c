"""A sample of what was written, encoded again by the tokenizer's own library and compared.

Nothing here goes by words.py: the tokenizer is loaded from the bytes of its file, gets whole texts, and
remembers nothing. What the way of encoding for speed gets wrong is seen here before a shard is sealed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from common.errors import UserError
from data_prep.plan import Part
from data_prep.rows import Row, TokenIds, checksum, plain_text, take
from data_prep.shards import Manifest, Shard
from data_prep.templates import Chat, Conversation, render
from data_prep.templates.chat import ChatTemplate
from data_prep.templates.chat import render as render_chat
from data_prep.tokenizer import TokenizerFacts

CHARS = 2000  # of a text that are encoded again; of instructions eight times as many, or none
ROWS = 4  # of a shard's first part that are encoded again
DOCUMENTS = 8  # of a shard that `verify` encodes again
TOKENS = 1 << 14  # of a document at most, there
EDGE = 8  # tokens at either end of a stretch whose text may get other ids alone than in its document
STRETCH = 512  # tokens of a stretch at most
MARGIN = 16  # tokens at the end of a text's beginning, which may depend on what follows
Example = tuple[list[int], list[tuple[int, int]]]  # ids, and start and end of what is supervised


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

    def names_special(self, text: str) -> bool:
        """Return whether a text holds the name of a special token."""
        return any(special in text for special in self.specials.values())

    def unsure(self, text: str) -> bool:
        """Return whether a text names a special token that is also a piece of the vocabulary.

        Such a name is encoded in pieces that its own library would not give it, see words.py.
        """
        for number, special in self.specials.items():
            around = (special, f" {special} ", f"x{special}x")
            if special in text and any(number in self.ids(one) for one in around):
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
        """While the tokenizer puts no space before a text."""
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
    """What some rows of a shard must be in it."""

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
            elif len(plain_text(row)) <= 8 * CHARS and not self._unsure(row):
                self._examples += [(domain, piece) for piece in self._fitted(self._example(row))]
        self._tokens[domain] += len(ids)

    def _unsure(self, row: Conversation | Chat) -> bool:
        text = plain_text(row)
        return self.plain.names_special(text) if isinstance(row, Chat) else self.plain.unsure(text)

    def compare(self, part: Path, kind: str, place: Path) -> None:
        """Raise UserError unless the rows are in the file `part`, which becomes the shard at `place`."""
        shard = Shard(part, kind)
        same = all(self._has_text(shard, *text) for text in self._texts) and all(
            _has_example(shard, domain, *example) for domain, example in self._examples
        )
        if not same:
            raise UserError(
                f"{place} is not made: the tokenizer itself gives other ids for a row of it than were to be "
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
        within = start - start // self.block * self.block
        written = tokens[within : within + count]
        if isinstance(text, TokenIds):
            return written == list(text.ids)[: len(written)]
        if len(text) > CHARS:  # a beginning, if that settles it
            ids = [*self.plain.bos, *self.plain.ids(text[:CHARS])][:-MARGIN]
            if written[: len(ids)] == ids[: len(written)]:
                return True
        ids = [*self.plain.bos, *self.plain.ids(text), *self.plain.eos]
        return (len(ids) == count and written == ids[: len(written)]) or self.plain.unsure(text)

    def _example(self, row: Conversation | Chat) -> Example:
        if isinstance(row, Chat):
            assert self.chat is not None
            return self._chat(row, self.chat)
        ids, spans = [*self.plain.bos], []
        for number, turn in enumerate(render(row, self.template)):
            ids += self.plain.ids(turn.text[: turn.start])
            begin = len(ids)
            ids += [*self.plain.ids(turn.text[turn.start :], continuing=True), *self.plain.eos]
            if number not in row.unsupervised:
                spans.append((begin, len(ids)))
        return ids, spans

    def _chat(self, row: Chat, template: ChatTemplate) -> Example:
        text, answers = render_chat(row, template)
        ids: list[int] = []
        spans = []
        done, end = 0, ""
        for number, (start, stop) in enumerate(answers):
            ids += self.plain.ids(end + text[done:start], markup=True)[bool(end) :]
            begin = len(ids)
            ids += self.plain.ids(text[start:stop], continuing=True, markup=True)
            if number not in row.unsupervised:
                spans.append((begin, len(ids)))
            done, end = stop, next((token for token in template.specials if text[:stop].endswith(token)), "")
        return ids, spans

    def _fitted(self, example: Example) -> list[Example]:
        """Return the rows that an example becomes: itself, or what data.overlong makes of it."""
        ids, spans = example
        if len(ids) > self.block and self.overlong == "drop":
            return []
        ends = len(ids) if self.overlong == "split" else 1
        pieces = []
        for start in range(0, ends, self.block):
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
        for place in range(0, min(len(ids), MARGIN)):
            alike = alike[tokens[starts[alike] + place] == ids[place]]
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

    Yields nothing where that cannot be told: ids that were given, a chat_template, a tokenizer that does not
    give back the text.
    """
    sources = json.dumps(manifest.config.get("sources")) + json.dumps(manifest.config.get("validation"))
    if '"format": "tokens"' in sources or (manifest.template or "").startswith("chat_template"):
        return
    rows = np.arange(len(shard.valid))
    for row in rows[np.linspace(0, len(rows) - 1, min(len(rows), DOCUMENTS)).astype(np.int64)].tolist():
        whole = _turns(shard, row, plain) if manifest.kind == "instruct" else _document(shard, row, plain)
        same = [None] if whole is None else [_same(plain, *part) for part in whole]
        if None in same:  # nothing whole that gives back its text: a stretch from within
            same = [_same_within(plain, _longest(shard, row, plain))]
        if None not in same:
            yield all(same)


def _longest(shard: Shard, row: int, plain: PlainEncoder) -> list[int]:
    """Return the longest stretch of a row that is of one text: a segment, or what a response carries."""
    tokens, segments, *spans = shard.row(row)
    ends = np.cumsum(segments).tolist()
    pairs = spans[0].reshape(-1, 2).tolist() if spans else list(zip([0, *ends], ends, strict=False))
    start, end = max(pairs, key=lambda pair: pair[1] - pair[0])
    ids: list[int] = tokens[start:end].tolist()
    ids = ids[len(plain.bos) :] if plain.bos and ids[: len(plain.bos)] == plain.bos else ids
    return (ids[: -len(plain.eos)] if plain.eos and ids[-len(plain.eos) :] == plain.eos else ids)[:STRETCH]


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
    kept = plain.ids(plain.decode(again[EDGE:-EDGE]), continuing=True)
    return False if _contains(kept, again[2 * EDGE : -2 * EDGE]) else None


def _contains(ids: list[int], middle: list[int]) -> bool:
    """Return whether `middle` stands in ids."""
    return any(ids[start : start + len(middle)] == middle for start in range(len(ids)))


def _same(plain: PlainEncoder, before: list[int], ids: list[int], continuing: bool) -> bool | None:
    """Return whether ids after others are those of their own text; None where that has no answer."""
    prefix = plain.decode(before) if continuing else ""
    text = plain.decode(before + ids if continuing else ids)
    if "\ufffd" in text or not text.startswith(prefix) or not plain.specials.keys().isdisjoint(ids):
        return None
    again = plain.ids(text[len(prefix) :], continuing)
    if again == ids:
        return True
    whole = plain.decode(before + again if continuing else again)
    return False if whole == text and not plain.unsure(text) else None


def _document(shard: Shard, row: int, plain: PlainEncoder) -> list[tuple[list[int], list[int], bool]] | None:
    """Return the whole document that begins in a row of text, without BOS and EOS, if one does."""
    ends = np.cumsum(shard.row(row)[1]).tolist()
    if len(ends) < 2:
        return None
    start, *following = ends
    ids: list[int] = shard.row(row)[0][start : following[0]].tolist()
    whole = len(following) > 1 or (bool(plain.eos) and ids[-1] == plain.eos[0])
    if not whole and not plain.eos:
        return None  # nothing tells where it ends
    while not whole:
        row += 1
        if row == len(shard.valid) or shard.domain[row] != shard.domain[row - 1] or len(ids) > TOKENS:
            return None
        more, segments = shard.row(row)[:2]
        ids += more[: segments[0]].tolist()
        whole = len(segments) > 1 or ids[-1] == plain.eos[0]
    inner = ids[len(plain.bos) : len(ids) - len(plain.eos)]
    if ids != [*plain.bos, *inner, *plain.eos] or not inner:
        return None
    return [([], inner, False)]


def _turns(shard: Shard, row: int, plain: PlainEncoder) -> list[tuple[list[int], list[int], bool]] | None:
    """Return the prompts and responses of the last example of a row, if it is a whole one."""
    tokens, segments, spans = shard.row(row)
    start = int(segments[:-1].sum())
    ids: list[int] = tokens[start:].tolist()
    pairs = [(a - start, b - start) for a, b in spans.reshape(-1, 2).tolist() if a >= start]
    place, found = len(plain.bos), []
    if not plain.bos or ids[:place] != plain.bos:
        return None  # it may be the end of one that was split
    for begin, end in pairs:
        prompt, response = ids[place:begin], ids[begin : end - 1]
        if ids[end - 1] != plain.eos[0] or plain.eos[0] in prompt:
            return None  # cut short, or with an answer that is not supervised
        found += [([], prompt, False), (prompt, response, True)]
        place = end
    return found if place == len(ids) else None
