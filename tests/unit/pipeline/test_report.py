"""What a run reports: records of windows and sets, console and log, and `emo report`."""

from __future__ import annotations

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
import yaml
from scipy.special import stdtrit

from emo.common.errors import ExitCode
from emo.common.report.numbers import DASH, MINUS
from emo.pipeline import cli
from emo.pipeline.control import run_dir
from emo.pipeline.control.run_dir import append_records
from emo.pipeline.monitor.console import Console
from emo.pipeline.monitor.documents import (
    FEWEST,
    Change,
    Documents,
    compute_change,
    write_documents,
)
from emo.pipeline.report.page import build_run_report
from emo.pipeline.report.runs import KILLED, RecordedRun, read_runs, regressions
from tests.conftest import REPO
from tests.helpers.html import Page
from tests.helpers.refusals import refused


def documents(nll: list[float] | np.ndarray, tokens: list[int] | np.ndarray) -> Documents:
    return Documents("set", np.asarray(nll, np.float64), np.asarray(tokens, np.int64))


@pytest.mark.parametrize("n", [9, 400])
def test_the_interval_is_a_naive_jackknife_s(n: int) -> None:
    """For many documents of uneven lengths, it also agrees with drawing them with replacement."""
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
    enough = compute_change(documents([2.0] * FEWEST, [2] * FEWEST), documents([3.0] * FEWEST, [2] * FEWEST))
    assert enough is not None and enough.interval
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
    console.record({"step": 20, "loss": 2.0, "demd": None})
    logger.info("saved: %s", "x", extra={"event_fields": {"event": "saved", "step": 3}})
    logger.warning("late")
    records = [json.loads(line) | {"time": 0} for line in stream.getvalue().splitlines()]
    assert records == [
        {"event": "train", "time": 0, "step": 20, "loss": 2.0, "demd": None},
        {"event": "saved", "time": 0, "step": 3},
        {"event": "message", "time": 0, "level": "warning", "text": "late"},
    ]


def test_what_compilers_print_goes_to_the_log(tmp_path: Path) -> None:
    """Child processes and C libraries write to descriptor 1. Python's print is for the user."""

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
    # Without a run directory, the output of a library may be the only explanation of a failure.
    assert run("os.write(1, b'nvcc: not found\\n')\nchatter.show()\n") == ("", "nvcc: not found\n")


def test_a_lost_reader_breaks_no_rank() -> None:
    program = "import sys; from emo.pipeline.monitor.console import split_output\n"
    program += "split_output(); sys.stdin.readline()\n"
    program += "for _ in range(3): print('a line')\nsys.stderr.write('went on')"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    rank = subprocess.Popen([sys.executable, "-c", program], cwd=REPO, text=True, **pipes)
    assert rank.stdin is not None and rank.stdout is not None and rank.stderr is not None
    rank.stdout.close()
    rank.stdin.write("go\n")
    rank.stdin.flush()
    assert rank.stderr.read() == "went on" and rank.wait() == 0


TOKENS = np.full(50, 100)


def train_record(step: int, **changes: Any) -> dict[str, Any]:
    """Return a record of ten steps. It has few quantities, so that charts are drawn quickly."""
    return {"step": step, "tokens": 1000 * step, "loss": 5 - step / 20, "tokens_per_s": 500.0} | changes


def make_run(directory: Path, steps: int = 40, **facts: Any) -> Path:
    """Write a run directory as the trainer does in `steps` steps. `facts` describe its launch."""
    directory.mkdir(parents=True)
    config = {"model": {"path": "some/model"}, "objective": {"name": "emo"}, "train": {"learning_rate": 1e-3}}
    (directory / run_dir.CONFIG).write_text(yaml.safe_dump(config))
    for step in range(10, steps + 1, 10):
        append_records(directory / run_dir.METRICS, [train_record(step)])
    begin = {"event": "begin", "time": 1.7e9, "step": 0, "steps": 100, "ranks": 2, "hosts": 1}
    begin |= {"device": "CPU", "batch": 8, "block": 256, "planned": None}
    append_records(directory / run_dir.LAUNCHES, [begin | facts])
    return directory


def write_validation(
    run: Path, name: str, steps: dict[int, float], seed: int = 0, tokens: np.ndarray = TOKENS, **others: float
) -> None:
    """Write measurements of a set with this mean NLL at each step. Its documents differ slightly."""
    for step, nll in steps.items():
        noise = np.random.default_rng([seed, step]).normal(0, 0.01, len(tokens))
        write_documents(run, name, step, Documents("set", tokens * (nll + noise - noise.mean()), tokens))
        record = {"step": step, "tokens": 1000 * step, "set": name, "validation_nll": nll}
        record |= others
        append_records(run / run_dir.METRICS, [record])


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Without replay, news improve and stories get worse. With replay, the change of stories is unclear."""
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
    """Launches are running, killed or stopped, and the first record of one follows a torn line."""
    run, now = make_run(tmp_path / "run"), time.time()
    for age, expected in ((5, "runs: training"), (500, KILLED)):
        (run / run_dir.HEARTBEAT).write_text(json.dumps({"time": now - age, "doing": "training", "step": 3}))
        assert RecordedRun(run).state == expected
    with (run / run_dir.LAUNCHES).open("a") as file:
        file.write('{"event": "begin", "step": 2')
    append_records(
        run / run_dir.LAUNCHES, [{"event": "begin", "time": 1.7e9, "step": 30, "steps": 100, "ranks": 4}]
    )
    end = {"event": "end", "time": 1.7e9, "step": 43, "how": "stopped", "reason": "SIGTERM"}
    append_records(run / run_dir.LAUNCHES, [end])
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
    """The slow first record does not count. Utilisation is a mean over time, here of 20, 20 and 40 s."""
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
    text, page = render(*runs)
    assert page.answer.startswith("Compared with plain on news, replay is worse by 0.100")
    assert "On stories, replay is better by 0.250" in page.answer
    assert "plain improves by 0.500 nats per token and replay by 0.400" in text
    assert "plain gets worse by 0.250 nats per token, and replay shows no clear change" in text
    keys = ["Held-out set", "Run", "Verdict", "Loss at step 0", "Loss now", "At step", "Documents"]
    keys += ["Against plain"]
    rows = page.table("Held-out set", "Run")
    assert [[r[key].split(" ")[0] for key in keys] for r in rows] == [
        ["news", "plain", "improved", "3.0000", "2.5000", "40", "50", DASH],
        ["news", "replay", "improved", "3.0000", "2.6000", "40", "50", "+0.1000"],
        ["stories", "plain", "worse", "1.0000", "1.2500", "40", "50", DASH],
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
    append_records(run / run_dir.METRICS, [{"step": 40, "set": "../../up", "validation_nll": 1.0}])
    _, page = render(run)
    assert {row["Held-out set"]: row["Verdict"] for row in page.table("Held-out set", "Verdict")} == {
        "lost": "not comparable", "late": "not measured at step 0", "short": "too few documents",
    }  # fmt: skip
    assert "(no interval)" in page.answer
    with refused("no-verdict"):
        regressions(read_runs([run]), ["short"])


def test_the_exported_step_is_judged(tmp_path: Path) -> None:
    """With load_best_at_end, a loss that rose after the exported step is no regression."""
    run = make_run(tmp_path / "run")
    write_validation(run, "news", {0: 2.0, 20: 1.5, 40: 2.5})
    assert [lost for lost, _ in regressions(read_runs([run]), ["news"])] == [True]
    config = yaml.safe_load((run / run_dir.CONFIG).read_text())
    config["train"]["load_best_at_end"] = True
    (run / run_dir.CONFIG).write_text(yaml.safe_dump(config))
    for step, verdict in ((20, [False]), (40, [True])):
        write_export(run, step)
        assert [lost for lost, _ in regressions(read_runs([run]), ["news"])] == verdict
    write_export(run, 30)
    with refused("no-verdict"):
        regressions(read_runs([run]), ["news"])


def write_export(run: Path, step: int) -> None:
    (run / run_dir.EXPORT).mkdir(exist_ok=True)
    (run / run_dir.EXPORT / "export.json").write_text(json.dumps({"step": step}))


def test_a_loss_that_is_not_finite_is_a_regression(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_validation(run, "broken", {0: 1.0, 40: 1.0})
    write_documents(run, "broken", 40, Documents("set", TOKENS * math.nan, TOKENS))
    ((lost, line),) = regressions(read_runs([run]), ["broken"])
    assert lost and "not finite" in line
    (row,) = render(run)[1].table("Held-out set", "Verdict")
    assert row["Verdict"] == "not finite"


@pytest.mark.parametrize("content", ["", "- a", "model:", "a: !!bool x"])
def test_files_that_another_program_damaged_are_remarks(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path / "run")
    write_validation(run, "news", {0: 3.0, 40: 2.5})
    (run / run_dir.CONFIG).write_text(content)
    append_records(run / run_dir.LAUNCHES, [{"time": 1, "step": 3}])
    append_records(run / run_dir.METRICS, [train_record(50, tokens="x")])
    text, _ = render(run)
    assert ("cannot be read" in text) == (content != "model:")


def test_a_branch_is_compared_with_the_start_of_its_trunk(tmp_path: Path) -> None:
    """It has the trunk's measurement at step 0, but not its records. Its time begins at the branch."""
    run = make_run(tmp_path / "run", step=20, tokens=train_record(20)["tokens"])
    write_validation(run, "news", {0: 3.0, 40: 2.5})
    metrics = run / run_dir.METRICS
    records = [record for record in map(json.loads, metrics.read_text().splitlines()) if record["step"] > 20]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    ((worse, line),) = regressions(read_runs([run]), ["news"])
    assert not worse and "no regression" in line
    (recorded,) = read_runs([run])
    assert sum(record["steps"] for record in recorded.trained) == 20


def test_a_loss_before_training_is_not_the_last_loss(tmp_path: Path) -> None:
    """A run in progress that measures only at its start and end has only a training loss so far."""
    run = make_run(tmp_path / "run")
    write_validation(run, "news", {0: 9.0})
    _, page = render(run)
    assert page.table("Run", "State")[0]["Held-out loss"] == DASH
    assert "9" not in page.answer and "step 0 only" in page.answer and "before training" not in page.answer
    with refused("no-verdict") as error:
        regressions(read_runs([run]), ["news"])
    assert "train.eval_steps" in str(error.value)


def test_the_kl_from_the_base_is_listed_and_can_be_limited(tmp_path: Path) -> None:
    """A set can keep its loss while its predictions change."""
    run = make_run(tmp_path / "run")
    write_validation(run, "news", {0: 3.0, 40: 2.5})
    write_validation(run, "stories", {0: 1.0, 40: 1.0}, validation_kl_from_base=0.25)
    text, page = render(run)
    rows = page.table("Held-out set", "Verdict")
    assert {row["Held-out set"]: row["KL from base"] for row in rows} == {"news": DASH, "stories": "0.2500"}
    assert "KL from the base model, nats per token on stories" in text

    def report(*options: str) -> int:
        return cli.main(["report", str(run), *options])

    gate = ("--fail_on_regression", "stories", "--max_kl")
    assert report(*gate, "0.25") == ExitCode.DONE and report(*gate, "0.2") == ExitCode.REGRESSION
    assert report("--max_kl", "0.2") == report(*gate, "-1") == ExitCode.MISTAKE
    assert report("--fail_on_regression", "news", "--max_kl", "1") == ExitCode.MISTAKE, "it has no KL"


def test_a_set_that_got_worse_is_a_regression(runs: tuple[Path, Path], tmp_path: Path) -> None:
    def report(names: str, *paths: Path) -> int:
        return cli.main(["report", *map(str, paths), "--fail_on_regression", names])

    plain, replay = runs
    assert report("storys", plain) == report("news", tmp_path) == ExitCode.MISTAKE
    assert not (plain / "report.html").exists()
    assert report("stories", plain) == report("news,stories", plain, replay) == ExitCode.REGRESSION
    assert report("news", plain) == report("news,stories", replay) == ExitCode.DONE
    assert (plain / "report.html").exists()
