"""Near-duplicates: MinHash signatures over word shingles, found by banding, checked by estimate."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from datasketch import MinHash  # imported where it is used: it brings scipy along, most of a second

PERMUTATIONS = 128
SHINGLE = 5  # words


@cache
def _blank() -> MinHash:
    from datasketch import MinHash

    return MinHash(PERMUTATIONS, seed=1, scheme="affine32", hashfunc=zlib.crc32)


def signature(text: str) -> np.ndarray:
    """MinHash of a text's 5-word shingles, uint32 [PERMUTATIONS]; case and spacing do not count."""
    words = text.lower().split()
    shingles = {
        " ".join(words[i : i + SHINGLE]).encode("utf-8", "replace")
        for i in range(max(1, len(words) - SHINGLE + 1))
    }
    sketch = _blank().copy()
    sketch.update_batch(shingles)
    return np.asarray(sketch.hashvalues, np.uint32)


def near_duplicates(signatures: np.ndarray, threshold: float) -> np.ndarray:
    """Rows that resemble an earlier one: bool [n].

    signatures: uint32 [n, PERMUTATIONS]. Rows that agree in one whole band (sizes as datasketch's LSH picks
    them for the threshold) are compared; pairs whose estimated Jaccard similarity reaches the threshold are
    joined into groups; all but the first row of a group are near-duplicates.
    """
    from datasketch import MinHashLSH

    n = len(signatures)
    index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
    leader = list(range(n))

    def find(row: int) -> int:
        while leader[row] != row:
            leader[row] = leader[leader[row]]
            row = leader[row]
        return row

    for band in range(index.b):
        rows = np.ascontiguousarray(signatures[:, band * index.r : (band + 1) * index.r])
        keys = rows.view([("", rows.dtype)] * index.r).reshape(-1)
        order = np.argsort(keys, kind="stable")
        same = keys[order][1:] == keys[order][:-1]
        heads = np.maximum.accumulate(np.where(np.concatenate([[False], same]), 0, np.arange(n)))
        later = np.flatnonzero(same) + 1
        pairs = np.concatenate(
            [np.stack([order[heads[later]], order[later]], 1), np.stack([order[later - 1], order[later]], 1)]
        )
        for a, b in pairs.tolist():
            first, second = find(a), find(b)
            if first != second and np.mean(signatures[a] == signatures[b]) >= threshold:
                leader[max(first, second)] = min(first, second)
    return np.array([find(row) != row for row in range(n)], dtype=bool)


def stack(signatures: Sequence[np.ndarray]) -> np.ndarray:
    """Signatures of a piece, uint32 [rows, PERMUTATIONS], or [0, 0] when there are none."""
    return np.stack(signatures) if signatures else np.zeros((0, 0), np.uint32)


def join(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Signatures of all pieces, one below the other."""
    some = [piece for piece in pieces if len(piece)]
    return np.concatenate(some) if some else stack([])
