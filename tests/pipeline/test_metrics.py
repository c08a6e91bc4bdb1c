"""What a run measures: windows averaged over tokens, bad steps, and the change of a set's NLL."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import stdtrit

from emo.pipeline.config import RunConfig, TrainConfig, load_config
from emo.pipeline.engine import DomainSums, Sums
from emo.pipeline.loss.fused import histogram
from emo.pipeline.report.console import Console
from emo.pipeline.report.metrics import Metrics
from emo.pipeline.report.validation import FEWEST, Change, Documents, change, read
from emo.pipeline.run_dir import BAD_BATCHES, METRICS, PROFILE, VALIDATION, read_metrics
from emo.pipeline.train import Guard
from tests.conftest import REPO
from tests.helpers.refusals import refused

ONE = Sums(1.0, 1.0, 1.0, 1, False)
DOMAINS = ("home", "abroad")


def config(run_dir: Path, **train: object) -> RunConfig:
    run_dir.mkdir(parents=True, exist_ok=True)
    overrides = [f"output_dir={run_dir}", *(f"train.{k}={v}" for k, v in train.items())]
    return load_config(REPO / "launch/recipes/quickstart-pretrain.yaml", overrides)


def documents(nll: list[float] | np.ndarray, tokens: list[int] | np.ndarray) -> Documents:
    return Documents("set", np.asarray(nll, np.float64), np.asarray(tokens, np.int64))


def alike(nll: float) -> Documents:
    """Return five documents with that NLL per token."""
    return documents(nll * np.arange(3, 8), np.arange(3, 8))


def test_a_window_is_averaged_over_tokens(tmp_path: Path) -> None:
    """Steps that were skipped count, and do not spoil the mean; records say when and how far."""
    metrics = Metrics(config(tmp_path, global_batch_size=8), 0, 10, active=True, rows=32)
    metrics.validation(0, 0, "home", Sums(1.0, 2.0, 3.0, 4, False), alike(1.0))
    few, many = (tuple(histogram(torch.tensor(w), 8.0).tolist()) for w in ([0.5] * 98, [1.0, 8.0]))
    metrics.step(1, Sums(10.0, 20.0, 3.0, 10, False, weights=few), 0.4)
    metrics.step(2, Sums(30.0, 40.0, 5.0, 30, False, weights=many), 0.6)
    metrics.log(2, 40, 1e-3)
    metrics.step(3, Sums(math.nan, math.nan, math.nan, 10, False, applied=False), math.inf)
    ones = tuple(histogram(torch.ones(5), None).tolist())
    metrics.step(4, Sums(10.0, 20.0, math.nan, 10, False, weights=ones), 0.5)
    metrics.log(4, 20, 1e-3)
    metrics.step(5, Sums(math.inf, math.inf, math.nan, 10, False), math.inf)
    assert json.dumps(metrics.state(), allow_nan=False)
    metrics.close()
    zero, first, second = read_metrics(tmp_path)
    assert [record["epoch"] for record in (zero, first, second)] == [0.0, 0.5, 1.0]
    assert (first["step"], first["tokens"], first["lr"], first["skipped"]) == (2, 40, 1e-3, 0)
    values = [first[key] for key in ("loss", "nll", "perplexity", "demd", "grad_norm", "grad_norm_max")]
    assert values == pytest.approx([1.0, 1.5, math.exp(1.5), 0.2, 0.5, 0.6])  # over the window
    assert (first["weight_p50"], first["weight_p99"], first["weight_max"]) == (0.5, 1.0, 8.0)
    assert first["weight_capped"] == 0.01
    assert (second["skipped"], second["nll"], second["grad_norm"]) == (1, 2.0, 0.5)
    assert second["demd"] is None  # not a number is written as JSON can say it
    assert not any(key.startswith("weight") for key in second), "likelihood's weights are all 1"


def apart(*domains: tuple[int, float, float]) -> Sums:
    """A step whose sums are those of its domains: tokens, loss, NLL."""
    tokens, loss, nll = (sum(column) for column in zip(*domains, strict=True))
    return Sums(loss, nll, 0.5, int(tokens), False, domains=tuple(DomainSums(*one) for one in domains))


def test_resume_drops_later_and_damaged_records(tmp_path: Path) -> None:
    """From a checkpoint those after it; without one the first measurement is made again, and told once."""
    metrics = Metrics(config(tmp_path), 0, 10, active=True)
    for step in (0, 2, 4):
        metrics.validation(step, 10 * step, "home", ONE, alike(1.0 + step))
    metrics.close()
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'\xff\x00\n[3]\n{"step": 1, "nll": Infinity}\n{"ste')
    Metrics(config(tmp_path), 2, 10, active=True).close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 2, 1]
    assert "Infinity" not in (tmp_path / METRICS).read_text()
    assert [read(tmp_path, "home", step) is not None for step in (0, 2, 4)] == [True, True, False]
    stored = tmp_path / VALIDATION / "home" / "step-000000.npz"
    whole = stored.read_bytes()
    for damaged in (b"", whole[:-4], whole.replace(b"documents", b"somethin_")):
        stored.write_bytes(damaged)
        assert read(tmp_path, "home", 0) is None
    Metrics(config(tmp_path), 0, 10, active=True).close()
    assert not read_metrics(tmp_path) and read(tmp_path, "home", 2) is None


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
    run = config(tmp_path, eval_steps=25, save_steps=40)
    console = Console("lines", stream)
    console._clock = clock
    options: dict[str, Any] = {"clock": clock, "console": console, "domains": DOMAINS}
    metrics = Metrics(run, 0, 100, active=True, peak_share=0.01, **options)
    run_steps(metrics, clock, range(1, 31), pause_after=25)
    for step, name, nll in ((0, "validation", 2.0), (30, "validation", 2.5), (30, "home", 2.5)):
        metrics.validation(step, 10 * step, name, Sums(10.0, 20.0, math.nan, 10, False), alike(nll))
    metrics.close()
    records = [r for r in read_metrics(tmp_path) if "loss" in r]
    assert [r["tokens_per_s"] for r in records] == [5.0, 5.0, 5.0]
    assert [r["mfu"] for r in records] == pytest.approx([0.005] * 3)
    assert records[-1]["loss"] == pytest.approx(2.55)
    lines = stream.getvalue().splitlines()
    assert "3 min left" in lines[0] and "2 h" in lines[2] and "+0.5000 [+0.5000, +0.5000]" in lines[4]


def test_a_resumed_run_logs_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    """The sums of a window in progress go through the checkpoint."""
    clock, stopped = Clock(), 3

    def reporter(name: str, step: int = 0, window: dict[str, Any] | None = None) -> Metrics:
        return Metrics(config(tmp_path / name), step, 20, True, None, window, clock, domains=DOMAINS)

    run_steps(reporter("a"), clock, range(1, 21))
    first = reporter("b")
    run_steps(first, clock, range(1, stopped + 1))
    state = json.loads(json.dumps(first.state(), allow_nan=False))
    run_steps(first, clock, range(stopped + 1, stopped + 4))  # lost when the run is killed
    first.close()
    run_steps(reporter("b", stopped, state), clock, range(stopped + 1, 21))
    actual, expected = ([r | {"time": None} for r in read_metrics(tmp_path / name)] for name in "ba")
    assert actual == expected


def test_tensorboard_and_wandb_get_every_record_and_steps_are_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each set has curves of its own. Two run directories of one name are two runs; a resumed one stays."""
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids, run = [], tmp_path / "b" / "run"
    for run_dir in (tmp_path / "a" / "run", run, tmp_path / "a" / "run"):
        options = {"report_to": "[tensorboard,wandb]", "profile": "[2,3]"}
        metrics = Metrics(config(run_dir, **options), 0, 10, active=True)
        assert wandb.run is not None
        ids.append(wandb.run.id)
        for name in ("validation", "home"):
            metrics.validation(0, 0, name, Sums(10.0, 20.0, math.nan, 10, False), alike(2.0))
        for step in range(1, 5):
            metrics.starts(step)
            metrics.step(step, ONE, 1.0)
        metrics.log(4, 4, 1e-3)
        metrics.close()
    assert ids[0] != ids[1] and ids[0] == ids[2]
    assert b"train/nll" in next(iter(run.glob("wandb/offline-run-*/*.wandb"))).read_bytes()
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert {"train/nll", "validation/validation_nll", "validation-home/validation_nll"} <= set(
        events.Tags()["scalars"]
    )
    assert json.loads((run / PROFILE).read_text())["traceEvents"]


ROWS = [["shard-00000", 3]]


def sums(nll: float, applied: bool = True) -> Sums:
    return Sums(loss=nll * 10, nll=nll * 10, demd=1.0, tokens=10, stop=False, applied=applied)


def guard(run_dir: Path, state: Any = None, **train: Any) -> Guard:
    return Guard(run_dir, TrainConfig(max_steps=1, **train), writes=True, state=state)


@pytest.mark.parametrize("bad", [sums(2.0, applied=False), sums(2.0)._replace(loss=math.nan)])
def test_only_bad_steps_in_a_row_end_the_run(tmp_path: Path, bad: Sums) -> None:
    watch, good = guard(tmp_path, max_skipped=3), sums(1.0)
    warned = [watch.observe(step, this, lambda: ROWS) for step, this in enumerate([bad, bad, good, bad, bad])]
    assert [line is not None for line in warned] == [True, True, False, True, True]
    with refused("not-finite"):
        watch.observe(6, bad, lambda: ROWS)
    records = [json.loads(line) for line in (tmp_path / BAD_BATCHES).read_text().splitlines()]
    assert [(r["step"], r["rows"]) for r in records] == [(step, ROWS) for step in (0, 1, 3, 4, 6)]


def test_a_spike_is_noted_or_ends_the_run_also_after_a_resume(tmp_path: Path) -> None:
    """Also one of the loss alone, as where transport costs are at fault."""
    jump = sums(2.0)._replace(loss=100.0)
    options: dict[str, Any] = {"spike_factor": 3, "max_skipped": 3}
    first = guard(tmp_path, **options)
    for step in range(20):
        assert first.observe(step, sums(2.0 + step % 2), lambda: ROWS) is None
    first.observe(20, sums(math.nan), lambda: ROWS)
    state = json.loads(json.dumps(first.state(), allow_nan=False))
    assert guard(tmp_path, state, **options).observe(21, jump, lambda: ROWS) is not None
    with refused("spike"):
        guard(tmp_path, state, spike_stops=True, **options).observe(21, jump, lambda: ROWS)
    assert "2 in a row" in (guard(tmp_path, state, **options).observe(21, sums(math.nan), lambda: ROWS) or "")


@pytest.mark.parametrize("n", [9, 400])
def test_the_interval_is_a_naive_jackknife_s(n: int) -> None:
    """And where there are many documents, of uneven lengths, that of drawing them with replacement."""
    rng = np.random.default_rng(1)
    tokens = np.maximum(1, rng.lognormal(4, 1.0, n)).astype(int)
    shift = tokens * rng.normal(0.05, 0.3, n) + np.sqrt(tokens) * rng.normal(0, 0.5, n)
    nll = tokens * rng.normal(3.0, 0.5, n)
    result = change(documents(nll, tokens), documents(nll + shift, tokens))
    value = shift.sum() / tokens.sum()
    left_out = [np.delete(shift, d).sum() / np.delete(tokens, d).sum() for d in range(n)]
    error = np.sqrt((n - 1) / n * np.square(np.subtract(left_out, value)).sum())
    half = stdtrit(tokens.sum() ** 2 / np.square(tokens).sum() - 1, 0.975) * error
    assert result == pytest.approx((value, value - half, value + half, n))
    if n == 400:
        drawn = rng.integers(n, size=(4000, n))
        low, high = np.quantile(shift[drawn].sum(1) / tokens[drawn].sum(1), [0.025, 0.975])
        assert (value - half, value + half) == pytest.approx((low, high), abs=0.1 * (high - low))


def test_what_has_no_interval_or_no_pairs() -> None:
    for n in range(1, FEWEST):
        few = change(documents([2.0] * n, [2] * n), documents([3.0] * n, [2] * n))
        assert few is not None and few.value == 0.5 and few.interval == "" and few.direction == 0
    full = documents([2.0] * 9, [5] * 9)
    assert change(full, full) == Change(0.0, 0.0, 0.0, 9)
    assert change(full, full._replace(fingerprint="other")) is None, "also with as many tokens"
    assert change(documents([2.0, 1.0], [2, 2]), documents([2.0, 1.0], [2, 3])) is None
    assert change(documents([], []), documents([], [])) is None
    result = change(documents([np.inf, 1.0], [2, 2]), documents([np.inf, 1.0], [2, 2]))
    assert result is not None and math.isnan(result.value) and result.direction == 0
    assert [Change(v, v - 1, v + 1, 5).direction for v in (-2.0, 0.5, 2.0)] == [-1, 0, 1]
