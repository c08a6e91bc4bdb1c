"""Text -> token ids, each word encoded once.

A text repeats its words, and most tokenizers' merges never join what stands on the two sides of a space.
Where a tokenizer's own definition proves that, a text's ids are its words' ids one after the other, and those
of a word are looked up when it comes again: several times as fast as the tokenizer alone, with the same ids.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from data_prep.tokenizer import SPACE, encoder

REMEMBERED = 1 << 18  # words, about 60 MB; then all are forgotten

# A sentencepiece model's word ends before a space and around line breaks.
PIECES = rf"[ {SPACE}]*[^ {SPACE}\n]+|[ {SPACE}]+|\n+"
PIECES_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}
# GPT-2's pattern never matches across the step from a character that is not white space to one that is. Which
# are, Unicode says; Python's \s has four more.
WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
BYTES = rf"[{WHITE}]*[^{WHITE}]+|[{WHITE}]+"
BYTES_SPLITTER = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


class TextEncoder:
    """The encoder of training text (see `tokenizer.encoder`) for many texts, to ids as bytes of `dtype`."""

    def __init__(self, place: Path, dtype: np.dtype) -> None:
        self.place, self.dtype = place, dtype
        rule = word_rule(json.loads((place / "tokenizer.json").read_text()))
        self.words = re.compile(rule[0]).findall if rule else None
        self.before = rule[1] if rule else ""

    @cached_property
    def beginning(self) -> Tokenizer:
        """For text that goes on from nothing."""
        return encoder(self.place)

    @cached_property
    def continuing(self) -> Tokenizer:
        """For text that goes on from earlier text, and for words."""
        return encoder(self.place, continuing=True)

    @cached_property
    def known(self) -> Known:
        """The words so far."""
        return Known(self.continuing, self.dtype)

    def encode(self, texts: Sequence[str], continuing: bool = False) -> list[bytes]:
        """The ids of each text; with `continuing` it goes on from earlier text."""
        if self.words is None:
            tokenizer = self.continuing if continuing else self.beginning
            encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [_packed(one.ids, self.dtype) for one in encoded]
        before = "" if continuing else self.before
        found: list[bytes] = []
        for text in texts:
            if len(self.known) > REMEMBERED:
                self.known.clear()
            words = self.words(before + text) if text else []
            found.append(b"".join(map(self.known.__getitem__, words)))
        return found


class Known(dict[str, bytes]):
    """Ids of words; one that is looked up for the first time is encoded."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        self.tokenizer, self.dtype = tokenizer, dtype

    def __missing__(self, word: str) -> bytes:
        ids = self.tokenizer.encode(word, add_special_tokens=False).ids
        self[word] = _packed(ids, self.dtype)
        return self[word]


def _packed(ids: list[int], dtype: np.dtype) -> bytes:
    return array(dtype.char, ids).tobytes()


def word_rule(tree: dict[str, Any]) -> tuple[str, str] | None:
    """A pattern that cuts text into words encoded apart, and what is put before a text; None: cannot be cut.

    `tree` is the content of tokenizer.json. Proven for two kinds of byte-pair encoders. GPT-2's own pattern
    cuts first. LLaMA's merges work on the whole text, but none of them makes a piece in which a space follows
    something else, or a line break stands beside something else; what no merge joins stays apart.
    """
    model, normalizer, splitter = tree["model"], tree["normalizer"], tree["pre_tokenizer"]
    if model["type"] != "BPE" or not all(token["special"] for token in tree["added_tokens"]):
        return None
    if any(model[key] for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        return None
    if normalizer is None and splitter is not None and splitter.items() >= BYTES_SPLITTER.items():
        return BYTES, ""
    if normalizer != PIECES_NORMALIZER or splitter is not None or model["ignore_merges"]:
        return None
    joined = "\0".join(a + b for a, b in model["merges"])
    crossing = re.search(rf"[^{SPACE}\0]{SPACE}|[^\n\0]\n|\n[^\n\0]", joined)
    return None if crossing or SPACE not in model["vocab"] else (PIECES, " ")
