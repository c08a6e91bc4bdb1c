"""The Triton kernels: in Triton's interpreter against float64, and compiled for the target GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import REPO


def run(*arguments: str, **environment: str) -> str:
    """Run a Python module and return its output. A failure shows its last lines."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    options = {"cwd": REPO, "env": inherited | environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-m", *arguments], **options)  # type: ignore[call-overload]
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.slow
def test_interpreted_kernels() -> None:
    """All cases of tests/helpers/triton_cases.py pass, and there are at least 55."""
    output = run("pytest", "tests/helpers/triton_cases.py", TRITON_INTERPRET="1")
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) >= 55 and "skipped" not in output, output[-500:]


@pytest.mark.slow
def test_compiled_for_the_target_gpus() -> None:
    """On A100 and H100, nothing is spilled or read twice, and loads are vectors though 50257 is odd."""
    from tests.bench import common, kernels_static

    report = common.Report("kernels_static")
    kernels_static.measure(report, quick=True)
    assert len(report.ratios) == 6 and all(entry["met"] for entry in report.ratios.values()), report.ratios
    assert {row["flavour"] for row in report.rows} == set(kernels_static.QUICK)
