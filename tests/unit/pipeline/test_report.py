"""What a run shows of itself: records of windows and sets, its console and log, `emo report`."""

from __future__ import annotations

import gzip
import io
import json
import logging
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import torch
import yaml
from scipy.special import stdtrit

from emo.common.errors import ExitCode
from emo.common.report.numbers import DASH, MINUS
from emo.pipeline import cli
from emo.pipeline.config import RunConfig, TrainConfig, load_config
from emo.pipeline.control import run_dir
from emo.pipeline.control.run_dir import read_metrics
from emo.pipeline.engine.engine import DomainSums, Sums
from emo.pipeline.loss.fused import histogram
from emo.pipeline.monitor import profiler as profile
from emo.pipeline.monitor.config import ProfileConfig
from emo.pipeline.monitor.console import Console, Progress
from emo.pipeline.monitor.launches import append
from emo.pipeline.monitor.metrics import Metrics
from emo.pipeline.monitor.validation import (
    FEWEST,
    Change,
    Documents,
    compute_change,
    read_documents,
    write_documents,
)
from emo.pipeline.report.page import build_run_report
from emo.pipeline.report.runs import KILLED, RecordedRun, read_runs, regressions
from emo.pipeline.trainer import Guard
from tests.conftest import REPO
from tests.helpers.html import Page
from tests.helpers.refusals import refused

ONE = Sums(1.0, 1.0, 1.0, 1, False)
DOMAINS = ("home", "abroad")


def config(directory: Path, **train: object) -> RunConfig:
    directory.mkdir(parents=True, exist_ok=True)
    overrides = [f"output_dir={directory}", *(f"train.{k}={v}" for k, v in train.items())]
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
    return Sums(loss, nll, 0.5, int(tokens), False, domains=tuple(DomainSums(*domain) for domain in domains))


def test_resume_drops_later_and_damaged_records(tmp_path: Path) -> None:
    """From a checkpoint those after it; without one the first measurement is made again, and told once."""
    metrics = Metrics(config(tmp_path), 0, 10, active=True)
    for step in (0, 2, 4):
        metrics.validation(step, 10 * step, "home", ONE, alike(1.0 + step))
    metrics.close()
    with (tmp_path / run_dir.METRICS).open("ab") as file:
        file.write(b'\xff\x00\n[3]\n{"ste')
    Metrics(config(tmp_path), 2, 10, active=True).close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 2]
    assert (tmp_path / run_dir.METRICS).read_bytes().count(b"\n") == 2
    kept = [read_documents(tmp_path, "home", step) is not None for step in (0, 2, 4)]
    assert kept == [True, True, False]
    stored = tmp_path / run_dir.VALIDATION / "home" / "step-000000.npz"
    whole = stored.read_bytes()
    for damaged in (b"", whole[:-4], whole.replace(b"documents", b"somethin_")):
        stored.write_bytes(damaged)
        assert read_documents(tmp_path, "home", 0) is None
    Metrics(config(tmp_path), 0, 10, active=True).close()
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
    path.write_text('{"step": 1}')  # whole but for the end of its line
    run_dir.drop_records(path, 1)
    assert path.read_text() == '{"step": 1}\n'
    run_dir.drop_records(path, 0)
    assert path.read_text() == ""


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


def test_tensorboard_and_wandb_get_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set has curves of its own. Two run directories of one name are two runs; a resumed one stays."""
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids, run = [], tmp_path / "b" / "run"
    for directory in (tmp_path / "a" / "run", run, tmp_path / "a" / "run"):
        options = {"hosts": ["a", "b"]}
        metrics = Metrics(config(directory, report_to="[tensorboard,wandb]"), 0, 10, active=True, **options)
        assert wandb.run is not None
        ids.append(wandb.run.id)
        for name in ("validation", "home"):
            metrics.validation(0, 0, name, Sums(10.0, 20.0, math.nan, 10, False), alike(2.0))
        for step in range(1, 5):
            metrics.step(step, ONE._replace(seconds=(1.0, 2.0)), 1.0)
        metrics.log(4, 4, 1e-3)
        metrics.close()
    assert ids[0] != ids[1] and ids[0] == ids[2]
    assert b"train/nll" in next(iter(run.glob("wandb/offline-run-*/*.wandb"))).read_bytes()
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert {
        "train/nll",
        "train/slowest_rank",
        "validation/validation_nll",
        "validation-home/validation_nll",
    } <= set(events.Tags()["scalars"])


def test_a_profile_is_of_its_steps_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short where the run ends before; on a GPU with its memory."""
    calls: list[str] = []
    for name in ("_record_memory_history", "_dump_snapshot"):
        record = lambda *path, name=name, **options: calls.append(f"{name} {[*path, *options]}")  # noqa: E731
        monkeypatch.setattr(torch.cuda.memory, name, record)
    monkeypatch.setattr(profile, "on_gpu", lambda: True)
    path = tmp_path / run_dir.PROFILE / "rank-1"
    for rank, last in ((0, 4), (1, 4), (1, 2)):
        recorder = profile.Profile(ProfileConfig(steps=(2, 3), ranks=[1]), tmp_path, rank)
        for step in range(1, last + 1):
            recorder.starts(step)
            torch.ones(step)
            recorder.ended(step)
        recorder.close()
        files = list(tmp_path.rglob("*.json.gz"))
        if files:
            events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
            assert sum(event["name"] == "aten::ones" for event in events) == min(last, 3) - 1
        assert files == [Path(f"{path}.json.gz")] * rank
    memory = "_record_memory_history"
    once = [f"{memory} ['max_entries']", f"_dump_snapshot ['{path}.memory.pickle']", f"{memory} ['enabled']"]
    assert calls == once * 2


ROWS = [["shard-00000", 3]]


def sums(nll: float, applied: bool = True) -> Sums:
    return Sums(loss=nll * 10, nll=nll * 10, demd=1.0, tokens=10, stop=False, applied=applied)


def guard(directory: Path, state: Any = None, **train: Any) -> Guard:
    return Guard(directory, TrainConfig(max_steps=1, **train), writes=True, state=state)


@pytest.mark.parametrize("bad", [sums(2.0, applied=False), sums(2.0)._replace(loss=math.nan)])
def test_only_bad_steps_in_a_row_end_the_run(tmp_path: Path, bad: Sums) -> None:
    watch, good = guard(tmp_path, max_skipped=3), sums(1.0)
    warned = [watch.observe(step, this, lambda: ROWS) for step, this in enumerate([bad, bad, good, bad, bad])]
    assert [line is not None for line in warned] == [True, True, False, True, True]
    with refused("not-finite"):
        watch.observe(6, bad, lambda: ROWS)
    records = [json.loads(line) for line in (tmp_path / run_dir.BAD_BATCHES).read_text().splitlines()]
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


def test_batches_of_the_models_own_are_compared_with_one_another(tmp_path: Path) -> None:
    """Their loss is another one: a divergence alone, beside that of likelihood and divergence."""
    watch = guard(tmp_path, spike_factor=3, spike_stops=True)
    for step in range(30):
        on_policy = step % 3 > 0
        assert watch.observe(step, sums(0.1 if on_policy else 3.0), lambda: ROWS, on_policy) is None
    with refused("spike"):
        watch.observe(30, sums(1.0), lambda: ROWS, True)


@pytest.mark.parametrize("n", [9, 400])
def test_the_interval_is_a_naive_jackknife_s(n: int) -> None:
    """And where there are many documents, of uneven lengths, that of drawing them with replacement."""
    rng = np.random.default_rng(1)
    tokens = np.maximum(1, rng.lognormal(4, 1.0, n)).astype(int)
    shift = tokens * rng.normal(0.05, 0.3, n) + np.sqrt(tokens) * rng.normal(0, 0.5, n)
    nll = tokens * rng.normal(3.0, 0.5, n)
    result = compute_change(documents(nll, tokens), documents(nll + shift, tokens))
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
        few = compute_change(documents([2.0] * n, [2] * n), documents([3.0] * n, [2] * n))
        assert few is not None and few.value == 0.5 and few.interval == "" and few.direction == 0
    full = documents([2.0] * 9, [5] * 9)
    assert compute_change(full, full) == Change(0.0, 0.0, 0.0, 9)
    assert compute_change(full, full._replace(fingerprint="other")) is None, "also with as many tokens"
    assert compute_change(documents([2.0, 1.0], [2, 2]), documents([2.0, 1.0], [2, 3])) is None
    assert compute_change(documents([], []), documents([], [])) is None
    result = compute_change(documents([np.inf, 1.0], [2, 2]), documents([np.inf, 1.0], [2, 2]))
    assert result is not None and math.isnan(result.value) and result.direction == 0
    assert [Change(v, v - 1, v + 1, 5).direction for v in (-2.0, 0.5, 2.0)] == [-1, 0, 1]


def test_json_lines_hold_every_record() -> None:
    stream = io.StringIO()
    console, logger = Console("json", stream), logging.Logger("of this test")
    logger.addHandler(console)
    console.record({"step": 20, "loss": 2.0, "demd": None}, Progress(20, 30, {}))
    logger.info("saved: %s", "x", extra={"event_fields": {"event": "saved", "step": 3}})
    logger.warning("late")
    records = [json.loads(line) | {"time": 0} for line in stream.getvalue().splitlines()]
    assert records == [
        {"event": "train", "time": 0, "step": 20, "loss": 2.0, "demd": None},
        {"event": "saved", "time": 0, "step": 3},
        {"event": "message", "time": 0, "level": "warning", "text": "late"},
    ]


def test_what_compilers_print_goes_to_the_log(tmp_path: Path) -> None:
    """A child process and a C library write to descriptor 1; Python's print is the user's."""

    def run(program: str) -> tuple[str, str]:
        text = "import os, sys\nfrom pathlib import Path\n"
        text += "from emo.pipeline.monitor.console import Console, split_output\n"
        text += f"chatter = split_output()\n{program}"
        command = [sys.executable, "-c", text, str(tmp_path)]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    program = (
        "os.system('echo g++ -c before')\nprint('hello')\n"
        "chatter.move(Path(sys.argv[1]), main=True)\nos.system('echo g++ -c after')\n"
        "with Console(chatter=chatter).compiling():\n    print('Time to load op')\n"
        "print('bye', file=sys.stderr)\n"
    )
    assert run(program) == ("hello\n", "bye\n")
    first, *others = (tmp_path / run_dir.LOG).read_text().splitlines()
    assert first.startswith("--- ") and others == ["g++ -c before", "g++ -c after", "Time to load op"]
    # Before there is a run directory, what a library printed may be the only explanation of a failure.
    assert run("os.write(1, b'nvcc: not found\\n')\nchatter.show()\n") == ("", "nvcc: not found\n")


def test_a_lost_reader_breaks_no_rank() -> None:
    program = "import sys; from emo.pipeline.monitor.console import split_output\n"
    program += "split_output(); sys.stdin.readline()\nfor _ in range(3): print('a line')\n"
    program += "sys.stderr.write('went on')"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    rank = subprocess.Popen([sys.executable, "-c", program], cwd=REPO, text=True, **pipes)
    assert rank.stdin is not None and rank.stdout is not None and rank.stderr is not None
    rank.stdout.close()
    rank.stdin.write("go\n")
    rank.stdin.flush()
    assert rank.stderr.read() == "went on" and rank.wait() == 0


TOKENS = np.full(50, 100)


def train_record(step: int, **changes: Any) -> dict[str, Any]:
    """Return a record of ten steps. It has few quantities, which are drawn quickly."""
    return {"step": step, "tokens": 1000 * step, "loss": 5 - step / 20, "tokens_per_s": 500.0} | changes


def make_run(directory: Path, steps: int = 40, **facts: Any) -> Path:
    """Write a run directory as the trainer does in `steps` steps. facts: of its launch."""
    directory.mkdir(parents=True)
    config = {"model": {"path": "some/model"}, "objective": {"name": "emo"}, "train": {"learning_rate": 1e-3}}
    (directory / run_dir.CONFIG).write_text(yaml.safe_dump(config))
    for step in range(10, steps + 1, 10):
        append(directory / run_dir.METRICS, train_record(step))
    begin = {"event": "begin", "time": 1.7e9, "step": 0, "steps": 100, "ranks": 2, "hosts": 1}
    begin |= {"device": "CPU", "batch": 8, "block": 256, "planned": None}
    append(directory / run_dir.LAUNCHES, begin | facts)
    return directory


def write_validation(
    run: Path, name: str, steps: dict[int, float], seed: int = 0, tokens: np.ndarray = TOKENS
) -> None:
    """Write measurements of a set: its mean NLL at each step, with documents that differ slightly."""
    for step, nll in steps.items():
        noise = np.random.default_rng([seed, step]).normal(0, 0.01, len(tokens))
        write_documents(run, name, step, Documents("set", tokens * (nll + noise - noise.mean()), tokens))
        record = {"step": step, "tokens": 1000 * step, "set": name, "validation_nll": nll}
        append(run / run_dir.METRICS, record)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Without replay news are learned and stories forgotten. With replay the change of stories is unclear."""
    plain, replay = make_run(tmp_path / "plain"), make_run(tmp_path / "replay")
    write_validation(plain, "news", {0: 3.0, 20: 2.8, 40: 2.5})
    write_validation(plain, "stories", {0: 1.0, 20: 1.1, 40: 1.25})
    write_validation(replay, "news", {0: 3.0, 20: 2.9, 40: 2.6}, seed=1)
    write_validation(replay, "stories", {0: 1.0, 40: 1.0001}, seed=1)
    return plain, replay


def render(*paths: Path) -> tuple[str, Page]:
    text = build_run_report(read_runs(paths), "step", paths[0]).html()
    return text, Page(text)


def test_states_and_launches(tmp_path: Path) -> None:
    """Running, killed and stopped launches, and one whose first record follows a torn line."""
    run, now = make_run(tmp_path / "run"), time.time()
    for age, expected in ((5, "runs: training"), (500, KILLED)):
        (run / run_dir.HEARTBEAT).write_text(json.dumps({"time": now - age, "doing": "training", "step": 3}))
        assert RecordedRun(run).state == expected
    with (run / run_dir.LAUNCHES).open("a") as file:
        file.write('{"event": "begin", "step": 2')
    append(run / run_dir.LAUNCHES, {"event": "begin", "time": 1.7e9, "step": 30, "steps": 100, "ranks": 4})
    end = {"event": "end", "time": 1.7e9, "step": 43, "how": "stopped", "reason": "SIGTERM"}
    append(run / run_dir.LAUNCHES, end)
    with (run / run_dir.METRICS).open("a") as file:
        file.write('{"step": 40, "loss": "high"}\nnot json\n{"st')
    text, page = render(run)
    keys = ("How it ended", "After step", "At step", "Ranks")
    first, second = ([row[key] for key in keys] for row in page.table("Run", "How it ended"))
    assert first == [KILLED, "0", DASH, "2"] and second == ["stopped: SIGTERM", "30", "43", "4"]
    assert "launches.jsonl: 1 damaged line" in text and "metrics.jsonl: 2 damaged lines" in text
    assert page.table("Run", "State")[0]["Steps"] == "43 of 100", "three steps since the last record"
    (run / run_dir.EXPORT).mkdir()
    assert RecordedRun(run).state == "finished"


def test_measurements_are_listed_with_the_plan(tmp_path: Path) -> None:
    """The slow first record does not count. Utilisation is a mean over time, here over 20, 20 and 40 s."""
    planned = {"seconds": 1.6, "mfu": 0.5, "memory_gib": 60.0}
    run = make_run(tmp_path / "run", planned=planned)
    slow = {"tokens_per_s": 10.0, "mfu": 0.01, "memory_gib": 70.0}
    lines = [train_record(10, **slow), *(train_record(s, mfu=0.4, memory_gib=66.0) for s in (20, 30))]
    lines.append(train_record(40, mfu=0.2, tokens_per_s=250.0))
    (run / run_dir.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = render(run)[1].table("Run", "Seconds per step")
    assert list(row.values())[1:] == [
        "2.67 planned 1.6, ratio 1.67",
        "768 planned 1,280, ratio 0.60",
        "30.0% planned 50.0%, ratio 0.60",
        "70.0 planned 60.0, ratio 1.17",
    ]


def test_the_command_links_evaluations_and_writes_json(tmp_path: Path) -> None:
    run = make_run(tmp_path / "all" / "a:run #1")
    write_validation(run, "news", {0: 3.0, 40: 2.5})
    (run / "eval").mkdir()
    for name in ("report.html", "results.json"):
        (run / "eval" / name).write_text("")
    page, numbers = tmp_path / "pages" / "one.html", tmp_path / "new.json"
    assert cli.main(["report", str(run), "--output_path", str(page), "--json", str(numbers)]) == ExitCode.DONE
    (link,) = (a for a in Page(page.read_text(encoding="utf-8")).addresses if not a.startswith("#"))
    assert link == "../all/a%3Arun%20%231/eval/report.html" and (page.parent / unquote(link)).is_file()
    (row,) = json.loads(numbers.read_text())
    assert (row["run"], row["set"], row["step"], row["start"], row["end"]) == (str(run), "news", 40, 3.0, 2.5)
    assert row["change"]["value"] == pytest.approx(-0.5) and row["change"]["documents"] == 50
    assert row["against_first"] is None


def test_runs_are_compared_with_their_start_and_with_each_other(runs: tuple[Path, Path]) -> None:
    _, page = render(*runs)
    assert "plain improves by 0.500" in page.answer and "replay improves by 0.400" in page.answer
    assert "plain gets worse by 0.250" in page.answer and "replay shows no clear change" in page.answer
    keys = ("Set", "Run", "Verdict", "Loss at step 0", "Loss now", "At step", "Documents", "Against plain")
    rows = page.table("Set", "Run")
    assert [[r[key].split(" ")[0] for key in keys] for r in rows] == [
        ["news", "plain", "gained", "3.0000", "2.5000", "40", "50", DASH],
        ["news", "replay", "gained", "3.0000", "2.6000", "40", "50", "+0.1000"],
        ["stories", "plain", "lost", "1.0000", "1.2500", "40", "50", DASH],
        ["stories", "replay", "no", "1.0000", "1.0001", "40", "50", f"{MINUS}0.2499"],
    ]
    low, high = (float(limit) for limit in rows[2]["Change"].split(" ", 1)[1].split(" to "))
    assert 0.24 < low < 0.25 < high < 0.26


def test_verdicts_without_a_pair_of_measurements(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name, steps in (("lost", (0, 40)), ("late", (20, 40)), ("early", (0,))):
        write_validation(run, name, dict.fromkeys(steps, 1.0))
    (run / run_dir.VALIDATION / "lost" / "step-000000.npz").unlink()
    write_validation(run, "short", {0: 3.0, 40: 2.0}, tokens=np.full(4, 10_000))
    append(run / run_dir.METRICS, {"step": 40, "set": "../../up", "validation_nll": 1.0})
    _, page = render(run)
    assert {row["Set"]: row["Verdict"] for row in page.table("Set", "Verdict")} == {
        "lost": "not comparable", "late": "not measured at step 0", "short": "too few documents",
    }  # fmt: skip
    assert "without an interval" in page.answer
    with refused("no-verdict"):
        regressions(read_runs([run]), ["short"])


def test_a_loss_before_training_is_not_the_last_loss(tmp_path: Path) -> None:
    """A run in progress that measures only at its ends has only a training loss so far."""
    run = make_run(tmp_path / "run")
    write_validation(run, "news", {0: 9.0})
    _, page = render(run)
    assert page.table("Run", "State")[0]["Held-out loss"] == DASH
    assert "9" not in page.answer and "step 0 only" in page.answer and "before training" not in page.answer
    with refused("no-verdict") as error:
        regressions(read_runs([run]), ["news"])
    assert "train.eval_steps" in str(error.value)


def test_a_set_that_got_worse_is_a_regression(runs: tuple[Path, Path], tmp_path: Path) -> None:
    def report(names: str, *paths: Path) -> int:
        return cli.main(["report", *map(str, paths), "--fail_on_regression", names])

    plain, replay = runs
    assert report("storys", plain) == report("news", tmp_path) == ExitCode.MISTAKE
    assert not (plain / "report.html").exists()
    assert report("stories", plain) == report("news,stories", plain, replay) == ExitCode.REGRESSION
    assert report("news", plain) == report("news,stories", replay) == ExitCode.DONE
    assert (plain / "report.html").exists()
