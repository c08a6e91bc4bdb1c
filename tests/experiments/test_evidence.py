"""The evidence from one end to the other, on parts that take seconds; the table and figure of objectives."""

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

from emo.common.errors import UserError
from emo.common.recipe import load_section
from emo.experiments import report
from emo.experiments.cli import main as sweep_command
from emo.experiments.evidence import Evidence, gather, main
from emo.experiments.weights import PROBABILITIES, objectives, pull
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.html import Page

SMALL = {"vocabularies": [10], "shares": [1.0], "tokens": [300], "truths": 3, "steps": 40, "rates": [3e-3]}
STUDY = {"extends": str(REPO / "experiments/known-truth.yaml"), "out": "unused"} | SMALL


ANSWER: dict[str, Any] = {"text": "Does it help?", "by": "study", "question": "geometry"}


def evidence(directory: Path, **changes: Any) -> Path:
    (directory / "study.yaml").write_text(yaml.safe_dump(STUDY))
    part = {"title": "A study", "about": "What it is.", "kind": "study", "file": "none.yaml"}
    instead = {"note": "another study", "file": str(directory / "study.yaml")}
    tree = {
        "out": str(directory / "out"),
        "names": {"data": str(directory / "nowhere")},
        "cut": ["almost everything"],
        "parts": {
            "study": part | {"needs": ["{data}/model"], "otherwise": instead},
            "text": part | {"title": "Text <b>", "needs": ["{data}/text"]},
        },
        "answers": {"geometry": ANSWER | {"also": ["text"]}},
    } | changes
    path = directory / "evidence.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_what_is_missing_is_replaced_or_left_out_and_reported(tmp_path: Path) -> None:
    assert main([str(evidence(tmp_path))]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["verdicts"]["geometry"]["answer"] in ("yes", "no", "undecided")
    assert results["verdicts"]["geometry"]["n"] == 3
    assert list(results["parts"]) == ["study"]
    assert {row["part"] for row in results["rows"]} == {"study"}
    assert list(results["left_out"]) == ["study", "text"]
    page = (tmp_path / "out/report.html").read_text()
    assert all(text in page for text in ("Does it help?", "almost everything", "Text &lt;b&gt;"))


def test_a_killed_command_takes_its_part_with_it() -> None:
    code = "from emo.experiments.evidence import run_command; run_command(['sleep', '300'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, cwd=REPO) as process:
        launching.wait_for(lambda: psutil.Process(process.pid).children(), "the part")
        (part,) = psutil.Process(process.pid).children()
        process.kill()
    launching.wait_for(
        lambda: not part.is_running() or part.status() == "zombie", "the part's end", timeout=30
    )


@pytest.mark.parametrize(("needs", "code"), [([], "part-failed"), (["{data}/x"], "part-left-out")])
def test_a_part_that_decides_must_be_there(needs: list[str], code: str, tmp_path: Path) -> None:
    part = {"title": "t", "about": "a", "kind": "study", "file": "missing.yaml", "needs": needs}
    path = evidence(tmp_path, parts={"study": part}, answers={"geometry": ANSWER})
    with pytest.raises(UserError) as error:
        gather(load_section(Evidence, path, []), jobs=1)
    assert error.value.code == code
    assert not (tmp_path / "out/results.json").exists()


def test_a_sweep_is_done_by_the_command_of_the_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "experiments/oracle.yaml"
    parts = {"study": {"title": "t", "about": "a", "kind": "sweep", "file": file}}
    path = evidence(tmp_path, parts=parts, answers={"geometry": ANSWER})
    (tmp_path / "out/study").mkdir(parents=True)
    (tmp_path / "out/study/results.json").write_text('{"verdicts": {"geometry": {}}, "rows": []}')

    def dry(command: list[str]) -> None:
        assert command[:3] == ["python", "-m", "emo"] and sweep_command([*command[3:], "--dry_run"]) == 0

    monkeypatch.setattr("emo.experiments.evidence.run_command", dry)
    assert list(gather(load_section(Evidence, path, []), jobs=2)["parts"]) == ["study"]


def test_a_sweep_is_drawn() -> None:
    """Numbers, marks and figures of a sweep's rows; a measure without an interval too."""
    unsure = {"mean": 0.0, "low": None, "high": None, "n": 1}
    rows: list[dict[str, Any]] = [
        {"labels": {"objective": "tailr"}, "measures": {}, "chosen": {"lr": "0.001"}}
    ]
    for label, value, p in (("mle", 0.1163, None), ("emo", 0.1151, 0.01)):
        measure = {"mean": value, "low": value - 0.1, "high": value + 0.1, "n": 3}
        differences = {"js": {"mean": 0.1, "p_holm": p}}
        row = {"labels": {"objective": label}, "measures": {"js": measure, "gap_js": unsure}}
        rows.append(row | {"differences": differences})
    question = {"question": "Does it help?", "effect": -0.2, "low": -0.3, "high": -0.1, "outcome": "gap_js"}
    verdicts = {"q": question | {"answer": "no", "n": 3, "also": {"p": unsure | {"answer": "undecided",
                "effect": 0.2, "outcome": "js"}}}}  # fmt: skip
    results = {"code": "c", "rows": rows, "verdicts": verdicts, "lacking": {"js": ["tailr-s1"]}}
    whole = {"minutes": 1, "left_out": {}, "cut": [], "parts": {"study": results}}
    document = report.evidence(results | whole, {"study": ("A study", "What it is.")})
    page, markdown = Page(document.html()), document.markdown()
    assert page.answer.startswith("Does it help? No") and "tailr-s1" in markdown
    assert [row["Answer"] for row in page.table("Question", "Answer")] == ["No", "Undecided"]
    (emo,) = (row for row in page.table("objective", "lr") if row["objective"] == "emo")
    assert emo["js"] == "0.1151* ± 0.1" and "| 0.1151\\* (± 0.1) |" in markdown
    assert report.sweep(results).markdown().count("0.1151") == 1


ROW = re.compile(r"^\| `(\w+)` \|.*\| (-?[\d.]+) \| (-?[\d.]+) \|$", re.M)


def test_the_table_is_that_of_the_code() -> None:
    written = {
        name: (low, high) for name, low, high in ROW.findall((REPO / "docs/objectives.md").read_text())
    }
    p = torch.tensor(PROBABILITIES, dtype=torch.float64)
    expected = {o.name: tuple(f"{x:.3f}" for x in pull(o, p).tolist()) for o in objectives()}
    assert written == expected
