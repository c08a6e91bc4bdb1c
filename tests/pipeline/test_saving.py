"""Real runs whose checkpoints hold exports: written beside training, whole or not at all, and reloaded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file

from emo.common.errors import ExitCode
from emo.pipeline.engine import Snapshots
from emo.pipeline.run_dir import EXPORT, HF, checkpoints, problem, step_of
from tests.helpers import launching
from tests.helpers.refusals import refused
from tests.helpers.saving_worker import LAST, SEEN

OPTIONS = [
    f"train.max_steps={LAST}",
    "train.save_steps=2",
    "train.export_checkpoints=true",
    "train.eval_rows=2",
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


def run(what: str, recipe: Path, run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A run of two ranks that is disturbed as `what` says."""
    arguments = [str(recipe), f"output_dir={run_dir}", *OPTIONS, *options]
    command = [str(launching.BIN / "python"), "-m", "tests.helpers.saving_worker", what, *arguments]
    return launching.run_group(2, command)


def test_exports_are_written_beside_training_and_of_their_own_step(recipe: Path) -> None:
    """Steps are taken meanwhile and do not show; nobody sees the new checkpoint, and one is kept."""
    run_dir, copies = recipe.parent / "whole", recipe.parent / "copies"
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
