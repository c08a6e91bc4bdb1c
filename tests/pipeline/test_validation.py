"""The change of a set's NLL between two measurements: its interval, and what is kept of measurements."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.pack import BlockPacker
from pipeline.report.validation import (
    FEWEST,
    Change,
    Documents,
    by_document,
    change,
    drop,
    read,
    write,
)
from pipeline.run_dir import VALIDATION

TRUTH = 0.05


def documents(nll: list[float] | np.ndarray, tokens: list[int] | np.ndarray) -> Documents:
    return Documents("set", np.asarray(nll, np.float64), np.asarray(tokens, np.int64))


def sampled(rng: np.random.Generator, n: int, spread: float) -> tuple[Documents, Documents]:
    """Documents of uneven lengths, each with a shift of its own around TRUTH per token."""
    tokens = np.maximum(1, rng.lognormal(4, spread, n)).astype(int)
    shift = tokens * rng.normal(TRUTH, 0.3, n) + np.sqrt(tokens) * rng.normal(0, 0.5, n)
    before = tokens * rng.normal(3.0, 0.5, n)
    return Documents("set", before, tokens), Documents("set", before + shift, tokens)


@given(st.lists(st.tuples(st.floats(0, 1e5, width=32), st.integers(1, 4096)), min_size=FEWEST, max_size=30))
def test_no_change_is_exactly_none(rows: list[tuple[float, int]]) -> None:
    found = documents([nll for nll, _ in rows], [tokens for _, tokens in rows])
    assert change(found, found) == Change(0.0, 0.0, 0.0, len(rows))


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100), st.integers(1, 99)), min_size=FEWEST, max_size=9)
)
@settings(max_examples=50)
def test_the_way_back_is_the_opposite(rows: list[tuple[float, float, int]]) -> None:
    first, second, tokens = (np.array(column) for column in zip(*rows, strict=True))
    there = change(documents(first, tokens), documents(second, tokens))
    back = change(documents(second, tokens), documents(first, tokens))
    assert there is not None and back is not None
    assert there.value == pytest.approx((second.sum() - first.sum()) / tokens.sum(), abs=1e-9)
    assert (back.value, back.low, back.high) == pytest.approx((-there.value, -there.high, -there.low))
    assert there.direction == -back.direction


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_the_interval_is_a_naive_bootstrap_s(spread: float) -> None:
    """Documents drawn again and again with replacement: what the formula stands for."""
    rng = np.random.default_rng(1)
    before, after = sampled(rng, 400, spread)
    found = change(before, after)
    assert found is not None
    drawn = rng.integers(400, size=(4000, 400))
    ratios = (after.nll - before.nll)[drawn].sum(1) / before.tokens[drawn].sum(1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    width = high - low
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.1 * width)


@pytest.mark.parametrize(("n", "spread"), [(5, 0.5), (5, 1.2), (30, 1.2), (200, 0.5)])
def test_the_interval_holds_the_truth(n: int, spread: float) -> None:
    """Also of a few documents of which one has most of the tokens."""
    rng = np.random.default_rng(n)
    held, rounds = 0, 1000
    for _ in range(rounds):
        found = change(*sampled(rng, n, spread))
        assert found is not None
        held += found.low <= TRUTH <= found.high
    assert 0.93 <= held / rounds <= 0.985


@pytest.mark.parametrize(("n", "block"), [(6, 64), (30, 64), (30, 2048)])
def test_the_interval_holds_the_truth_where_documents_span_rows(n: int, block: int) -> None:
    """Documents are sampled, and packed into rows as data are prepared."""
    rng = np.random.default_rng(block)
    held = naive = 0
    rounds = 400
    for _ in range(rounds):
        lengths = rng.integers(200, 1200, n)
        rows = BlockPacker(block).add(
            np.zeros(lengths.sum(), np.uint16), lengths, np.arange(n, dtype=np.uint64)
        )
        tokens = rows.segments - 1
        shift = rng.normal(TRUTH, 0.2, n)[rows.sources] * tokens + rng.normal(0, np.sqrt(tokens))
        nll = 3.0 * tokens
        found = change(*(by_document("set", rows.sources, of, tokens) for of in (nll, nll + shift)))
        alone = change(*(Documents("set", of[tokens > 0], tokens[tokens > 0]) for of in (nll, nll + shift)))
        assert found is not None and alone is not None and found.value == pytest.approx(alone.value)
        assert found.documents <= n < alone.documents
        held += found.low <= TRUTH <= found.high
        naive += alone.low <= TRUTH <= alone.high
    assert 0.92 <= held / rounds <= 0.98
    assert block > 1000 or naive / rounds < 0.7, "rows are not independent, or this would test nothing"


def test_segments_of_a_document_are_summed() -> None:
    found = by_document("set", np.array([9, 4, 9, 7]), np.array([1.0, 2.0, 4.0, 8.0]), np.array([1, 2, 4, 0]))
    assert (found.nll.tolist(), found.tokens.tolist()) == ([2.0, 5.0], [2, 5])


def test_other_texts_are_not_paired() -> None:
    """Also where they have as many tokens, as full rows always do."""
    before = documents([2.0] * 9, [5] * 9)
    assert change(before, before._replace(fingerprint="other")) is None


def test_what_has_no_interval_or_no_pairs() -> None:
    for n in range(1, FEWEST):
        few = change(documents([2.0] * n, [2] * n), documents([3.0] * n, [2] * n))
        assert few is not None and few.value == 0.5 and math.isnan(few.low) and few.direction == 0
        assert few.interval == "" and "too few" in str(few)
    assert change(documents([2.0, 1.0], [2, 2]), documents([2.0, 1.0], [2, 3])) is None
    assert change(documents([2.0], [2]), documents([2.0, 1.0], [2, 2])) is None
    assert change(documents([], []), documents([], [])) is None
    infinite = change(documents([np.inf, 1.0], [2, 2]), documents([np.inf, 1.0], [2, 2]))
    assert infinite is not None and math.isnan(infinite.value) and infinite.direction == 0


def test_which_way_it_went() -> None:
    assert str(Change(0.02, 0.01, 0.03, 5)) == "+0.0200 [+0.0100, +0.0300]"
    assert [Change(v, v - 1, v + 1, 5).direction for v in (-2.0, 0.5, 2.0)] == [-1, 0, 1]


def test_measurements_are_kept_and_dropped_by_step(tmp_path: Path) -> None:
    for name in ("home", "abroad"):
        for step in (0, 100, 1_000_000):
            write(tmp_path, name, step, documents([1.5 + step, 2.0], [3, 4]))
            found = read(tmp_path, name, step)
            assert found is not None and found.nll.tolist() == [1.5 + step, 2.0]
            assert (found.fingerprint, found.tokens.tolist()) == ("set", [3, 4])
    (tmp_path / VALIDATION / "home" / "step-notes.npz").write_bytes(b"")
    drop(tmp_path, 100)
    left = sorted(path.name for path in (tmp_path / VALIDATION / "home").iterdir())
    assert left == ["step-000000.npz", "step-000100.npz", "step-notes.npz"]
    assert read(tmp_path, "home", 1_000_000) is None


@pytest.mark.parametrize("damage", ["missing", "empty", "torn", "other", "pickle", "packed", "huge", "zero"])
def test_a_damaged_measurement_is_none(tmp_path: Path, damage: str) -> None:
    write(tmp_path, "home", 0, documents([1.0, 2.0], [3, 4]))
    path = tmp_path / VALIDATION / "home" / "step-000000.npz"
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other":
        np.savez(path, documents=np.zeros(3), fingerprint="set")
    elif damage == "pickle":
        np.savez(path, documents=np.array([{}, []], dtype=object), fingerprint="set")
    elif damage == "packed":
        np.savez_compressed(path, documents=np.zeros(1 << 20, np.uint8), fingerprint="set")
    elif damage == "zero":
        write(tmp_path, "home", 0, documents([1.0, 2.0], [3, 0]))
    else:
        changed = {"empty": b"", "torn": whole[:-4], "huge": whole.replace(b"(2,)", b"(9999999999999,)")}
        path.write_bytes(changed[damage])
    assert read(tmp_path, "home", 0) is None
