"""The evidence is gathered from small parts, and the published tables match the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from emo.common.config.recipe import load_section
from emo.experiments.cli import main as sweep_command
from emo.experiments.evidence import Evidence, gather_parts, main
from emo.experiments.known_truth.picture import tabulate_map
from emo.experiments.weights import PROBABILITIES, compute_pull, default_objectives
from tests.conftest import REPO
from tests.helpers.launching import wait_for
from tests.helpers.refusals import refused

SMALL = {"vocabularies": [12], "shares": [1.0], "draws": [40], "truths": 2, "selection": 1, "steps": 40}
STUDY = {"extends": str(REPO / "experiments/configs/known-truth-contestants.yaml"), "out": "unused"} | SMALL
PART = {"title": "A study", "about": "What it is.", "kind": "study", "file": "none.yaml"}
QUICK = "experiments/configs/known-truth-quick.yaml"
ANSWER: dict[str, Any] = {"text": "Does it help?", "by": "study", "question": "geometry"}


def evidence(directory: Path, **parts: dict[str, Any]) -> Path:
    tree = {
        "out": str(directory / "out"),
        "names": {"data": str(directory / "nowhere")},
        "cut": ["almost everything"],
        "parts": {name: PART | part for name, part in parts.items()},
        "answers": {"geometry": ANSWER | {"also": [name for name in parts if name != "study"]}},
    }
    path = directory / "evidence.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the evidence's directory. A small study replaces one part, and another part is left out."""
    directory = tmp_path_factory.mktemp("evidence")
    (directory / "study.yaml").write_text(yaml.safe_dump(STUDY))
    otherwise = {"note": "another study", "file": str(directory / "study.yaml")}
    study = {"needs": ["{data}/model"], "otherwise": otherwise}
    text = {"title": "Text <b>", "needs": ["{data}/text"]}
    assert main([str(evidence(directory, study=study, text=text))]) == 0
    return directory / "out"


@pytest.mark.slow
def test_missing_parts_are_replaced_or_left_out_and_reported(out: Path) -> None:
    results = json.loads((out / "results.json").read_text())
    assert results["verdicts"]["geometry"]["answer"] in ("yes", "no", "undecided")
    assert results["verdicts"]["geometry"]["n"] == 2
    assert list(results["parts"]) == ["study"]
    assert {row["part"] for row in results["rows"]} == {"study"}
    assert list(results["left_out"]) == ["study", "text"]
    page = (out / "report.html").read_text()
    assert all(phrase in page for phrase in ("Does it help?", "almost everything", "Text &lt;b&gt;"))


@pytest.mark.slow
def test_the_fixed_points_and_gaps_of_a_small_study(out: Path) -> None:
    results = json.loads((out / "study/results.json").read_text())
    points = {point["contestant"]: point for point in results["fixed_points"]}
    assert points["mle"]["kl_pq"] < 1e-9
    assert points["mle"]["temperature"] == pytest.approx(1.0, abs=1e-6)
    assert 0.8 < points["emo"]["temperature"] < 0.97
    assert points["emo-constant"]["kl_from_tempered_truth"] < points["emo"]["kl_from_tempered_truth"]
    assert points["tailr"]["settled"] < 1
    (row,) = results["rows"]
    mle, emo = (row["contestants"][name] for name in ("mle", "emo"))
    assert mle["gap_js"]["mean"] == pytest.approx(0.0, abs=1e-9)
    assert emo["temperature"]["mean"] > mle["temperature"]["mean"]
    assert {"geometry", "beyond-sharpening"} < set(results["verdicts"])
    assert row["contestants"]["emo-begins"]["gap_js"]["mean"] != emo["gap_js"]["mean"]


def test_a_part_ends_with_its_killed_parent() -> None:
    code = "from emo.experiments.evidence import run_part_command; run_part_command(['sleep', '300'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, cwd=REPO) as process:
        wait_for(lambda: psutil.Process(process.pid).children(), "the part")
        (part,) = psutil.Process(process.pid).children()
        process.kill()
    wait_for(lambda: not part.is_running() or part.status() == "zombie", "the part's end", timeout=30)


@pytest.mark.parametrize(
    ("otherwise", "code"),
    [(None, "part-left-out"), ({"note": "", "before": ["false"], "file": QUICK}, "part-failed")],
)
def test_a_decisive_part_must_run(otherwise: dict[str, Any] | None, code: str, tmp_path: Path) -> None:
    path = evidence(tmp_path, study={"needs": ["{data}/x"], "otherwise": otherwise})
    with refused(code):
        gather_parts(load_section(Evidence, path, []), jobs=1)
    assert not (tmp_path / "out/results.json").exists()


@pytest.mark.parametrize(("kind", "file"), [("study", QUICK), ("sweep", "experiments/configs/oracle.yaml")])
def test_an_unknown_question_is_rejected_before_the_run(kind: str, file: str, tmp_path: Path) -> None:
    path = evidence(tmp_path, study={"kind": kind, "file": file})
    with refused("unknown-question"):
        gather_parts(load_section(Evidence, path, ["answers.geometry.question=geometri"]), jobs=1)
    assert not (tmp_path / "out").exists()


def test_a_sweep_is_run_by_emo_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = evidence(tmp_path, study={"kind": "sweep", "file": "experiments/configs/oracle.yaml"})
    (tmp_path / "out/study").mkdir(parents=True)
    (tmp_path / "out/study/results.json").write_text('{"verdicts": {"geometry": {}}, "rows": []}')

    def dry(command: list[str]) -> None:
        assert command[:3] == ["python", "-m", "emo"] and sweep_command([*command[3:], "--dry_run"]) == 0

    monkeypatch.setattr("emo.experiments.evidence.run_part_command", dry)
    assert list(gather_parts(load_section(Evidence, path, []), jobs=2)["parts"]) == ["study"]


def test_the_tables_of_the_map_are_current() -> None:
    rows = json.loads((REPO / "experiments/known_truth/map.json").read_text())["rows"]
    assert (REPO / "experiments/results/map.md").read_text() == tabulate_map(rows)


def test_the_table_of_objectives_is_that_of_the_code() -> None:
    row = re.compile(r"^\| `(\w+)` \|.*\| (-?[\d.]+) \| (-?[\d.]+) \|$", re.M)
    page = (REPO / "docs/reference/objectives.md").read_text()
    written = {name: pulls for name, *pulls in row.findall(page)}
    p = torch.tensor(PROBABILITIES, dtype=torch.float64)
    assert written == {
        o.name: [f"{x:.3f}" for x in compute_pull(o, p).tolist()] for o in default_objectives()
    }
