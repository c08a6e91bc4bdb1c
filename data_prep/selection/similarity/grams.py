"""Words of texts in any script, and hashes of all runs of n words, by which texts are compared.

Texts are compared in Unicode's compatibility form (NFKC), with case folded and without invisible characters.
In scripts without spaces every character counts separately: as half a word (Chinese characters, kana) or a
quarter (Thai, Khmer, Lao, Burmese and similar scripts, whose words have about four code points). A run of n
words is therefore about equally long in every script.

The hash is a polynomial modulo 2**64 over the letters. numpy derives the hashes of all runs of many texts
from its running sum.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

WORD = 4  # weight of a word
POWERS = 1 << 20  # most letters of a usual piece
_MULTIPLIER = 0x5851F42D4C957F2D  # odd, so that it has an inverse modulo 2**64
_BEGIN = np.uint64(1 << 32)  # added to a letter that begins a word

# Classes of characters.
_UNKNOWN, _SPACE, _IGNORED, _PUNCTUATION, _SYMBOL, _LETTER, _MARK, _HALF, _QUARTER = range(9)
_WEIGHTS = np.array([WORD, WORD, WORD, WORD, WORD, WORD, WORD, WORD // 2, WORD // 4])
# Scripts without spaces between words, by the beginnings of their characters' names.
_HALVES = ("CJK ", "HIRAGANA ", "KATAKANA", "BOPOMOFO ", "YI SYLLABLE", "TANGUT ", "NUSHU ", "IDEOGRAPHIC ")
_QUARTERS = (
    *("THAI ", "LAO ", "KHMER ", "MYANMAR ", "TAI ", "NEW TAI LUE ", "BALINESE ", "JAVANESE ", "SUNDANESE "),
    *("TIBETAN ", "CHAM ", "BATAK ", "REJANG ", "AHOM ", "KAWI "),
)
_classes = np.zeros(0x110000, np.uint8)  # of the characters seen so far


class Words(NamedTuple):
    """The words of texts, prepared for the hashes of their runs."""

    text: np.ndarray  # int64 [words]: the text of each word
    starts: np.ndarray  # int64 [words + 1]: first letter of each word, and the number of letters
    weights: np.ndarray  # int64 [words + 1]: weight of all earlier words
    prefix: np.ndarray  # uint64 [letters + 1]: hash of all earlier letters
    inverses: np.ndarray  # uint64 [letters + 1]: powers of the inverse multiplier

    def totals(self, count: int) -> np.ndarray:
        """Return the weight of each of `count` texts, int64."""
        return np.bincount(self.text, np.diff(self.weights), count).astype(np.int64)

    def grams(self, n: int | np.ndarray, short: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the hashes of all runs of n words, uint64, and the text of each run, ascending.

        n: one number for all texts, or int64 [texts]. short: a text with fewer words is one run.
        """
        words = n if isinstance(n, int) else n[self.text]
        if self.weights[-1] == WORD * len(self.text):
            end = np.arange(len(self.text)) + words
        else:
            end = np.searchsorted(self.weights, self.weights[:-1] + WORD * words)
        bounds = np.cumsum(np.bincount(self.text))[self.text]  # the word after the text's last
        valid = end <= bounds
        if short and len(valid):
            valid |= np.append(True, self.text[1:] != self.text[:-1])
        begin = np.flatnonzero(valid)
        end = np.minimum(end, bounds)[valid]
        first = self.starts[begin]
        last = self.starts[end]
        return (self.prefix[last] - self.prefix[first]) * self.inverses[first], self.text[begin]


def split(texts: Sequence[str], punctuation: bool = False) -> Words:
    """Return the words of texts: letters, digits and marks, or with `punctuation` everything but spaces."""
    joined = "\0".join(text.replace("\0", " ") for text in texts)
    if joined.isascii():
        letters = np.frombuffer(joined.lower().encode(), np.uint8)
    else:
        folded = unicodedata.normalize("NFKC", joined).casefold()
        folded = unicodedata.normalize("NFKC", folded)
        letters = np.frombuffer(folded.encode("utf-32-le", "surrogatepass"), np.uint32)
    classes = _classes[letters]
    if (unknown := letters[classes == _UNKNOWN]).size:
        for letter in np.unique(unknown).tolist():
            _classes[letter] = _class_of(chr(letter))
        classes = _classes[letters]
    ends = np.flatnonzero(letters == 0)  # of all texts but the last
    inside = classes >= (_PUNCTUATION if punctuation else _LETTER)  # words
    gaps = np.cumsum(~inside & (classes != _IGNORED))[inside]
    used = np.flatnonzero(inside)
    kinds = classes[used]
    alone = (kinds >= _HALF) | (kinds == _SYMBOL)
    # A word begins at a character that counts separately, and after such a character unless a mark follows.
    first = alone.copy()
    first[1:] |= alone[:-1] & (kinds[1:] != _MARK)
    first |= np.append(True, gaps[1:] != gaps[:-1])[: len(used)]
    if letters.dtype == np.uint8:
        values = _ascii_values()[letters[used] + np.uint8(128) * first]
    else:
        values = mixed(letters[used].astype(np.uint64) + first * _BEGIN)
    powers, inverses = _power_tables(max(1 << (len(used) + 1).bit_length(), POWERS))
    prefix = np.zeros(len(used) + 1, np.uint64)
    np.cumsum(values * powers[: len(used)], out=prefix[1:])
    starts = np.flatnonzero(first)
    weights = _WEIGHTS[kinds[starts]]
    return Words(
        np.searchsorted(ends, used[starts]),
        np.append(starts, len(used)),
        np.append(0, np.cumsum(weights)),
        prefix,
        inverses,
    )


def folded(text: str) -> str:
    """Return a text in a form that ignores case and spaces, for comparison."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def tokens(text: str) -> list[str]:
    """Return the words of a text in lower case. Characters of scripts without spaces are separate words.

    The words of ASCII text are the runs of letters and digits, as in rouge-score.
    """
    if text.isascii():
        return re.findall("[a-z0-9]+", text.lower())
    words: list[str] = []
    before = _SPACE
    for letter in unicodedata.normalize("NFKC", text).lower():
        kind = _cached_class(letter)
        if kind in (_LETTER, _MARK) and before in (_LETTER, _MARK):
            words[-1] += letter
        elif kind == _MARK and before >= _HALF:
            words[-1] += letter
            continue  # the next letter begins a word
        elif kind >= _LETTER:
            words.append(letter)
        if kind != _IGNORED:
            before = kind
    return words


def units(text: str) -> list[str]:
    """Return the text between spaces. Characters of scripts without spaces are separate units."""
    result: list[str] = []
    for word in (text if text.isascii() else unicodedata.normalize("NFKC", text)).split():
        if word.isascii():
            result.append(word)
            continue
        begins = True
        for letter in word:
            kind = _cached_class(letter)
            if kind >= _HALF or begins:
                result.append(letter)
            else:
                result[-1] += letter
            begins = kind >= _HALF
    return result


def end_of_words(text: str, count: int) -> int:
    """Return the end of the first `count` units of a text (see `units`), or its length if it has fewer.

    A mark belongs to its letter.
    """
    end = 0
    found = 0
    after_space = True
    after_alone = False
    for i, letter in enumerate(text):
        if letter.isspace():
            after_space = True
            continue
        alone = not letter.isascii() and _cached_class(letter) >= _HALF
        is_mark = not letter.isascii() and unicodedata.category(letter)[0] == "M"
        if after_space or ((alone or after_alone) and not is_mark):
            if found == count:
                return end
            found += 1
        if after_space or not is_mark:
            after_alone = alone
        after_space = False
        end = i + 1
    return len(text)


@lru_cache(maxsize=1 << 16)
def _cached_class(letter: str) -> int:
    return _class_of(letter)


def _class_of(letter: str) -> int:
    """Return the class of a character."""
    category = unicodedata.category(letter)
    if letter.isspace() or category in ("Cc", "Zs", "Zl", "Zp") or letter == "\u200b":  # zero width space
        return _SPACE
    name = unicodedata.name(letter, "")
    if category == "Cf" or name.startswith("VARIATION SELECTOR") or letter in "\u034f\u17b4\u17b5":
        return _IGNORED
    if category[0] in "LNM":
        if name.startswith(_HALVES):
            return _HALF
        if name.startswith(_QUARTERS):
            return _QUARTER
        return _MARK if category[0] == "M" else _LETTER
    return _SYMBOL if category in ("So", "Sk") and not letter.isascii() else _PUNCTUATION


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Return hashes of numbers, uint64, by the finaliser of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))


@cache
def _ascii_values() -> np.ndarray:
    """Return the value of each letter within a word, and of each letter that begins a word."""
    letters = np.arange(128, dtype=np.uint64)
    return mixed(np.concatenate([letters, letters + _BEGIN]))


@lru_cache(maxsize=1)
def _power_tables(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tables of `size` powers. The last tables are kept, since most pieces have the same size."""
    bases = np.array([_MULTIPLIER, pow(_MULTIPLIER, -1, 2**64)], np.uint64)
    tables = np.ones((2, size), np.uint64)
    tables[:, 1:] = bases[:, None]
    np.multiply.accumulate(tables, axis=1, out=tables)
    return tables[0], tables[1]
