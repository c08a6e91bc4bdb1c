"""A small study end to end: known fixed points, paired cells, nothing done twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.known_truth.study import main
from tests.conftest import REPO

FILE = str(REPO / "experiments/known-truth.yaml")
SMALL = ["vocabularies=[12]", "shares=[1.0]", "tokens=[400]", "truths=3", "steps=60", "rates=[3e-3]"]


def test_a_small_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([FILE, f"out={tmp_path}", *SMALL]) == 0
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
    assert main([FILE, f"out={tmp_path}", *SMALL]) == 0
    assert cell.stat().st_mtime_ns == before
    capsys.readouterr()


def test_a_wrong_study_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([FILE, f"out={tmp_path}", "baseline=mel"]) == 2
    assert "mel is not one of the contestants" in capsys.readouterr().err


def test_a_truth_with_zeros(tmp_path: Path) -> None:
    """MixCE's set-up: measures that are infinite there are left out, the mass in the zeros is not."""
    small = [one for one in SMALL if not one.startswith("shares")]
    assert main([str(REPO / "experiments/known-truth-mixce.yaml"), f"out={tmp_path}", *small]) == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    mle = row["contestants"]["mle"]
    assert "kl_qp" not in mle and 0 < mle["tail_mass"]["mean"] < 1
