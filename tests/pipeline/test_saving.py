"""Real runs of two ranks: saving and exporting beside training, copies, a full disk, a hanging rank."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file

from emo.common.errors import ExitCode
from emo.pipeline.engine import Snapshots
from emo.pipeline.run_dir import CONFIG, EXPORT, HF, checkpoints, problem, step_of
from tests.helpers import launching
from tests.helpers.launching import losses
from tests.helpers.refusals import refused
from tests.helpers.saving_worker import LAST, SEEN


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"max_steps": LAST, "save_steps": 2, "eval_rows": 2, "export_checkpoints": True}
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"), **settings)


def run(what: str, recipe: Path, run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A run that is disturbed as `what` says."""
    arguments = (what, str(recipe), f"output_dir={run_dir}", *options)
    return launching.run_ranks("-m", "tests.helpers.saving_worker", *arguments)


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """A finished run that wrote exports late and kept one checkpoint; its copies are beside it."""
    run_dir = recipe.parent / "whole"
    options = ("train.save_total_limit=1", f"train.copy_to={recipe.parent / 'copies'}")
    done = run("late", recipe, run_dir, *options)
    assert done.returncode == ExitCode.DONE, done.stdout
    return run_dir


def test_exports_are_written_beside_training_and_of_their_step(whole: Path) -> None:
    """Steps are taken meanwhile and do not show; nobody sees the new checkpoint, and one is kept."""
    assert [json.loads(line) for line in (whole.parent / SEEN).read_text().splitlines()] == [
        {"step": 2, "checkpoints": [], "targets": []},
        {"step": 4, "checkpoints": [2], "targets": ["whole-step-000002"]},
    ]
    copies = checkpoints(whole.parent / "copies")
    assert [step_of(d) for d in checkpoints(whole)] == [LAST]
    assert [step_of(d) for d in copies] == [2, 4]
    exports = []
    for directory in copies:
        assert problem(directory) is None
        exports.append(load_file(directory / HF / "model.safetensors"))
        state = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag="state")
        assert exports[-1].keys() == state.keys()
        assert all(torch.equal(exports[-1][name], state[name]) for name in state)
        assert json.loads((directory / HF / "export.json").read_text())["step"] == step_of(directory)
    assert not torch.equal(exports[0]["lm_head.weight"], exports[1]["lm_head.weight"])
    final = load_file(whole / EXPORT / "model.safetensors")
    assert all(torch.equal(final[name], exports[-1][name]) for name in final)


def test_a_copy_is_resumed_from_and_a_full_disk_loses_none(recipe: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    shutil.copy(whole / CONFIG, run_dir)
    for source in (whole.parent / "copies/step-000002", whole / "initial"):
        shutil.copytree(source, run_dir / source.name)
    done = run("full", recipe, run_dir, "train.save_steps=1")
    assert done.returncode == ExitCode.FAILURE and "Traceback" not in done.stdout, done.stdout
    (remaining,) = checkpoints(run_dir)
    assert step_of(remaining) == 2 and problem(remaining) is None
    done = launching.run_ranks("launch/continual.sh", str(recipe), f"output_dir={run_dir}")
    assert done.returncode == ExitCode.DONE, done.stdout
    assert losses(run_dir) == losses(whole)[2:]


def test_weights_that_are_not_finite_are_in_no_checkpoint(recipe: Path, tmp_path: Path) -> None:
    """One value of one rank. Trying again from the last checkpoint would end alike: somebody must look."""
    options = ["train.save_steps=1", "train.export_checkpoints=false", "train.async_save=false"]
    done = run("damaged", recipe, tmp_path / "run", *options)
    assert done.returncode == ExitCode.MISTAKE and "Traceback" not in done.stdout, done.stdout
    assert [step_of(d) for d in checkpoints(tmp_path / "run")] == [1]
    assert not list((tmp_path / "run").glob("step-*.partial")) and not (tmp_path / "run" / EXPORT).exists()


def test_a_rank_that_hangs_is_given_up(recipe: Path, tmp_path: Path) -> None:
    done = run("hanging", recipe, tmp_path / "run", "train.timeout_minutes=0.05", "train.save_steps=0")
    assert done.returncode == ExitCode.FAILURE
    assert "rank 0 lost another rank" in done.stdout


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
