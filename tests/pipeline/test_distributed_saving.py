"""Real runs: saving beside training, a full disk, hanging and killed ranks, copies and heartbeats."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from emo.common.errors import ExitCode
from emo.pipeline.run_dir import HEARTBEAT, checkpoints, problem, read_metrics, step_of
from tests.helpers import launching
from tests.helpers.launching import losses, wait_for_step

SAVES = ["train.save_steps=1", "train.save_total_limit=2", "train.keep_every=3"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """A finished run of one rank that saved beside training; its copies are in `copies` beside it."""
    run_dir = recipe.parent / "whole"
    options = [*SAVES, f"train.copy_to={recipe.parent / 'copies'}", "train.async_save=true"]
    done = launching.run_alone(str(recipe), f"output_dir={run_dir}", *options)
    assert done.returncode == 0, done.stdout
    return run_dir


def test_kept_copied_and_alive(recipe: Path, whole: Path, tmp_path: Path) -> None:
    """A copy is a checkpoint: put back, the run resumes from it."""
    copies, again = whole.parent / "copies", tmp_path / "run"
    assert [step_of(d) for d in checkpoints(whole)] == [3, 6, 7, 8]
    assert [step_of(d) for d in checkpoints(copies)] == list(range(1, 9))
    assert all(problem(d) is None for d in checkpoints(copies))
    beat = json.loads((whole / HEARTBEAT).read_text())
    assert beat["step"] >= 1 and time.time() - beat["time"] < 600
    again.mkdir()
    (again / "config.yaml").write_text((whole / "config.yaml").read_text())
    for source in (copies / "step-000006", whole / "initial"):
        shutil.copytree(source, again / source.name)
    done = launching.run_alone(str(recipe), f"output_dir={again}")
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stdout
    assert losses(again) == losses(whole)[6:]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_loses_none(
    recipe: Path, whole: Path, tmp_path: Path
) -> None:
    """A limit on the size of files stands for a full disk: the write fails in the same way."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    for directory in ("step-000007", "step-000008", "export"):
        shutil.rmtree(run_dir / directory)
    arguments = [str(recipe), f"output_dir={run_dir}", *SAVES]
    command = [str(launching.BIN / "python"), "launch/continual.sh", *arguments]
    limited = ["bash", "-c", 'ulimit -f 50; exec "$@"', "limited", *command]
    environment = launching.ENVIRONMENT
    done = subprocess.run(limited, cwd=launching.REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == ExitCode.FAILURE and "Traceback" not in done.stderr, done.stderr
    assert [step_of(d) for d in checkpoints(run_dir)] == [3, 6]
    assert all(problem(d) is None for d in checkpoints(run_dir))
    assert launching.run_alone(*arguments).returncode == 0
    assert losses(run_dir) == losses(whole)


def test_a_rank_that_hangs_is_given_up(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    endless = ["train.max_steps=5000", "train.lr_scheduler_type=constant", "train.timeout_minutes=0.05"]
    process = launching.start(2, str(recipe), f"output_dir={run_dir}", *endless)
    wait_for_step(run_dir, 4)
    first, hanging = launching.ranks_of(process)
    hanging.send_signal(signal.SIGSTOP)
    try:
        first.wait(timeout=60)
        hanging.kill()  # the launcher would, half a minute later
        output, _ = process.communicate(timeout=120)
    finally:
        for rank in launching.processes_of(run_dir):
            rank.kill()
    assert process.returncode not in (ExitCode.DONE, ExitCode.STOPPED)
    assert "rank 0 lost another rank" in output


def test_torchrun_restarts_what_was_killed(recipe: Path, tmp_path: Path) -> None:
    """The launcher's own restarts: the same path as any other start."""
    run_dir = tmp_path / "run"
    command = [str(launching.BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command += ["launch/continual.sh", str(recipe), f"output_dir={run_dir}"]
    process = subprocess.Popen(
        [*command, "train.max_steps=40", "train.save_steps=3"],
        cwd=launching.REPO,
        env=launching.ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_step(run_dir, 4)
    (victim,) = (p for p in launching.below(process) if p.environ().get("RANK") == "1")
    os.kill(victim.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0 and "resumed from" in output, output
    assert [r["step"] for r in read_metrics(run_dir) if "nll" in r] == list(range(1, 41))
