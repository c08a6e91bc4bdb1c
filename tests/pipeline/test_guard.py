"""Bad steps are counted, written down with their origin, and end the run when they do not stop coming."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from emo.pipeline.config import TrainConfig
from emo.pipeline.engine import Sums
from emo.pipeline.run_dir import BAD_BATCHES
from emo.pipeline.train import Guard
from tests.helpers.refusals import refused

ROWS = [["shard-00000", 3]]


def sums(nll: float, applied: bool = True) -> Sums:
    return Sums(loss=nll * 10, nll=nll * 10, demd=1.0, tokens=10, stop=False, applied=applied)


def guard(run_dir: Path, **train: Any) -> Guard:
    return Guard(run_dir, TrainConfig(max_steps=1, **train), writes=True)


@pytest.mark.parametrize("bad", [sums(math.nan), sums(2.0, applied=False), sums(2.0)._replace(loss=math.nan)])
def test_only_bad_steps_in_a_row_end_the_run(tmp_path: Path, bad: Sums) -> None:
    watch, good = guard(tmp_path, max_skipped=3), sums(1.0)
    warned = [watch.observe(step, this, lambda: ROWS) for step, this in enumerate([bad, bad, good, bad, bad])]
    assert [line is not None for line in warned] == [True, True, False, True, True]
    with refused("not-finite"):
        watch.observe(6, bad, lambda: ROWS)
    records = [json.loads(line) for line in (tmp_path / BAD_BATCHES).read_text().splitlines()]
    assert [(r["step"], r["rows"]) for r in records] == [(step, ROWS) for step in (0, 1, 3, 4, 6)]


@pytest.mark.parametrize("jump", [sums(9.0), sums(2.0)._replace(loss=100.0)])
def test_a_spike_is_noted_or_ends_the_run(tmp_path: Path, jump: Sums) -> None:
    """Also one of the loss alone, as where transport costs are at fault."""
    for stops in (False, True):
        watch = guard(tmp_path, spike_factor=3, spike_stops=stops)
        for step in range(20):
            assert watch.observe(step, sums(2.0 + step % 2), lambda: ROWS) is None
        if stops:
            with refused("spike"):
                watch.observe(20, jump, lambda: ROWS)
        else:
            assert watch.observe(20, jump, lambda: ROWS) is not None


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
    assert third.observe(21, sums(9.0), lambda: ROWS) is not None
