"""emo report: runs as one page, what they gained and lost, an exit code for regressions."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import yaml

from emo.common.errors import ExitCode
from emo.common.report.numbers import DASH, MINUS
from emo.pipeline import cli, run_dir
from emo.pipeline.report.launches import append
from emo.pipeline.report.page import document
from emo.pipeline.report.runs import KILLED, Run, read_runs, regressions
from emo.pipeline.report.validation import Documents, write
from tests.helpers.html import Page
from tests.helpers.refusals import refused

TOKENS = np.full(50, 100)


def train_record(step: int, **changes: Any) -> dict[str, Any]:
    """Ten steps of a thousand tokens in two seconds each; so few quantities are drawn quickly."""
    return {"step": step, "tokens": 1000 * step, "loss": 5 - step / 20, "tokens_per_s": 500.0} | changes


def make_run(directory: Path, steps: int = 40, **facts: Any) -> Path:
    """A run directory as the trainer leaves it after `steps`; facts: of its launch."""
    directory.mkdir(parents=True)
    config = {"model": {"path": "some/model"}, "objective": {"name": "emo"}, "train": {"learning_rate": 1e-3}}
    (directory / run_dir.CONFIG).write_text(yaml.safe_dump(config))
    for step in range(10, steps + 1, 10):
        append(directory / run_dir.METRICS, train_record(step))
    begin = {"event": "begin", "time": 1.7e9, "step": 0, "steps": 100, "ranks": 2, "hosts": 1}
    begin |= {"device": "CPU", "batch": 8, "block": 256, "planned": None}
    append(directory / run_dir.LAUNCHES, begin | facts)
    return directory


def measured(
    run: Path, name: str, steps: dict[int, float], seed: int = 0, tokens: np.ndarray = TOKENS
) -> None:
    """Leave what validation leaves: the mean NLL at each step, with documents that differ a little."""
    for step, nll in steps.items():
        noise = np.random.default_rng([seed, step]).normal(0, 0.01, len(tokens))
        write(run, name, step, Documents("set", tokens * (nll + noise - noise.mean()), tokens))
        append(
            run / run_dir.METRICS, {"step": step, "tokens": 1000 * step, "set": name, "validation_nll": nll}
        )


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Without replay one is learnt and one forgotten; with replay less of both, and one is not sure."""
    plain, replay = make_run(tmp_path / "plain"), make_run(tmp_path / "replay")
    measured(plain, "news", {0: 3.0, 20: 2.8, 40: 2.5})
    measured(plain, "stories", {0: 1.0, 20: 1.1, 40: 1.25})
    measured(replay, "news", {0: 3.0, 20: 2.9, 40: 2.6}, seed=1)
    measured(replay, "stories", {0: 1.0, 40: 1.0001}, seed=1)
    return plain, replay


def shown(*paths: Path) -> tuple[str, Page]:
    text = document(read_runs(paths), "step", paths[0]).html()
    return text, Page(text)


def test_states_and_launches(tmp_path: Path) -> None:
    """A launch that lives, one that was killed, one that was stopped, one begun behind a torn line."""
    run, now = make_run(tmp_path / "run"), time.time()
    for age, expected in ((5, "runs: training"), (500, KILLED)):
        (run / run_dir.HEARTBEAT).write_text(json.dumps({"time": now - age, "doing": "training", "step": 3}))
        assert Run(run).state == expected
    with (run / run_dir.LAUNCHES).open("a") as file:
        file.write('{"event": "begin", "step": 2')  # the disk was full
    append(run / run_dir.LAUNCHES, {"event": "begin", "time": 1.7e9, "step": 30, "steps": 100, "ranks": 4})
    end = {"event": "end", "time": 1.7e9, "step": 43, "how": "stopped", "reason": "SIGTERM"}
    append(run / run_dir.LAUNCHES, end)
    with (run / run_dir.METRICS).open("a") as file:
        file.write('{"step": 40, "loss": "high"}\nnot json\n{"st')
    text, page = shown(run)
    keys = ("How it ended", "After step", "At step", "Ranks")
    first, second = ([row[key] for key in keys] for row in page.table("Run", "How it ended"))
    assert first == [KILLED, "0", DASH, "2"] and second == ["stopped: SIGTERM", "30", "43", "4"]
    assert "launches.jsonl: 1 damaged line" in text and "metrics.jsonl: 2 damaged lines" in text
    assert page.table("Run", "State")[0]["Steps"] == "43 of 100", "three steps since the last record"
    (run / run_dir.EXPORT).mkdir()
    assert Run(run).state == "finished"


def test_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    """A slow first record changes nothing; utilisation is a mean over time, here over 20, 20 and 40 s."""
    planned = {"seconds": 1.6, "mfu": 0.5, "memory_gib": 60.0}
    run = make_run(tmp_path / "run", planned=planned)
    slow = {"tokens_per_s": 10.0, "mfu": 0.01, "memory_gib": 70.0}
    lines = [train_record(10, **slow), *(train_record(s, mfu=0.4, memory_gib=66.0) for s in (20, 30))]
    lines.append(train_record(40, mfu=0.2, tokens_per_s=250.0))
    (run / run_dir.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = shown(run)[1].table("Run", "Seconds per step")
    assert list(row.values())[1:] == [
        "2.67 planned 1.6, ratio 1.67",
        "768 planned 1,280, ratio 0.60",
        "30.0% planned 50.0%, ratio 0.60",
        "70.0 planned 60.0, ratio 1.17",
    ]


def test_the_command_links_evaluations_and_writes_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "all" / "a:run #1")
    measured(run, "news", {0: 3.0, 40: 2.5})
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


def test_runs_stand_side_by_side(runs: tuple[Path, Path]) -> None:
    """Also against each other, where they measured the same documents."""
    _, page = shown(*runs)
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


def test_what_cannot_be_paired_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name, steps in (("lost", (0, 40)), ("late", (20, 40)), ("early", (0,))):
        measured(run, name, dict.fromkeys(steps, 1.0))
    (run / run_dir.VALIDATION / "lost" / "step-000000.npz").unlink()
    measured(run, "short", {0: 3.0, 40: 2.0}, tokens=np.full(4, 10_000))  # however clear the change is
    append(run / run_dir.METRICS, {"step": 40, "set": "../../up", "validation_nll": 1.0})
    _, page = shown(run)
    assert {row["Set"]: row["Verdict"] for row in page.table("Set", "Verdict")} == {
        "lost": "not comparable", "late": "not measured at step 0", "short": "too few documents",
    }  # fmt: skip
    assert "without an interval" in page.answer
    with refused("no-verdict"):
        regressions(read_runs([run]), ["short"])


def test_a_lost_set_is_a_regression(runs: tuple[Path, Path], tmp_path: Path) -> None:
    def report(names: str, *paths: Path) -> int:
        return cli.main(["report", *map(str, paths), "--fail_on_regression", names])

    plain, replay = runs
    assert report("storys", plain) == report("news", tmp_path) == ExitCode.MISTAKE
    assert not (plain / "report.html").exists()
    assert report("stories", plain) == report("news,stories", plain, replay) == ExitCode.REGRESSION
    assert report("news", plain) == report("news,stories", replay) == ExitCode.DONE
    assert (plain / "report.html").exists()
