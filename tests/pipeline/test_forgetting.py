"""What a run gained and lost on its validation sets: on the page, as JSON, as an exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from common.errors import ExitCode, UserError
from common.report.numbers import DASH, MINUS
from pipeline import cli
from pipeline.report.forgetting import regressions
from pipeline.report.gather import read_runs
from pipeline.report.launches import append
from pipeline.report.page import document
from pipeline.report.validation import Documents, read, write
from pipeline.run_dir import METRICS, VALIDATION
from tests.helpers.html import Page
from tests.pipeline.test_run_report import make_run

TOKENS = np.full(50, 100)
ATTACK = '<script>alert("x")</script>'


def measured(run: Path, name: str, steps: dict[int, float], seed: int = 0, every: bool = True) -> None:
    """Leave what validation leaves: the mean NLL at each step, with documents that differ a little."""
    for step, nll in steps.items():
        noise = np.random.default_rng([seed, step]).normal(0, 0.01, len(TOKENS))
        found = TOKENS * (nll + noise - noise.mean())
        if every or step:
            write(run, name, step, Documents("set", found, TOKENS))
        record = {"step": step, "tokens": 1000 * step, "set": name, "validation_nll": nll}
        append(run / METRICS, record)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Without replay one is learnt and one forgotten; with replay less of both, and one is not sure."""
    plain, replay = make_run(tmp_path / "plain"), make_run(tmp_path / "replay")
    measured(plain, "news", {0: 3.0, 20: 2.8, 40: 2.5})
    measured(plain, "stories", {0: 1.0, 20: 1.1, 40: 1.25})
    measured(replay, "news", {0: 3.0, 20: 2.9, 40: 2.6}, seed=1)
    measured(replay, "stories", {0: 1.0, 40: 1.0001}, seed=1)
    return plain, replay


def shown(*runs: Path) -> Page:
    return Page(document(read_runs(runs), "step", runs[0]).html())


def test_one_run_says_what_it_gained_and_lost(runs: tuple[Path, Path]) -> None:
    page = shown(runs[0])
    assert "the loss on news improves by 0.500" in page.answer
    assert "the loss on stories gets worse by 0.250" in page.answer
    rows = {row["Set"]: list(row.values())[1:] for row in page.table("Set", "Verdict")}
    change, *others = rows["news"][1].split(" "), rows["news"][0], *rows["news"][2:]
    assert change[0] == f"{MINUS}0.5000" and others == ["gained", "3.0000", "2.5000", "40", "50"]
    assert rows["stories"][0] == "lost"
    low, high = (float(limit) for limit in rows["stories"][1].split(" ", 1)[1].split(" to "))
    assert 0.24 < low < 0.25 < high < 0.26


def test_runs_stand_side_by_side(runs: tuple[Path, Path]) -> None:
    """Also against each other, where they measured the same documents."""
    page = shown(*runs)
    assert "plain improves by 0.500" in page.answer and "replay by 0.400" in page.answer
    assert "plain gets worse by 0.250" in page.answer and "replay shows no clear change" in page.answer
    told = [
        (r["Set"], r["Run"], r["Verdict"], r["Against plain"].split(" ")[0]) for r in page.table("Set", "Run")
    ]
    assert told == [
        ("news", "plain", "gained", DASH),
        ("news", "replay", "gained", "+0.1000"),
        ("stories", "plain", "lost", DASH),
        ("stories", "replay", "no clear change", f"{MINUS}0.2499"),
    ]


def test_what_cannot_be_paired_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    measured(run, "lost", {0: 1.0, 40: 2.0}, every=False)
    measured(run, "late", {20: 1.0, 40: 2.0})
    measured(run, "early", {0: 1.0})
    measured(run, ATTACK.replace("/", "|"), {0: 1.0, 40: 2.0})
    append(run / METRICS, {"step": 40, "set": "../../up", "validation_nll": 1.0})
    append(run / METRICS, {"step": 40, "set": [1], "validation_nll": 1.0})
    rows = {row["Set"]: row["Verdict"] for row in shown(run).table("Set", "Verdict")}
    assert rows["lost"] == "not comparable" and rows["late"] == "not measured at step 0"
    assert "early" not in rows and len(rows) == 3


def test_one_set_is_drawn_over_the_training_curve(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", more={"nll": 2.0})
    assert "Held-out loss on" not in document(read_runs([run]), "step", run).html()


def test_the_numbers_as_json(runs: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    arguments = ["report", *map(str, runs), "--json", str(path), "--out", str(tmp_path / "page.html")]
    assert cli.main(arguments) == ExitCode.DONE
    found = json.loads(path.read_text())
    assert [(row["run"], row["set"]) for row in found] == [
        (str(run), name) for name in ("news", "stories") for run in runs
    ]
    first, _, _, last = found
    assert (first["start"], first["end"], first["step"]) == (3.0, 2.5, 40) and first["against_first"] is None
    assert first["change"]["value"] == pytest.approx(-0.5) and first["change"]["documents"] == 50
    ends = [read(run, "stories", 40) for run in runs]
    assert ends[0] is not None and ends[1] is not None
    gap = (ends[1].nll - ends[0].nll).sum() / TOKENS.sum()
    assert last["against_first"]["value"] == pytest.approx(gap)


def test_few_documents_have_no_verdict(tmp_path: Path) -> None:
    """However clear the change is: of four articles nobody knows how they differ."""
    run, tokens = make_run(tmp_path / "run"), np.full(4, 10_000)
    for step in (0, 40):
        write(run, "news", step, Documents("set", tokens * (1.0 + step), tokens))
        append(run / METRICS, {"step": step, "tokens": step, "set": "news", "validation_nll": 1.0 + step})
    with pytest.raises(UserError) as error:
        regressions(read_runs([run]), ["news"])
    assert error.value.code == "no-verdict"


def test_a_lost_set_is_a_regression(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(names: str, *paths: Path) -> tuple[int, list[str], str]:
        code = cli.main(["report", *map(str, paths), "--fail-on-regression", names])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()[-1]

    plain, replay = runs
    code, said, _ = report("stories", plain)
    assert code == ExitCode.REGRESSION and "plain: regression on stories: +0.2500" in said[-1]
    assert report("news", plain)[0] == ExitCode.DONE
    code, said, _ = report("news,stories", replay)
    assert code == ExitCode.DONE and len(said) == 4 and "no regression on stories: +0.0001" in said[-1]
    assert report("news,stories", plain, replay)[0] == ExitCode.REGRESSION
    (plain / "report.html").unlink()
    code, said, error = report("storys", plain)
    assert code == ExitCode.MISTAKE and error.endswith("no validation set storys; did you mean stories?")
    (plain / VALIDATION / "news" / "step-000000.npz").unlink()
    code, said, error = report("stories,news", plain)
    assert code == ExitCode.MISTAKE and "no verdict on news" in error and not said
    assert not (plain / "report.html").exists()


def test_a_change_without_an_interval_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", np.full(1, 100))
    run = make_run(tmp_path / "run")
    measured(run, "short", {0: 3.0, 40: 2.0})
    page = shown(run)
    assert page.table("Set", "Verdict")[0]["Verdict"] == "too few documents"
    assert "without an interval" in page.answer
