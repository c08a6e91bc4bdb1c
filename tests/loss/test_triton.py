"""The Triton kernels: run by Triton's interpreter against float64, and compiled for the GPUs meant."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import REPO

pytest.importorskip("triton", reason="triton is not installed")


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
    assert int(passed[1]) >= 60, output[-500:]
    assert "skipped" not in output


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pipeline.loss import kernels_triton as k

numbers = {"stride": "i32", "cost_stride": "i32", "V": "i32", "cap": "fp32", "uniform": "fp32"}
numbers["logit_scale"] = "fp32"
longs = {"labels", "which"}
for name in ("statistics_kernel", "gradient_kernel"):
    kernel = getattr(k, name)
    for on in (True, False):
        signature, constants = {}, {}
        for argument in kernel.arg_names:
            if argument.isupper() and argument != "V":
                signature[argument] = "constexpr"
                constants[argument] = 4096 if argument == "BLOCK" else on
            elif argument in numbers:
                signature[argument] = numbers[argument]
            elif argument in longs:
                signature[argument] = "*i64"
            else:
                signature[argument] = {"logits": "*bf16", "costs": "*fp16"}.get(argument, "*fp32")
        source = ASTSource(kernel, signature, constants)
        target = GPUTarget("cuda", int(sys.argv[1]), 32)
        binary = triton.compile(source, target=target, options={"num_warps": 8})
        assert len(binary.asm["cubin"]) > 1000
        print(name, on, len(binary.asm["cubin"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_compiles_ahead_of_time(capability: str) -> None:
    """Both kernels become machine code for A100 (8.0) and H100/H200 (9.0); no GPU needed for that."""
    assert len(run("-c", COMPILE, capability).splitlines()) == 4
