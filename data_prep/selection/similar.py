"""The stages that drop near duplicates: keys of bands, pairs, their similarity, groups and their copies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .buckets import BATCH_BYTES, Chunk, merged, read_buckets
from .compare import contract_children, contract_parents, distinct, find_copies, find_pairs, rows_of
from .row_units import RowUnit
from .similarity.near import PERMUTATIONS, band_shape
from .stages import Dropped, Stages, by_prefix


def drop_similar(stages: Stages, code: int, threshold: float) -> None:
    """Drop the rows that are similar to others, directly or by a chain.

    Rows that agree in a complete band are compared with the first such row and with the one before. Pairs
    whose estimated Jaccard similarity reaches the threshold belong to one group.
    """
    stars = _contract(stages, _similar_pairs(stages, _agreeing_pairs(stages, threshold), threshold))

    def members(number: int) -> Iterator[np.ndarray]:
        seen = np.zeros(0, np.uint64)
        for batch in read_buckets(stars, len(stages.units) + number):
            heads = np.setdiff1d(batch[:, 1], seen)  # a head that is yielded twice would be its own copy
            seen = np.union1d(seen, heads)
            yield np.concatenate([np.stack([heads, heads], axis=1), batch[:, ::-1]])

    copies = stages.run("similar", lambda number: map(stages.by_unit, find_copies(members(number))))
    stages.dropped.append(Dropped(copies, code))


def _agreeing_pairs(stages: Stages, threshold: float) -> list[Path]:
    """Return files of the pairs that are compared, by the units of their first rows."""
    bands = band_shape(threshold)[0]

    def keys_of(number: int) -> Iterator[Chunk]:
        """Yield a chunk for each band."""
        index, nodes, _ = stages.live(number)
        rows, keys = stages.units[number].read_bands()
        at = np.searchsorted(rows, index)
        for band in range(bands if len(keys) else 0):
            key = keys[at, band]
            yield np.stack([key, nodes], axis=1), by_prefix(key, len(stages.units))

    keys = stages.run("keys", keys_of)

    def pairs_of(number: int) -> Iterator[Chunk]:
        for band in range(bands):
            for pairs in find_pairs(read_buckets(keys, number, band)):
                yield pairs, stages.units_of(pairs[:, 0])

    return stages.run("pairs", pairs_of)


def _similar_pairs(stages: Stages, pairs: list[Path], threshold: float) -> list[Path]:
    """Return files of the pairs whose signatures are similar, as edges by the units of their children."""
    blocks = np.array([begin for unit in stages.units for begin in unit.blocks()])

    def halves_of(number: int) -> Iterator[Chunk]:
        """Yield the pairs with the signatures of their first rows, by the blocks of their second rows."""
        for batch in read_buckets(pairs, number):
            for found, signed in _signed(stages.units[number], distinct(batch)):
                records = np.concatenate([found, signed], axis=1)
                yield records, np.searchsorted(blocks, rows_of(found[:, 1]), side="right") - 1

    halves = stages.run("halves", lambda number: merged(halves_of(number)), max(1, len(blocks)))

    def similar(number: int) -> Iterator[Chunk]:
        unit = stages.units[number]
        first = int(np.searchsorted(blocks, unit.first))
        for block, (index, signatures) in enumerate(unit.read_signatures(), first):
            for batch in read_buckets(halves, block):
                other = signatures[index[rows_of(batch[:, 1]) - blocks[block]]].view(np.uint32)
                same = np.ascontiguousarray(batch[:, 2:]).view(np.uint32) == other
                share = same.reshape(len(batch), -1, PERMUTATIONS).mean(axis=2)
                pairs = np.sort(batch[(share >= threshold).all(axis=1), :2], axis=1)
                edges = pairs[:, ::-1]  # child and parent
                yield edges, stages.units_of(edges[:, 0])

    return stages.run("edges", similar)


def _signed(unit: RowUnit, pairs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs whose first rows are in a unit, and the signatures of these rows, a few at once."""
    rows = rows_of(pairs[:, 0])
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    for begin, (index, signatures) in zip(unit.blocks(), unit.read_signatures(), strict=True):
        first, last = np.searchsorted(rows, (begin, begin + len(index))).tolist()
        step = max(1, BATCH_BYTES // (8 * signatures.shape[1]))
        for start in range(first, last, step):
            stop = min(last, start + step)
            yield pairs[order[start:stop]], signatures[index[rows[start:stop] - begin]]


def _contract(stages: Stages, edges: list[Path], turn: int = 0) -> list[Path]:
    """Return files of edges from each node of a group to its head.

    Their buckets are the units of the nodes, and then the units of the heads.
    """
    count = len(stages.units)

    def parents_of(number: int) -> Iterator[Chunk]:
        for moved, changed in contract_parents(read_buckets(edges, number)):
            numbers = np.concatenate([stages.units_of(moved[:, 0]), count + stages.units_of(moved[:, 1])])
            yield _flagged(np.concatenate([moved, moved]), numbers, changed, 2 * count)

    parents = stages.run(f"parents-{turn}", parents_of, 2 * count + 1)

    def children_of(number: int) -> Iterator[Chunk]:
        children = read_buckets(parents, count + number)
        for moved, changed in contract_children(read_buckets(parents, number), children):
            yield _flagged(moved, stages.units_of(moved[:, 0]), changed, count)

    children = stages.run(f"children-{turn}", children_of, count + 1)
    flags = itertools.chain(read_buckets(parents, 2 * count), read_buckets(children, count))
    return _contract(stages, children, turn + 1) if any(map(len, flags)) else parents


def _flagged(records: np.ndarray, numbers: np.ndarray, changed: bool, bucket: int) -> Chunk:
    """Return a chunk with a further record in `bucket` if an edge has changed."""
    if not changed:
        return records, numbers
    return np.concatenate([records, np.zeros((1, 2), np.uint64)]), np.append(numbers, bucket)
