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

from common.errors import ExitCode
from pipeline.run_dir import HEARTBEAT, LAUNCHES, checkpoints, problem, read_metrics, read_records, step_of
from tests.helpers import launching
from tests.helpers.launching import losses, wait_for_step


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def long_run(recipe: Path) -> list[str]:
    """Arguments of a run that does not end by itself within a test."""
    return [str(recipe), "train.steps=5000", "train.schedule=constant", "train.save_every=3"]


SAVES = ["train.save_every=1", "train.keep_last=2", "train.keep_every=3"]


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """A finished run of one rank that saved beside training; its copies are in `copies` beside it."""
    run_dir = recipe.parent / "whole"
    options = [*SAVES, f"train.copy_to={recipe.parent / 'copies'}", "train.async_save=true"]
    done = launching.run_alone(str(recipe), f"run_dir={run_dir}", *options)
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
    done = launching.run_alone(str(recipe), f"run_dir={again}")
    assert done.returncode == 0, done.stdout
    assert "resumed from" in done.stdout
    assert losses(again) == losses(run_dir)[6:]


def test_saving_aside_or_at_once_is_the_same(recipe: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = launching.run_alone(str(recipe), f"run_dir={run_dir}", *SAVES, "train.async_save=false")
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


def test_compiled_or_not_is_the_same(recipe: Path, whole: Path, tmp_path: Path) -> None:
    options = ["deepspeed=ds_configs/zero1.json", "model.compile=true"]
    done = launching.run_alone(str(recipe), f"run_dir={tmp_path / 'run'}", *options)
    assert done.returncode == 0, done.stdout
    for found, expected in zip(losses(tmp_path / "run"), losses(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_bucket_that_cannot_be_reached_does_not_end_the_run(recipe: Path, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("not a directory")
    done = launching.run_alone(str(recipe), f"run_dir={tmp_path / 'run'}", f"train.copy_to={target}/x")
    assert done.returncode == 0, done.stdout
    assert f"step-000008 was not copied to train.copy_to={target}/x" in done.stdout


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_loses_none(
    recipe: Path, whole: Path, tmp_path: Path
) -> None:
    """A limit on the size of files stands for a full disk: the write fails in the same way."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    for directory in ("step-000007", "step-000008", "export"):
        shutil.rmtree(run_dir / directory)
    arguments = [str(recipe), f"run_dir={run_dir}", *SAVES]
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


def test_one_killed_rank_ends_all_soon_and_the_run_resumes(long_run: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = launching.start(2, *long_run, f"run_dir={run_dir}")
    wait_for_step(run_dir, 4)
    launching.ranks_of(process)[1].send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode not in (ExitCode.DONE, ExitCode.STOPPED)
    assert "rank 0 lost another rank" in output
    stopped = launching.run_ranks(2, *long_run, f"run_dir={run_dir}", "train.max_minutes=0.02")
    assert stopped.returncode == ExitCode.STOPPED, stopped.stdout
    assert "resumed from" in stopped.stdout


def test_a_killed_launcher_never_looks_like_success(long_run: list[str], tmp_path: Path) -> None:
    """defects B3: and the ranks, which notice it, save and end."""
    run_dir = tmp_path / "run"
    process = launching.start(2, *long_run, "train.save_every=0", f"run_dir={run_dir}")
    wait_for_step(run_dir, 3)
    launcher = launching.member(run_dir, "launch.py")
    assert launcher is not None
    launcher.kill()
    process.communicate(timeout=120)
    launching.wait_until_gone(run_dir)
    assert process.returncode not in (ExitCode.DONE, ExitCode.MISTAKE, ExitCode.STOPPED)
    assert len(checkpoints(run_dir)) == 1


def test_the_script_tells_the_true_code_when_its_launcher_is_killed(
    long_run: list[str], tmp_path: Path
) -> None:
    """defects B3"""
    run_dir = tmp_path / "run"
    process = launching.popen(launching.script_command(2, *long_run, f"run_dir={run_dir}"))
    wait_for_step(run_dir, 3)
    launcher = launching.member(run_dir, "launch.py")
    assert launcher is not None
    launcher.kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.STOPPED, output
    assert not launching.processes_of(run_dir)
    assert "run the same command again to resume" in output


def test_a_signal_while_the_imports_take_their_time(recipe: Path, tmp_path: Path) -> None:
    """defects B9"""
    process = launching.popen(
        [str(launching.BIN / "python"), "launch/continual.sh", str(recipe), f"run_dir={tmp_path / 'run'}"]
    )
    maps = Path(f"/proc/{process.pid}/maps")
    launching.wait_for(lambda: "libtorch" in maps.read_text(encoding="utf-8"), "import of torch")
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.STOPPED, output
    assert not (tmp_path / "run").exists()


def test_a_rank_that_hangs_is_given_up(long_run: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = launching.start(2, *long_run, f"run_dir={run_dir}", "train.timeout_minutes=0.05")
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
    process = launching.start(2, *long_run, f"run_dir={run_dir}", "train.save_every=0")
    wait_for_step(run_dir, 3)
    (run_dir / "STOP").touch()
    seen = read_metrics(run_dir)[-1]["step"]
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    (saved,) = checkpoints(run_dir)
    # one step may end, and one may be under way, between the file and the look at the metrics
    assert step_of(saved) <= seen + 3
    assert not (run_dir / "STOP").exists()


ASKED_WHILE_MEASURING = """
import runpy, sys
from pathlib import Path
from pipeline import train

def evaluate(*arguments, measure=train.evaluate):
    Path(sys.argv[2].removeprefix("run_dir="), "STOP").touch()
    return measure(*arguments)

train.evaluate = evaluate
sys.argv[0] = "launch/continual.sh"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_stop_while_the_first_step_is_yet_to_come(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "script.py").write_text(ASKED_WHILE_MEASURING)
    command = ["python", str(tmp_path / "script.py"), str(recipe), f"run_dir={run_dir}"]
    stopped = launching.run_group(2, command)
    assert stopped.returncode == ExitCode.STOPPED, stopped.stdout
    assert "stopped before step 1 (the file" in stopped.stdout and not checkpoints(run_dir)
    assert not (run_dir / "STOP").exists()
    assert read_records(run_dir / LAUNCHES)[0][-1]["how"] == "stopped"
    done = launching.run_alone(str(recipe), f"run_dir={run_dir}")
    assert done.returncode == 0, done.stdout
    assert [r["step"] for r in read_metrics(run_dir) if "validation_nll" in r].count(0) == 1


def test_torchrun_restarts_what_was_killed(recipe: Path, tmp_path: Path) -> None:
    """The launcher's own restarts: the same path as any other start."""
    run_dir = tmp_path / "run"
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    process = subprocess.Popen(
        [str(launching.BIN / "torchrun"), *options, "launch/continual.sh", str(recipe), f"run_dir={run_dir}",
         "train.steps=40", "train.save_every=3"],
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
