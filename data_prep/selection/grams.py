"""Words of texts in any script, and hashes of all runs of n words: what texts are compared by.

Texts are compared as they read: Unicode's compatibility form (NFKC) with case folded, without characters
that are not seen. Where words are written without spaces, every character counts by itself, as a half of a
word (Chinese characters, kana) or a quarter (Thai, Khmer, Lao, Burmese and their like, where a word takes
about four code points), so that a run of n words is about as long in every script.

The hash is a polynomial modulo 2**64 over the letters, from whose running sum numpy has the hash of every run
of many texts at once.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

WORD = 4  # weight of a word
POWERS = 1 << 20  # letters of a usual piece at most
_MULTIPLIER = 0x5851F42D4C957F2D  # odd, so that it has an inverse modulo 2**64
_BEGIN = np.uint64(1 << 32)  # added to a letter that begins a word

# Classes of characters.
_UNKNOWN, _SPACE, _IGNORED, _PUNCTUATION, _SYMBOL, _LETTER, _MARK, _HALF, _QUARTER = range(9)
_WEIGHTS = np.array([WORD, WORD, WORD, WORD, WORD, WORD, WORD, WORD // 2, WORD // 4])
# Scripts that separate no words, by the beginnings of their characters' names.
_HALVES = ("CJK ", "HIRAGANA ", "KATAKANA", "BOPOMOFO ", "YI SYLLABLE", "TANGUT ", "NUSHU ", "IDEOGRAPHIC ")
_QUARTERS = (
    *("THAI ", "LAO ", "KHMER ", "MYANMAR ", "TAI ", "NEW TAI LUE ", "BALINESE ", "JAVANESE ", "SUNDANESE "),
    *("TIBETAN ", "CHAM ", "BATAK ", "REJANG ", "AHOM ", "KAWI "),
)
_classes = np.zeros(0x110000, np.uint8)  # of the characters that were met


class Words(NamedTuple):
    """The words of some texts, ready for the hashes of their runs."""

    text: np.ndarray  # int64 [words]: which text each is from
    starts: np.ndarray  # int64 [words + 1]: first letter of each, and the number of letters
    weights: np.ndarray  # int64 [words + 1]: weight of all words before
    prefix: np.ndarray  # uint64 [letters + 1]: hash of all letters before
    inverses: np.ndarray  # uint64 [letters + 1]: powers of the inverse multiplier

    def totals(self, count: int) -> np.ndarray:
        """Return the weight of each of `count` texts, int64."""
        return np.bincount(self.text, np.diff(self.weights), count).astype(np.int64)

    def grams(self, n: int | np.ndarray, short: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the hashes of all runs of n words of one text, uint64, and the text of each, ascending.

        n: for all texts or, int64 [texts], for each. short: a text of fewer words is a run of its own length.
        """
        words = n if isinstance(n, int) else n[self.text]
        if self.weights[-1] == WORD * len(self.text):
            end = np.arange(len(self.text)) + words
        else:
            end = np.searchsorted(self.weights, self.weights[:-1] + WORD * words)
        bounds = np.cumsum(np.bincount(self.text))[self.text]  # the word after the text's last
        whole = end <= bounds
        if short and len(whole):
            whole |= np.append(True, self.text[1:] != self.text[:-1])
        begin, end = np.flatnonzero(whole), np.minimum(end, bounds)[whole]
        first, last = self.starts[begin], self.starts[end]
        return (self.prefix[last] - self.prefix[first]) * self.inverses[first], self.text[begin]


def split(texts: Sequence[str], punctuation: bool = False) -> Words:
    """Return the words of texts: letters, digits and marks; or, with punctuation, all that is no space."""
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
    # A word begins at a character that counts by itself, and at any other but a mark after such a one.
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
    """Return a text in the form in which two copies of it are equal: case and spaces do not count."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def tokens(text: str) -> list[str]:
    """Return the words of a text in lower case; characters of scripts without spaces count by themselves.

    Of ASCII text these are the runs of letters and digits, as rouge-score has them.
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
    """Return what stands between spaces, and of scripts without spaces every character by itself."""
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
    """Return where the first `count` words of a text end, counted like `units`: its length if it has fewer.

    Marks stay with their letter.
    """
    end, found, after_space, after_alone = 0, 0, True, False
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
        after_space, end = False, i + 1
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
    """Return each number scattered over all of uint64, by splitmix64's finaliser."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))


@cache
def _ascii_values() -> np.ndarray:
    """Return the value of each letter within a word, and of each that begins one."""
    letters = np.arange(128, dtype=np.uint64)
    return mixed(np.concatenate([letters, letters + _BEGIN]))


@lru_cache(maxsize=1)
def _power_tables(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tables of `size` powers; the last one is kept, since most pieces are alike."""
    bases = np.array([_MULTIPLIER, pow(_MULTIPLIER, -1, 2**64)], np.uint64)
    tables = np.ones((2, size), np.uint64)
    tables[:, 1:] = bases[:, None]
    np.multiply.accumulate(tables, axis=1, out=tables)
    return tables[0], tables[1]
