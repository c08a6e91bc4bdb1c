"""Real runs: saving and exporting beside training, a full disk, hanging and killed ranks, copies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file

from emo.common.errors import ExitCode
from emo.pipeline.engine import Snapshots
from emo.pipeline.run_dir import (
    EXPORT,
    HEARTBEAT,
    HF,
    checkpoints,
    is_complete,
    problem,
    read_metrics,
    step_of,
)
from tests.helpers import launching
from tests.helpers.launching import losses, wait_for_step
from tests.helpers.refusals import refused
from tests.helpers.saving_worker import LAST, SEEN

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
        [*command, "train.max_steps=30", "train.save_steps=10"],
        cwd=launching.REPO,
        env=launching.ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    launching.wait_for(lambda: any(map(is_complete, checkpoints(run_dir))), "a checkpoint")
    (victim,) = (p for p in launching.below(process) if p.environ().get("RANK") == "1")
    os.kill(victim.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0 and "resumed from" in output, output
    assert [r["step"] for r in read_metrics(run_dir) if "nll" in r] == list(range(1, 31))


OPTIONS = [
    f"train.max_steps={LAST}",
    "train.save_steps=2",
    "train.export_checkpoints=true",
    "train.eval_rows=2",
]


def run(what: str, recipe: Path, run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A run of two ranks that is disturbed as `what` says."""
    arguments = [str(recipe), f"output_dir={run_dir}", *OPTIONS, *options]
    command = [str(launching.BIN / "python"), "-m", "tests.helpers.saving_worker", what, *arguments]
    return launching.run_group(2, command)


def test_exports_are_written_beside_training_and_of_their_own_step(recipe: Path, tmp_path: Path) -> None:
    """Steps are taken meanwhile and do not show; nobody sees the new checkpoint, and one is kept."""
    run_dir, copies = tmp_path / "whole", tmp_path / "copies"
    done = run("late", recipe, run_dir, "train.save_total_limit=1", f"train.copy_to={copies}")
    assert done.returncode == 0, done.stdout
    assert [json.loads(line) for line in (run_dir.parent / SEEN).read_text().splitlines()] == [
        {"step": 2, "checkpoints": [], "targets": []},
        {"step": 4, "checkpoints": [2], "targets": ["whole-step-000002"]},
    ]
    assert [step_of(d) for d in checkpoints(run_dir)] == [LAST]
    assert [step_of(d) for d in checkpoints(copies)] == [2, 4]
    exports = []
    for directory in checkpoints(copies):
        assert problem(directory) is None
        exports.append(load_file(directory / HF / "model.safetensors"))
        state = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag="state")
        assert exports[-1].keys() == state.keys()
        assert all(torch.equal(exports[-1][name], state[name]) for name in state)
        assert json.loads((directory / HF / "export.json").read_text())["step"] == step_of(directory)
    assert not torch.equal(exports[0]["lm_head.weight"], exports[1]["lm_head.weight"])
    final = load_file(run_dir / EXPORT / "model.safetensors")
    assert all(torch.equal(final[name], exports[-1][name]) for name in final)


def test_weights_that_are_not_finite_are_in_no_checkpoint(recipe: Path, tmp_path: Path) -> None:
    """One value of one rank. Trying again from the last checkpoint would end alike: somebody must look."""
    options = ["train.save_steps=1", "train.export_checkpoints=false", "train.async_save=false"]
    done = run("damaged", recipe, tmp_path / "run", *options)
    assert done.returncode == ExitCode.MISTAKE and "Traceback" not in done.stdout, done.stdout
    assert [step_of(d) for d in checkpoints(tmp_path / "run")] == [1]
    assert not list((tmp_path / "run").glob("step-*.partial")) and not (tmp_path / "run" / EXPORT).exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_buffers_may_hold_what_is_not_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    weight, mask = torch.ones(3, dtype=dtype), torch.tensor([0.0, -torch.inf])
    state = {"module": {"w": weight, "mask": mask}, "buffer_names": ["mask"], "step": torch.tensor(3)}
    snapshots = Snapshots(None)
    snapshots.save(state, str(tmp_path / "good.pt"))
    assert snapshots.write() == [tmp_path / "good.pt"]
    weight[1] = torch.nan
    snapshots.save(state, str(tmp_path / "bad.pt"))
    with refused("not-finite"):
        snapshots.write()
    assert not (tmp_path / "bad.pt").exists()
