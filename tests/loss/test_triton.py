"""The Triton kernels: run by Triton's interpreter against float64, and compiled for the target GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import REPO


def run(*command: str, **environment: str) -> str:
    """Output of a Python process; fails with its last lines where it failed."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPO,
        env=inherited | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.slow
def test_interpreted_kernels() -> None:
    """Every case of tests/helpers/triton_cases.py passes, and there are as many as there should be."""
    output = run("-m", "pytest", "tests/helpers/triton_cases.py", TRITON_INTERPRET="1")
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert int(passed[1]) >= 50, output[-500:]
    assert "skipped" not in output


COMPILE = """
from tests.bench import kernels_static
kernels_static.main(["--quick"])
"""


@pytest.mark.slow
def test_compiled_for_the_target_gpus() -> None:
    """Every flavour of both kernels becomes machine code for an A100 and an H100; no GPU needed for that.

    Nothing is spilled or read twice, and all loads of a row are vectors though 50257 is odd.
    """
    report = run("-c", COMPILE).splitlines()
    assert sum("target <= " in line and line.endswith(" met") for line in report) == 6, report[-9:]
