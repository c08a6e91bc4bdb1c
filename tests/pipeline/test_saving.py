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
from emo.pipeline.engine import DamagedError, Snapshots
from emo.pipeline.run_dir import EXPORT, HF, INITIAL, checkpoints, problem, step_of
from tests.helpers import launching
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


def run(
    what: str, ranks: int, recipe: Path, run_dir: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """A run that is disturbed as `what` says."""
    arguments = [str(recipe), f"output_dir={run_dir}", *OPTIONS, *options]
    command = [str(launching.BIN / "python"), "-m", "tests.helpers.saving_worker", what, *arguments]
    return launching.run_group(ranks, command)


def errors(output: str) -> list[str]:
    """The lines that say why a run ended."""
    assert "Traceback" not in output, output
    return [line for line in output.splitlines() if line.startswith("error: ")]


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """A run of two ranks that trained on while exports were about to be written; beside it `copies`."""
    run_dir = recipe.parent / "whole"
    copies = f"train.copy_to={recipe.parent / 'copies'}"
    done = run("late", 2, recipe, run_dir, "train.save_total_limit=1", copies)
    assert done.returncode == 0, done.stdout
    return run_dir


def test_steps_are_taken_while_an_export_is_written(whole: Path) -> None:
    """The writer waits for them. Meanwhile nobody sees the new checkpoint, and the one before is kept."""
    last = [json.loads(line) for line in (whole.parent / SEEN).read_text().splitlines()]
    assert last == [
        {"step": 2, "checkpoints": [], "targets": []},
        {"step": 4, "checkpoints": [2], "targets": ["whole-step-000002"]},
    ]
    assert [step_of(d) for d in checkpoints(whole)] == [LAST]


def test_an_export_holds_the_weights_of_its_own_step(whole: Path) -> None:
    """They were copied when the state was: the steps taken before they were written do not show."""
    copied = checkpoints(whole.parent / "copies")
    assert [step_of(d) for d in copied] == [2, 4]
    result = []
    for directory in copied:
        assert problem(directory) is None
        result.append(load_file(directory / HF / "model.safetensors"))
        state = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag="state")
        assert result[-1].keys() == state.keys()
        assert all(torch.equal(result[-1][name], state[name]) for name in state)
        output = json.loads((directory / HF / "export.json").read_text())
        assert (
            output["step"] == step_of(directory) and output["template"] is None
        )  # of instructions: there are none
    assert not torch.equal(result[0]["lm_head.weight"], result[1]["lm_head.weight"])
    final = load_file(whole / EXPORT / "model.safetensors")
    assert all(torch.equal(final[name], result[-1][name]) for name in final)


def test_an_export_that_cannot_be_written_ends_all_ranks_alike(
    recipe: Path, whole: Path, tmp_path: Path
) -> None:
    """A limit on the size of files, which the adapters' state keeps and the merged model does not."""
    run_dir = tmp_path / "run"
    settings = ["model.lora.r=1", "model.architecture=null", f"model.path={whole / INITIAL}"]
    done = run("limited", 2, recipe, run_dir, *settings)
    assert done.returncode == ExitCode.FAILURE, done.stdout
    (line,) = errors(done.stdout)
    assert line.startswith("error: the checkpoint after step 2 cannot be written (rank 0: ")
    assert f"{HF}.partial cannot be written (" in line
    assert line.endswith("make room, then run the same command again to resume from it")
    assert not list(run_dir.glob("step-*"))


def test_weights_that_are_not_finite_are_in_no_checkpoint(recipe: Path, tmp_path: Path) -> None:
    """One value of one rank. Trying again from the last checkpoint would end alike: somebody must look."""
    options = ["train.save_steps=1", "train.export_checkpoints=false", "train.async_save=false"]
    done = run("damaged", 2, recipe, tmp_path / "run", *options)
    assert done.returncode == ExitCode.MISTAKE, done.stdout
    (line,) = errors(done.stdout)
    assert "after step 2 cannot be written" in line
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
    with pytest.raises(DamagedError) as error:
        snapshots.write()
    assert error.value.code == "not-finite" and not (tmp_path / "bad.pt").exists()
