"""The verdict of a bench, and `make bench`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.bench import common
from tests.conftest import REPO

MET = {"met": (1.0, 1.0)}  # by name: value and largest allowed value


@pytest.mark.parametrize(
    ("ratios", "judged", "code"),
    [
        (MET, True, 0),
        (MET | {"without a target": (9.0, None)}, True, 0),
        (MET | {"missed": (1.1, 1.0)}, True, 1),
        (MET | {"missing value": (None, 1.0)}, True, 1),
        ({}, True, 1),
        ({}, False, 0),
        ({"missed": (1.1, 1.0), "missing value": (None, 1.0)}, False, 0),
    ],
)
def test_a_bench_fails_if_a_target_is_missed_or_nothing_was_measured(
    ratios: dict[str, tuple[float | None, float | None]],
    judged: bool,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(common, "REPO", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    report = common.Report("example", judged)
    for name, (value, target) in ratios.items():
        report.ratio(name, value, at_most=target)
    assert report.finish() == code
    report.skip("part", "no data")
    assert report.finish() == judged


def test_make_bench_runs_all_benches_and_fails_if_one_misses(tmp_path: Path) -> None:
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(f'#!/bin/sh\necho "$2" >> {calls}\n[ "$2" != tests.bench.data ]\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "-o", "setup", "bench", f"BIN={tmp_path}"], cwd=REPO, capture_output=True)
    benches = {f"tests.bench.{p.stem}" for p in (REPO / "tests" / "bench").glob("[a-z]*.py")}
    assert done.returncode and set(calls.read_text().split()) == benches - {"tests.bench.common"}
