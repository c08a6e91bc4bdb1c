"""emo report: runs as one page, what they gained and lost, an exit code for regressions."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import yaml

from emo.common.errors import ExitCode, UserError
from emo.common.report.numbers import DASH, MINUS
from emo.pipeline import cli
from emo.pipeline.report.launches import append
from emo.pipeline.report.page import document
from emo.pipeline.report.runs import KILLED, Run, read_runs, regressions
from emo.pipeline.report.validation import Documents, read, write
from emo.pipeline.run_dir import (
    BAD_BATCHES,
    CONFIG,
    EXPORT,
    HEARTBEAT,
    LAUNCHES,
    METRICS,
    SAMPLES,
    VALIDATION,
)
from tests.helpers.html import Page

ATTACK = '<script>alert("x")</script>'
TOKENS = np.full(50, 100)


def train_record(step: int, **changes: Any) -> dict[str, Any]:
    """Ten steps of a thousand tokens in two seconds each; so few quantities are drawn quickly."""
    return {"step": step, "tokens": 1000 * step, "loss": 5 - step / 20, "tokens_per_s": 500.0} | changes


def make_run(directory: Path, steps: int = 40, more: dict[str, float] | None = None, **facts: Any) -> Path:
    """A run directory as the trainer leaves it after `steps`; more: in its records; facts: of its launch."""
    directory.mkdir(parents=True)
    config = {"model": {"path": "some/model"}, "objective": {"name": "emo"}, "train": {"learning_rate": 1e-3}}
    (directory / CONFIG).write_text(yaml.safe_dump(config))
    for step in range(10, steps + 1, 10):
        append(directory / METRICS, train_record(step, **(more or {})))
        if more:
            record = {"step": step, "tokens": 1000 * step, "set": "validation", "validation_nll": 2.5}
            append(directory / METRICS, record)
    begin = {"event": "begin", "time": 1.7e9, "step": 0, "steps": 100, "ranks": 2, "hosts": 1}
    begin |= {"device": "CPU", "batch": 8, "block": 256, "planned": None}
    append(directory / LAUNCHES, begin | facts)
    return directory


def measured(
    run: Path, name: str, steps: dict[int, float], seed: int = 0, tokens: np.ndarray = TOKENS
) -> None:
    """Leave what validation leaves: the mean NLL at each step, with documents that differ a little."""
    for step, nll in steps.items():
        noise = np.random.default_rng([seed, step]).normal(0, 0.01, len(tokens))
        write(run, name, step, Documents("set", tokens * (nll + noise - noise.mean()), tokens))
        append(run / METRICS, {"step": step, "tokens": 1000 * step, "set": name, "validation_nll": nll})


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Without replay one is learnt and one forgotten; with replay less of both, and one is not sure."""
    plain, replay = make_run(tmp_path / "plain"), make_run(tmp_path / "replay")
    measured(plain, "news", {0: 3.0, 20: 2.8, 40: 2.5})
    measured(plain, "stories", {0: 1.0, 20: 1.1, 40: 1.25})
    measured(replay, "news", {0: 3.0, 20: 2.9, 40: 2.6}, seed=1)
    measured(replay, "stories", {0: 1.0, 40: 1.0001}, seed=1)
    return plain, replay


def shown(*paths: Path, over: str = "step") -> tuple[str, Page]:
    text = document(read_runs(paths), over, paths[0]).html()
    return text, Page(text)


def test_a_run_is_one_page(tmp_path: Path) -> None:
    more = {"lr": 1e-3, "nll": 2.0, "demd": 0.5, "grad_norm": 1.0, "skipped": 0}
    text, page = shown(make_run(tmp_path / "run", more=more))
    (row,) = page.table("Run", "State")
    assert (row["Steps"], row["Objective"], row["From"]) == ("40 of 100", "emo", "some/model")
    assert (row["Loss"], row["Held-out loss"], row["State"]) == ("2", "2.5", KILLED)
    assert row["Time"] == "1 min"  # 40 steps of 2 s are 80 s
    for title in ("NLL", "DEMD", "objective minimises", "Learning rate", "Supervised tokens per second"):
        assert title in text
    for title in ("MFU)", "Skipped steps", "Held-out loss on"):
        assert title not in text, "nothing is drawn that no record has, and one set is drawn over training"
    likelihood = make_run(tmp_path / "mle", more={"nll": 3.0 + 1e-6, "loss": 3.0})
    assert "objective minimises" not in shown(likelihood)[0], "it would be the same curve"


@pytest.mark.parametrize("count", [2, 30])
def test_several_runs_share_the_figures(tmp_path: Path, count: int) -> None:
    """Of many the first and the best are in colour, and the others are named."""
    paths = [make_run(tmp_path / str(i) / "run", 20, {"nll": 3 - i / 100}) for i in range(count)]
    text, page = shown(*paths, over="tokens")
    assert {row["Run"] for row in page.table("Run", "State")} == {f"{i}/run" for i in range(count)}
    assert "training tokens" in text and "training steps" not in text
    legend = re.findall(r"</svg>([^<]*)</li>", text[: text.index("<nav")])
    assert legend[0] == "0/run" and len(legend) == min(count, 8)
    assert ("In grey: " in text) == (count > 8)


def test_states_and_launches(tmp_path: Path) -> None:
    """A launch that lives, one that was killed, one that was stopped, one begun behind a torn line."""
    run, now = make_run(tmp_path / "run"), time.time()
    for age, expected in ((5, "runs: training"), (500, KILLED)):
        (run / HEARTBEAT).write_text(json.dumps({"time": now - age, "doing": "training", "step": 3}))
        assert read_runs([run])[0].state(now) == expected
    with (run / LAUNCHES).open("a") as file:
        file.write('{"event": "begin", "step": 2')  # the disk was full
    append(run / LAUNCHES, {"event": "begin", "time": 1.7e9, "step": 30, "steps": 100, "ranks": 4})
    end = {"event": "end", "time": 1.7e9, "step": 43, "how": "stopped", "reason": "SIGTERM"}
    append(run / LAUNCHES, end)
    text, page = shown(run)
    keys = ("How it ended", "After step", "At step", "Ranks")
    first, second = ([row[key] for key in keys] for row in page.table("Run", "How it ended"))
    assert first == [KILLED, "0", DASH, "2"] and second == ["stopped: SIGTERM", "30", "43", "4"]
    assert "launches.jsonl: 1 damaged line" in text
    assert page.table("Run", "State")[0]["Steps"] == "43 of 100", "three steps since the last record"
    (run / EXPORT).mkdir()
    assert read_runs([run])[0].state(now) == "finished"


def test_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    """A pause before the launch and its slow first record change nothing."""
    planned = {"seconds": 1.6, "mfu": 0.5, "memory_gib": 60.0}
    run = make_run(tmp_path / "run", planned=planned)
    slow = {"tokens_per_s": 10.0, "mfu": 0.01, "memory_gib": 70.0}
    lines = [train_record(10, **slow), *(train_record(s, mfu=0.4, memory_gib=66.0) for s in (20, 30, 40))]
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = shown(run)[1].table("Run", "Seconds per step")
    assert list(row.values())[1:] == [
        "2 planned 1.6, ratio 1.25",
        "1,024 planned 1,280, ratio 0.80",
        "40.0% planned 50.0%, ratio 0.80",
        "70.0 planned 60.0, ratio 1.17",
    ]


def test_utilisation_is_a_mean_over_time() -> None:
    """Ten steps at half the speed count for twice the time: 30 steps in 40 units of 2/3 and 1/3."""
    fast, slow = train_record(20, mfu=0.4), train_record(30, mfu=0.2, tokens_per_s=250.0)
    run = Run("run", Path("run"), records=[train_record(10), fast, slow])
    assert run.measured().mfu == pytest.approx(0.4 * 20 / 60 + 0.2 * 40 / 60)
    assert run.measured().seconds == pytest.approx(60 / 20)


def test_texts_domains_mixtures_and_bad_steps(tmp_path: Path) -> None:
    """The last sample is first; names and texts of data are shown as they are."""
    run, plain = make_run(tmp_path / "mixed", steps=0), make_run(tmp_path / "plain")
    for step in (0, 10, 20):
        append(run / SAMPLES, {"step": step, "prompt": "The cat", "text": f" said {step} {ATTACK}"})
        parts = {name: {"tokens": step, "nll": 3.0, "loss": 2.0} for name in ("home", "abroad <b>")}
        append(run / METRICS, train_record(step, domains=parts))
    mixtures: list[dict[str, Any]] = [
        {"step": 0, "mixture": None},
        {"step": 10, "mixture": "0.3 home + 0.7 abroad, by tokens"},
    ]
    append(run / LAUNCHES, {"event": "begin", "time": 1.7e9, "step": 10, "mixtures": mixtures})
    append(run / BAD_BATCHES, {"step": 7, "reason": ATTACK, "nll": "nan", "rows": []})
    text, page = shown(run, plain)
    positions = [text.index(f" said {step} &lt;script") for step in (20, 0, 10)]
    assert positions == sorted(positions) and "2 earlier" in text and ATTACK not in text
    assert "Loss on domain home" in text and "Loss on domain abroad &lt;b&gt;" in text
    assert [list(row.values())[1:] for row in page.table("Run", "Mixture")] == [
        ["none: all rows alike", "0"],
        [mixtures[1]["mixture"], "10"],
    ]
    assert page.table("Run", "Step") == [{"Run": "mixed", "Step": "7", "What": ATTACK, "Loss": "nan"}]


def test_what_is_missing_or_damaged_is_a_remark(tmp_path: Path) -> None:
    full, empty = make_run(tmp_path / "full"), make_run(tmp_path / "empty", steps=0)
    (full / CONFIG).write_text("a: [")
    with (full / METRICS).open("a") as file:
        file.write('{"step": 50, "loss": "high"}\nnot json\n' + "[" * 100_000 + '\n{"step": "70"}\n{"st')
    text, page = shown(full, empty)
    assert str(full / CONFIG) in text and str(empty / METRICS) in text
    assert "metrics.jsonl: 4 damaged lines" in text and len(page.table("Run", "State")) == 2
    with pytest.raises(UserError):
        read_runs([empty])


def test_evaluations_beside_the_run_are_linked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "all" / "a:run #1")
    for folder in (run / "eval", tmp_path / "all"):
        folder.mkdir(exist_ok=True)
        for name in ("report.html", "results.json"):
            (folder / name).write_text("")
    page = tmp_path / "pages" / "one.html"
    assert cli.main(["report", str(run), "--output_path", str(page)]) == ExitCode.DONE
    links = [a for a in Page(page.read_text(encoding="utf-8")).addresses if not a.startswith("#")]
    assert links == ["../all/a%3Arun%20%231/eval/report.html", "../all/report.html"]
    assert all((page.parent / unquote(link)).is_file() for link in links)


def test_runs_stand_side_by_side(runs: tuple[Path, Path]) -> None:
    """Also against each other, where they measured the same documents."""
    _, page = shown(*runs)
    assert "plain improves by 0.500" in page.answer and "replay improves by 0.400" in page.answer
    assert "plain gets worse by 0.250" in page.answer and "replay shows no clear change" in page.answer
    keys = ("Set", "Run", "Verdict", "Against plain")
    assert [[r[key].split(" ")[0] for key in keys] for r in page.table("Set", "Run")] == [
        ["news", "plain", "gained", DASH],
        ["news", "replay", "gained", "+0.1000"],
        ["stories", "plain", "lost", DASH],
        ["stories", "replay", "no", f"{MINUS}0.2499"],
    ]


def test_what_cannot_be_paired_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name, steps in (("lost", (0, 40)), ("late", (20, 40)), ("early", (0,))):
        measured(run, name, dict.fromkeys(steps, 1.0))
    (run / VALIDATION / "lost" / "step-000000.npz").unlink()
    measured(run, "short", {0: 3.0, 40: 2.0}, tokens=np.full(4, 10_000))  # however clear the change is
    append(run / METRICS, {"step": 40, "set": "../../up", "validation_nll": 1.0})
    _, page = shown(run)
    assert {row["Set"]: row["Verdict"] for row in page.table("Set", "Verdict")} == {
        "lost": "not comparable", "late": "not measured at step 0", "short": "too few documents",
    }  # fmt: skip
    assert "without an interval" in page.answer
    with pytest.raises(UserError) as error:
        regressions(read_runs([run]), ["short"])
    assert error.value.code == "no-verdict"


def test_the_numbers_as_json(runs: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    arguments = ["report", *map(str, runs), "--json", str(path), "--output_path", str(tmp_path / "page.html")]
    assert cli.main(arguments) == ExitCode.DONE
    first, second, *_, last = rows = json.loads(path.read_text())
    assert [(row["run"], row["set"]) for row in rows] == [
        (str(run), name) for name in ("news", "stories") for run in runs
    ]
    assert (first["start"], first["end"], first["step"]) == (3.0, 2.5, 40) and first["against_first"] is None
    assert first["change"]["value"] == pytest.approx(-0.5) and first["change"]["documents"] == 50
    ends = [read(run, "stories", 40) for run in runs]
    assert ends[0] is not None and ends[1] is not None
    gap = (ends[1].nll - ends[0].nll).sum() / TOKENS.sum()
    assert last["against_first"]["value"] == pytest.approx(gap) and second["against_first"]["value"] > 0


def test_a_lost_set_is_a_regression(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def report(names: str, *paths: Path) -> tuple[int, list[str]]:
        code = cli.main(["report", *map(str, paths), "--fail_on_regression", names])
        return code, capsys.readouterr().out.splitlines()

    plain, replay = runs
    code, lines = report("stories", plain)
    assert code == ExitCode.REGRESSION and "plain: regression on stories: +0.2500" in lines[-1]
    assert report("news", plain)[0] == ExitCode.DONE
    code, lines = report("news,stories", replay)
    assert code == ExitCode.DONE and "no regression on stories: +0.0001" in lines[-1]
    assert report("news,stories", plain, replay)[0] == ExitCode.REGRESSION
    (plain / "report.html").unlink()
    assert (
        report("storys", plain) == (ExitCode.MISTAKE, []) and report("news", tmp_path)[0] == ExitCode.MISTAKE
    )
    assert not (plain / "report.html").exists()
