"""Real runs: saving beside training, a full disk, hanging and killed ranks, copies and heartbeats."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from emo.common.errors import ExitCode
from emo.pipeline.run_dir import HEARTBEAT, checkpoints, problem, read_metrics, step_of
from tests.helpers import launching
from tests.helpers.launching import losses, wait_for_step


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def long_run(recipe: Path) -> list[str]:
    """Arguments of a run that does not end by itself within a test."""
    return [str(recipe), "train.max_steps=5000", "train.lr_scheduler_type=constant", "train.save_steps=3"]


SAVES = ["train.save_steps=1", "train.save_total_limit=2", "train.keep_every=3"]


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """A finished run of one rank that saved beside training; its copies are in `copies` beside it."""
    run_dir = recipe.parent / "whole"
    options = [*SAVES, f"train.copy_to={recipe.parent / 'copies'}", "train.async_save=true"]
    done = launching.run_alone(str(recipe), f"output_dir={run_dir}", *options)
    assert done.returncode == 0, done.stdout
    return run_dir


def test_kept_copied_and_alive(recipe: Path, whole: Path, tmp_path: Path) -> None:
    run_dir, copies = whole, whole.parent / "copies"
    assert [step_of(d) for d in checkpoints(run_dir)] == [3, 6, 7, 8]
    copied = checkpoints(copies)
    assert [step_of(d) for d in copied] == list(range(1, 9))
    assert all(problem(d) is None for d in copied)
    beat = json.loads((run_dir / HEARTBEAT).read_text())
    assert beat["step"] >= 1 and time.time() - beat["time"] < 600
    # a copy is a checkpoint: put back, the run resumes from it
    again = tmp_path / "again"
    again.mkdir()
    (again / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    for source in (copies / "step-000006", run_dir / "initial"):
        shutil.copytree(source, again / source.name)
    done = launching.run_alone(str(recipe), f"output_dir={again}")
    assert done.returncode == 0, done.stdout
    assert "resumed from" in done.stdout
    assert losses(again) == losses(run_dir)[6:]


def test_saving_aside_or_at_once_is_the_same(recipe: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = launching.run_alone(str(recipe), f"output_dir={run_dir}", *SAVES, "train.async_save=false")
    assert done.returncode == 0, done.stdout
    assert losses(run_dir) == losses(whole)
    compared = 0
    for aside in sorted((whole / "step-000006").rglob("*.pt")):
        at_once = run_dir / aside.relative_to(whole)
        for a, b in zip(*(tensors(torch.load(p, weights_only=False)) for p in (aside, at_once)), strict=True):
            assert torch.equal(a, b)
            compared += 1
    assert compared > 3


def tensors(tree: object) -> Iterator[torch.Tensor]:
    """Those of a checkpoint's file."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors(value)


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
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 50; exec "$@"', "limited", *command],
        cwd=launching.REPO,
        env=launching.ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == ExitCode.FAILURE, done.stdout + done.stderr
    assert "error: the checkpoint after step 7 cannot be written (rank 0: " in done.stderr
    assert "Traceback" not in done.stderr
    assert [step_of(d) for d in checkpoints(run_dir)] == [3, 6]
    assert all(problem(d) is None for d in checkpoints(run_dir))
    assert launching.run_alone(*arguments).returncode == 0
    assert losses(run_dir) == losses(whole)


def test_a_rank_that_hangs_is_given_up(long_run: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = launching.start(2, *long_run, f"output_dir={run_dir}", "train.timeout_minutes=0.05")
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


def test_a_stop_is_honoured_within_two_steps(long_run: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = launching.start(2, *long_run, f"output_dir={run_dir}", "train.save_steps=0")
    wait_for_step(run_dir, 3)
    (run_dir / "STOP").touch()
    last = read_metrics(run_dir)[-1]["step"]
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    (saved,) = checkpoints(run_dir)
    # one step may end, and one may be under way, between the file and the look at the metrics
    assert step_of(saved) <= last + 3
    assert not (run_dir / "STOP").exists()


def test_torchrun_restarts_what_was_killed(recipe: Path, tmp_path: Path) -> None:
    """The launcher's own restarts: the same path as any other start."""
    run_dir = tmp_path / "run"
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    process = subprocess.Popen(
        [str(launching.BIN / "torchrun"), *options, "launch/continual.sh", str(recipe),
         f"output_dir={run_dir}", "train.max_steps=40", "train.save_steps=3"],
        cwd=launching.REPO,
        env=launching.ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    wait_for_step(run_dir, 4)
    (victim,) = (p for p in launching.below(process) if p.environ().get("RANK") == "1")
    os.kill(victim.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert "resumed from" in output
    assert [r["step"] for r in read_metrics(run_dir) if "nll" in r] == list(range(1, 41))
