"""metrics.jsonl: token-weighted means, honest about skipped steps, cut back on resume."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from pipeline.config import RunConfig, load_config
from pipeline.engine import Sums
from pipeline.metrics import Metrics
from pipeline.run_dir import HEARTBEAT, METRICS, PROFILE, read_metrics
from tests.conftest import REPO


def config(run_dir: Path, **train: object) -> RunConfig:
    overrides = [
        f"run_dir={run_dir}",
        "train.tensorboard=false",
        *(f"train.{k}={v}" for k, v in train.items()),
    ]
    return load_config(REPO / "launch/recipes/quickstart-pretrain.yaml", overrides)


def reporter(run_dir: Path, step: int = 0) -> Metrics:
    return Metrics(config(run_dir), step, 10, active=True)


def test_a_window_is_averaged_over_tokens(tmp_path: Path) -> None:
    metrics = reporter(tmp_path)
    metrics.step(1, Sums(10.0, 20.0, 3.0, 10, False))
    metrics.step(2, Sums(30.0, 40.0, 5.0, 30, False))
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
    metrics.step(1, Sums(math.nan, math.nan, math.nan, 10, False, applied=False))
    metrics.step(2, Sums(10.0, 20.0, math.nan, 10, False))
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
    silent = Metrics(config(tmp_path), 0, 10, active=False)
    silent.step(1, Sums(1.0, 1.0, 1.0, 1, False))
    silent.log(1, 1, 1.0, 1.0)
    silent.say("nothing")
    silent.close()
    assert list(tmp_path.iterdir()) == []


def test_the_heartbeat_is_renewed_and_the_share_of_the_peak_logged(tmp_path: Path) -> None:
    metrics = Metrics(config(tmp_path), 0, 10, active=True, peak_share=0.01)
    metrics.step(1, Sums(1.0, 1.0, 1.0, 1, False))
    beat = json.loads((tmp_path / HEARTBEAT).read_text())
    assert (beat["step"], beat["doing"]) == (1, "training")
    assert abs(beat["time"] - time.time()) < 60
    metrics.log(1, 1, 1e-3, 0.5)
    metrics.close()
    assert read_metrics(tmp_path)[0]["mfu"] > 0


def test_a_window_of_steps_is_profiled(tmp_path: Path) -> None:
    metrics = Metrics(config(tmp_path, profile="[2,3]"), 0, 10, active=True)
    for step in range(1, 5):
        metrics.starts(step)
        metrics.step(step, Sums(1.0, 1.0, 1.0, 1, False))
    metrics.close()
    assert json.loads((tmp_path / PROFILE).read_text())["traceEvents"]


def test_wandb_gets_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    metrics = Metrics(config(tmp_path, wandb="emo-test"), 0, 10, active=True)
    assert wandb.run is not None and wandb.run.project == "emo-test"
    metrics.step(1, Sums(1.0, 1.0, 1.0, 1, False))
    metrics.log(1, 1, 1e-3, 0.5)
    metrics.close()
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"train/nll" in written.read_bytes()
