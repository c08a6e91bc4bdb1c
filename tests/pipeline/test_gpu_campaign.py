"""The GPU campaign tried in small on a CPU: what it keeps, says and returns, also when parts of it fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import gpu
from tests.campaigns.gpu_setting import RESULTS


def records(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """What is kept, by part."""
    result: dict[str, list[dict[str, Any]]] = {}
    for record in json.loads((directory / RESULTS).read_text())["records"]:
        result.setdefault(record["part"], []).append(record)
    return result


@pytest.mark.slow
def test_parts_run_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts run as real processes, and one that needs a GPU is left out."""
    out = ["--output_path", str(tmp_path)]
    monkeypatch.setattr(gpu, "RUNS", tmp_path / "runs")
    assert gpu.main(["--quick", "--parts", "6", "9", *out]) == 0
    result = records(tmp_path)
    assert all(record["met"] is not False for part in result.values() for record in part)
    leaks = [r for r in result["attention"] if "leak" in r["what"]]
    assert leaks and all(r["met"] and r["target"] == "<= 0.0001" for r in leaks)
    assert [r["note"] for r in result["compiled"]] == ["left out: needs a GPU"]
    output = capsys.readouterr().out
    assert "sdpa: packed and alone" in output and f"0 missed; {tmp_path / RESULTS}" in output


def test_the_parts_fit_into_25_minutes() -> None:
    assert sum(part.seconds for part in gpu.PARTS.values()) <= 25 * 60
