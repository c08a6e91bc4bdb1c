"""What runs were made with: another recipe, file or validation set is refused, what changes nothing not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import UserError
from experiments.design import read_experiment
from experiments.stages import Stage, in_order
from experiments.work import Work
from tests.helpers.sweeping import sweep


def parts(here: Path) -> Path:
    """A recipe that extends another one and names a DeepSpeed file, weights and a program, all of its own."""
    data: dict[str, Any] = {"dir": str(here / "data"), "root": str(here), "train_tokenizer": 384}
    tree = {
        "run_dir": str(here / "run"),
        "data": data | {"sources": [{"files": "text.txt"}], "validation_fraction": 0.1},
        "model": {"path": str(here / "weights")},
        "train": {"steps": 3, "lr": 0.1, "eval_rows": 8},
        "deepspeed": str(here / "ds.json"),
    }
    (here / "base.yaml").write_text(yaml.safe_dump(tree))
    (here / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    (here / "weights").mkdir()
    (here / "weights/model.safetensors").write_bytes(b"weights")
    (here / "make.py").write_text("pass")
    path = here / "recipe.yaml"
    path.write_text("extends: base.yaml\n")
    return path


def opened(here: Path, **changes: Any) -> Work:
    before = {"corpus": f"python {here}/make.py"}
    path = sweep(here, here / "recipe.yaml", **{"before": before, "measures": {}} | changes)
    return Work(read_experiment(path, []), lambda _: None)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """An experiment of which all runs are done."""
    parts(tmp_path)
    work = opened(tmp_path)
    for stage in (*work.before(), *(stage for run in work.runs for stage in work.whole(run).stages)):
        if stage.place is not None:
            stage.place.mkdir(parents=True, exist_ok=True)
        stage.finish(1.0)
    opened(tmp_path).refuse_others()
    assert all(task.done for task in opened(tmp_path).tasks())
    return tmp_path


def recipe(text: str) -> Callable[[Path], None]:
    def edit(here: Path) -> None:
        (here / "recipe.yaml").write_text(f"extends: base.yaml\n{text}\n")

    return edit


def base(old: str, new: str) -> Callable[[Path], None]:
    def edit(here: Path) -> None:
        text = (here / "base.yaml").read_text()
        assert old in text
        (here / "base.yaml").write_text(text.replace(old, new))

    return edit


def file(name: str, text: str) -> Callable[[Path], None]:
    def edit(here: Path) -> None:
        (here / name).write_text(text)

    return edit


VALIDATION = "data: {validation: [{files: other.txt}], validation_fraction: 0}"


@pytest.mark.parametrize(
    ("edit", "key"),
    [
        (recipe("train: {lr: 0.2}"), r"train\.lr=0\.1, now 0\.2"),
        (base("lr: 0.1", "lr: 0.3"), r"train\.lr=0\.1, now 0\.3"),
        (recipe("train: {eval_rows: 4}"), r"train\.eval_rows=8, now 4"),
        (recipe(VALIDATION), r"data\.validation"),
        (
            file("ds.json", '{"zero_optimization": {"stage": 2}}'),
            r"deepspeed\.zero_optimization\.stage=1, now 2",
        ),
        (file("weights/model.safetensors", "strange"), "content of model.path"),
        (file("make.py", "print()"), r"before\.corpus\.content of .*make\.py"),
    ],
)
def test_runs_that_are_done_are_not_mixed_with_others(
    here: Path, edit: Callable[[Path], None], key: str
) -> None:
    kept = {path: path.read_text() for path in (here / "out/notes").rglob("*.json")}
    edit(here)
    with pytest.raises(UserError, match=key) as told:
        opened(here).refuse_others()
    assert "mle-1" in str(told.value) and "set another out" in str(told.value)
    with pytest.raises(UserError, match=key):
        opened(here).work()
    assert kept == {path: path.read_text() for path in (here / "out/notes").rglob("*.json")}


@pytest.mark.parametrize(
    "edit",
    [
        recipe("train: {log_every: 99, save_every: 7, micro_batch: 1}"),
        recipe("# a comment"),
        lambda here: shutil.rmtree(here / "weights"),  # nothing that is done needs them
        lambda here: (here / "ds.json").write_text('{"zero_optimization":  {"stage": 1}}'),
    ],
)
def test_what_changes_no_result_is_not_refused(here: Path, edit: Callable[[Path], None]) -> None:
    edit(here)
    work = opened(here)
    work.refuse_others()
    assert all(task.done for task in work.tasks())


def test_another_corpus_is_refused_before_it_is_made(here: Path) -> None:
    with pytest.raises(UserError, match=r"before\.corpus\.command"):
        opened(here, before={"corpus": f"python {here}/make.py more"}).refuse_others()


def test_a_run_that_was_removed_is_made_anew(here: Path) -> None:
    recipe("train: {lr: 0.2}")(here)
    for place in (here / "out/runs").iterdir():
        shutil.rmtree(place)
    work = opened(here)
    work.refuse_others()
    assert [stage.done for stage in work.tasks()[0].stages] == [True, False]  # the same data, not trained


def test_what_was_begun_is_refused_too(here: Path) -> None:
    """A trainer lets a run go on with other validation rows; its table would say one number of both."""
    train = opened(here).whole(opened(here).runs[0]).stages[-1]
    train.note.unlink()
    train.claim()
    assert not train.done
    opened(here).refuse_others()
    recipe("train: {eval_rows: 4}")(here)
    with pytest.raises(UserError, match=r"mle-1: train was made with train\.eval_rows=8, now 4"):
        opened(here).refuse_others()


def test_a_recipe_that_changes_while_the_sweep_runs_is_refused(here: Path) -> None:
    shutil.rmtree(here / "out/runs/emo-2")
    work = opened(here)
    task = next(task for task in work.tasks() if task.run.name == "emo-2")
    recipe("train: {lr: 0.2}")(here)
    with pytest.raises(UserError, match="emo-2: what it is made with has just changed"):
        work._do(task)


def test_notes_of_another_version_are_refused(here: Path) -> None:
    for note in (here / "out/notes").rglob("train.json"):
        note.write_text(json.dumps({"command": ["a"], "after": "", "seconds": 1.0}))
    with pytest.raises(UserError, match="its note does not say") as told:
        opened(here).refuse_others()
    assert "and so with 3 more" in str(told.value)


def test_each_stage_depends_on_those_before_it(tmp_path: Path) -> None:
    one, two = (Stage(name, [name], tmp_path / name, {"command": [name]}) for name in "ab")
    chain = in_order([one, two])
    assert chain[0].after == ""
    assert in_order([one._replace(made_with={"command": ["c"]}), two])[1].after != chain[1].after
