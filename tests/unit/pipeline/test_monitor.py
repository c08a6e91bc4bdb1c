"""What a run logs and monitors: metrics, loggers, the profiler and the guard."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emo.pipeline.batches.loader import StepBatch, Writing
from emo.pipeline.config import RunConfig, TrainConfig, load_config
from emo.pipeline.control import run_dir
from emo.pipeline.control.run_dir import read_metrics
from emo.pipeline.engine.totals import DomainTotals, StepTotals
from emo.pipeline.loss.fused import histogram
from emo.pipeline.monitor import profiler
from emo.pipeline.monitor.component import RunState
from emo.pipeline.monitor.config import ProfileConfig
from emo.pipeline.monitor.console import Console
from emo.pipeline.monitor.documents import Documents, read_documents
from emo.pipeline.monitor.guard import Guard
from emo.pipeline.monitor.loggers import LOGGERS
from emo.pipeline.monitor.loggers.logger import Logger
from emo.pipeline.monitor.metrics import Metrics, RunFacts
from emo.pipeline.report import glossary
from tests.conftest import REPO
from tests.helpers.launching import metric_names
from tests.helpers.refusals import refused

ONE = StepTotals(1.0, 1.0, 1.0, 1, False, grad_norm=1.0)
DOMAINS = ("home", "abroad")
BATCH = StepBatch(np.arange(3), 10, [], [])
WRITTEN = BATCH._replace(written=Writing(tokens=5, seconds=0.1))
ORIGIN = [["shard-00000", 3]]


def config(directory: Path, **train: object) -> RunConfig:
    directory.mkdir(parents=True, exist_ok=True)
    overrides = [f"output_dir={directory}", *(f"train.{k}={v}" for k, v in train.items())]
    return load_config(REPO / "launch/recipes/quickstart-pretrain.yaml", overrides)


def reporter(
    directory: Path, step: int = 0, steps: int = 10, facts: RunFacts | None = None, **options: Any
) -> Metrics:
    """Return the metrics of rank 0. Options are those of Metrics, or settings of `train`."""
    given = {name: options.pop(name) for name in ("console", "clock") if name in options}
    console = given.pop("console", None) or Console("quiet", io.StringIO())
    start = RunState(steps, step=step)
    return Metrics(config(directory, **options), start, True, facts or RunFacts(), console, **given)


def take_step(metrics: Metrics, step: int, totals: StepTotals, tokens: int = 0, steps: int = 10) -> None:
    metrics.after_step(RunState(steps, step=step, tokens=tokens, lr=1e-3), BATCH, totals)


def same_documents(nll: float) -> Documents:
    """Return five documents with this NLL per token."""
    return Documents("set", nll * np.arange(3, 8), np.arange(3, 8))


def test_a_run_that_ends_early_records_its_last_steps(tmp_path: Path) -> None:
    metrics = reporter(tmp_path, steps=40, logging_steps=10)
    for step in range(1, 26):
        take_step(metrics, step, ONE, tokens=10 * step, steps=40)
    for _ in range(2):  # nothing is left for the second time
        metrics.record_rest(RunState(40, step=25, tokens=250))
    metrics.close()
    assert [(r["step"], r["tokens"]) for r in read_metrics(tmp_path)] == [(10, 100), (20, 200), (25, 250)]


def test_a_window_is_averaged_over_tokens(tmp_path: Path) -> None:
    """Skipped steps are counted, but do not change the means."""
    metrics = reporter(tmp_path, facts=RunFacts(rows=32), global_batch_size=8, logging_steps=2)
    measured = StepTotals(1.0, 2.0, 3.0, 4, False)
    metrics.record_validation(RunState(10), "home", measured, same_documents(1.0))
    few, many = (tuple(histogram(torch.tensor(w), 8.0).tolist()) for w in ([0.5] * 98, [1.0, 8.0]))
    ones = tuple(histogram(torch.ones(5), None).tolist())
    nan, inf = math.nan, math.inf
    take_step(metrics, 1, StepTotals(10.0, 20.0, 3.0, 10, False, weights=few, grad_norm=0.4))
    take_step(metrics, 2, StepTotals(30.0, 40.0, 5.0, 30, False, weights=many, grad_norm=0.6), tokens=40)
    take_step(metrics, 3, StepTotals(nan, nan, nan, 10, False, applied=False, grad_norm=inf))
    take_step(metrics, 4, StepTotals(10.0, 20.0, nan, 10, False, weights=ones, grad_norm=0.5))
    take_step(metrics, 5, StepTotals(inf, inf, nan, 10, False, grad_norm=inf))
    assert json.dumps(metrics.state_dict(), allow_nan=False)
    metrics.close()
    zero, first, second = read_metrics(tmp_path)
    assert [record["epoch"] for record in (zero, first, second)] == [0.0, 0.5, 1.0]
    assert (first["step"], first["tokens"], first["lr"], first["skipped"]) == (2, 40, 1e-3, 0)
    values = [first[key] for key in ("loss", "nll", "perplexity", "demd", "grad_norm", "grad_norm_max")]
    assert values == pytest.approx([1.0, 1.5, math.exp(1.5), 0.2, 0.5, 0.6])
    assert (first["weight_p50"], first["weight_p99"], first["weight_max"]) == (0.5, 1.0, 8.0)
    assert first["weight_capped"] == 0.01
    assert (second["skipped"], second["nll"], second["grad_norm"]) == (1, 2.0, 0.5)
    assert second["demd"] is None, "JSON has no NaN"
    assert not any(key.startswith("weight") for key in second), "the weights of MLE are all 1"


def test_text_that_the_model_writes_is_not_in_the_nll_of_the_data(tmp_path: Path) -> None:
    facts = RunFacts(domains=DOMAINS)
    metrics = reporter(tmp_path, facts=facts, logging_steps=2)
    parts = DomainTotals(10, 30.0, 40.0), DomainTotals(0, 0.0, 0.0)
    for step, batch in enumerate([BATCH, WRITTEN, WRITTEN, WRITTEN], 1):
        nll = 2.0 if batch.written else 40.0
        totals = StepTotals(30.0, nll, nll, 10, False, grad_norm=1.0, domains=parts)
        metrics.after_step(RunState(10, step=step), batch, totals)
    metrics.close()
    mixed, written = read_metrics(tmp_path)
    assert (mixed["loss"], mixed["nll"], mixed["demd"]) == (3.0, 4.0, 4.0)
    assert (written["loss"], written["nll"], written["demd"]) == (3.0, None, None)
    assert (mixed["domains"]["home"]["nll"], written["domains"]["home"]["nll"]) == (4.0, None)


def test_the_glossary_explains_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emo.pipeline.monitor.metrics.on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    facts = RunFacts(rows=32, domains=DOMAINS, hosts=["a", "b"], peak_share=0.01)
    metrics = reporter(tmp_path, facts=facts, logging_steps=1)
    weights = tuple(histogram(torch.tensor([1.0, 8.0]), 8.0).tolist())
    totals = by_domain((4, 2.0, 3.0), (6, 3.0, 4.0))._replace(
        weights=weights, divergence=0.1, kl_from_base=0.1, seconds=(1.0, 2.0), grad_norm=1.0
    )
    metrics.after_step(RunState(10, step=1, tokens=10, lr=1e-3), WRITTEN, totals)
    for step in (0, 1):
        metrics.record_validation(RunState(10, step=step), "home", totals, same_documents(1.0))
    metrics.close()
    records = read_metrics(tmp_path)
    for table, is_validation in ((glossary.TRAINING, False), (glossary.VALIDATION, True)):
        assert metric_names([r for r in records if ("set" in r) == is_validation]) == table.keys()


def test_the_glossary_explains_every_event() -> None:
    files = [*(REPO / "pipeline").rglob("*.py"), REPO / "launch" / "rank.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    found = re.findall(r'"event": "(\w+)"|(?:\blog_event|\.event)\([^\n]*?, "(\w+)"', text)
    assert {name for pair in found for name in pair if name} == glossary.EVENTS.keys()


def by_domain(*domains: tuple[int, float, float]) -> StepTotals:
    """Return totals that are the sums of the domains, each of them (tokens, loss, NLL)."""
    tokens, loss, nll = (sum(column) for column in zip(*domains, strict=True))
    parts = tuple(DomainTotals(*domain) for domain in domains)
    return StepTotals(loss, nll, 0.5, int(tokens), False, domains=parts)


def test_a_resume_drops_later_and_damaged_records(tmp_path: Path) -> None:
    metrics = reporter(tmp_path)
    for step in (0, 2, 4):
        state = RunState(10, step=step, tokens=10 * step)
        metrics.record_validation(state, "home", ONE, same_documents(1.0 + step))
    metrics.close()
    with (tmp_path / run_dir.METRICS).open("ab") as file:
        file.write(b'\xff\x00\n[3]\n{"ste')
    reporter(tmp_path, step=2).close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 2]
    assert (tmp_path / run_dir.METRICS).read_bytes().count(b"\n") == 2
    assert [read_documents(tmp_path, "home", step) is not None for step in (0, 2, 4)] == [True, True, False]
    stored = tmp_path / run_dir.VALIDATION / "home" / "step-000000.npz"
    content = stored.read_bytes()
    for damaged in (b"", content[:-4], content.replace(b"documents", b"somethin_")):
        stored.write_bytes(damaged)
        assert read_documents(tmp_path, "home", 0) is None
    reporter(tmp_path, step=0).close()
    assert not read_metrics(tmp_path) and read_documents(tmp_path, "home", 2) is None


def test_a_long_run_resumes_without_reading_all_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / run_dir.METRICS
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 2001)).rstrip())
    parsed: list[str] = []
    parse = run_dir.parse_json
    monkeypatch.setattr(run_dir, "parse_json", lambda text: parsed.append(text) or parse(text))
    run_dir.drop_records(path, 1990)
    assert len(parsed) == 11
    run_dir.drop_records(path, 1990)
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 1991))
    path.write_text('{"step": 1}')  # complete except for the end of the line
    run_dir.drop_records(path, 1)
    assert path.read_text() == '{"step": 1}\n'
    run_dir.drop_records(path, 0)
    assert path.read_text() == ""


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def run_steps(metrics: Metrics, clock: Clock, steps: range, pause_after: int = 0) -> None:
    """Take steps of ten tokens and two seconds, with a pause of an hour after step `pause_after`."""
    for step in steps:
        clock.now += 2.0
        totals = by_domain((4, 0.5 * step, step), (6, 0.5 * step, step))._replace(grad_norm=float(step))
        take_step(metrics, step, totals, 10 * step, steps=100)
        if step == pause_after:
            clock.now += 3600
            metrics.exclude_pause()


def test_a_pause_slows_no_token_down_and_counts_in_the_time_left(tmp_path: Path) -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console("lines", stream)
    console._clock = clock
    facts = RunFacts(domains=DOMAINS, peak_share=0.01)
    options: dict[str, Any] = {"clock": clock, "console": console}
    options |= {"eval_steps": 25, "save_steps": 40, "logging_steps": 10}
    metrics = reporter(tmp_path, steps=100, facts=facts, **options)
    run_steps(metrics, clock, range(1, 31), pause_after=25)
    totals = StepTotals(10.0, 20.0, math.nan, 10, False)
    for step, name, nll in ((0, "validation", 2.0), (30, "validation", 2.5), (30, "home", 2.5)):
        state = RunState(100, step=step, tokens=10 * step)
        metrics.record_validation(state, name, totals, same_documents(nll))
    metrics.close()
    records = [r for r in read_metrics(tmp_path) if "loss" in r]
    assert [r["tokens_per_s"] for r in records] == [5.0, 5.0, 5.0]
    assert [r["mfu"] for r in records] == pytest.approx([0.005] * 3)
    assert records[-1]["loss"] == pytest.approx(2.55)
    *progress, _, change, _ = stream.getvalue().splitlines()
    left = {int(line.split("/")[0].removeprefix("step ")): line for line in progress}
    assert "3 min left" in left[9] and "2 h" in left[30] and "+0.5000 [+0.5000, +0.5000]" in change
    assert max(np.diff(sorted(left))) * 2.0 <= 5, "no silence of more than 5 seconds"


def test_a_resumed_run_logs_what_an_undisturbed_run_does(tmp_path: Path) -> None:
    """A checkpoint holds the sums of the window in progress."""
    clock, stopped = Clock(), 3

    def start(name: str, step: int = 0) -> Metrics:
        return reporter(tmp_path / name, step, 100, RunFacts(domains=DOMAINS), clock=clock)

    run_steps(start("a"), clock, range(1, 21))
    first = start("b")
    run_steps(first, clock, range(1, stopped + 1))
    state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    run_steps(first, clock, range(stopped + 1, stopped + 4))  # lost when the run is killed
    first.close()
    resumed = start("b", stopped)
    resumed.load_state_dict(state)
    run_steps(resumed, clock, range(stopped + 1, 21))
    actual, expected = ([r | {"time": None} for r in read_metrics(tmp_path / name)] for name in "ba")
    assert actual == expected


def test_tensorboard_and_wandb_get_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories with the same name have different W&B runs. A resumed run continues its W&B run."""
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids, run = [], tmp_path / "b" / "run"
    for directory in (tmp_path / "a" / "run", run, tmp_path / "a" / "run"):
        facts = RunFacts(hosts=["a", "b"])
        options: dict[str, Any] = {"report_to": "[tensorboard,wandb]", "logging_steps": 4}
        metrics = reporter(directory, facts=facts, **options)
        assert wandb.run is not None
        ids.append(wandb.run.id)
        for value in range(12):  # as `emo export` does while training is stopped
            wandb.run.log({"eval/accuracy": value})
        totals = StepTotals(10.0, 20.0, math.nan, 10, False)
        for name in ("validation", "home"):
            metrics.record_validation(RunState(10), name, totals, same_documents(2.0))
        for step in range(1, 5):
            take_step(metrics, step, ONE._replace(seconds=(1.0, 2.0)), tokens=4)
        assert wandb.run.summary["train/step"] == 4 and wandb.run.summary["validation-home/step"] == 0
        metrics.close()
    assert ids[0] != ids[1] and ids[0] == ids[2]
    assert b"train/nll" in next(iter(run.glob("wandb/offline-run-*/*.wandb"))).read_bytes()
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    curves = {"train/nll", "train/slowest_rank"}
    curves |= {"validation/validation_nll", "validation-home/validation_nll"}
    assert curves <= set(events.Tags()["scalars"])


def log_twice(directory: Path, tracker: str, project: str) -> None:
    """Log a step of two runs with the same name, then a step of the first one after a restart."""
    for step, run in ((1, "a/run"), (1, "b/run"), (2, "a/run")):
        options: dict[str, Any] = {"report_to": f"[{tracker}]", "logging_steps": 1, "project": project}
        metrics = reporter(directory / run, **options)
        take_step(metrics, step, ONE._replace(nll=2.0 * step), tokens=4)
        metrics.close()


def test_a_tracker_that_fails_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(Logger):
        def log(self, values: dict[str, Any], step: int) -> None:
            raise ConnectionError("no server")

    monkeypatch.setitem(LOGGERS, "trackio", Gone)
    metrics = reporter(tmp_path, report_to="[trackio]", logging_steps=1)
    for step in (1, 2):
        take_step(metrics, step, ONE, tokens=4)
    metrics.close()
    assert [record["step"] for record in run_dir.read_metrics(tmp_path)] == [1, 2]
    assert caplog.text.count("no server") == 1


def test_mlflow_continues_the_run_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    log_twice(tmp_path, "mlflow", "mine")
    runs = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    assert len(runs) == 2 and all(run.info.status == "FINISHED" for run in runs)
    metrics = reporter(tmp_path / "a/run", report_to="[mlflow]", logging_steps=1, project="mine")
    take_step(metrics, 2, ONE, tokens=4)  # repeated after a restart
    metrics.close()
    first = (tmp_path / "a/run" / run_dir.MLFLOW_ID).read_text()
    history = mlflow.MlflowClient().get_metric_history(first, "train/nll")
    assert [point.step for point in history] == [1, 2]
    assert mlflow.get_run(first).data.params["train.global_batch_size"]


def test_trackio_continues_the_run_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    log_twice(tmp_path, "trackio", "mine")
    names = [(tmp_path / run / run_dir.TRACKIO_ID).read_text() for run in ("a/run", "b/run")]
    assert len(set(names)) == 2
    logs = [SQLiteStorage.get_logs("mine", name) for name in names]
    assert [entry["step"] for entry in logs[0]] == [1, 2] and len(logs[1]) == 1
    assert logs[0][0]["train/nll"] > 0


def test_the_profiler_records_its_steps_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stops earlier writes the steps so far. On a GPU, its memory is recorded as well."""
    calls: list[str] = []
    for name in ("_record_memory_history", "_dump_snapshot"):
        record = lambda *path, name=name, **options: calls.append(f"{name} {[*path, *options]}")  # noqa: E731
        monkeypatch.setattr(torch.cuda.memory, name, record)
    monkeypatch.setattr(profiler, "on_gpu", lambda: True)
    path = tmp_path / run_dir.PROFILE / "rank-1"
    for rank, last in ((0, 4), (1, 4), (1, 2)):
        recorder = profiler.Profiler(ProfileConfig(steps=(2, 3), ranks=[1]), tmp_path, rank)
        for step in range(1, last + 1):
            recorder.before_step(RunState(10, step=step - 1))
            torch.ones(step)
            recorder.after_step(RunState(10, step=step), BATCH, ONE)
        recorder.close()
        files = list(tmp_path.rglob("*.json.gz"))
        if files:
            events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
            assert sum(event["name"] == "aten::ones" for event in events) == min(last, 3) - 1
        assert files == [Path(f"{path}.json.gz")] * rank
    memory = "_record_memory_history"
    once = [f"{memory} ['max_entries']", f"_dump_snapshot ['{path}.memory.pickle']", f"{memory} ['enabled']"]
    assert calls == once * 2


def totals(nll: float, applied: bool = True) -> StepTotals:
    return StepTotals(loss=nll * 10, nll=nll * 10, demd=1.0, tokens=10, stop=False, applied=applied)


def guard(directory: Path, state: Any = None, **train: Any) -> Guard:
    created = Guard(directory, TrainConfig(max_steps=1, **train), True, lambda _: ORIGIN)
    if state is not None:
        created.load_state_dict(state)
    return created


@pytest.mark.parametrize("bad", [totals(2.0, applied=False), totals(2.0)._replace(loss=math.nan)])
def test_only_bad_steps_in_a_row_end_the_run(tmp_path: Path, bad: StepTotals) -> None:
    watch, good = guard(tmp_path, max_skipped=3), totals(1.0)
    warned = [
        watch.check(step, BATCH, step_totals) for step, step_totals in enumerate([bad, bad, good, bad, bad])
    ]
    assert [line is not None for line in warned] == [True, True, False, True, True]
    with refused("not-finite"):
        watch.check(6, BATCH, bad)
    records = [json.loads(line) for line in (tmp_path / run_dir.BAD_BATCHES).read_text().splitlines()]
    assert [(r["step"], r["rows"]) for r in records] == [(step, ORIGIN) for step in (0, 1, 3, 4, 6)]


def test_a_spike_is_recorded_or_ends_the_run_also_after_a_resume(tmp_path: Path) -> None:
    """Transport costs can cause a spike of the loss alone, which counts as well."""
    jump = totals(2.0)._replace(loss=100.0)
    options: dict[str, Any] = {"spike_factor": 3, "max_skipped": 3}
    first = guard(tmp_path, **options)
    for step in range(20):
        assert first.check(step, BATCH, totals(2.0 + step % 2)) is None
    first.check(20, BATCH, totals(math.nan))
    state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    assert guard(tmp_path, state, **options).check(21, BATCH, jump) is not None
    with refused("spike"):
        guard(tmp_path, state, spike_stops=True, **options).check(21, BATCH, jump)
    assert "2 in a row" in (guard(tmp_path, state, **options).check(21, BATCH, totals(math.nan)) or "")


def test_batches_that_the_model_wrote_are_compared_with_one_another(tmp_path: Path) -> None:
    """Their loss is only the divergence."""
    watch = guard(tmp_path, spike_factor=3, spike_stops=True)
    for step in range(30):
        batch = WRITTEN if step % 3 else BATCH
        assert watch.check(step, batch, totals(0.1 if step % 3 else 3.0)) is None
    with refused("spike"):
        watch.check(30, WRITTEN, totals(1.0))
