"""Experiment files: expansion, choice on development data, and errors before the first run."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from emo.common.errors import UserError
from emo.experiments.cli import main
from emo.experiments.sweeps.checks import check_runs
from emo.experiments.sweeps.design import choose_runs, expand, find_trials, read_experiment
from emo.experiments.sweeps.sweep import Sweep
from tests.helpers.refusals import refused
from tests.helpers.schedulers import stand_in
from tests.helpers.sweeping import opened, small_recipe, sweep

AXES = {
    "objective": {"mle": {"objective.name": "mle"}, "emo": {"objective.name": "emo"}},
    "lr": {"train.learning_rate": [0.1, 0.2]},
    "seed": {"train.seed": [1, 2, 3]},
}
FILE: dict[str, Any] = {"out": "runs/x", "set": {"train.logging_steps": 3}, "axes": AXES}
FILE |= {"choose": {"axis": "lr"}, "measures": {}, "questions": {}}


def write(tmp_path: Path, **changes: Any) -> Path:
    return sweep(tmp_path, Path("launch/recipes/quickstart-continue.yaml"), **FILE | changes)


MISTAKES = """
repeat: sed
compare: {axis: objective, baseline: mel}
choose: {axis: lr, by: "validation_nll:home"}
choose: {axis: lr, where: {objective: [em]}}
{choose: {axis: lr, by: x}, measures: {gap: {command: "a {baseline}", read: {x: "x.json:x"}}}}
set: {data.dir: "{out.__class__.__init__.__globals__}"}
before: {corpus: "python 'x"}
names: {export: x}
{set: {names.oracel: x}, names: {oracle: y}}
axes: {lr: {a: {train.learning_rate: 1}, b: {train.learning_rate: 1}}}
axes: {lr: {a-1: {train.learning_rate: 1}, a: {train.learning_rate: 2}}, seed: {1: {a: 1}, 1-1: {a: 2}}}
measures: {train: {command: a}}
measures: {a: {command: "python -m emo eval --model {export} --data hub --limt 3"}}
measures: {a: {command: "emo quality"}}
measures: {a: {command: "python -m emo eval --model {export} --data hub --limit few"}}
measures: {a: {command: a, read: {x: "x.json:x"}}, b: {command: a, read: {x: "x.json:x"}}}
measures: {a: {command: a, read: {x: "{plase}/x.json:x"}}}
set: {train.stesp: 3}
ranks: 65
axes: {mix: {train.mixture.shares: [{a: 1}, {a: 0.5}]}}
"""


@pytest.mark.parametrize("text", MISTAKES.strip().splitlines())
def test_invalid_experiments_are_one_line(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = yaml.safe_load(text)
    if "axes" in changes:
        changes["axes"] = AXES | changes["axes"]
    assert main(["sweep", str(write(tmp_path, **changes)), "--dry_run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_runs_are_all_combinations_in_order(tmp_path: Path) -> None:
    runs = expand(read_experiment(write(tmp_path), []))
    rates, seeds = ("0.1", "0.2"), ("1", "2", "3")
    assert [run.name for run in runs] == ["-".join(x) for x in product(("mle", "emo"), rates, seeds)]
    expected = {"train.logging_steps": 3, "objective.name": "emo", "train.learning_rate": 0.2}
    assert runs[-1].overrides == expected | {"train.seed": 3}
    changes = ["set.train.logging_steps=7", "set.model.dtype=bfloat16", "set.data.sources=[{files: a=b}]"]
    changed = expand(read_experiment(write(tmp_path), changes))[-1].overrides
    expected |= {"train.logging_steps": 7, "model.dtype": "bfloat16", "data.sources": [{"files": "a=b"}]}
    assert changed == expected | {"train.seed": 3}
    for wrong in ("set.=3", "set.train.seed", "set.train.seed=[", "set..x=1"):
        with pytest.raises(UserError):
            read_experiment(write(tmp_path), [wrong])


@pytest.mark.parametrize(("least", "rates"), [(True, ("0.2", "0.1")), (False, ("0.1", "0.2"))])
def test_an_axis_is_chosen_with_the_first_repetition(
    tmp_path: Path, least: bool, rates: tuple[str, str]
) -> None:
    experiment = read_experiment(write(tmp_path, choose={"axis": "lr", "least": least}), [])
    runs = expand(experiment)
    scores = {"mle-0.1-1": 2.0, "mle-0.2-1": 1.0, "emo-0.1-1": 1.0, "emo-0.2-1": 2.0}
    assert [run.name for run in find_trials(experiment, runs)] == [*scores]
    best = zip(("mle", "emo"), rates, strict=True)
    expected = [f"{name}-{rate}-{seed}" for name, rate in best for seed in (1, 2, 3)]
    assert [run.name for run in choose_runs(experiment, runs, scores)] == expected


def test_names_are_filled_in_and_labels_override_them(tmp_path: Path) -> None:
    far = {"names.place": "{place}/far", "data.root": "{place}"}
    corpus = {"near": {"data.limit_rows": "{rows}"}, "far": far}
    names = {"root": "some", "place": "{root}/where", "rows": 3}
    overrides = {"data.sources": [{"files": "{out}/corpus.jsonl", "limit": 5}], "data.root": "{place}"}
    path = write(tmp_path, names=names, set=overrides, axes=AXES | {"corpus": corpus})
    near, *_, last = expand(read_experiment(path, ["names.root=there"]))
    assert near.overrides["data.sources"] == [{"files": "runs/x/corpus.jsonl", "limit": 5}]
    assert near.overrides["data.root"] == near.variables["place"] == "there/where"
    assert near.overrides["data.limit_rows"] == "3"
    assert last.overrides["data.root"] == last.variables["place"] == "there/where/far"


def test_jobs_share_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers of a Slurm array and of a Kubernetes job run the same command. `--on` submits the same file."""
    path, array, job = (tmp_path / name for name in ("sweep.yaml", "a.sbatch", "a.yaml"))
    write(tmp_path, out=str(tmp_path / "out"), ranks=2)
    assert main(["sweep", str(path), "--slurm", str(array), "--kubernetes", str(job), "--workers", "3"]) == 0
    assert {"#SBATCH --array=1-3", "#SBATCH --gpus=2"} <= set(array.read_text().splitlines())
    assert array.read_text().endswith(f" -m emo sweep {path}\n")
    spec = yaml.safe_load(job.read_text())["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["parallelism"] == spec["completions"] == 3
    assert container["command"] == ["tini", "--", "python", "-m", "emo", "sweep", str(path)]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    stand_in(tmp_path, monkeypatch, sbatch=f'#!/bin/sh\ncat "$2" > {tmp_path}/submitted\necho 17\n')
    assert main(["sweep", str(path), "--on", "slurm", "--workers", "3"]) == 0
    assert (tmp_path / "submitted").read_text() == array.read_text()
    assert "submitted: job 17" in capsys.readouterr().out


KUBECTL = f"""#!{sys.executable}
import json, sys
job = json.load(sys.stdin)
name, known = job["metadata"]["name"], open(sys.argv[0] + ".jobs", "a+")
known.seek(0)
print(f"job.batch/{{name}}", "unchanged" if name in known.read() else "created")
known.write(name)
"""


def test_a_job_that_exists_is_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other overrides and another number of workers make another job."""
    stand_in(tmp_path, monkeypatch, kubectl=KUBECTL)
    write(tmp_path, out=str(tmp_path / "out"))
    command = ["sweep", str(tmp_path / "sweep.yaml"), "--on", "kubernetes"]
    for more, expected in (
        ([], "applied: job"),
        ([], "exists already"),
        (["minutes=3"], "applied: job"),
        (["--workers", "3"], "applied: job"),
    ):
        assert main([*command, *more]) == 0
        assert expected in capsys.readouterr().out


def small_sweep(root: Path, late: dict[str, Any], **changes: Any) -> Sweep:
    """Return a sweep whose second label has the overrides `late`."""
    objectives = {"mle": {"objective.name": "mle"}, "late": {"objective.name": "emo"} | late}
    axes = {"objective": objectives, "seed": {"train.seed": [1, 2]}}
    return opened(sweep(root, small_recipe(root), axes=axes, questions={}, **changes))


@pytest.mark.parametrize(
    ("late", "local"),
    [
        ({"objective.name": "emoo"}, False),
        ({"deepspeed": "ds_configs/zero9.json"}, False),
        ({"objective.cost": "./pretraind"}, True),
        ({"model.path": "{out}/nowhere"}, True),
        ({"data.root": "{out}/nowhere"}, True),
    ],
)
def test_errors_of_late_runs_are_found_first(tmp_path: Path, late: dict[str, Any], local: bool) -> None:
    """Missing files are errors only on the host that does the runs."""
    if local:
        check_runs(small_sweep(tmp_path, late), local=False)
    with pytest.raises(UserError, match=r"late-1: .*"):
        check_runs(small_sweep(tmp_path, late), local=local)


def test_decisive_metrics_must_be_measured(tmp_path: Path) -> None:
    for metric in ("gained", "lost"):
        front = {"text": "What is lost?", "gained": "validation_nll", "lost": "letters"} | {metric: "leters"}
        with pytest.raises(UserError, match=r"no measure reads leters.*letters"):
            check_runs(small_sweep(tmp_path, {}, fronts={"letters": front}), local=False)
    choice = {"axis": "lr", "by": "validation_kl_from_base"}
    chosen = opened(sweep(tmp_path, small_recipe(tmp_path), axes=AXES, questions={}, choose=choice))
    with refused("not-measured"):
        check_runs(chosen, local=False)
    prediction = {"text": "Is it predicted?", "by": "validation_nll", "of": "leters"}
    with pytest.raises(UserError, match=r"no measure reads leters.*letters"):
        check_runs(small_sweep(tmp_path, {}, predictions={"letters": prediction}), local=False)


def test_runs_read_different_files(tmp_path: Path) -> None:
    measures = {"length": {"command": "a", "read": {"letters": "{out}/{objective}.json:letters"}}}
    with refused("shared-files"):
        check_runs(small_sweep(tmp_path, {}, measures=measures), local=False)


def test_files_that_before_makes_may_be_missing(tmp_path: Path) -> None:
    late = {"model.path": "{out}/model", "data.root": "{out}/corpus"}
    check_runs(small_sweep(tmp_path, late, before={"corpus": "python -c pass"}), local=True)
    assert not (tmp_path / "out").exists()
