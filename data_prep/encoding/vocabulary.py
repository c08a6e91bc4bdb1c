"""Extend the vocabulary of a BPE tokenizer by continuing its training.

The tokenizer keeps its ids and merges. New merges have a lower priority, so a text without a new piece is
encoded as before. `Tokenizer.add_tokens` is no substitute, because added tokens are matched before any merge.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from emo.common.errors import UserError

from .tokenizer import TRAINING_CHARS

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a piece of SentencePiece's byte fallback
WORDS = re.compile("▁*[^▁]+|▁+")  # of tokenizers that mark spaces instead of splitting at them


@dataclass
class Extension:
    """An extended tokenizer, and the old pieces that each new piece consists of."""

    tokenizer: Tokenizer
    parts: dict[int, list[int]]  # new id -> old ids. Special tokens have none


class _Words:
    """The distinct words of a text as sequences of ids, with the counts of adjacent pairs."""

    def __init__(self, words: dict[tuple[int, ...], int]) -> None:
        self.words = [list(word) for word in words]
        self.counts = list(words.values())
        self.pairs: Counter[tuple[int, int]] = Counter()
        self.places: dict[tuple[int, int], set[int]] = defaultdict(set)  # words that may have the pair
        for number in range(len(self.words)):
            self._count(number, 1)

    def _count(self, number: int, sign: int) -> None:
        word = self.words[number]
        for pair in itertools.pairwise(word):
            self.pairs[pair] += sign * self.counts[number]
            if sign > 0:
                self.places[pair].add(number)

    def merge(self, pair: tuple[int, int], new: int) -> None:
        """Replace a pair by a new id wherever it occurs."""
        for number in self.places.pop(pair, ()):
            word = self.words[number]
            if not any(found == pair for found in itertools.pairwise(word)):
                continue
            self._count(number, -1)
            merged: list[int] = []
            for token in word:
                if merged and (merged[-1], token) == pair:
                    merged[-1] = new
                else:
                    merged.append(token)
            self.words[number] = merged
            self._count(number, 1)
        del self.pairs[pair]


def extend_vocabulary(
    tokenizer: Tokenizer, texts: Iterable[str], pieces: int, special: Sequence[str] = ()
) -> Extension:
    """Return a tokenizer with at most `pieces` more pieces, learned from `texts`, and more special tokens.

    Raises UserError for a tokenizer that is not BPE.
    """
    tree = json.loads(tokenizer.to_str())
    model = tree["model"]
    if model["type"] != "BPE":
        raise UserError(
            f"only BPE tokenizers can be extended, and this one is {model['type']}", code="extension"
        )
    vocabulary: dict[str, int] = model["vocab"]
    for token in tree["added_tokens"]:  # otherwise their ids would follow the longer vocabulary
        vocabulary.setdefault(token["content"], token["id"])
    names = {number: piece for piece, number in vocabulary.items()}
    size = max(names) + 1
    parts: dict[int, list[int]] = {}

    def add(piece: str, old: Sequence[int]) -> int:
        new = size + len(parts)
        vocabulary[piece] = new
        names[new] = piece
        parts[new] = [part for number in old for part in parts.get(number, [number])]
        return new

    counted = _count_words(tokenizer, texts)
    characters = _missing_characters(tokenizer, counted, pieces // 2)
    by_bytes = {ids: add(char, ids) for char, ids in characters.items()}
    words: dict[tuple[int, ...], int] = Counter()
    for word, count in counted.items():
        ids = [token.id for token in tokenizer.model.tokenize(word)]
        words[_with_characters(ids, by_bytes)] += count
    state = _Words(words)
    as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)  # as in older files
    while len(parts) < pieces and state.pairs:
        pair, count = min(state.pairs.items(), key=lambda item: (-item[1], item[0]))
        if count < 2:
            break
        merge = [names[number] for number in pair]
        piece = "".join(merge)
        if piece in vocabulary or any(map(BYTE.fullmatch, merge)):
            del state.pairs[pair]
            continue
        model["merges"].append(" ".join(merge) if as_text else merge)
        state.merge(pair, add(piece, pair))
    extended = Tokenizer.from_str(json.dumps(tree))
    added = [token for token in special if token not in vocabulary]
    extended.add_special_tokens(added)
    numbers = extended.get_vocab()
    parts |= {numbers[token]: [] for token in added}
    return Extension(extended, parts)


def _count_words(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    """Return how often each word occurs in at most TRAINING_CHARS characters."""
    counted: Counter[str] = Counter()
    characters = 0
    for text in texts:
        characters += len(text)
        normalized = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
        stretches = [normalized]
        if tokenizer.pre_tokenizer is not None:
            stretches = [part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized)]
        for stretch in stretches:
            counted.update(WORDS.findall(stretch) if "▁" in stretch else [stretch])
        if characters >= TRAINING_CHARS:
            break
    return counted


def _missing_characters(
    tokenizer: Tokenizer, counted: dict[str, int], most: int
) -> dict[str, tuple[int, ...]]:
    """Return the `most` most frequent characters that are encoded as bytes, with the ids of their bytes."""
    frequency: Counter[str] = Counter()
    for word, count in counted.items():
        for char in word:
            frequency[char] += count
    characters: dict[str, tuple[int, ...]] = {}
    for char, _ in sorted(frequency.items(), key=lambda item: (-item[1], item[0])):
        if len(characters) == most:
            break
        tokens = tokenizer.model.tokenize(char)
        if len(tokens) > 1 and all(BYTE.fullmatch(token.value) for token in tokens):
            characters[char] = tuple(token.id for token in tokens)
    return characters


def _with_characters(ids: list[int], by_bytes: dict[tuple[int, ...], int]) -> tuple[int, ...]:
    """Replace the bytes of each character that has a piece now, which `by_bytes` names."""
    result: list[int] = []
    position = 0
    while position < len(ids):
        length = next((n for n in (4, 3, 2) if tuple(ids[position : position + n]) in by_bytes), 0)
        result.append(by_bytes[tuple(ids[position : position + length])] if length else ids[position])
        position += length or 1
    return tuple(result)
