"""Bad steps are counted, written down with their origin, and end the run when they do not stop coming."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from emo.common.errors import UserError
from emo.pipeline.config import TrainConfig
from emo.pipeline.engine import Sums
from emo.pipeline.run_dir import BAD_BATCHES
from emo.pipeline.train import Guard

ROWS = [["shard-00000", 3]]


def sums(nll: float, applied: bool = True) -> Sums:
    return Sums(loss=nll * 10, nll=nll * 10, demd=1.0, tokens=10, stop=False, applied=applied)


def guard(run_dir: Path, **train: Any) -> Guard:
    return Guard(run_dir, TrainConfig(max_steps=1, **train), writes=True)


def recorded(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / BAD_BATCHES).read_text().splitlines()]


LOSS_ALONE = sums(2.0)._replace(loss=math.nan)


@pytest.mark.parametrize("bad", [sums(math.nan), sums(math.inf), sums(2.0, applied=False), LOSS_ALONE])
def test_a_bad_step_is_told_and_its_rows_are_kept(tmp_path: Path, bad: Sums) -> None:
    watch = guard(tmp_path)
    assert "step 7 skipped" in (watch.observe(7, bad, lambda: ROWS) or "")
    assert watch.skipped == 1
    (record,) = recorded(tmp_path)
    assert (record["step"], record["rows"]) == (7, ROWS)


def test_only_bad_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    watch = guard(tmp_path, max_skipped=3)
    bad, good = sums(math.nan), sums(1.0)
    for step, this in enumerate([bad, bad, good, bad, bad], start=1):
        watch.observe(step, this, lambda: ROWS)
    with pytest.raises(UserError, match="3 steps in a row up to step 6"):
        watch.observe(6, bad, lambda: ROWS)


def test_a_spike_is_noted_or_ends_the_run(tmp_path: Path) -> None:
    for stops in (False, True):
        watch = guard(tmp_path, spike_factor=3, spike_stops=stops)
        for step in range(20):
            assert watch.observe(step, sums(2.0 + step % 2), lambda: ROWS) is None
        if stops:
            with pytest.raises(UserError) as error:
                watch.observe(20, sums(9.0), lambda: ROWS)
            assert error.value.code == "spike"
        else:
            assert "jumped to 9" in (watch.observe(20, sums(9.0), lambda: ROWS) or "")
    assert [r["reason"] for r in recorded(tmp_path)] == ["spike", "spike"]


def test_a_loss_that_jumps_alone_is_a_spike(tmp_path: Path) -> None:
    """As where transport costs are at fault, and likelihoods are as usual."""
    watch = guard(tmp_path, spike_factor=3)
    for step in range(20):
        watch.observe(step, sums(2.0), lambda: ROWS)
    assert watch.observe(20, sums(2.0)._replace(loss=100.0), lambda: ROWS) is not None
    assert watch.observe(21, sums(math.inf)._replace(loss=20.0), lambda: ROWS) is not None
    json.dumps(watch.state(), allow_nan=False)


def test_a_resumed_run_judges_as_an_undisturbed_one(tmp_path: Path) -> None:
    """Nothing that is measured over several steps depends on where a run was interrupted."""
    first = guard(tmp_path, spike_factor=3, max_skipped=3)
    for step in range(20):
        first.observe(step, sums(2.0 + step % 2), lambda: ROWS)
    first.observe(20, sums(math.nan), lambda: ROWS)
    state = json.loads(json.dumps(first.state(), allow_nan=False))
    second = Guard(tmp_path, first.train, writes=True, state=state)
    assert "2 in a row" in (second.observe(21, sums(math.nan), lambda: ROWS) or "")
    third = Guard(tmp_path, first.train, writes=True, state=state)
    assert "jumped to 9" in (third.observe(21, sums(9.0), lambda: ROWS) or "")
