"""The change of a set's NLL between two measurements: its interval, and what is kept of measurements."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emo.data_prep.pack import BlockPacker
from emo.pipeline.report.validation import FEWEST, Change, Documents, by_document, change, drop, read, write
from emo.pipeline.run_dir import VALIDATION

TRUTH = 0.05


def documents(nll: list[float] | np.ndarray, tokens: list[int] | np.ndarray) -> Documents:
    return Documents("set", np.asarray(nll, np.float64), np.asarray(tokens, np.int64))


def sampled(rng: np.random.Generator, n: int, spread: float) -> tuple[Documents, Documents]:
    """Documents of uneven lengths, each with a shift of its own around TRUTH per token."""
    tokens = np.maximum(1, rng.lognormal(4, spread, n)).astype(int)
    shift = tokens * rng.normal(TRUTH, 0.3, n) + np.sqrt(tokens) * rng.normal(0, 0.5, n)
    before = tokens * rng.normal(3.0, 0.5, n)
    return documents(before, tokens), documents(before + shift, tokens)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100), st.integers(1, 99)), min_size=FEWEST, max_size=9)
)
@settings(max_examples=50)
def test_the_way_back_is_the_opposite_and_no_change_is_none(rows: list[tuple[float, float, int]]) -> None:
    first, second, tokens = (np.array(column) for column in zip(*rows, strict=True))
    before, after = documents(first, tokens), documents(second, tokens)
    forward, back = change(before, after), change(after, before)
    assert forward is not None and back is not None
    assert forward.value == pytest.approx((second.sum() - first.sum()) / tokens.sum(), abs=1e-9)
    assert (back.value, back.low, back.high) == pytest.approx((-forward.value, -forward.high, -forward.low))
    assert forward.direction == -back.direction
    assert change(before, before) == Change(0.0, 0.0, 0.0, len(rows))


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_the_interval_is_a_naive_bootstrap_s(spread: float) -> None:
    """Documents drawn again and again with replacement: what the formula stands for."""
    rng = np.random.default_rng(1)
    before, after = sampled(rng, 400, spread)
    result = change(before, after)
    assert result is not None
    drawn = rng.integers(400, size=(4000, 400))
    ratios = (after.nll - before.nll)[drawn].sum(1) / before.tokens[drawn].sum(1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    assert (result.low, result.high) == pytest.approx((low, high), abs=0.1 * (high - low))


@pytest.mark.parametrize(("n", "block"), [(6, 64), (30, 2048)])
def test_the_interval_covers_the_truth_where_documents_span_rows(n: int, block: int) -> None:
    """Documents are sampled, and packed into rows as data are prepared."""
    rng = np.random.default_rng(block)
    covered = naive = 0
    for _ in range(400):
        lengths = rng.integers(200, 1200, n)
        ids, sources = np.zeros(lengths.sum(), np.uint16), np.arange(n, dtype=np.uint64)
        rows = BlockPacker(block).add(ids, lengths, sources)
        tokens = rows.segments - 1
        shift = rng.normal(TRUTH, 0.2, n)[rows.sources] * tokens + rng.normal(0, np.sqrt(tokens))
        nlls = 3.0 * tokens, 3.0 * tokens + shift
        result = change(*(by_document("set", rows.sources, nll, tokens) for nll in nlls))
        alone = change(*(documents(nll[tokens > 0], tokens[tokens > 0]) for nll in nlls))
        assert result is not None and alone is not None and result.value == pytest.approx(alone.value)
        assert result.documents <= n < alone.documents
        covered += result.low <= TRUTH <= result.high
        naive += alone.low <= TRUTH <= alone.high
    assert 0.92 <= covered / 400 <= 0.98
    assert block > 1000 or naive / 400 < 0.7, "rows are not independent, or this would test nothing"


def test_what_has_no_interval_or_no_pairs() -> None:
    for n in range(1, FEWEST):
        few = change(documents([2.0] * n, [2] * n), documents([3.0] * n, [2] * n))
        assert few is not None and few.value == 0.5 and math.isnan(few.low) and few.direction == 0
        assert few.interval == ""
    full = documents([2.0] * 9, [5] * 9)
    assert change(full, full._replace(fingerprint="other")) is None, "also with as many tokens"
    assert change(documents([2.0, 1.0], [2, 2]), documents([2.0, 1.0], [2, 3])) is None
    assert change(documents([2.0], [2]), documents([2.0, 1.0], [2, 2])) is None
    assert change(documents([], []), documents([], [])) is None
    infinite = documents([np.inf, 1.0], [2, 2])
    result = change(infinite, infinite)
    assert result is not None and math.isnan(result.value) and result.direction == 0
    assert str(Change(0.02, 0.01, 0.03, 5)) == "+0.0200 [+0.0100, +0.0300]"
    assert [Change(v, v - 1, v + 1, 5).direction for v in (-2.0, 0.5, 2.0)] == [-1, 0, 1]


def test_measurements_are_written_and_dropped_by_step(tmp_path: Path) -> None:
    for step in (0, 100, 1_000_000):
        write(tmp_path, "home", step, documents([1.5 + step, 2.0], [3, 4]))
        stored = read(tmp_path, "home", step)
        assert stored is not None and stored.nll.tolist() == [1.5 + step, 2.0]
        assert (stored.fingerprint, stored.tokens.tolist()) == ("set", [3, 4])
    folder = tmp_path / VALIDATION / "home"
    (folder / "step-notes.npz").write_bytes(b"")
    drop(tmp_path, 100)
    names = ["step-000000.npz", "step-000100.npz", "step-notes.npz"]
    assert sorted(path.name for path in folder.iterdir()) == names
    whole = (folder / names[0]).read_bytes()
    for damaged in (b"", whole[:-4], whole.replace(b"documents", b"somethin_")):
        (folder / names[0]).write_bytes(damaged)
        assert read(tmp_path, "home", 0) is None
    assert read(tmp_path, "home", 1_000_000) is None
