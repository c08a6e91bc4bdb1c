"""The GPU campaign tried in small on a CPU: what it keeps, says and returns, also when parts of it fail."""

from __future__ import annotations

import importlib
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import gpu
from tests.campaigns.gpu import Part
from tests.campaigns.gpu_figures import RESULTS, Figures, MissingError
from tests.campaigns.gpu_setting import run


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


def test_without_a_gpu_it_says_how_to_try_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "--quick" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_parts_fit_into_25_minutes() -> None:
    assert sum(part.seconds for part in gpu.PARTS.values()) <= 25 * 60


@pytest.mark.parametrize(
    ("value", "bounds", "met"),
    [
        (1.0, {"at_most": 1.0}, True),
        (1.1, {"at_most": 1.0}, False),
        (0.8, {"at_least": 0.9, "at_most": 1.1}, False),
        (1.0, {"at_least": 0.9, "at_most": 1.1}, True),
        (0.0, {"at_most": 0}, True),
        (math.nan, {"at_most": 1.0}, False),
        (None, {"at_least": 1.0}, False),
        (5.0, {}, None),
    ],
)
def test_a_figure_meets_its_target_or_not(
    tmp_path: Path, value: float | None, bounds: dict[str, float], met: bool | None
) -> None:
    Figures(tmp_path, "part")("what", value, **bounds)
    Figures(tmp_path, "part", quick=True)("in small", value, **bounds)
    held, tried = records(tmp_path)["part"]
    assert held["met"] is met
    assert tried["met"] is None


def test_what_goes_wrong_in_an_attempt_is_kept(tmp_path: Path) -> None:
    show = Figures(tmp_path, "part", deadline=time.monotonic() + 100)
    with show.attempt("first"):
        raise MissingError("flash-attn is not installed")
    with show.attempt("second"):
        raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")
    with show.attempt("third"):
        show.need_seconds(101)
        show("never", 1.0)
    with show.attempt("fourth"):
        show("measured", 1.0)
    with show.attempt("fifth"):
        importlib.import_module("package_that_nobody_has.part")
    with show.attempt("sixth"):
        importlib.import_module("pipeline.module_that_is_gone")
    first, second, third, fourth, fifth, sixth = records(tmp_path)["part"]
    assert (first["met"], first["note"]) == (None, "left out: flash-attn is not installed")
    assert second["met"] is False and "illegal memory access" in second["note"]
    assert third["met"] is None and "less than 101 s left" in third["note"]
    assert fourth["value"] == 1.0
    assert (fifth["met"], fifth["note"]) == (None, "left out: package_that_nobody_has is not installed")
    assert sixth["met"] is False and "pipeline.module_that_is_gone" in sixth["note"]


def test_a_run_takes_no_longer_than_its_part_has_left(tmp_path: Path) -> None:
    assert Figures(tmp_path, "part").limit(90) == 90
    assert 50 < Figures(tmp_path, "part", deadline=time.monotonic() + 60).limit(90) < 60
    assert Figures(tmp_path, "part", deadline=time.monotonic() - 60).limit(90) == 1


def test_a_process_that_lacks_a_package_is_left_out() -> None:
    with pytest.raises(MissingError, match="package_that_nobody_has is not installed"):
        run(["-c", "import package_that_nobody_has.part"], 60)
    with pytest.raises(RuntimeError, match=r"exit code 1: .*pipeline\.module_that_is_gone"):
        run(["-c", "import pipeline.module_that_is_gone"], 60)
