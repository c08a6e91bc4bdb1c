"""A sweep refuses runs of another recipe, file, code or validation set, and no others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import emo.experiments.code
from emo.common.errors import UserError
from emo.experiments.code import code_digest, sources
from emo.experiments.stages import Stage, command_origin
from emo.experiments.sweep import Sweep
from tests.helpers import sweeping as helper

Edit = Callable[[Path], object]


def opened(root: Path, **changes: Any) -> Sweep:
    before = {"corpus": f"python {root}/make.py"}
    return helper.opened(
        helper.sweep(root, root / "recipe.yaml", **{"before": before, "measures": {}} | changes)
    )


BASE = """
output_dir: {root}/run
data:
  {{ dir: {root}/data, root: {root}, train_tokenizer: 384, validation_fraction: 0.1,
    sources: [{{ files: text.txt }}] }}
model: {{ path: {root}/weights }}
train: {{ max_steps: 3, learning_rate: 0.1, eval_rows: 8 }}
deepspeed: {root}/ds.json
"""


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """An experiment of which all runs are done; its recipe extends another one and names files of its own."""
    (tmp_path / "base.yaml").write_text(BASE.format(root=tmp_path))
    recipe("")(tmp_path)
    text("ds.json", '{"zero_optimization": {"stage": 1}}')(tmp_path)
    text("weights/model.safetensors", "weights")(tmp_path)
    text("make.py", "pass")(tmp_path)
    work = opened(tmp_path)
    for stage in work.before():
        stage.write(1.0)
    helper.pretend(work)
    opened(tmp_path).refuse_changes()
    assert all(task.done for task in opened(tmp_path).tasks())
    return tmp_path


def text(name: str, content: str) -> Edit:
    def write(root: Path) -> None:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)

    return write


def recipe(content: str) -> Edit:
    return text("recipe.yaml", f"extends: base.yaml\n{content}\n")


@pytest.mark.parametrize(
    "edit",
    [
        recipe("train: {learning_rate: 0.2}"),
        recipe("train: {eval_rows: 4}"),
        recipe("data: {validation: [{files: other.txt}], validation_fraction: 0}"),
        text("ds.json", '{"zero_optimization": {"stage": 2}}'),
        text("weights/model.safetensors", "strange"),
        text("make.py", "print()"),
    ],
)
def test_runs_that_are_done_are_not_mixed_with_others(finished: Path, edit: Edit) -> None:
    notes = {path: path.read_text() for path in (finished / "out/notes").rglob("*.json")}
    edit(finished)
    for attempt in (opened(finished).refuse_changes, opened(finished).work):
        with pytest.raises(UserError, match="mle-1: ") as error:
            attempt()
        assert error.value.code == "stage-changed"
    assert notes == {path: path.read_text() for path in (finished / "out/notes").rglob("*.json")}


def test_what_changes_no_result_is_not_refused(finished: Path) -> None:
    recipe("train: {logging_steps: 99, save_steps: 7, micro_batch_size: 1}")(finished)
    shutil.rmtree(finished / "weights")  # nothing that is done needs them
    (finished / "ds.json").write_text('{"zero_optimization":  {"stage": 1}}')
    work = opened(finished)
    work.refuse_changes()
    assert all(task.done for task in work.tasks())


def test_a_run_that_was_removed_is_made_anew(finished: Path) -> None:
    recipe("train: {learning_rate: 0.2}")(finished)
    shutil.rmtree(finished / "out/runs")
    work = opened(finished)
    work.refuse_changes()
    assert [stage.done for stage in work.tasks()[0].stages] == [True, False]  # the same data, not trained


def test_a_recipe_that_changes_while_the_sweep_runs_is_refused(finished: Path) -> None:
    shutil.rmtree(finished / "out/runs/emo-2")
    work = opened(finished)
    task = next(task for task in work.tasks() if task.run.name == "emo-2")
    recipe("train: {learning_rate: 0.2}")(finished)
    with pytest.raises(UserError) as error:
        work.advance(task.run, task.stages[1])
    assert error.value.code == "stage-changed"


def test_a_command_whose_code_changed_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, out = tmp_path / "module.py", tmp_path / "out"
    monkeypatch.setattr(emo.experiments.code, "sources", lambda _: {"module": module})

    def measure() -> Stage:
        code_digest.cache_clear()
        command = ["python", "-m", "emo", "eval"]
        return Stage("measure", command, tmp_path / "note.json", command_origin(command, out))

    module.write_text("number = 1\n")
    measure().write(1.0)
    assert measure().done
    module.write_text("number = 2\n")
    assert not measure().done
    code_digest.cache_clear()


def test_code_is_what_a_module_imports() -> None:
    """Directly, through others, and within functions; a package's own file counts, other users do not."""
    modules = sources("emo.experiments.known_truth.study").keys()
    assert modules >= {"emo.experiments", "emo.experiments.known_truth.bigram"}
    assert modules >= {"emo.pipeline.loss.objectives", "emo.eval.generation.distributions"}
    assert modules.isdisjoint({"emo.experiments.sweep", "emo.experiments.known_truth.oracle"})
    assert "emo.experiments.report" in sources("emo.experiments.cli")  # imported within a function
