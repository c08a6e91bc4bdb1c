"""A check of written shards: a sample of rows is encoded again by the tokenizers library and compared.

This code does not use words.py. The tokenizer is loaded from its file and encodes complete texts without a
cache. Errors of the fast encoding are found here before a shard gets its note.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from emo.common.errors import UserError

from ..config import DataConfig, by_chat_template
from ..encoding.chat_templates import ChatTemplate
from ..encoding.chat_writer import ChatWriter
from ..encoding.templates import ANSWER_FOLLOWS, Chat, Conversation, render
from ..encoding.tokenizer import TokenizerFacts
from ..encoding.weights import AnswerWeights, weighted_answer
from ..selection.plan import ShardPart
from ..sources.rows import plain_text, take
from ..sources.spec import Row, TokenIds
from .format import Manifest, Shard

CHARS = 2000  # characters of a text that are encoded again. Instructions: up to eight times as many, or none
ROWS = 4  # rows of a shard's first part that are encoded again
DOCUMENTS = 8  # documents of a shard that `verify` encodes again
MAX_TOKENS = 512  # compared tokens of a document
MARGIN = 16  # last tokens of a text's beginning, which may depend on the text after it
Sampled = tuple[int, Row]  # number of a row among the encoded rows of a part, copies included, and the row
# ids, and start, end and weight of supervised spans
Tokens = tuple[list[int], list[tuple[int, int, float]]]
Beginning = tuple[list[int], list[int], bool]  # ids before a text, ids of the text, whether it is complete


class PlainEncoder:
    """Encodes texts with the tokenizers library alone."""

    def __init__(self, backend: Tokenizer, facts: TokenizerFacts) -> None:
        self.backend = backend
        self.facts = facts
        backend.no_padding()
        backend.no_truncation()
        self.bos = facts.start
        self.eos = [] if facts.eos_id is None else [facts.eos_id]
        added = backend.get_added_tokens_decoder().items()
        self.specials = {number: token.content for number, token in added if token.special}
        self.specials |= {number: str(backend.id_to_token(number)) for number in (*self.bos, *self.eos)}
        # Its normalizer and pre-tokenizer, and both without the space before a text.
        empty = {"normalizer": normalizers.Sequence([]), "pre_tokenizer": pre_tokenizers.Sequence([])}
        parts = {name: part for name in empty if (part := getattr(backend, name)) is not None}
        self._parts = parts, {name: _without_prefix(part, empty[name]) for name, part in parts.items()}

    def unsure(self, text: str) -> bool:
        """Return whether a text contains a special token that is also a piece of the vocabulary.

        Such a text is encoded in other pieces than by the library, see words.py.
        """
        for number, special in self.specials.items():
            around = (special, f" {special} ", f"x{special}x")
            if special in text and any(number in self.ids(spelled) for spelled in around):
                return True
        return False

    def ids(self, text: str, continuing: bool = False, markup: bool = False) -> list[int]:
        """Return the ids of a text. continuing: it follows other text. markup: it has special tokens."""
        for name, part in self._parts[continuing].items():
            setattr(self.backend, name, part)
        self.backend.encode_special_tokens = not markup
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def offsets(self, text: str, markup: bool = False) -> list[tuple[int, int]]:
        """Return where each token of a text after other text begins and ends, in characters."""
        for name, part in self._parts[True].items():
            setattr(self.backend, name, part)
        self.backend.encode_special_tokens = not markup
        offsets: list[tuple[int, int]] = self.backend.encode(text, add_special_tokens=False).offsets
        return offsets


def _without_prefix(part: Any, empty: Any) -> Any:
    """Turn `empty` into a normalizer or pre-tokenizer that does the same as `part` without a prefix."""
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


def sample(part: ShardPart) -> list[Sampled]:
    """Return rows of a part to encode again: ROWS of a shard's first part, one of parts 1, 2, 4, 8 ..."""
    used = np.flatnonzero(part.copies)
    number = part.number
    if number & (number - 1) or not len(used):
        return []
    chosen = np.unique(used[(part.check + np.arange(1 if number else ROWS) * len(used) // ROWS) % len(used)])
    copies = np.zeros_like(part.copies)
    copies[chosen] = 1
    rows = take(part.payload, part.spec, copies.tolist())
    before = np.cumsum(part.copies, dtype=np.int64) - part.copies
    return list(zip(before[chosen].tolist(), rows, strict=True))


class ShardCheck:
    """Compares some rows of a shard with its file."""

    def __init__(self, plain: PlainEncoder, config: DataConfig, chat: ChatTemplate | None) -> None:
        self.plain = plain
        self.config = config
        self.chat = None if chat is None else ChatWriter(chat)
        self._texts: list[tuple[int, int, int, str | TokenIds]] = []  # domain, first token, tokens
        self._documents: list[tuple[int, list[int], str | TokenIds]] = []  # domain, tokens; not cut at rows
        self._examples: list[tuple[int, Tokens]] = []
        self._tokens: Counter[int] = Counter()  # of each domain so far

    def add(self, domain: int, ids: np.ndarray, lengths: np.ndarray, rows: Sequence[Sampled]) -> None:
        """Record the tokens of a part, and its rows that will be compared.

        Args:
            domain: The number of the part's domain.
            ids: The tokens of the part.
            lengths: int64 [sequences].
            rows: The rows to compare.
        """
        for number, row in rows:
            if isinstance(row, str | TokenIds):
                start = int(lengths[:number].sum())
                count = int(lengths[number])
                if self.config.packing != "blocks":
                    self._documents.append((domain, ids[start : start + count].tolist(), row))
                elif count:
                    self._texts.append((domain, self._tokens[domain] + start, count, row))
                continue
            text = plain_text(row)
            if isinstance(row, Chat):
                unsure = any(special in text for special in self.plain.specials.values())
            else:
                unsure = self.plain.unsure(text)
            if len(text) <= 8 * CHARS and not unsure:
                examples = self._chat(row) if isinstance(row, Chat) else [self._conversation(row)]
                self._examples += [(domain, piece) for each in examples for piece in self._fitted(*each)]
        self._tokens[domain] += len(ids)

    def compare(self, part: Path, kind: str, path: Path) -> None:
        """Raise UserError unless the rows are in the file `part`, which will become the shard at `path`."""
        shard = Shard(part, kind)
        block = self.config.sequence_len
        pieces: list[tuple[int, Tokens]] = [
            (domain, (tokens[start : start + block], []))
            for domain, tokens, _ in self._documents
            for start in range(0, len(tokens), block)
        ]
        if (
            not all(self._has_text(shard, *text) for text in self._texts)
            or not all(self._has_ids(row, ids, len(ids)) for _, ids, row in self._documents if ids)
            or not all(_has_example(shard, domain, *example) for domain, example in self._examples + pieces)
        ):
            raise UserError(
                f"{path} is not written: the tokenizer gives other ids for one of its rows. This is an error "
                "of this program or its libraries. Please report it",
                code="not-as-tokenized",
            )

    def _has_text(self, shard: Shard, domain: int, start: int, count: int, text: str | TokenIds) -> bool:
        """Return whether the tokens of a text are at their position, as far as their rows were written.

        start: the first token of the text, among those of the domain.
        """
        rows = np.flatnonzero(shard.domain == domain)
        block = self.config.sequence_len
        used = rows[start // block : -(-(start + count) // block)].tolist()
        if not used:
            return True
        tokens = np.concatenate([shard.row(row)[0] for row in used]).tolist()
        return self._has_ids(text, tokens[start % block : start % block + count], count)

    def _has_ids(self, text: str | TokenIds, written: list[int], count: int) -> bool:
        """Return whether a text has `count` tokens, the first of which are `written`."""
        if isinstance(text, TokenIds):
            return written == list(text.ids)[: len(written)]
        if len(text) > CHARS:  # compare the beginning first
            ids = [*self.plain.bos, *self.plain.ids(text[:CHARS])][:-MARGIN]
            if written[: len(ids)] == ids[: len(written)]:
                return True
        ids = [*self.plain.bos, *self.plain.ids(text), *self.plain.eos]
        return (len(ids) == count and written == ids[: len(written)]) or self.plain.unsure(text)

    def _conversation(self, row: Conversation) -> Tokens:
        ids = [*self.plain.bos]
        spans: list[tuple[int, int, float]] = []
        for number, turn in enumerate(render(row, self.config.template)):
            ids += self.plain.ids(turn.text[: turn.start])
            begin = len(ids)
            response = turn.text[turn.start :]
            ids += [*self.plain.ids(response, continuing=True), *self.plain.eos]
            if number not in row.unsupervised:
                loss = row.weights[number] if row.weights else AnswerWeights()
                weights = loss.by_character(len(response), 0, len(response))
                starts = [start for start, _ in self.plain.offsets(response)]
                spans += weighted_answer(begin, len(ids), starts, weights)
        return ids, spans

    def _chat(self, row: Chat) -> list[Tokens]:
        assert self.chat is not None
        examples = []
        for text, answers in self.chat.examples(row, exact=True):
            ids: list[int] = []
            spans: list[tuple[int, int, float]] = []
            done = 0
            end = ""
            for number, answer in enumerate(answers, 1):
                context = self.plain.ids(end + text[done : answer.start], markup=True)
                response = text[answer.start : answer.stop]
                following = self.plain.ids(end + text[done : answer.stop], markup=True)
                prompt = ids + context[bool(end) :]
                offsets = self.plain.offsets(response, markup=True)
                masked = sum(stop <= answer.masked for _, stop in offsets)
                example = prompt + self.plain.ids(response, continuing=True, markup=True)
                starts = [start for start, _ in offsets[masked:]]
                spans += weighted_answer(len(prompt) + masked, len(example), starts, answer.weights)
                if number < len(answers) and following[: len(context)] != context:
                    examples.append((example, spans))
                    spans = []
                    continue
                ids = example
                done = answer.stop
                end = self.chat.template.last(text[: answer.stop])
            examples.append((ids, spans))
        return examples

    def _fitted(self, ids: list[int], spans: list[tuple[int, int, float]]) -> list[Tokens]:
        """Return the sequences of an example after data.overlong."""
        block = self.config.sequence_len
        overlong = self.config.overlong
        if len(ids) > block and overlong == "drop":
            return []
        pieces = []
        for start in range(0, len(ids) if overlong == "split" else 1, block):
            inside = [(max(a - start, 0), min(b - start, block), weight) for a, b, weight in spans]
            inside = [span for span in inside if span[0] < span[1]]
            if len(ids) <= block or (inside and inside[-1][1] > 1):
                pieces.append((ids[start : start + block], inside))
        return pieces


def _has_example(shard: Shard, domain: int, ids: list[int], spans: list[tuple[int, int, float]]) -> bool:
    """Return whether a segment of a shard has these ids and spans."""
    expected = [(start, stop, float(np.float32(weight))) for start, stop, weight in spans]
    row = 0
    for (offsets, tokens), (counts, lengths) in zip(
        shard.columns["input_ids"], shard.columns["segment_lengths"], strict=True
    ):
        starts = np.cumsum(lengths, dtype=np.int64) - lengths  # segments and rows are contiguous
        candidates = np.flatnonzero(lengths == len(ids))
        for position in range(0, min(len(ids), MARGIN)):
            candidates = candidates[tokens[starts[candidates] + position] == ids[position]]
        for segment in candidates.tolist():
            number = int(np.searchsorted(counts, segment, side="right")) - 1
            start = int(starts[segment])
            if tokens[start : start + len(ids)].tolist() == ids and shard.domain[row + number] == domain:
                within = start - int(offsets[number])
                columns = shard.row(row + number)[2:]
                if not columns:  # text
                    return True
                written, weights = columns
                pairs = (written.reshape(-1, 2).astype(np.int64) - within).tolist()
                all_weights = weights.tolist() or [1.0] * len(pairs)
                found = [(a, b, weight) for (a, b), weight in zip(pairs, all_weights, strict=True)]
                if [span for span in found if span[0] >= 0 and span[1] <= len(ids)] == expected:
                    return True
        row += len(counts) - 1
    return False


def reencode_documents(shard: Shard, manifest: Manifest, plain: PlainEncoder) -> Iterator[bool]:
    """Yield for some documents or examples whether encoding their decoded beginning gives the same ids.

    Yields nothing if that cannot be decided: for sources of token ids, a chat_template, or a tokenizer that
    does not restore the text.
    """
    sources = json.dumps(manifest.config.get("sources")) + json.dumps(manifest.config.get("validation"))
    if '"format": "tokens"' in sources or by_chat_template(manifest.template or ""):
        return
    split = manifest.config.get("overlong") == "split"
    bos = plain.bos
    cut = _cut_documents(shard, manifest)
    rows = np.linspace(0, len(shard.valid), DOCUMENTS, endpoint=False).astype(np.int64)
    for row in np.unique(rows).tolist() if len(shard.valid) else ():
        for later in range(row, len(shard.valid)):
            tokens, segments, *spans = (column.tolist() for column in shard.row(later))
            start = len(tokens) - segments[-1]
            begins = tokens[start : start + len(bos)] == bos
            is_first = bool(start or later == 0)
            if cut is not None:
                is_first = int(shard.cell("sources", later)[-1]) not in cut
            if not begins and is_first and not split:
                yield False  # every document and example begins with BOS
                break
            texts = _beginning(tokens, start, spans, plain) if begins and (bos or is_first) else []
            same = [_has_own_ids(plain, *text) for text in texts]
            if same and None not in same:
                yield all(same)
                break


def _cut_documents(shard: Shard, manifest: Manifest) -> set[int] | None:
    """Return the documents that fill a row, whose other pieces may be anywhere.

    None: the documents are in order.
    """
    if manifest.kind == "instruct" or manifest.config.get("packing", "blocks") == "blocks":
        return None
    full = np.flatnonzero(np.diff(shard.token_offsets()) == manifest.block).tolist()
    rows = (row for row in full if len(shard.cell("sources", row)) == 1)
    return {int(shard.cell("sources", row)[0]) for row in rows}


def _beginning(tokens: list[int], start: int, spans: list[list[int]], plain: PlainEncoder) -> list[Beginning]:
    """Return the beginning of the last document of a row, or the prompt and response of its last example."""
    first = start + len(plain.bos)
    complete = bool(plain.eos) and tokens[-1] == plain.eos[0]
    if not spans:
        return [([], tokens[first : len(tokens) - complete], complete)]
    begin, stop = next((a, b) for a, b in zip(spans[0][::2], spans[0][1::2], strict=True) if a >= start)
    prompt = tokens[first:begin]
    complete = tokens[stop - 1] == plain.eos[0]
    if plain.eos[0] in prompt or len(prompt) > MAX_TOKENS:
        return []  # an earlier answer is not supervised, or the prompt is too long
    if not plain.backend.decode(prompt, skip_special_tokens=False).rstrip().endswith(ANSWER_FOLLOWS):
        return []  # the response begins with text that is not supervised
    return [([], prompt, True), (prompt, tokens[begin : stop - complete], complete)]


def _has_own_ids(plain: PlainEncoder, before: list[int], ids: list[int], complete: bool) -> bool | None:
    """Return whether the text of ids encodes to the same ids. None: this cannot be decided.

    The last ids of an incomplete text may depend on the text after it. Some tokenizers give ids that depend
    on distant text. Then even a part of the same text has other ids, and nothing can be decided.

    before: the ids before the text. complete: whether the text ends with the last id.
    """
    complete = complete and len(ids) <= MAX_TOKENS
    ids = ids[:MAX_TOKENS]
    settled = len(ids) if complete else max(0, len(ids) - MARGIN)
    if not plain.specials.keys().isdisjoint(ids):
        return None
    decode = partial(plain.backend.decode, skip_special_tokens=False)
    prefix = decode(before) if before else ""
    text = decode(before + ids)[len(prefix) :]
    again = plain.ids(text, continuing=bool(before))
    if again[:settled] == ids[:settled] and (len(again) == len(ids) or not complete):
        return True
    part = plain.ids(text[: len(text) // 2], continuing=bool(before))[:-MARGIN]
    lossy = "\ufffd" in text or decode(before + again)[len(prefix) :] != text
    return None if lossy or part != again[: len(part)] or plain.unsure(text) else False
