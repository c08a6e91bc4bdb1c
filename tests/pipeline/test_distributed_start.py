"""Real runs: how a start ends that cannot work, what an abort of a rank means, and what may be resumed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from common.exit_codes import ExitCode
from tests.helpers import launching
from tests.helpers.launching import losses

# Imported by every Python below: the second rank's optimizer cannot be built, as without a compiler.
BROKEN = """
import os
if os.environ.get("RANK") == "1":
    import torch
    def step(self, closure=None):
        raise OSError("CUDA_HOME environment variable is not set")
    torch.optim.AdamW.step = step
"""
# A PyTorch for GPUs on a host without one.
CUDA_BUILD = """
import torch
torch.version.cuda = "13.0"
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of the product with more in its environment; an empty value takes away."""
    settings = {key: value for key, value in (launching.ENVIRONMENT | environment).items() if value}
    return subprocess.run(
        command,
        cwd=launching.REPO,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def test_a_failure_before_the_first_step_is_not_tried_again(recipe: Path, tmp_path: Path) -> None:
    """No nvcc on the host: one rank says why and with a traceback, the other has only lost it."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    command = launching.script_command(2, str(recipe), f"run_dir={tmp_path / 'run'}")
    done = run(command, PYTHONPATH=str(tmp_path))
    assert done.returncode == ExitCode.MISTAKE, done.stdout
    assert "Traceback" in done.stdout
    assert "error: OSError: CUDA_HOME environment variable is not set (before the first step" in done.stdout
    assert "run the same command again" not in done.stdout.split("error: OSError")[1].split("\n")[0]


def test_a_gpu_that_cannot_be_used_is_refused(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CUDA_BUILD)
    command = [
        str(launching.BIN / "python"),
        "launch/continual.sh",
        str(recipe),
        f"run_dir={tmp_path / 'run'}",
    ]
    done = run(command, PYTHONPATH=str(tmp_path), DS_ACCELERATOR="")
    assert done.returncode == ExitCode.MISTAKE, done.stdout
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "this PyTorch is built for CUDA 13.0 and no GPU is here" in errors[0]
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "run").exists()


def test_muon_with_copies_of_weights_in_each_host(recipe: Path, tmp_path: Path) -> None:
    """Muon and hpZ by recipe; `test_distributed_optimizers.py` compares them with others and resumes them."""
    run_dir, file = tmp_path / "run", tmp_path / "hpz.json"
    tree = json.loads((launching.REPO / "ds_configs/zero3_hpz.json").read_text())
    # as in a model of real size, no parameter is small enough to stay whole
    tree["zero_optimization"] |= {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    file.write_text(json.dumps(tree))
    options = [str(recipe), f"run_dir={run_dir}", f"deepspeed={file}", "train.optimizer=muon"]
    options += ["train.muon_lr=0.02", "train.clip=0", "train.weight_decay=0.1"]
    done = launching.run_ranks(2, *options)
    assert done.returncode == 0, done.stdout
    nll = [result for _, result, _ in losses(run_dir)]
    assert nll[-1] < nll[0] - 0.1
