"""The word cache: text -> token ids, with each distinct word encoded once.

What it buys: text is encoded about twice as fast as by the tokenizer alone, with the same ids. It costs this
module, its check in `encode.words_agree`, and their tests.

How it works: texts repeat words, and most tokenizers never merge across a space. If the definition of a
tokenizer proves that (`word_rule`), the ids of a text are the concatenated ids of its words, and repeated
words are looked up. `prepare` compares both ways on real rows before it uses the cache.
"""

from __future__ import annotations

import contextlib
import json
import re
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from tokenizers import Tokenizer

from .tokenizer import SPACE, special_names

CACHE_BYTES = 32 << 20  # the cache is cleared when it is larger
MAX_CHARS = 128  # longer words are rarely repeated and not cached
ENTRY_BYTES = 230  # of a dictionary's entry and its two objects, without the content

# A word of a sentencepiece model ends before a space and around line breaks.
PIECES = rf"[ {SPACE}]*[^ {SPACE}\n]+|[ {SPACE}]+|\n+"
PIECES_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}
BYTE_PIECES = {f"<0x{byte:02X}>" for byte in range(256)}
LINE_BREAK = "<0x0A>"
# GPT-2's pattern never matches white space after another character. This is Unicode's white space: Python's
# \s has four more characters.
WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
WHITE_SPACE = tuple(re.findall(f"[{WHITE}]", "".join(map(chr, range(0x3001)))))
BYTES = rf"[{WHITE}]*[^{WHITE}]+|[{WHITE}]+"
BYTES_SPLITTER = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


class Definition(TypedDict):
    """The content of tokenizer.json, without the parts that are not read here."""

    model: Any  # the keys of these three depend on their `type`
    normalizer: Any
    pre_tokenizer: Any
    added_tokens: list[Any]


class TextEncoder:
    """Encodes many training texts as ids, in bytes of `dtype`. See `encoder`.

    Without `by_words` every text is encoded as a whole.
    """

    def __init__(self, directory: Path, dtype: np.dtype, by_words: bool = True) -> None:
        self.directory = directory
        self.dtype = dtype
        rule = _rule(_content(directory)) if by_words else None
        self.words = re.compile(rule[0]).findall if rule else None
        self.before = rule[1] if rule else ""
        pieces = bool(rule and rule[0] == PIECES)
        # If nothing cuts a word further, the model alone gives its ids, in half the time.
        self.merge = self.continuing.model.tokenize if pieces else None
        self.attaching = SPACE if pieces else WHITE_SPACE  # characters to which a following space belongs
        self.cache = WordCache(self._encode_word)
        self.spaced_cache = WordCache(self._encode_after_space, lines=False)  # texts between two spaces

    @cached_property
    def beginning(self) -> Tokenizer:
        """Return the encoder of a text's beginning."""
        return encoder(self.directory)

    @cached_property
    def continuing(self) -> Tokenizer:
        """Return the encoder of text that continues earlier text, and of words."""
        return encoder(self.directory, continuing=True)

    def encode(self, texts: Sequence[str], continuing: bool = False) -> list[bytes]:
        """Return the ids of each text. With `continuing` it continues earlier text."""
        if self.words is None:
            tokenizer = self.continuing if continuing else self.beginning
            encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [array(self.dtype.char, encoding.ids).tobytes() for encoding in encoded]
        before = "" if continuing else self.before
        return [self._encode_text(before + text) if text else b"" for text in texts]

    def _encode_text(self, text: str) -> bytes:
        """Return the ids of a text.

        A word begins at every single space, so texts are cut there, which is fast. Only a text in which a
        space belongs to white space before it is cut by the pattern.
        """
        inner = text.strip(" ")
        first, *others = inner.split(" ")
        if inner and not first.endswith(self.attaching):
            before, _, after = text.partition(inner)
            with contextlib.suppress(KeyError):
                words = b"".join(map(self.spaced_cache.__getitem__, others))
                return self._encode_words(before + first) + words + self._encode_words(after)
        return self._encode_words(text)

    def _encode_words(self, text: str) -> bytes:
        assert self.words is not None
        return b"".join(map(self.cache.__getitem__, self.words(text)))

    def _encode_word(self, word: str) -> bytes:
        if self.merge is not None:
            ids = [token.id for token in self.merge(word.replace(" ", SPACE))]
        else:
            ids = self.continuing.encode(word, add_special_tokens=False).ids
        return array(self.dtype.char, ids).tobytes()

    def _encode_after_space(self, text: str) -> bytes:
        """Return the ids of a space and a text. Raises KeyError if a space after it begins no word."""
        if text.isalnum():  # one word under every rule
            return self._encode_word(f" {text}")
        if not text or text.endswith(self.attaching):
            raise KeyError(text)
        assert self.words is not None
        words = self.words(f" {text}")
        return (
            self._encode_word(words[0]) if len(words) == 1 else b"".join(map(self.cache.__getitem__, words))
        )


class WordCache(dict[str, bytes]):
    """Ids of words. A word is encoded when it is looked up for the first time."""

    def __init__(self, encode: Callable[[str], bytes], lines: bool = True) -> None:
        """lines: whether words with line breaks inside are cached."""
        self.encode = encode
        self.lines = lines
        self.bytes = 0

    def __missing__(self, word: str) -> bytes:
        ids = self.encode(word)
        if len(word) > MAX_CHARS or (not self.lines and "\n" in word.strip("\n")):
            return ids
        size = 4 * len(word) + len(ids) + ENTRY_BYTES
        if self.bytes + size > CACHE_BYTES:
            self.clear()
            self.bytes = 0
        self.bytes += size
        self[word] = ids
        return ids


def word_rule(tree: Definition) -> tuple[str, str] | None:
    """Return a pattern of words that can be encoded separately, and the prefix of a text. None: no such rule.

    `tree` is the content of tokenizer.json. The rule is proven for two kinds of byte-pair encoders. GPT-2's
    pattern itself cuts text into words. LLaMA merges in the complete text, but no merge makes a piece with a
    space after another character, or with a line break next to another character. There every character must
    have ids, if necessary by bytes: unknown characters would be merged across words.
    """
    model = tree["model"]
    normalizer = tree["normalizer"]
    splitter = tree["pre_tokenizer"]
    if model["type"] != "BPE" or not all(token["special"] for token in tree["added_tokens"]):
        return None
    if any(model[key] for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        return None
    if normalizer is None and splitter is not None and splitter.items() >= BYTES_SPLITTER.items():
        return BYTES, ""
    if normalizer != PIECES_NORMALIZER or splitter is not None or model["ignore_merges"]:
        return None
    vocab = model["vocab"]
    if SPACE not in vocab or not model["byte_fallback"] or not vocab.keys() >= BYTE_PIECES:
        return None
    merges = "\0".join(a + b for a, b in model["merges"])
    crossing = re.search(rf"[^{SPACE}\0]{SPACE}|[^\n\0]\n|\n[^\n\0]|{LINE_BREAK}", merges)
    return None if crossing else (PIECES, " ")


@lru_cache(maxsize=1)
def _rule(content: str) -> tuple[str, str] | None:
    """Return the `word_rule` of a tokenizer.json's content."""
    return word_rule(_tree(content))


def _content(directory: Path) -> str:
    return (directory / "tokenizer.json").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _tree(content: str) -> Definition:
    """Return the parsed tokenizer.json, which must not be changed."""
    return json.loads(content)


def special_tokens(directory: Path) -> tuple[str, ...]:
    """Return all special tokens of a saved tokenizer, sorted."""
    return tuple(sorted(_special_tokens(directory, _content(directory))))


def _special_tokens(directory: Path, content: str) -> frozenset[str]:
    added = {token["content"] for token in _tree(content)["added_tokens"] if token["special"]}
    return frozenset(added | set(special_names(directory).values()))


def special_pattern(directory: Path) -> re.Pattern[str]:
    """Return a pattern of the special tokens of a saved tokenizer, without the one for unknown text."""
    specials = {*special_tokens(directory)} - {special_names(directory).get("unk_token", ""), ""}
    by_start: dict[str, list[str]] = {}
    for special in sorted(specials, key=len, reverse=True):
        by_start.setdefault(special[0], []).append(re.escape(special[1:]))
    # `re` finds a single first character fast.
    groups = [f"{re.escape(first)}(?:{'|'.join(rests)})" for first, rests in sorted(by_start.items())]
    return re.compile("|".join(groups) or r"(?!)")


def encoder(directory: Path, continuing: bool = False, markup: bool = False) -> Tokenizer:
    """Return an encoder of a saved tokenizer that adds no special tokens and finds none in the text.

    "</s>" in a document is four characters, never the end-of-sequence id. With `markup`, for text of a chat
    template, it is that id. With `continuing`, for text after other text, no space is put before the text.
    """
    content = _content(directory)
    return _encoder(content, _special_tokens(directory, content), continuing, markup)


@lru_cache(maxsize=4)
def _encoder(content: str, specials: frozenset[str], continuing: bool, markup: bool) -> Tokenizer:
    """Return the encoder of a tokenizer.json's content. The object is shared and must not be changed."""
    tree = _tree(content)
    if continuing:
        tree = tree | {
            "normalizer": _without_prefix(tree["normalizer"]),
            "pre_tokenizer": _without_prefix(tree["pre_tokenizer"]),
        }
        if tree == _tree(content):  # as with GPT-2's kind
            return _encoder(content, specials, False, markup)
        content = json.dumps(tree)
    backend = _bare(content)
    backend.encode_special_tokens = not markup
    for special in () if markup else specials - {tree["model"].get("unk_token")}:
        texts = [special, f" {special} ", f"x{special}x"]
        number = backend.token_to_id(special)
        if any(number in encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)):
            # It is also a piece of the vocabulary, so text may produce it.
            return _bare(json.dumps(_renamed(tree, specials)))
    return backend


def _bare(content: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json as an encoder of plain text."""
    backend = Tokenizer.from_str(content)
    backend.post_processor = None
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    return backend


def _renamed(tree: Definition, specials: frozenset[str]) -> Definition:
    """Return the tokenizer with its special tokens renamed to names that no text contains."""

    def name(token: str) -> str:
        return f"\0{token}" if token in specials else token

    model = dict(tree["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {name(piece): number for piece, number in model["vocab"].items()}
    else:
        model["vocab"] = [[name(piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & specials]
    if model.get("unk_token"):
        model["unk_token"] = name(model["unk_token"])
    added = [token | {"content": name(token["content"])} for token in tree["added_tokens"]]
    return tree | {"model": model, "added_tokens": added}


def _without_prefix(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer without the space before the text."""
    if part is None or part["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            inner = map(_without_prefix, part[name])
            return part | {name: [inner_part for inner_part in inner if inner_part is not None]}
    if part["type"] == "Metaspace":
        return part | {"prepend_scheme": "never"}
    return part | {"add_prefix_space": False} if "add_prefix_space" in part else part
