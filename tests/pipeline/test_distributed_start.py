"""Real runs: how a start ends that cannot work, what an abort of a rank means, and what may be resumed."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.errors import ExitCode
from pipeline.run_dir import checkpoints
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
    given = {key: value for key, value in (launching.ENVIRONMENT | environment).items() if value}
    return subprocess.run(
        command,
        cwd=launching.REPO,
        env=given,
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


def test_a_rank_that_aborts_after_some_steps_is_a_failure(recipe: Path, tmp_path: Path) -> None:
    """NCCL's watchdog aborts ranks that have lost another one; job files start such runs again."""
    run_dir = tmp_path / "run"
    options = [f"run_dir={run_dir}", "train.steps=100000", "train.schedule=constant", "train.save_every=2"]
    process = launching.popen(launching.script_command(2, str(recipe), *options))
    launching.wait_for_step(run_dir, 4)
    rank = launching.member(run_dir, "rank 1")
    assert rank is not None
    rank.send_signal(signal.SIGABRT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == ExitCode.FAILURE, output
    assert checkpoints(run_dir)


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
    nll = [found for _, found, _ in losses(run_dir)]
    assert nll[-1] < nll[0] - 0.1


def test_adapters_have_the_dtype_of_their_model(recipe: Path, tmp_path: Path) -> None:
    """Under ZeRO-3, too, which builds them partitioned."""
    run_dir = tmp_path / "run"
    options = [
        "model.dtype=bfloat16",
        "model.lora.r=4",
        "train.steps=2",
        "train.lr=0.05",
        "objective.name=mle",
    ]
    done = launching.run_ranks(2, str(recipe), f"run_dir={run_dir}", *options)
    assert done.returncode == 0, done.stdout
    dtypes = set()
    for path in checkpoints(run_dir)[-1].rglob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        dtypes |= {tensor.dtype for name, tensor in state["module"].items() if "lora_" in name}
    assert dtypes == {torch.bfloat16}
    exported = load_file(run_dir / "export/model.safetensors")
    first = load_file(run_dir / "initial/model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    assert exported[name].dtype == torch.bfloat16
    assert (exported[name].float() - first[name].float()).abs().max() > 1e-3
