"""Comparison of records in batches: copies, pairs of similar rows, and the groups that pairs form.

A node is a row as one number. Of two copies the smaller node remains: it has the split (12 bits), how much
fewer copies the row has than the most (16 bits), and the row (36 bits).

Groups are found by star contraction (Kiveris et al., Connected Components in MapReduce and Beyond, 2014). An
edge is a child and its parent, a smaller node. Each round connects the child and the other parents of a child
with its smallest parent, and then children with the parent of their parent, until all edges of a group have
the same parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

SPLIT = 52  # bits after the split
MOST_SPLITS = 1 << (64 - SPLIT)
_RANK = 36  # bits after the copies
MOST_ROWS = 1 << _RANK
_MOST_COPIES = 0xFFFF


def nodes_of(rows: np.ndarray, split: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """Return rows as nodes, uint64."""
    fewer = (_MOST_COPIES - copies).astype(np.uint64) << np.uint64(_RANK)
    return (split.astype(np.uint64) << np.uint64(SPLIT)) | fewer | rows.astype(np.uint64)


def rows_of(nodes: np.ndarray) -> np.ndarray:
    """Return the row of each node, int64."""
    return (nodes & np.uint64(MOST_ROWS - 1)).astype(np.int64)


def find_copies(batches: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the nodes, uint64, that are copies of a preferred node with the same key.

    A key with a training row (split 0) keeps one node. Any other key keeps one node of each split.

    batches: uint64 [records, 2], key and node.
    """
    kept = np.zeros((0, 2), np.uint64)
    for batch in batches:
        records = np.concatenate([kept, batch]) if len(kept) else batch
        order, new = _grouped(records[:, 0], "quicksort")
        several = ~new
        several[:-1] |= ~new[1:]
        members = order[several]
        key, node = records[members].T
        members = members[by_key := np.lexsort((node, key))]
        key, node = key[by_key], node[by_key]
        split = node >> np.uint64(SPLIT)
        first = _begins(key)
        best = split[first][np.cumsum(first) - 1] if len(key) else split
        dropped = ~(first | (_begins(split) & (best > 0)))
        yield node[dropped]
        keep = np.ones(len(records), bool)
        keep[members[dropped]] = False
        kept = records[keep]


def find_pairs(batches: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield pairs of nodes with the same key, uint64 [pairs, 2].

    Each node is paired with the first of its key and with the one before it.

    batches: uint64 [records, 2], key and node, with the nodes of a key in order of their rows.
    """
    kept = np.zeros((0, 2), np.uint64)
    for batch in batches:
        records = np.concatenate([kept, batch]) if len(kept) else batch
        order, new = _grouped(records[:, 0], "stable")
        node = records[order, 1]
        begins = np.flatnonzero(new)
        later = np.flatnonzero(~new)
        head = begins[np.searchsorted(begins, later) - 1]
        third = later[later > head + 1]
        yield np.concatenate([node[np.stack([head, later], 1)], node[np.stack([third - 1, third], 1)]])
        kept = records[order[new | np.append(new[1:], True)[: len(new)]]]  # the first and last of each key


def distinct(pairs: np.ndarray) -> np.ndarray:
    """Return the distinct pairs, uint64 [pairs, 2], sorted by the first and then the second number."""
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    return pairs[_begins(pairs[:, 0]) | _begins(pairs[:, 1])]


def contract_parents(batches: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield edges to the smallest parent of each child, of the child and its other parents.

    The second value is True if a child had several parents. batches: edges, uint64 [edges, 2].
    """
    kept = np.zeros((0, 2), np.uint64)
    for batch in batches:
        edges = distinct(np.concatenate([kept, batch]))
        first = _begins(edges[:, 0])
        kept = edges[first]
        smallest = kept[np.cumsum(first) - 1, 1] if len(kept) else edges[:, 1]
        moved = np.stack([edges[:, 1], smallest], axis=1)[~first]
        yield moved, bool(len(moved))
    yield kept, False


def contract_children(
    parents: Iterable[np.ndarray], children: Iterable[np.ndarray]
) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield edges of all children to the smallest parent of their parent, or to their parent if it has none.

    The second value is True if a parent had a parent.

    Args:
        parents: Edges of the parents, uint64 [edges, 2].
        children: Edges to the parents.
    """
    edges = np.zeros((0, 2), np.uint64)
    for batch in parents:
        edges = distinct(np.concatenate([edges, batch]))
        edges = edges[_begins(edges[:, 0])]
    for batch in children:
        at = np.minimum(np.searchsorted(edges[:, 0], batch[:, 1]), max(0, len(edges) - 1))
        has = edges[at, 0] == batch[:, 1] if len(edges) else np.zeros(len(batch), bool)
        moved = batch.copy()
        moved[has, 1] = edges[at[has], 1]
        yield moved, bool(has.any())


def _grouped(keys: np.ndarray, kind: Literal["quicksort", "stable"]) -> tuple[np.ndarray, np.ndarray]:
    """Return an order by key, and whether each key in that order differs from the one before."""
    order = np.argsort(keys, kind=kind)
    return order, _begins(keys[order])


def _begins(values: np.ndarray) -> np.ndarray:
    """Return whether each value is the first or differs from the one before."""
    begins = np.ones(len(values), bool)
    begins[1:] = values[1:] != values[:-1]
    return begins
