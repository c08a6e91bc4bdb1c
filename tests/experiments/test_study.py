"""A small study end to end: known fixed points, paired cells, nothing done twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from emo.common.recipe import load_section
from emo.experiments.known_truth import study
from tests.conftest import REPO

FILE = str(REPO / "experiments/known-truth.yaml")
SMALL = ["vocabularies=[12]", "shares=[1.0]", "tokens=[400]", "truths=3", "steps=60", "rates=[3e-3]"]


def test_a_small_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main([FILE, f"out={tmp_path}", *SMALL]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    points = {point["contestant"]: point for point in results["fixed_points"]}
    assert points["mle"]["kl_pq"] < 1e-9
    assert points["mle"]["temperature"] == pytest.approx(1.0, abs=1e-6)
    assert 0.8 < points["emo"]["temperature"] < 0.97
    assert points["emo-constant"]["kl_from_tempered_truth"] < points["emo"]["kl_from_tempered_truth"]
    assert points["tailr"]["settled"] < 1
    (row,) = results["rows"]
    assert row["contestants"]["mle"]["gap_js"]["mean"] == pytest.approx(0.0, abs=1e-9)
    assert set(row["verdicts"]) == set(results["verdicts"])
    assert row["at_end"] == []  # a single rate is no choice
    assert row["contestants"]["emo"]["temperature"]["mean"] > row["contestants"]["mle"]["temperature"]["mean"]
    assert set(results["verdicts"]) == {"geometry", "beyond-sharpening"}
    assert results["verdicts"]["geometry"]["n"] == 3
    (cell,) = (tmp_path / "cells").iterdir()
    before = cell.stat().st_mtime_ns
    assert study.main([FILE, f"out={tmp_path}", *SMALL]) == 0
    assert cell.stat().st_mtime_ns == before
    capsys.readouterr()


def test_a_truth_with_zeros(tmp_path: Path) -> None:
    """MixCE's set-up: measures that are infinite there are left out, the mass in the zeros is not."""
    small = [override for override in SMALL if not override.startswith("shares")]
    assert study.main([str(REPO / "experiments/known-truth-mixce.yaml"), f"out={tmp_path}", *small]) == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    mle = row["contestants"]["mle"]
    assert "kl_qp" not in mle and 0 < mle["tail_mass"]["mean"] < 1


PLUGIN = "import torch\n\ndef scaled(m):\n    return torch.full_like(m, {})\n"


def test_cells_are_made_again_by_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of the study's code, a plug-in, a parameter or a share makes its cell anew."""
    (tmp_path / "plugin.py").write_text(PLUGIN.format(1.0))
    tree = {
        "out": str(tmp_path / "out"),
        "contestants": {"mle": {"name": "mle"}, "mine": {"name": f"{tmp_path / 'plugin.py'}:scaled"}},
        "vocabularies": [6],
        "shares": [0.12345678],
        "tokens": [200],
        "truths": 2,
        "steps": 20,
        "rates": [3e-3],
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree))
    measured = []
    measure = study.measure_cell
    monkeypatch.setattr(study, "fixed_points", lambda _: [])
    monkeypatch.setattr(study, "measure_cell", lambda *cell: measured.append(cell) or measure(*cell))

    def run(*overrides: str) -> int:
        study.run(load_section(study.Study, tmp_path / "study.yaml", list(overrides)))
        return len(measured)

    assert [run(), run()] == [1, 1]
    assert [run("shares=[0.12345679]"), run("steps=40"), run()] == [2, 3, 3]
    (tmp_path / "plugin.py").write_text(PLUGIN.format(2.0))
    assert [run(), run()] == [4, 4]
    monkeypatch.setattr(study, "code_digest", lambda _: "other")
    assert [run(), run()] == [5, 5]


def test_truths_are_independent() -> None:
    """No truth is met twice, in a cell or in two; the same cell has the same ones in any study."""
    shipped = load_section(study.Study, REPO / "experiments/known-truth-quick.yaml", [])
    drawn = [study.draw_truths(shipped, 8, 0.5, tokens) for tokens in (500, 5000)]
    rows = {json.dumps(truth.rows.tolist()) for truths in drawn for truth in truths}
    assert len(rows) == 2 * shipped.truths
    again = study.draw_truths(shipped.model_copy(update={"truths": 2}), 8, 0.5, 500)
    assert again[1].rows.equal(drawn[0][1].rows)
