"""What a run gained and lost on its validation sets: on the page, as JSON, as an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from common.exit_codes import ExitCode
from pipeline import cli
from pipeline.report.gather import read_runs
from pipeline.report.launches import append
from pipeline.report.validation import Documents, read, write
from pipeline.run_dir import METRICS, VALIDATION
from tests.pipeline.test_run_report import Page, make_run

TOKENS = np.full(50, 100)
ATTACK = '<script>alert("x")</script>'


def measured(run: Path, name: str, steps: dict[int, float], seed: int = 0, every: bool = True) -> None:
    """Leave what validation leaves: the mean NLL at each step, with documents that differ a little."""
    for step, nll in steps.items():
        noise = np.random.default_rng([seed, step]).normal(0, 0.01, len(TOKENS))
        found = TOKENS * (nll + noise - noise.mean())
        if every or step:
            write(run, name, step, Documents(found, TOKENS))
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


def test_one_run_says_what_it_gained_and_lost(runs: tuple[Path, Path]) -> None:
    text = write_report(read_runs(runs[:1]), None, "step").read_text()
    rows = {row[0]: row[1:] for row in Page(text).tables[1]}
    assert rows["Set"][:3] == ["Verdict", "Documents", "NLL at step 0"] and rows["Set"][-1] == "95 % interval"
    assert rows["news"][:6] == ["gained", "50", "3.0000", "2.5000", "40", "-0.5000"]
    assert rows["stories"][:6] == ["lost", "50", "1.0000", "1.2500", "40", "+0.2500"]
    low, high = (float(limit) for limit in rows["stories"][6].strip("[]").split(","))
    assert 0.24 < low < 0.25 < high < 0.26
    for name in ("news", "stories"):
        assert f"NLL of validation set {name} (nats per token)" in text
    assert text.count("<svg") == 4, "what was gained and lost, and the curves, each for two widths"


def test_runs_stand_side_by_side(runs: tuple[Path, Path]) -> None:
    """Also against each other, where they measured the same documents."""
    text = write_report(read_runs(runs), None, "tokens").read_text()
    head, *rows = Page(text).tables[1]
    assert head[:3] == ["Set", "Run", "Verdict"] and head[-1] == "Against plain"
    told = [(row[0], row[1], row[2], row[-1].split(" ")[0]) for row in rows]
    assert told == [
        ("news", "plain", "gained", "\u2013"),
        ("", "replay", "gained", "+0.1000"),
        ("stories", "plain", "lost", "\u2013"),
        ("", "replay", "cannot be told", "-0.2499"),
    ]


def test_what_cannot_be_paired_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    measured(run, "lost", {0: 1.0, 40: 2.0}, every=False)
    measured(run, "late", {20: 1.0, 40: 2.0})
    measured(run, "early", {0: 1.0})
    measured(run, ATTACK.replace("/", "|"), {0: 1.0, 40: 2.0})
    append(run / METRICS, {"step": 40, "set": "../../up", "validation_nll": 1.0})
    append(run / METRICS, {"step": 40, "set": [1], "validation_nll": 1.0})
    text = write_report(read_runs([run]), None, "step").read_text()
    page = Page(text)
    rows = {row[0]: row[1] for row in page.tables[1]}
    assert rows["lost"] == "not comparable" and rows["late"] == "not measured at step 0"
    assert "early" not in rows and len(rows) == 4 and "script" not in page.tags


def test_one_set_is_drawn_over_the_training_curve(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", more={"nll": 2.0})
    text = write_report(read_runs([run]), None, "step").read_text()
    assert "NLL of validation set" not in text and "Held-out NLL" in text


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


def test_a_lost_set_is_a_regression(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(names: str, *paths: Path) -> tuple[int, list[str], str]:
        code = cli.main(["report", *map(str, paths), "--fail-on-regression", names])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()[-1]

    plain, replay = runs
    code, said, _ = report("stories", plain)
    assert code == ExitCode.REGRESSION
    assert said[-1].startswith("plain: regression on stories: +0.2500 [+0.2")
    assert said[-1].endswith("] nats per token since step 0, at step 40")
    assert report("news", plain)[0] == ExitCode.DONE
    code, said, _ = report("news,stories", replay)
    assert code == ExitCode.DONE and len(said) == 3 and "no regression on stories: +0.0001" in said[-1]
    assert report("news,stories", plain, replay)[0] == ExitCode.REGRESSION
    (plain / "report.html").unlink()
    code, said, error = report("storys", plain)
    assert code == ExitCode.MISTAKE and error.endswith("no validation set storys; did you mean stories?")
    (plain / VALIDATION / "news" / "step-000000.npy").unlink()
    code, said, error = report("stories,news", plain)
    assert code == ExitCode.MISTAKE and "no verdict on news" in error and not said
    assert not (plain / "report.html").exists()
