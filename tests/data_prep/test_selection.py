"""Which rows are taken: weights before duplicates, limits exact, copies spread; domains and sets by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emo.data_prep.limit import _trimmed, in_turn
from emo.data_prep.near import band_shape
from emo.data_prep.scan import uniform
from emo.data_prep.world import TASKS, corpus, read_rows, task_rows
from tests.data_prep.test_prepare import rows_of
from tests.helpers.corpus import alpaca_rows, prepared, texts, train_set, write_jsonl


def test_a_weight_drops_no_row_of_another_source(tmp_path: Path) -> None:
    """Rows in A (weight 0.1) and in B (weight 1) are all used."""
    first, second = texts(300, seed=1), texts(300, seed=2)
    write_jsonl(tmp_path / "a.jsonl", first + second[:150])
    write_jsonl(tmp_path / "b.jsonl", second)
    sources = [{"files": "a.jsonl", "weight": 0.1}, {"files": "b.jsonl"}]
    for name, dedup in (("exact", "exact"), ("near", "near")):
        times = Counter(rows_of(prepared(tmp_path, dir=str(tmp_path / name), sources=sources, dedup=dedup)))
        assert [times[text] for text in second] == [1] * 300
        assert 10 < sum(times[text] for text in first) < 60
    sources[0]["weight"] = 2
    times = Counter(rows_of(prepared(tmp_path, dir=str(tmp_path / "two"), sources=sources[::-1])))
    assert [times[text] for text in second] == [2] * 150 + [1] * 150  # the most that a source asks for


@pytest.mark.parametrize("weight", [1, 2.5, 0.6])
def test_limit_of_rows_counts_copies(tmp_path: Path, weight: float) -> None:
    """Limit_rows 300 with weight 2.5 gave 713."""
    write_jsonl(tmp_path / "a.jsonl", texts(700))
    write_jsonl(tmp_path / "b.jsonl", texts(200, seed=1))
    sources = [{"files": "a.jsonl", "weight": weight}, {"files": "b.jsonl"}]
    config = prepared(tmp_path, sources=sources, limit_rows=300)
    assert len(rows_of(config)) == 300 == train_set(config).manifest.documents


def test_copies_are_spread(tmp_path: Path) -> None:
    """Far from each other, and rows without copies keep their order."""
    first, second = texts(300, seed=1), texts(40, seed=2)
    write_jsonl(tmp_path / "a.jsonl", first)
    write_jsonl(tmp_path / "b.jsonl", second)
    sources = [{"files": "a.jsonl"}, {"files": "b.jsonl", "weight": 4}]
    found = rows_of(prepared(tmp_path, sources=sources, shards=1))
    places = {text: [i for i, other in enumerate(found) if other == text] for text in second}
    assert all(len(at) == 4 and min(np.diff(at)) >= 40 for at in places.values())
    assert [text for text in found if text in set(first)] == first


def test_limit_of_tokens_takes_all_sources_in_proportion(tmp_path: Path) -> None:
    """... copies counted; and what is less than the limit is used whole."""
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(600, seed=1))
    write_jsonl(tmp_path / "b.jsonl", alpaca_rows(200, seed=2))
    common = {
        "kind": "instruct",
        "sequence_len": 256,
        "sources": [{"files": "a.jsonl"}, {"files": "b.jsonl"}],
    }
    common["sources"][1] |= {"weight": 2.0}
    whole = train_set(prepared(tmp_path, dir=str(tmp_path / "whole"), limit_tokens=10**9, **common)).manifest
    half = train_set(
        prepared(tmp_path, dir=str(tmp_path / "half"), limit_tokens=whole.tokens // 2, **common)
    ).manifest
    assert whole.documents == 600 + 2 * 200 and "limit" not in whole.rejected
    assert 0 <= whole.tokens // 2 - half.tokens < 256
    taken = [source["train"] for source in half.sources]
    assert abs(taken[0] - 300) < 20 and abs(taken[1] - 200) < 20 and sum(taken) == half.documents
    assert half.rejected["limit"] == 800 - taken[0] - -(-taken[1] // 2)


def test_a_limit_of_tokens_may_end_among_the_copies_of_the_first_row(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(1))
    more = {"kind": "instruct", "sequence_len": 512, "shards": 1}
    more |= {"sources": [{"files": "a.jsonl", "weight": 3}]}
    whole = train_set(prepared(tmp_path, limit_tokens=10**9, **more)).manifest
    two = prepared(tmp_path, dir=str(tmp_path / "two"), limit_tokens=whole.tokens // 3 * 2, **more)
    assert (whole.documents, train_set(two).manifest.documents) == (3, 2)


def test_draws_of_a_seed_stay_what_they_were() -> None:
    """Other ones would split the same sources into other training and validation rows."""
    assert uniform(np.arange(2, dtype=np.uint64), 3, 1).round(9).tolist() == [0.523950592, 0.454937907]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_blocks_are_trimmed_exactly(blocks: list[int], data: st.DataObject) -> None:
    surplus = data.draw(st.integers(0, sum(blocks)))
    left = _trimmed(np.array(blocks), surplus)
    assert left.sum() == sum(blocks) - surplus and (left >= 0).all() and (left <= blocks).all()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_any_beginning_has_the_sources_in_proportion(have: list[int]) -> None:
    source = np.repeat(np.arange(len(have)), have)
    order = in_turn(source)
    assert sorted(order.tolist()) == list(range(len(source)))
    for count in range(1, len(source) + 1):
        taken = np.bincount(source[order[:count]], minlength=len(have))
        assert (np.abs(taken - np.array(have) * count / len(source)) <= len(have)).all()


@pytest.mark.parametrize(
    ("threshold", "shape"),
    [(0.3, (37, 3)), (0.5, (25, 5)), (0.7, (14, 9)), (0.8, (9, 13)), (0.9, (5, 25)), (0.95, (3, 42))],
)
def test_bands_are_those_that_datasketch_takes(threshold: float, shape: tuple[int, int]) -> None:
    assert band_shape(threshold) == shape


def first_split(task: str) -> str:
    return "dev" if task == "mmlu" else "train"


@pytest.mark.parametrize("task", TASKS)
def test_no_test_row_stands_in_a_document_or_a_demonstration(task: str) -> None:
    key = "question" if task == "mmlu" else "text"
    corpora = map(corpus, ("world", "world-home", "world-abroad"))
    texts = [row["text"] for path in corpora for row in read_rows(path)]
    demonstrations = [row[key] for row in task_rows(task, first_split(task))]
    everything = "\n".join([*texts, *demonstrations])
    assert all(row[key] not in everything for row in task_rows(task, "test"))
    assert all(text in everything for text in demonstrations)  # the search itself works
