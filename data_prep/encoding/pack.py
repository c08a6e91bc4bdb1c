"""Packing of token sequences into rows: documents into fixed blocks or bins, examples into bins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

ROWS = 1024  # packed at once, if they have at most TOKENS
TOKENS = 1 << 24
# Supervised tokens of an example: start, stop and loss weight.
SPAN = np.dtype([("start", np.int64), ("stop", np.int64), ("weight", np.float32)])


class PackedRows(NamedTuple):
    """Rows of different lengths as flat arrays, for the columns of a shard."""

    ids: np.ndarray  # tokens of all rows, concatenated
    lengths: np.ndarray  # int64 [rows]: tokens of each row
    segments: np.ndarray  # int64: segment lengths of all rows
    segment_counts: np.ndarray  # int64 [rows]
    sources: np.ndarray  # uint64: the document of each segment, all rows
    spans: np.ndarray  # int64: start, end of supervised tokens in the row, all rows; empty for text
    span_counts: np.ndarray  # int64 [rows]: numbers in `spans`, two for each span
    valid: np.ndarray  # int64 [rows]: supervised targets after the shift
    domain: int  # number of the domain of all rows
    # Instruct only:
    weights: np.ndarray = np.zeros(0, np.float32)  # of each span of the rows that have weights
    weight_counts: np.ndarray = np.zeros(0, np.int64)  # int64 [rows]: numbers in `weights`
    weight: np.ndarray = np.zeros(0)  # float64 [rows]: sum of the weights of the targets


class BlockPacker:
    """Packs documents of one domain, in order, into rows of exactly `block` tokens.

    A document that does not fit continues in the next row as a separate segment. The remainder at the end is
    less than a block and is dropped.
    """

    def __init__(self, block: int, domain: int = 0) -> None:
        self.block = block
        self.domain = domain
        self._ids = np.zeros(0, np.uint16)
        self._lengths = np.zeros(0, np.int64)
        self._sources = np.zeros(0, np.uint64)

    @property
    def remainder(self) -> int:
        """Return the number of tokens that do not fill a block yet."""
        return len(self._ids)

    def add(self, ids: np.ndarray, lengths: np.ndarray, sources: np.ndarray) -> PackedRows:
        """Append documents (flat ids, lengths and hashes) and return the rows that became full."""
        ids = np.concatenate([self._ids.astype(ids.dtype), ids])
        sources = np.concatenate([self._sources, sources[lengths > 0]])
        lengths = np.concatenate([self._lengths, lengths[lengths > 0]])
        full = len(ids) // self.block
        used = full * self.block
        ends = np.cumsum(lengths)
        cuts = np.union1d(ends[ends < used], np.arange(1, full + 1) * self.block)
        segments = np.diff(cuts, prepend=0)
        counts = np.bincount((cuts - 1) // self.block, minlength=full) if full else cuts
        self._ids = ids[used:].copy()  # a view would keep all ids in memory
        self._lengths = np.diff(ends[ends > used], prepend=used)
        self._sources = sources[ends > used]
        none = np.zeros(0, np.int64)
        return PackedRows(
            ids[:used],
            np.full(full, self.block),
            segments,
            counts,
            sources[np.searchsorted(ends, cuts)],
            none,
            np.zeros(full, np.int64),
            self.block - counts,
            self.domain,
        )


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Assign lengths to bins: each length, longest first, goes into the first bin with enough space.

    lengths: int64 [n], each in 1..capacity. Returns the members of each bin, in the order of assignment. Ties
    keep their order. A tree of the largest space below each node finds the bin in logarithmic time.
    """
    order = np.argsort(-lengths, kind="stable")
    leaves = 1 << max(0, (len(lengths) - 1).bit_length())
    space = [capacity] * (2 * leaves)  # node k has children 2k and 2k + 1; leaves are bins
    bins: list[list[int]] = []
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        node = 1
        while node < leaves:
            node *= 2
            if space[node] < length:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(item)
        space[node] -= length
        while node > 1:
            node //= 2
            space[node] = max(space[2 * node], space[2 * node + 1])
    return [np.array(members) for members in bins]


def cut_documents(lengths: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of the pieces of documents, at most `block` tokens each, and the pieces of each.

    lengths: int64 [n]. Documents without tokens have no piece.
    """
    counts = -(-lengths // block)
    pieces = np.full(int(counts.sum()), block)
    used = counts > 0
    pieces[np.cumsum(counts)[used] - 1] = (lengths - (counts - 1) * block)[used]
    return pieces, counts


def rows_at_once(block: int) -> int:
    """Return how many rows of `block` tokens are packed at once."""
    return max(1, min(ROWS, TOKENS // block))


def packed_rows(
    ids: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    spans: list[np.ndarray],
    sources: np.ndarray,
    block: int,
    domain: int = 0,
    alone: bool = False,
) -> Iterator[PackedRows]:
    """Yield the packed rows of the examples of one domain, `rows_at_once` at a time.

    Args:
        ids: Flat tokens, may be a memory map.
        starts: int64 [n], the beginning of each example in `ids`.
        lengths: int64 [n].
        spans: The spans of each example, SPAN [k], relative to its start.
        sources: uint64 [n].
        block: Most tokens of a row.
        domain: Number of the domain.
        alone: Give each example its own row, in their order.
    """
    bins = [np.array([k]) for k in range(len(lengths))] if alone else first_fit_decreasing(lengths, block)
    step = rows_at_once(block)
    for begin in range(0, len(bins), step):
        counts = np.array([len(members) for members in bins[begin : begin + step]])
        members = np.concatenate(bins[begin : begin + step])
        sizes = lengths[members]
        row = np.repeat(np.arange(len(counts)), counts)
        tokens = np.bincount(row, sizes).astype(np.int64)
        offsets = np.cumsum(sizes) - sizes - (np.cumsum(tokens) - tokens)[row]  # in their rows
        of_example = [len(spans[member]) for member in members]
        supervised = np.concatenate([spans[member] for member in members])
        start, stop, weight = (supervised[name] for name in ("start", "stop", "weight"))
        row_of_span = np.repeat(row, of_example)
        span_counts = np.bincount(row_of_span, minlength=len(counts))
        targets = stop - np.maximum(start, 1)  # nothing predicts the first token of a segment
        weighted = np.bincount(row_of_span, weight != 1, len(counts)) > 0
        bounds = np.stack((start, stop), 1) + np.repeat(offsets, of_example)[:, None]
        yield PackedRows(
            np.concatenate([ids[starts[m] : starts[m] + lengths[m]] for m in members]),
            tokens,
            sizes,
            counts,
            sources[members],
            bounds.ravel(),
            2 * span_counts,
            np.bincount(row_of_span, targets, len(counts)).astype(np.int64),
            domain,
            weight[weighted[row_of_span]],
            span_counts * weighted,
            np.bincount(row_of_span, targets * weight.astype(np.float64), len(counts)),
        )
