"""The batch order depends on nothing but (rows, batch, seed)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batches import BatchOrder, micro_batches, rank_rows


@given(st.integers(1, 50), st.integers(1, 40), st.integers(0, 5))
def test_each_epoch_is_a_permutation_and_steps_follow_on(rows: int, batch: int, seed: int) -> None:
    order = BatchOrder(rows, batch, seed)
    steps = -(-3 * rows // batch)
    stream = np.concatenate([order.step_rows(s) for s in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_a_resumed_order_equals_the_undisturbed_one() -> None:
    undisturbed = BatchOrder(37, 8, 1)
    expected = [undisturbed.step_rows(s) for s in range(20)]
    assert np.array_equal(BatchOrder(37, 8, 1).step_rows(13), expected[13])


def test_epochs_and_seeds_differ() -> None:
    order = BatchOrder(64, 64, 0)
    assert not np.array_equal(order.step_rows(0), order.step_rows(1))
    assert not np.array_equal(order.step_rows(0), BatchOrder(64, 64, 1).step_rows(0))


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 9))
def test_the_ranks_together_take_the_global_batch(ranks: int, step: int) -> None:
    rows = BatchOrder(100, 16, 3).step_rows(step)
    parts = [rank_rows(rows, r, ranks) for r in range(ranks)]
    assert np.array_equal(np.concatenate(parts), rows)


def test_micro_batches_cover_the_rows_in_order() -> None:
    assert [list(m) for m in micro_batches(np.arange(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]
