"""metrics.jsonl: token-weighted means, honest about skipped steps, cut back on resume."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.engine import DomainSums, Sums
from emo.pipeline.loss.fused import histogram
from emo.pipeline.report.console import Console
from emo.pipeline.report.metrics import Metrics
from emo.pipeline.report.validation import Documents, read
from emo.pipeline.run_dir import METRICS, PROFILE, read_metrics
from tests.conftest import REPO


def config(run_dir: Path, **train: object) -> RunConfig:
    overrides = [f"output_dir={run_dir}", *(f"train.{k}={v}" for k, v in train.items())]
    return load_config(REPO / "launch/recipes/quickstart-pretrain.yaml", overrides)


def documents(nll: float) -> Documents:
    """Return five documents with that NLL per token."""
    tokens = np.arange(3, 8)
    return Documents("set", nll * tokens, tokens)


def reporter(run_dir: Path, step: int = 0) -> Metrics:
    return Metrics(config(run_dir), step, 10, active=True)


def test_a_window_is_averaged_over_tokens(tmp_path: Path) -> None:
    """Steps that were skipped count, and do not spoil the mean; records say when and how far."""
    before = time.time()
    metrics = Metrics(config(tmp_path, global_batch_size=8), 0, 10, active=True, rows=32)
    metrics.validation(0, 0, "home", Sums(1.0, 2.0, 3.0, 4, False), documents(1.0))
    few, many = (tuple(histogram(torch.tensor(w), 8.0).tolist()) for w in ([0.5] * 98, [1.0, 8.0]))
    metrics.step(1, Sums(10.0, 20.0, 3.0, 10, False, weights=few), 0.4)
    metrics.step(2, Sums(30.0, 40.0, 5.0, 30, False, weights=many), 0.6)
    metrics.log(2, 40, 1e-3)
    metrics.step(3, Sums(math.nan, math.nan, math.nan, 10, False, applied=False), math.inf)
    ones = tuple(histogram(torch.ones(5), None).tolist())
    metrics.step(4, Sums(10.0, 20.0, math.nan, 10, False, weights=ones), 0.5)
    metrics.log(4, 20, 1e-3)
    metrics.step(5, Sums(math.inf, math.inf, math.nan, 10, False), math.inf)
    assert "Infinity" not in json.dumps(metrics.state())
    metrics.close()
    zero, first, second = read_metrics(tmp_path)
    assert [record["epoch"] for record in (zero, first, second)] == [0.0, 0.5, 1.0]
    assert all(before <= record["time"] <= time.time() for record in (zero, first, second))
    assert (first["step"], first["tokens"], first["lr"], first["skipped"]) == (2, 40, 1e-3, 0)
    values = [first[key] for key in ("loss", "nll", "perplexity", "demd", "grad_norm", "grad_norm_max")]
    assert values == pytest.approx([1.0, 1.5, math.exp(1.5), 0.2, 0.5, 0.6])  # over the window
    assert (first["weight_p50"], first["weight_p99"], first["weight_max"]) == (0.5, 1.0, 8.0)
    assert first["weight_capped"] == 0.01
    assert (second["skipped"], second["nll"]) == (1, 2.0) and "domains" not in second
    assert second["demd"] is None  # not a number is written as JSON can say it
    assert second["grad_norm"] == second["grad_norm_max"] == 0.5
    assert not any(key.startswith("weight") for key in second), "likelihood's weights are all 1"


def apart(*domains: tuple[int, float, float]) -> Sums:
    """A step whose sums are those of its domains: tokens, loss, NLL."""
    tokens, loss, nll = (sum(column) for column in zip(*domains, strict=True))
    return Sums(loss, nll, 0.5, int(tokens), False, domains=tuple(DomainSums(*one) for one in domains))


def test_domains_are_averaged_apart(tmp_path: Path) -> None:
    """Tokens are those of the run so far; loss and NLL are of the window, and of steps that were applied."""
    metrics = Metrics(config(tmp_path), 0, 10, active=True, domains=("home", "abroad"))
    metrics.step(1, apart((10, 20.0, 30.0), (30, 30.0, 60.0)), 1.0)
    metrics.step(2, apart((30, 20.0, 50.0), (10, 50.0, 40.0)), 1.0)
    metrics.log(2, 80, 1e-3)
    nan = math.nan
    metrics.step(3, apart((5, nan, nan), (35, 35.0, 35.0))._replace(applied=False), math.inf)
    metrics.step(4, apart((0, 0.0, 0.0), (40, 80.0, 120.0)), 1.0)
    metrics.log(4, 160, 1e-3)
    metrics.step(5, apart((5, nan, nan), (35, 35.0, 35.0))._replace(applied=False), math.inf)
    metrics.log(5, 200, 1e-3)
    metrics.close()
    first, second, third = (record["domains"] for record in read_metrics(tmp_path))
    assert first == {
        "home": {"tokens": 40, "nll": 2.0, "loss": 1.0},
        "abroad": {"tokens": 40, "nll": 2.5, "loss": 2.0},
    }
    assert second == {
        "home": {"tokens": 45, "nll": None, "loss": None},
        "abroad": {"tokens": 115, "nll": 3.0, "loss": 2.0},
    }
    assert third["home"] == {"tokens": 50, "nll": None, "loss": None}


def test_resume_drops_later_and_damaged_records(tmp_path: Path) -> None:
    """From a checkpoint those after it; without one the first measurement is made again, and told once."""
    nothing = Sums(1.0, 1.0, 1.0, 1, False)
    metrics = reporter(tmp_path)
    for step in (0, 2, 4):
        metrics.validation(step, 10 * step, "home", nothing, documents(1.0 + step))
    metrics.close()
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'\xff\x00\n[3]\n{"step": 1, "nll": Infinity}\n{"ste')
    reporter(tmp_path, step=2).close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 2, 1]
    assert "Infinity" not in (tmp_path / METRICS).read_text()
    assert [read(tmp_path, "home", step) is not None for step in (0, 2, 4)] == [True, True, False]
    again = reporter(tmp_path)
    again.validation(0, 0, "home", nothing, documents(1.0))
    again.close()
    assert [(r["step"], r["set"]) for r in read_metrics(tmp_path)] == [(0, "home")]
    assert read(tmp_path, "home", 2) is None


class Clock:
    """A clock that moves when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def run_steps(metrics: Metrics, clock: Clock, steps: range, pause_after: int = 0) -> None:
    """Ten tokens and two seconds a step, with an hour's pause after step `pause_after`."""
    for step in steps:
        clock.now += 2.0
        metrics.step(step, apart((4, 0.5 * step, step), (6, 0.5 * step, step)), float(step))
        if step % 10 == 0:
            metrics.log(step, 10 * step, 1e-3)
        if step == pause_after:
            clock.now += 3600
            metrics.pause()


def test_pauses_and_what_the_console_hears(tmp_path: Path) -> None:
    """Two seconds a step; an hour's pause slows no token down, and is counted in what is left."""
    clock, stream = Clock(), io.StringIO()
    run, console = config(tmp_path, eval_steps=25, save_steps=40), Console("lines", stream, clock=clock)
    metrics = Metrics(
        run, 0, 100, active=True, peak_share=0.01, clock=clock, console=console, domains=("a", "b")
    )
    run_steps(metrics, clock, range(1, 31), pause_after=25)
    for step, name, nll in ((0, "validation", 2.0), (30, "validation", 2.5), (30, "home", 2.5)):
        metrics.validation(step, 10 * step, name, Sums(10.0, 20.0, math.nan, 10, False), documents(nll))
    metrics.close()
    records = [r for r in read_metrics(tmp_path) if "loss" in r]
    assert [r["tokens_per_s"] for r in records] == [5.0, 5.0, 5.0]
    assert [r["mfu"] for r in records] == pytest.approx([0.005] * 3)
    assert records[-1]["loss"] == pytest.approx(2.55)
    first, _, third, *validations = stream.getvalue().splitlines()
    assert first == "step 10/100  loss 0.55  5 tokens/s  3 min left  validation at 25"
    assert third.startswith("step 30/100  loss 2.55  5 tokens/s  2 h") and third.endswith("save at 40")
    assert validations[1].endswith("NLL since step 0 +0.5000 [+0.5000, +0.5000]") and len(validations) == 3


@pytest.mark.parametrize("stopped", [3, 10])
def test_a_resumed_run_logs_what_an_undisturbed_one_does(tmp_path: Path, stopped: int) -> None:
    """The sums of a window in progress go through the checkpoint."""

    def reporter(name: str, step: int = 0, window: dict[str, Any] | None = None) -> Metrics:
        (tmp_path / name).mkdir(exist_ok=True)
        domains = ("home", "abroad")
        return Metrics(config(tmp_path / name), step, 20, True, window=window, clock=clock, domains=domains)

    clock = Clock()
    run_steps(reporter("a"), clock, range(1, 21))
    first = reporter("b")
    run_steps(first, clock, range(1, stopped + 1))
    state = json.loads(json.dumps(first.state(), allow_nan=False))
    run_steps(first, clock, range(stopped + 1, stopped + 4))  # lost when the run is killed
    first.close()
    run_steps(reporter("b", stopped, state), clock, range(stopped + 1, 21))
    actual, expected = ([r | {"time": None} for r in read_metrics(tmp_path / name)] for name in "ba")
    assert actual == expected


def test_each_set_has_curves_of_its_own(tmp_path: Path) -> None:
    """In TensorBoard; what is no number, the set's name among it, is none there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(config(tmp_path, report_to="[tensorboard]"), 0, 10, active=True)
    for name in ("validation", "home"):
        metrics.validation(0, 0, name, Sums(10.0, 20.0, math.nan, 10, False), documents(2.0))
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    keys = ("loss", "nll", "perplexity")
    expected = {f"{group}/validation_{key}" for group in ("validation", "validation-home") for key in keys}
    assert set(events.Tags()["scalars"]) == expected


def test_a_window_of_steps_is_profiled(tmp_path: Path) -> None:
    metrics = Metrics(config(tmp_path, profile="[2,3]"), 0, 10, active=True)
    for step in range(1, 5):
        metrics.starts(step)
        metrics.step(step, Sums(1.0, 1.0, 1.0, 1, False), 1.0)
    metrics.close()
    assert json.loads((tmp_path / PROFILE).read_text())["traceEvents"]


def test_wandb_gets_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two run directories of one name are two runs, and a resumed one stays the same."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for run_dir in (tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "a" / "run"):
        run_dir.mkdir(parents=True, exist_ok=True)
        metrics = Metrics(config(run_dir, report_to="[wandb]", project="emo-test"), 0, 10, active=True)
        assert wandb.run is not None and wandb.run.project == "emo-test"
        ids.append(wandb.run.id)
        metrics.step(1, Sums(1.0, 1.0, 1.0, 1, False), 1.0)
        metrics.log(1, 1, 1e-3)
        metrics.close()
    assert ids[0] != ids[1] and ids[0] == ids[2]
    written = next(iter((tmp_path / "b" / "run").glob("wandb/offline-run-*/*.wandb")))
    assert b"train/nll" in written.read_bytes()
