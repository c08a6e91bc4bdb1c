"""--fail_on_regression is a function of stored results: who computed them, and when, makes no difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emo.eval import store
from tests.helpers.evaluating import command, tiny_model, write_tasks
from tests.helpers.results import fabricated

GOOD, BAD = [True] * 40, [True] * 10 + [False] * 30


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gates")
    tiny_model(root / "model")
    write_tasks(root / "data", ["sst2", "trec"], train=20, test=8)
    return root


def evaluated(run: Path, name: str) -> None:
    """Mark a checkpoint as any watcher does that has evaluated it."""
    mark = {"name": name, "state": "evaluated", "files": "f", "asked": {"a": "evaluated"}}
    store.replace(run / "eval/watch/done" / f"{name}.json", store.dump(mark))


def watch(run: Path, data: Path, *options: Any) -> int:
    arguments = ["watch", run, "--once", "--no_report", "--tasks", "sst2", "--data", data]
    return command(*arguments, "--fail_on_regression", "base", *options)[0]


def test_a_watch_answers_the_same_however_often_it_is_asked(world: Path, tmp_path: Path) -> None:
    """Nothing is left to evaluate in any of these passes: other watchers, or earlier ones, did it."""
    data, out = world / "data", tmp_path / "eval"
    fabricated(out, "base", {"sst2": GOOD})
    fabricated(out, "run-step-000001", {"sst2": GOOD})
    evaluated(tmp_path, "run-step-000001")
    assert [watch(tmp_path, data) for _ in range(2)] == [0, 0]
    fabricated(out, "run-step-000002", {"sst2": BAD})
    assert watch(tmp_path, data) == 0  # no checkpoint of this run yet
    evaluated(tmp_path, "run-step-000002")
    assert [watch(tmp_path, data) for _ in range(2)] == [3, 3]


@pytest.mark.parametrize("lost", ["task", "model"])
def test_a_watch_without_all_results_gives_no_verdict(lost: str, world: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "eval", "run-step-000001"
    fabricated(out, "base", {"sst2": GOOD, "trec": GOOD})
    fabricated(out, name, {"sst2": GOOD} if lost == "task" else {"sst2": GOOD, "trec": GOOD})
    evaluated(tmp_path, name)
    if lost == "model":
        (out / "models" / name / "model.json").write_text("{", encoding="utf-8")
    assert [watch(tmp_path, world / "data") for _ in range(2)] == [2, 2]


def test_gates_that_cannot_fail_are_mistakes(world: Path, tmp_path: Path) -> None:
    fabricated(tmp_path, "base", {"sst2": GOOD})
    fabricated(tmp_path, "new", {"sst2": BAD})
    run = ["eval", "--model", world / "model", "--data", world / "data", "--output_path", tmp_path]
    gate = ["--fail_on_regression", "base"]
    assert command(*run, "--tasks", "sst2", "--max_drop", 1)[0] == 2  # alone it would decide nothing
    assert command(*run, "--tasks", "sst2", "--name", "base", *gate)[0] == 2
    for pair, options in (("base new", [*gate[:1], "--max_drop", "nan"]), ("new new", gate[:1])):
        assert command("compare", *pair.split(), "--results", tmp_path, *options)[0] == 2
