"""metrics.jsonl: token-weighted means, honest about skipped steps, cut back on resume."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pipeline.engine import Sums
from pipeline.metrics import METRICS, Metrics, read_metrics


def reporter(run_dir: Path, step: int = 0) -> Metrics:
    return Metrics(run_dir, step, 10, active=True, tensorboard=False, label="test")


def test_a_window_is_averaged_over_tokens(tmp_path: Path) -> None:
    metrics = reporter(tmp_path)
    metrics.step(Sums(10.0, 20.0, 3.0, 10, False))
    metrics.step(Sums(30.0, 40.0, 5.0, 30, False))
    metrics.log(2, 40, 1e-3, 0.5)
    metrics.close()
    (record,) = read_metrics(tmp_path)
    assert record["loss"] == pytest.approx(1.0)
    assert record["nll"] == pytest.approx(1.5)
    assert record["perplexity"] == pytest.approx(math.exp(1.5))
    assert record["demd"] == pytest.approx(0.2)
    assert (record["step"], record["tokens"], record["lr"], record["grad_norm"]) == (2, 40, 1e-3, 0.5)


def test_skipped_steps_count_but_do_not_spoil_the_mean(tmp_path: Path) -> None:
    metrics = reporter(tmp_path)
    metrics.step(Sums(math.nan, math.nan, math.nan, 10, False, applied=False))
    metrics.step(Sums(10.0, 20.0, math.nan, 10, False))
    metrics.log(2, 20, 1e-3, 0.5)
    metrics.close()
    (record,) = read_metrics(tmp_path)
    assert record["skipped"] == 1
    assert record["nll"] == pytest.approx(2.0)
    assert record["demd"] is None  # not a number is written as JSON can say it


def test_resume_drops_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    reporter(tmp_path, step=2).close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    silent = Metrics(tmp_path, 0, 10, active=False, tensorboard=True, label="test")
    silent.step(Sums(1.0, 1.0, 1.0, 1, False))
    silent.log(1, 1, 1.0, 1.0)
    silent.say("nothing")
    silent.close()
    assert list(tmp_path.iterdir()) == []
