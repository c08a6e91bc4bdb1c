"""Models side by side: what is compared or refused, what is a regression, and gates on stored results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emo.common.errors import UserError
from emo.eval import store
from emo.eval.compare import compare_pair, regression, table
from emo.eval.results import read_models
from emo.eval.store import replace, seal
from tests.helpers.evaluating import command, tiny_model, write_tasks
from tests.helpers.results import fabricated, write_result
from tests.helpers.said import lines


def test_a_clear_regression_is_one(tmp_path: Path) -> None:
    good = fabricated(tmp_path, "good", {"sst2": [True] * 80 + [False] * 20, "trec": [True] * 50})
    bad = fabricated(tmp_path, "bad", {"sst2": [True] * 60 + [False] * 40, "trec": [True] * 50})
    verdict = regression(good, bad)
    assert verdict.regressions and "sst2 -20.0 points" in verdict.summary
    assert "mean -10.0 points" in verdict.summary
    assert not regression(bad, good).regressions and not regression(good, bad, only=["trec"]).regressions
    assert regression(good, bad, 5.0).regressions != regression(good, bad, 15.0).regressions
    with pytest.raises(UserError) as error:
        regression(good, good)
    assert error.value.code == "own-baseline"
    assert "-20.0" in table(good, bad) and "*" in table(good, bad).splitlines()[2]


def test_one_row_per_subject_is_not_a_regression(tmp_path: Path) -> None:
    """28 rows of as many subjects, two more wrong: exit code 3."""
    a = [i % 3 == 0 for i in range(28)]
    b = [not ok if i in (0, 3, 6, 9, 12, 1, 2, 4) else ok for i, ok in enumerate(a)]
    groups = [f"s{i}" for i in range(28)]
    first, second = (
        fabricated(tmp_path, name, {"mmlu": r}, groups=groups) for name, r in (("a", a), ("b", b))
    )
    actual = compare_pair(first, second, ["mmlu"])
    c = actual.tasks["mmlu"]
    assert (c["only_a"], c["only_b"], c["difference"]) == (5, 3, pytest.approx(-2 / 28))
    assert c["interval"]["low"] < -0.2 and c["interval"]["high"] > 0.1
    assert actual.mean is not None and actual.mean["p"] == c["p_mcnemar"] == pytest.approx(0.7265625)
    assert not regression(first, second).regressions


@pytest.mark.parametrize("changed", [{"prompt": "x"}, {"shots": 4}, {"unheard_of": 1}], ids=str)
def test_what_cannot_be_compared_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    """Gold labels are the same, and yet other texts or settings were asked."""
    fabricated(tmp_path, "a", {"sst2": [True] * 10, "trec": [True] * 10})
    fabricated(tmp_path, "b", {"sst2": [True] * 10})
    write_result(tmp_path, "b", "trec", [True] * 10, **changed)
    a, b = read_models([tmp_path])
    comparison = compare_pair(a, b, ["sst2", "trec"])
    assert list(comparison.tasks) == ["sst2"] and list(comparison.refused) == ["trec"]
    code, out, err = command("compare", "a", "b", "--results", tmp_path)
    assert code == 2 and not out and len(lines(err)) == 1


def test_a_result_that_is_not_the_sealed_one_is_left_out(tmp_path: Path) -> None:
    """A file that is easily edited must not say anything else than the store, which is not."""
    for name in "ab":
        fabricated(tmp_path, name, {"sst2": [True] * 10, "trec": [True, False] * 5})
    path = tmp_path / "models" / "b" / "trec.json"
    view = json.loads(path.read_text())
    sealed = tmp_path / "store" / view["key"] / "result.json"
    replace(sealed, seal(view["result"]))
    assert lines(command("compare", "a", "b", "--results", tmp_path)[2]) == []
    path.write_text(json.dumps(view | {"result": view["result"] | {"accuracy": 0.9}}))
    code, out, err = command("compare", "a", "b", "--results", tmp_path)
    assert code == 0 and "not compared, for want of a result: trec (b)" in out
    assert f"skipped {path}" in err
    sealed.write_text("{")  # what is damaged itself cannot contradict
    assert "trec" in read_models([tmp_path])[1].results


def test_a_gate_on_named_tasks_heeds_no_others(tmp_path: Path) -> None:
    """Neither their regressions nor their absence; Holm and the mean are over those that are named."""
    fabricated(tmp_path, "base", {"sst2": GOOD, "trec": GOOD, "mr": GOOD})
    fabricated(tmp_path, "new", {"sst2": BAD, "trec": GOOD})

    def gate(*tasks: str) -> tuple[int, str, str]:
        return command("compare", "base", "new", "--results", tmp_path, "--fail_on_regression", *tasks)

    assert gate()[0] == 3 and gate("sst2")[0] == 3 and gate("sst2,trec")[0] == 3
    code, out, _ = gate("trec")
    assert code == 0 and "on 1 task: +0.0 points" in out and "sst2" not in out
    assert [gate(tasks)[0] for tasks in ("trec,mr", "mr", "sst3", "sst2,")] == [2] * 4


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
    """Nothing is left to evaluate in any of these passes. Without all results there is no verdict."""
    data, out = world / "data", tmp_path / "eval"
    fabricated(out, "base", {"sst2": GOOD})
    fabricated(out, "run-step-000001", {"sst2": GOOD})
    evaluated(tmp_path, "run-step-000001")
    assert [watch(tmp_path, data) for _ in range(2)] == [0, 0]
    fabricated(out, "run-step-000002", {"sst2": BAD})
    assert watch(tmp_path, data) == 0  # no checkpoint of this run yet
    evaluated(tmp_path, "run-step-000002")
    assert [watch(tmp_path, data) for _ in range(2)] == [3, 3]
    fabricated(out, "run-step-000002", {"sst2": GOOD})
    fabricated(out, "base", {"trec": GOOD})
    assert watch(tmp_path, data) == 2  # a task is missing
    (out / "models" / "base" / "trec.json").unlink()
    assert watch(tmp_path, data) == 0
    (out / "models" / "run-step-000002" / "model.json").write_text("{", encoding="utf-8")
    assert watch(tmp_path, data) == 2


def test_names_stay_on_their_line(tmp_path: Path) -> None:
    forged = "emo\nall is well: no regression \x1b[32m"
    text = table(*(fabricated(tmp_path, name, {"sst2": [True, False]}) for name in ("base", forged)))
    assert "\x1b" not in text and not any(line.startswith("all is well") for line in text.splitlines())


def test_gates_that_cannot_fail_are_mistakes(tmp_path: Path) -> None:
    fabricated(tmp_path, "base", {"sst2": GOOD})
    fabricated(tmp_path, "new", {"sst2": BAD})
    gate, drop = "--fail_on_regression", "--max_drop"
    for pair, options in (("base new", [drop, 1]), ("base new", [gate, drop, "nan"]), ("new new", [gate])):
        assert command("compare", *pair.split(), "--results", tmp_path, *options)[0] == 2
