"""Packing: nothing lost or doubled, bins as first-fit-decreasing makes them, blocks as plain Python does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emo.data_prep.pack import BlockPacker, first_fit_decreasing, packed_rows


def naive_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook version."""
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for members in bins:
            if sum(lengths[m] for m in members) + lengths[item] <= capacity:
                members.append(item)
                break
        else:
            bins.append([item])
    return bins


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_bins_are_those_of_first_fit_decreasing(lengths: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(np.array(lengths, np.int64), capacity)
    assert [b.tolist() for b in bins] == naive_first_fit_decreasing(lengths, capacity)


def test_bins_of_nothing_and_of_full_items() -> None:
    assert first_fit_decreasing(np.array([], np.int64), 8) == []
    assert [b.tolist() for b in first_fit_decreasing(np.array([8, 8, 8]), 8)] == [[0], [1], [2]]


Documents = list[list[int]]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 60_000), max_size=40), max_size=30),
    st.integers(2, 16),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_blocks_are_the_documents_cut(documents: Documents, block: int, splits: list[int]) -> None:
    """Whatever portions the documents arrive in."""
    packer = BlockPacker(block)
    cuts = sorted({0, len(documents), *(s for s in splits if s < len(documents))})
    ids, segments, counts, sources, valid = [], [], [], [], []
    for a, b in pairwise(cuts):
        flat = np.array([t for d in documents[a:b] for t in d], np.uint16)
        rows = packer.add(
            flat, np.array([len(d) for d in documents[a:b]], np.int64), np.arange(a, b, dtype=np.uint64)
        )
        assert rows.ids.dtype == np.uint16
        assert (rows.lengths == block).all() and rows.lengths.sum() == len(rows.ids)
        ids += rows.ids.tolist()
        segments += rows.segments.tolist()
        counts += rows.segment_counts.tolist()
        sources += rows.sources.tolist()
        valid += rows.valid.tolist()

    stream = [(t, d, i) for d, document in enumerate(documents) for i, t in enumerate(document)]
    full = len(stream) // block
    assert ids == [t for t, _, _ in stream[: full * block]]
    assert packer.remainder == len(stream) - full * block
    expected, expected_sources, expected_valid = [], [], []
    for row in range(full):
        owners = [d for _, d, _ in stream[row * block : (row + 1) * block]]
        runs = [owners.count(d) for d in sorted(set(owners))]
        expected.append(runs)
        expected_sources += sorted(set(owners))
        expected_valid.append(sum(r - 1 for r in runs))
    assert segments == [r for runs in expected for r in runs]
    assert counts == [len(runs) for runs in expected]
    assert sources == expected_sources
    assert valid == expected_valid


Example = tuple[list[int], list[tuple[int, int]]]


@st.composite
def examples(draw: st.DrawFn) -> list[Example]:
    """Token sequences of at most 20, each with disjoint supervised spans."""
    found = []
    for number in range(draw(st.integers(1, 25))):
        length = draw(st.integers(2, 20))
        edges = sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=4)))
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        found.append(([number * 100 + i for i in range(length)], spans))
    return found


@settings(max_examples=200, deadline=None)
@given(examples())
def test_packed_examples_keep_their_tokens_and_spans(made: list[Example]) -> None:
    lengths = np.array([len(ids) for ids, _ in made], np.int64)
    flat = np.array([t for ids, _ in made for t in ids], np.uint16)
    starts = np.cumsum(lengths) - lengths
    spans = [np.array(s, np.int64).reshape(-1, 2) for _, s in made]
    found = {}
    for row in packed_rows(flat, starts, lengths, spans, np.arange(len(made), dtype=np.uint64) // 2, 24):
        assert row.lengths.tolist() == [row.segments.sum()] and row.segments.sum() <= 24
        at = 0
        supervised = np.zeros(len(row.ids), bool)
        for a, b in row.spans.reshape(-1, 2):
            supervised[a:b] = True
        targets = 0
        for segment, length in enumerate(row.segments):
            own = slice(at, at + length)
            number = int(row.ids[at]) // 100
            assert row.sources[segment] == number // 2
            found[number] = (row.ids[own].tolist(), supervised[own].tolist())
            targets += int(supervised[at + 1 : at + length].sum())
            at += length
        assert row.valid.tolist() == [targets]
    assert len(found) == len(made)
    for number, (ids, given_spans) in enumerate(made):
        mask = [any(a <= i < b for a, b in given_spans) for i in range(len(ids))]
        assert found[number] == (ids, mask)


@pytest.mark.parametrize(("block", "limit"), [(512, 0.02), (2048, 0.01)])
def test_waste_on_lengths_like_instructions(block: int, limit: float) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.0, 0.6, 20_000).astype(np.int64), 20, block)
    bins = first_fit_decreasing(lengths, block)
    assert 1 - lengths.sum() / (len(bins) * block) <= limit
