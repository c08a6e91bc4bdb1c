"""The GPU campaign tried in small on a CPU: what it keeps, says and returns, also when parts of it fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import gpu
from tests.campaigns.gpu import Part
from tests.campaigns.gpu_figures import RESULTS


def records(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """What is kept, by part."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in json.loads((directory / RESULTS).read_text())["records"]:
        found.setdefault(record["part"], []).append(record)
    return found


@pytest.mark.slow
def test_parts_run_and_failures_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes: two parts that do well, then one that crashes, one that hangs, one without room."""
    out = ["--out", str(tmp_path)]
    monkeypatch.setattr(gpu, "RUNS", tmp_path / "runs")
    assert gpu.main(["--quick", "--parts", "6", "9", *out]) == 0
    found = records(tmp_path)
    assert all(record["met"] is not False for part in found.values() for record in part)
    leaks = [r for r in found["attention"] if "leak" in r["what"]]
    assert leaks and all(r["met"] and r["target"] == "<= 0.0001" for r in leaks)
    assert [r["note"] for r in found["compiled"]] == ["left out: needs a GPU"]
    said = capsys.readouterr().out
    assert "sdpa: packed and alone" in said and f"0 missed; {tmp_path / RESULTS}" in said

    monkeypatch.setitem(gpu.PARTS, 98, Part("crashing", 30, "gpu_loss"))  # the child knows of no such part
    monkeypatch.setitem(gpu.PARTS, 1, gpu.PARTS[1]._replace(seconds=1))
    monkeypatch.setattr(gpu, "LOG_BYTES", 40)
    work = tmp_path / "runs" / "gpu-quick" / "work"
    work.mkdir(parents=True)
    (work / "recipes").touch()  # where a directory has to be
    assert gpu.main(["--quick", "--parts", "98", "1", "5", *out]) == 1
    found = records(tmp_path)
    assert len(found["attention"]) > 3, "the figures of parts that did not run again stay"
    (crash,) = (r for r in found["crashing"] if r["met"] is False)
    assert "exit code 1: KeyError: 98" in crash["note"]
    (hang,) = (r for r in found["kernels"] if r["met"] is False)
    assert "killed after 1 s" in hang["note"]
    (full,) = (r for r in found["plan"] if r["met"] is False)
    assert "FileExistsError" in full["note"]
    assert "3 missed" in capsys.readouterr().out
    log = (tmp_path / "crashing.log").read_text()
    assert log.startswith("... cut") and log.endswith("KeyError: 98\n"), "the end of the output is kept"
    kept = {path.name for path in tmp_path.iterdir()} - {"runs"}
    assert kept == {RESULTS, *(f"{name}.log" for name in ("attention", "crashing", "kernels", "plan"))}
    about = json.loads((tmp_path / RESULTS).read_text())["about"]
    assert list(about) == ["attention", "compiled", "crashing", "kernels", "plan"] and about["plan"]["quick"]


def test_the_parts_fit_into_25_minutes() -> None:
    assert sum(part.seconds for part in gpu.PARTS.values()) <= 25 * 60
