"""Experiment files: expansion, choice on development data, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import UserError
from experiments.__main__ import main
from experiments.design import chosen, expand, read_experiment, trials
from tests.conftest import REPO

FILE: dict[str, Any] = {
    "out": "runs/x",
    "recipe": "launch/recipes/quickstart-continue.yaml",
    "set": {"train.log_every": 3},
    "axes": {
        "objective": {"mle": {"objective.name": "mle"}, "emo": {"objective.name": "emo"}},
        "lr": {"train.lr": [0.1, 0.2]},
        "seed": {"train.seed": [1, 2, 3]},
    },
    "repeat": "seed",
    "choose": {"axis": "lr"},
    "compare": {"axis": "objective", "baseline": "mle"},
}

AGAINST = {"gap": {"command": "python -c pass {baseline}", "read": {"x": "x.json:x"}}}


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(FILE | changes, sort_keys=False))
    return path


def reads(number: str, place: str = "x.json:x") -> dict[str, Any]:
    return {"command": "python -c pass", "read": {number: place}}


LABEL = {"../../x": {"train.lr": 1}, "emo": {"train.lr": 2}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": FILE["axes"] | {"lr": LABEL}}, "'../../x' cannot be part of a file's name"),
        ({"axes": FILE["axes"] | {"lr": {"train.lr": ["-rf", "b"]}}}, "'-rf' cannot be part"),
        ({"before": {"a/b": "python -c pass"}}, "'a/b' cannot be part"),
        ({"measures": {"..": {"command": "python -c pass"}}}, "'..' cannot be part"),
        ({"axes": FILE["axes"] | {"lr": {"train.lr": list(range(2000))}}}, "more than 10,000 runs"),
        ({"set": {"data.dir": "{out:>99999999999}"}}, "cannot be filled in"),
        ({"set": {"data.dir": "{out.__class__.__init__.__globals__}"}}, "cannot be filled in"),
    ],
)
def test_names_stay_in_out_and_templates_are_names(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_experiment(write(tmp_path, **changes), [])


def test_runs_are_all_combinations_in_order(tmp_path: Path) -> None:
    runs = expand(read_experiment(write(tmp_path), []))
    assert [run.name for run in runs[:4]] == ["mle-0.1-1", "mle-0.1-2", "mle-0.1-3", "mle-0.2-1"]
    assert len(runs) == 12
    assert runs[-1].overrides == {
        "train.log_every": 3,
        "objective.name": "emo",
        "train.lr": 0.2,
        "train.seed": 3,
    }


def test_an_axis_is_chosen_with_the_first_repetition_alone(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path), [])
    runs = expand(experiment)
    first = trials(experiment, runs)
    assert [run.name for run in first] == ["mle-0.1-1", "mle-0.2-1", "emo-0.1-1", "emo-0.2-1"]
    scores = {"mle-0.1-1": 2.0, "mle-0.2-1": 1.0, "emo-0.1-1": 1.0, "emo-0.2-1": float("inf")}
    kept = [run.name for run in chosen(experiment, runs, scores)]
    assert kept == ["mle-0.2-1", "mle-0.2-2", "mle-0.2-3", "emo-0.1-1", "emo-0.1-2", "emo-0.1-3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeat": "sed"}, "did you mean seed?"),
        ({"axes": {**FILE["axes"], "lr": {"slow": 3}}}, "axes.lr.slow"),
        ({"compare": {"axis": "objective", "baseline": "mel"}}, "did you mean mle?"),
        ({"compare": {"axis": "lr", "baseline": "0.1"}}, "different axes"),
        ({"choose": {"axis": "lr", "by": "validation_nl"}}, "did you mean validation_nll?"),
        (
            {"choose": {"axis": "lr", "by": "validation_nll:home"}},
            "no validation set for validation_nll:home",
        ),
        ({"axis": {}}, "axis"),
        ({"set": {"model.path": "{oracel}"}}, "override model.path: '{oracel}' cannot be filled in"),
        ({"before": {"corpus": "python -c {oracle}"}}, "before.corpus: '{oracle}' cannot be filled in"),
        ({"before": {"corpus": "python 'x"}}, "No closing quotation"),
        ({"before": {"corpus": ""}}, "before.corpus is empty"),
        ({"names": {"lr": "x"}}, "names.lr"),
        ({"set": {"names.oracel": "x"}, "names": {"oracle": "y"}}, "did you mean oracle?"),
        ({"set": {"train.stesp": 3}}, "mle-0.1-1: unknown key train.stesp"),
        ({"ranks": 3}, "does not divide over 3 ranks"),
        ({"choose": {"axis": "lr", "where": {"objectiv": ["emo"]}}}, "did you mean objective?"),
        ({"choose": {"axis": "lr", "where": {"objective": ["em"]}}}, "did you mean emo?"),
        ({"choose": {"axis": "lr", "by": "x"}, "measures": AGAINST}, "needs the baseline"),
        ({"measures": {"train": {"command": "python -c pass"}}}, "measures.train"),
        ({"names": {"export": "x"}}, "{export} already means something else"),
        ({"axes": FILE["axes"] | {"seed": {"train.seed": [1, 1]}}}, "train.seed is given '1' more than once"),
        ({"axes": FILE["axes"] | {"lr": {"train.lr": [1.0e-3, 0.001]}}}, "'0.001' more than once"),
        ({"axes": FILE["axes"] | {"lr": {"train.lr": [1.0e-3, "1e-3"]}}}, "given '0.001' more than once"),
        (
            {"axes": FILE["axes"] | {"lr": {"a": {"train.lr": 1}, "b": {"train.lr": 1}}}},
            "a and b are the same",
        ),
        ({"axes": FILE["axes"] | {"seed": {"train.seed": []}}}, "axes.seed has no labels"),
        ({"axes": FILE["axes"] | {"seed": {}}}, "axes.seed has no labels"),
        ({"measures": {"a": reads("x"), "b": reads("x")}}, "measures.b.read.x: a reads it too"),
        ({"measures": {"a": reads("validation_nll")}}, "every run reports this itself"),
        ({"measures": {"a": reads("x", "{plase}/x.json:x")}}, "measures.a.read.x: '{plase}/x.json:x' cannot"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(write(tmp_path, **changes)), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "reader"),
    [("evidence", "experiments.evidence"), ("known-truth-quick", "experiments.known_truth.study")],
)
def test_files_of_other_commands_are_told_apart(
    capsys: pytest.CaptureFixture[str], name: str, reader: str
) -> None:
    assert main(["run", str(REPO / f"experiments/{name}.yaml")]) == 2
    assert f"is not for this command; give it to python -m {reader}\n" in capsys.readouterr().err


def test_labels_may_be_numbers(tmp_path: Path) -> None:
    axes = FILE["axes"] | {"seed": {1: {"train.seed": 1, "data.seed": 1}, 2: {"train.seed": 2}}}
    runs = expand(read_experiment(write(tmp_path, axes=axes), []))
    assert [run.name for run in runs[:2]] == ["mle-0.1-1", "mle-0.1-2"]


def test_labels_that_a_command_tells_apart_may_have_the_same_overrides(tmp_path: Path) -> None:
    measures = {"a": {"command": "python -c pass {temperature}", "read": {"x": "x.json:x"}}}
    axes = FILE["axes"] | {"temperature": {"cold": {}, "hot": {}}}
    assert len(expand(read_experiment(write(tmp_path, axes=axes, measures=measures), []))) == 24


def test_two_runs_of_one_name_are_refused(tmp_path: Path) -> None:
    lr = {"a-1": {"train.lr": 1}, "a": {"train.lr": 2}}
    axes = FILE["axes"] | {"lr": lr, "seed": {"1": {"train.seed": 1}, "1-1": {"train.seed": 2}}}
    with pytest.raises(UserError, match="both called mle-a-1-1"):
        read_experiment(write(tmp_path, axes=axes), [])


def test_a_dry_run_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, out=str(tmp_path / "out"), minutes=2.0)
    assert main(["run", str(path), "--dry-run", "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "12 combinations; to do now 4 of 4 runs" in said
    assert "about 4 minutes with 2 at a time" in said
    assert not (tmp_path / "out").exists()


def test_names_are_filled_into_overrides(tmp_path: Path) -> None:
    changes = {
        "names": {"root": "some", "place": "{root}/where", "rows": 3},
        "set": {"data.sources": [{"files": "{out}/corpus.jsonl", "limit": 5}], "data.root": "{place}"},
        "axes": FILE["axes"] | {"lr": {"slow": {"train.lr": 0.1, "data.limit_rows": "{rows}"}}},
    }
    run = expand(read_experiment(write(tmp_path, **changes), ["names.root=there"]))[0]
    assert run.overrides["data.sources"] == [{"files": "runs/x/corpus.jsonl", "limit": 5}]
    assert run.overrides["data.root"] == "there/where"
    assert run.overrides["data.limit_rows"] == "3"


def test_an_axis_may_belong_to_some_labels_alone(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path, choose={"axis": "lr", "where": {"objective": ["emo"]}}), [])
    runs = expand(experiment)
    names = [run.name for run in runs]
    assert names[:4] == ["mle-1", "mle-2", "mle-3", "emo-0.1-1"]
    assert len(names) == 3 + 6
    assert "train.lr" not in runs[0].overrides
    assert [run.name for run in trials(experiment, runs)] == ["emo-0.1-1", "emo-0.2-1"]
    kept = chosen(experiment, runs, {"emo-0.1-1": 2.0, "emo-0.2-1": 1.0})
    assert [run.name for run in kept] == ["mle-1", "mle-2", "mle-3", "emo-0.2-1", "emo-0.2-2", "emo-0.2-3"]


def test_a_label_gives_a_name_another_text(tmp_path: Path) -> None:
    corpus = {"near": {"train.seed": 1}, "far": {"names.place": "{place}/far", "data.root": "{place}"}}
    changes = {"names": {"place": "here"}, "axes": {**FILE["axes"], "corpus": corpus}}
    near, far = expand(read_experiment(write(tmp_path, **changes), ["names.place=there"]))[:2]
    assert not near.names
    assert far.names == {"place": "there/far"}
    assert far.overrides["data.root"] == "there/far"
