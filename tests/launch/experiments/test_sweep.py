"""Sweeps repeat no work, share stages, choose on development data, reject changes, and leave no process."""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import psutil
import pynvml
import pytest
import yaml

import emo.experiments.sweeps.code
from emo.common.errors import ExitCode
from emo.common.report.figure import LIGHT
from emo.experiments.cli import main
from emo.experiments.sweeps import report
from emo.experiments.sweeps.code import code_digest, find_plugin_sources, find_sources
from emo.experiments.sweeps.design import RunSpec, read_experiment
from emo.experiments.sweeps.report import gather_results
from emo.experiments.sweeps.stages import Stage, command_origin
from emo.experiments.sweeps.sweep import Sweep
from emo.experiments.sweeps.workers import CommandPool, visible_gpus
from emo.pipeline.config import load_config
from tests.conftest import REPO
from tests.helpers.html import Page
from tests.helpers.killing import to_the_end
from tests.helpers.launching import wait_for
from tests.helpers.refusals import refused
from tests.helpers.sweeping import EXPERIMENT, notes, opened, pretend, small_recipe, sweep

find_once = functools.cache(find_sources)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait less, and read the imports of a command once for all tests."""
    monkeypatch.setattr("emo.experiments.sweeps.sweep.POLL", 0.1)
    monkeypatch.setattr("emo.experiments.sweeps.code.find_sources", find_once)
    yield
    code_digest.cache_clear()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return small_recipe(tmp_path)


TRAINING = f"""#!{sys.executable}
import json, pathlib, sys, time
directory = pathlib.Path(sys.argv[-1])
time.sleep(0.3)
directory.mkdir(parents=True, exist_ok=True)
record = {{"step": 3, "set": "validation", "validation_nll": len(directory.name)}}
(directory / "metrics.jsonl").write_text(json.dumps(record) + "\\n")
"""


def _run(path: Path) -> None:
    """Run `emo sweep` in a fork, with a sleeping script for preparation and training."""
    script, training = path.with_name("training"), Sweep.training
    script.write_text(TRAINING)
    script.chmod(0o755)

    def short(self: Sweep, run: RunSpec) -> list[Stage]:
        return [replace(s, command=[str(script), str(s.directory)]) for s in training(self, run)]

    Sweep.training = short  # type: ignore[method-assign]
    sys.exit(main(["sweep", str(path), "--jobs", "2"]))


@pytest.mark.slow
def test_a_killed_sweep_repeats_nothing(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training is simulated here, and tests/campaigns/sweep.py kills real training."""
    path, out = sweep(tmp_path, recipe), tmp_path / "out"
    assert main(["sweep", str(path), "--dry_run"]) == 0  # load the libraries once for all forks
    draw, before = random.Random(0), dict[str, int]()

    def moment() -> float:
        assert notes(out).items() >= before.items()  # no stage was repeated
        before.update(notes(out))
        return draw.uniform(0.3, 1.2)

    assert to_the_end(_run, (path,), 3, moment)
    assert notes(out).items() >= before.items()
    results, table = json.loads((out / "results.json").read_text()), (out / "table.md").read_text()
    assert [row["labels"]["objective"] for row in results["rows"]] == ["mle", "emo"]
    assert all(row["measures"]["validation_nll"]["n"] == 2 for row in results["rows"])
    assert main(["sweep", str(path), "--jobs", "2"]) == 0
    assert "to do now 0 of 4 runs" in capsys.readouterr().out
    assert (out / "table.md").read_text() == table


def test_differences_are_paired_by_repetition_and_marked(tmp_path: Path, recipe: Path) -> None:
    work = opened(sweep(tmp_path, recipe))
    with refused("not-done"):
        gather_results(work)
    program, *words = work.stages(work.runs[-1])[1].command
    assert program == "deepspeed" and words[2].endswith("launch/continual.sh")
    assert load_config(Path(words[3]), words[4:]) == work.config(work.runs[-1])
    pretend(work, {"mle-1": 2.0, "mle-2": 3.0, "emo-1": 1.5, "emo-2": 2.49})
    results = gather_results(work)
    mle, emo = results["rows"]
    assert mle["measures"]["validation_nll"]["mean"] == 2.5
    gap = emo["differences"]["validation_nll"]
    assert gap["mean"] == pytest.approx(-0.505)
    assert gap["p_holm"] == gap["p"] < 0.05
    assert emo["measures"]["letters"]["mean"] == 5
    assert report.sweep_document(results).markdown().startswith("# Does EMO help? Yes: +0.5050")
    results["rows"][1]["measures"]["letters"] |= {"low": None, "high": None}
    whole = results | {"minutes": 1, "left_out": {}, "cut": [], "parts": {"sweep": results}}
    document = report.evidence_document(whole, {"sweep": ("A sweep", "What it is.")})
    (row,) = (row for row in Page(document.html()).table("objective") if row["objective"] == "emo")
    assert (row["validation_nll"], row["letters"]) == ("1.995* ± 6.3", "5")
    assert "| 1.995\\* (± 6.3) |" in document.markdown()


def test_fronts_are_paired_by_repetition(tmp_path: Path, recipe: Path) -> None:
    """The front of each objective spans the learning rates, and emo loses 0.5 more than mle."""
    axes = yaml.safe_load(EXPERIMENT)["axes"] | {"lr": {"train.learning_rate": [1e-3, 2e-3]}}
    front = {"text": "What is lost?", "gained": "validation_nll", "lost": "letters"}
    prediction = {"text": "Does the loss predict it?", "by": "validation_nll", "of": "letters"}
    parts = {"fronts": {"letters": front}, "predictions": {"loss": prediction}}
    work = opened(sweep(tmp_path, recipe, axes=axes, **parts))
    names = [run.name for run in work.runs]
    letters = {name: (1.0 if "0.001" in name else 3.0) + 0.5 * ("emo" in name) for name in names}
    pretend(work, {name: 2.0 if "0.001" in name else 1.0 for name in names}, letters=letters)
    results = gather_results(work)
    (gap,) = results["fronts"]["letters"]["labels"].values()
    assert gap["mean"] == pytest.approx(0.5) and gap["n"] == 2
    page = report.sweep_document(results).html()
    assert "What is lost?" in page and "Does the loss predict it?" in page
    assert results["predictions"]["loss"]["mean"] < -0.8 and results["predictions"]["loss"]["n"] == 8
    results["fronts"]["letters"]["points"]["emo"][0][0] = (None, 1.0)
    figure = report.draw_fronts(results["fronts"])
    assert ">What is lost?<" in figure
    markers = re.findall(r"<use [^>]*fill: (#\w+)", figure)
    black, blue = LIGHT["s1"], LIGHT["s2"]
    assert (markers.count(black), markers.count(blue)) == (4 + 1, 3 + 1)  # runs with values, and the legend


def test_runs_without_a_number_are_listed_and_leave_questions_undecided(tmp_path: Path, recipe: Path) -> None:
    work = opened(sweep(tmp_path, recipe))
    pretend(work, {"emo-1": float("nan"), "emo-2": float("nan")})
    results = gather_results(work)
    assert [verdict["answer"] for verdict in results["verdicts"].values()] == ["undecided"]
    assert results["lacking"] == {"validation_nll": ["emo-1", "emo-2"]}
    assert "No value of validation_nll: emo-1, emo-2." in report.sweep_document(results).markdown()


def test_a_measure_without_a_number_fails_and_later_files_do_not_count(tmp_path: Path, recipe: Path) -> None:
    work = opened(sweep(tmp_path, recipe))
    pretend(work)
    task = next(task for task in work.tasks() if task.run.name == "emo-1")
    (tmp_path / "out/emo-1.json").write_text("{}")  # another command replaces it
    assert work.values(task.run)["letters"] == 5
    task.stages[-1].note.unlink()
    work.commands.run = lambda command, log: 0  # type: ignore[method-assign]
    with refused("no-number"):
        work.advance(task.run, task.stages[-1])
    assert not task.stages[-1].done


def test_a_measure_whose_numbers_change_is_repeated(tmp_path: Path, recipe: Path) -> None:
    path = sweep(tmp_path, recipe)
    pretend(opened(path))
    assert all(task.done for task in opened(path).tasks())
    tree = yaml.safe_load(path.read_text())
    tree["measures"]["length"]["read"]["first"] = "{out}/{run}.json:letters.0"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    again = opened(path)
    assert [[stage.done for stage in task.stages][-1] for task in again.tasks()] == [False] * 4
    assert all(stage.done for task in again.tasks() for stage in task.stages[:-1])


def test_losses_are_those_of_the_exported_model(tmp_path: Path, recipe: Path) -> None:
    """The best checkpoint is of step 2, and the run ends after step 3."""
    best = {"train.keep_best": "nll", "train.load_best_at_end": True, "train.eval_steps": 1}
    work = opened(sweep(tmp_path, recipe, set=best))
    pretend(work)
    run = work.runs[0]
    records = [
        {"step": i, "set": "validation", "validation_nll": nll} for i, nll in enumerate((9.0, 4.0, 2.0, 3.0))
    ]
    (work.directory(run) / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "validation_nll" not in work.values(run)  # no export yet
    export = work.directory(run) / "export"
    export.mkdir()
    (export / "export.json").write_text('{"step": 2}')
    assert work.values(run)["validation_nll"] == 2.0


@pytest.mark.parametrize(("code", "expected"), [(2, ExitCode.MISTAKE), (3, ExitCode.FAILURE)])
def test_a_failure_is_reported_once(
    tmp_path: Path, recipe: Path, code: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The failure is reported once, although two workers could run the same command."""
    path = sweep(tmp_path, recipe, before={"corpus": f"python -c 'raise SystemExit({code})'"})
    assert main(["sweep", str(path), "--jobs", "2"]) == expected
    assert capsys.readouterr().err.count("error") == 1


def test_a_run_that_another_launch_trains_is_waited_for(tmp_path: Path, recipe: Path) -> None:
    path = sweep(tmp_path, recipe, measures={})
    pretend(opened(path))
    (tmp_path / "out/notes/emo-1/train.json").unlink()
    lines: list[str] = []
    work = Sweep(read_experiment(path, []), lines.append)
    codes = iter([ExitCode.MISTAKE, ExitCode.DONE])

    def run(command: list[str], log: IO[bytes]) -> int:
        if code := next(codes):
            log.write(b"error: out/runs/emo-1 is in use by a launch [run-in-use]\n")
        return code

    work.commands.run = run  # type: ignore[method-assign]
    work.work()
    waiting = "emo-1: another launch trains this run. Waiting for it"
    assert lines == ["emo-1: train", waiting, "emo-1: train"]
    assert all(task.done for task in work.tasks())


def test_measures_against_the_baseline_wait_for_it(tmp_path: Path, recipe: Path) -> None:
    command = "python -c pass {baseline_run} {baseline} {export}"
    measures = {"gap": {"command": command, "read": {"gap": "{out}/x.json:x"}}}
    work = opened(sweep(tmp_path, recipe, measures=measures))
    tasks = {task.run.name: task for task in work.tasks()}
    assert list(tasks)[:2] == ["mle-1", "mle-2"]  # baselines first
    exports = [str(tmp_path / f"out/runs/{name}/export") for name in ("mle-2", "emo-2")]
    assert tasks["emo-2"].stages[-1].command[-3:] == ["mle-2", *exports]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/x.json").write_text('{"x": 1}')
    pretend(work)
    work.stages(work.runs[0])[-1].note.unlink()  # mle-1 is not trained
    for name, can_be_done in (("emo-1", False), ("emo-2", True)):
        task = tasks[name]
        assert work.advance(task.run, task.stages[-1]) == task.done == can_be_done


def test_shared_stages_run_once_before_all_runs(tmp_path: Path, recipe: Path) -> None:
    """The shared command appends one letter to a file each time it runs."""
    corpus, script = tmp_path / "a corpus", tmp_path / "count.py"
    script.write_text("import sys, time; time.sleep(0.5); open(sys.argv[1], 'a').write('x')")
    changes = {"names": {"corpus": str(corpus)}, "before": {"corpus": f"python {script} {{corpus}}"}}
    path = sweep(tmp_path, recipe, measures={}, **changes)
    sweeps = [opened(path) for _ in range(3)]
    assert sweeps[0].before()[0].command[-1] == str(corpus)  # one argument despite the space
    pretend(sweeps[0])
    with ThreadPoolExecutor(3) as workers:
        list(workers.map(Sweep.work, sweeps))
    assert corpus.read_text() == "x"
    other = opened(path, "names.corpus=/elsewhere")
    assert not any(stage.done for task in other.tasks() for stage in task.stages)


def test_only_chosen_runs_are_measured_on_test_data(tmp_path: Path, recipe: Path) -> None:
    """`dev` chooses gamma for EMO only, and `test` is measured only for the chosen runs."""
    axes: dict[str, Any] = {"objective": {name: {"objective.name": name} for name in ("mle", "emo")}}
    axes |= {"gamma": {"train.learning_rate": [0.1, 0.25]}, "seed": {"train.seed": [1, 2]}}
    letters, marker = "{out}/{run}.json:letters.0", "{out}/{run}.json:made"
    measures: dict[str, Any] = {
        "texts": {"command": "python -c pass {run} dev"},
        "dev": {"command": "python -c pass {run}", "read": {"dev": letters}},
        "test": {"command": "python -c pass {run} test", "read": {"score": [letters, marker]}},
    }
    choose = {"axis": "gamma", "by": "dev", "least": False, "where": {"objective": ["emo"]}}
    work = opened(sweep(tmp_path, recipe, axes=axes, measures=measures, choose=choose, questions={}))
    assert "train.learning_rate" not in work.runs[0].overrides  # a run of MLE
    trials = work.tasks()
    names = {task.run.name: [stage.name for stage in task.stages] for task in trials}
    assert names == {run: ["prepare", "train", "texts", "dev"] for run in ("emo-0.1-1", "emo-0.25-1")}
    pretend(work, tasks=trials)
    tasks = work.tasks()  # the longer name has the better score
    assert [task.run.name for task in tasks] == ["mle-1", "mle-2", "emo-0.25-1", "emo-0.25-2"]
    assert [stage.name for stage in tasks[2].stages if not stage.done] == ["test"]
    pretend(work, tasks=tasks)
    results = gather_results(work)
    assert [row["chosen"]["gamma"] for row in results["rows"]] == ["-", "0.25"]
    assert results["rows"][0]["measures"]["score"]["mean"] == 3  # the mean of 5 and 1
    assert [row["at_end"] for row in results["rows"]] == [[], ["gamma"]]  # 0.1 and 0.25 were tried
    assert "0.25 (end)" in report.sweep_document(results).markdown()


# --- changed inputs -----------------------------------------------------------------------------------------

OWN = "extends: base.yaml\nmodel: { path: ROOT/weights }\ndeepspeed: ROOT/ds.json\n"


def write(root: Path, name: str, content: str) -> None:
    """Write a file of the experiment. The recipe's content is appended to OWN."""
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text((OWN.replace("ROOT", str(root)) if name == "recipe.yaml" else "") + content)


def corpus_sweep(root: Path) -> Sweep:
    before = {"corpus": f"python {root}/make.py"}
    parts = [{"name": f"{root}/mine.py:scaled"}, {"name": "kl", "teacher": {"model": f"{root}/teacher"}}]
    axes = yaml.safe_load(EXPERIMENT)["axes"]
    axes["objective"]["emo"] = {"objective.sum": parts}
    return opened(sweep(root, root / "recipe.yaml", before=before, axes=axes, measures={}))


@pytest.fixture
def finished(tmp_path: Path, recipe: Path) -> Path:
    """Return the directory of a finished experiment, whose recipe extends another and names several files."""
    recipe.rename(tmp_path / "base.yaml")
    write(tmp_path, "recipe.yaml", "")
    write(tmp_path, "ds.json", '{"zero_optimization": {"stage": 1}}')
    write(tmp_path, "weights/model.safetensors", "weights")
    write(tmp_path, "teacher/model.safetensors", "weights")
    write(tmp_path, "mine.py", "from helper import number")
    write(tmp_path, "helper.py", "number = 1")
    write(tmp_path, "make.py", "pass")
    work = corpus_sweep(tmp_path)
    for stage in work.before():
        stage.write(1.0)
    pretend(work)
    corpus_sweep(tmp_path).reject_changes()
    assert all(task.done for task in corpus_sweep(tmp_path).tasks())
    return tmp_path


CHANGES = (
    ("recipe.yaml", "train: {learning_rate: 0.2}"),
    ("recipe.yaml", "train: {eval_rows: 4}"),
    ("recipe.yaml", "train: {kl_from_base: 8}"),
    ("recipe.yaml", "train: {early_stopping: {metric: nll}, eval_steps: 1}"),
    ("recipe.yaml", "train: {keep_best: nll, load_best_at_end: true, eval_steps: 1}"),
    ("recipe.yaml", "data: {validation: [{files: other.txt}], validation_fraction: 0}"),
    ("ds.json", '{"zero_optimization": {"stage": 2}}'),
    ("weights/model.safetensors", "strange"),
    ("teacher/model.safetensors", "strange"),
    ("mine.py", "from helper import number as n"),
    ("helper.py", "number = 2"),
    ("make.py", "print()"),
)


def test_changed_inputs_of_finished_runs_are_rejected(finished: Path) -> None:
    before = notes(finished / "out")
    for name, content in CHANGES:
        original = (finished / name).read_bytes()
        write(finished, name, content)
        with refused("stage-changed"):
            corpus_sweep(finished).reject_changes()
        (finished / name).write_bytes(original)
    write(finished, *CHANGES[-1])
    with refused("stage-changed"):
        corpus_sweep(finished).work()
    assert notes(finished / "out") == before


def test_changes_without_effect_on_results_are_accepted(finished: Path) -> None:
    write(
        finished,
        "recipe.yaml",
        "train: {logging_steps: 99, save_steps: 7, eval_steps: 2, micro_batch_size: 1}",
    )
    shutil.rmtree(finished / "weights")  # no remaining stage needs them
    write(finished, "ds.json", '{"zero_optimization":  {"stage": 1}}')
    work = corpus_sweep(finished)
    work.reject_changes()
    assert all(task.done for task in work.tasks())


def test_a_removed_run_is_repeated(finished: Path) -> None:
    write(finished, "recipe.yaml", "train: {learning_rate: 0.2}")
    shutil.rmtree(finished / "out/runs")
    work = corpus_sweep(finished)
    work.reject_changes()
    assert [stage.done for stage in work.tasks()[0].stages] == [True, False]  # prepared, but not trained


def test_what_a_repeated_training_changes_is_measured_again(tmp_path: Path, recipe: Path) -> None:
    """The weights may differ, for example if the removed ones were damaged."""
    work = opened(sweep(tmp_path, recipe))
    pretend(work)
    task = next(task for task in work.tasks() if task.run.name == "emo-1")
    _, train, measure = task.stages
    shutil.rmtree(work.directory(task.run))
    assert measure.done
    work.commands.run = lambda command, log: 0  # type: ignore[method-assign]
    assert work.advance(task.run, train) and not measure.done
    others = [stage for other in work.tasks() if other.run != task.run for stage in other.stages]
    assert all(stage.done for stage in others)


@pytest.mark.parametrize("removed", ["run", "data"])
def test_a_repeated_trial_is_measured_again(tmp_path: Path, recipe: Path, removed: str) -> None:
    """The measure is not part of the trial. Without the data, the other runs are trained again, too."""
    axes = yaml.safe_load(EXPERIMENT)["axes"] | {"lr": {"train.learning_rate": [1e-3, 2e-3]}}
    choose = {"axis": "lr", "by": "validation_nll"}
    work = opened(sweep(tmp_path, recipe, axes=axes, choose=choose))
    pretend(work)
    trial = work.tasks()[0]
    assert trial.done
    shutil.rmtree(work.directory(trial.run) if removed == "run" else work.data(trial.run))
    stage = trial.stages[1 if removed == "run" else 0]
    work.commands.run = lambda command, log: 0  # type: ignore[method-assign]
    assert work.advance(trial.run, stage) and not trial.stages[-1].done
    others = [run for run in work.runs if run != trial.run]
    assert all(work.stages(run)[1].done == (removed == "run") for run in others)


def test_a_recipe_that_changes_during_a_sweep_is_rejected(finished: Path) -> None:
    shutil.rmtree(finished / "out/runs/emo-2")
    work = corpus_sweep(finished)
    task = next(task for task in work.tasks() if task.run.name == "emo-2")
    write(finished, "recipe.yaml", "train: {learning_rate: 0.2}")
    with refused("stage-changed"):
        work.advance(task.run, task.stages[1])


@pytest.mark.parametrize("command", [["python", "-m", "emo", "eval"], ["emo", "eval"]])
def test_a_measure_is_repeated_if_its_code_changes(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "module.py"
    monkeypatch.setattr(emo.experiments.sweeps.code, "find_sources", lambda _: {"module": module})

    def measure() -> Stage:
        code_digest.cache_clear()
        return Stage("measure", command, tmp_path / "note.json", command_origin(command, tmp_path / "out"))

    module.write_text("number = 1\n")
    measure().write(1.0)
    assert measure().done
    module.write_text("number = 2\n")
    assert not measure().done


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("index", [1, 2])
def test_code_that_changes_during_a_sweep_is_rejected(
    index: int, during: bool, tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of training or of a measure changes before its command starts, or while it runs."""
    module = tmp_path / "module.py"
    monkeypatch.setattr(emo.experiments.sweeps.code, "find_sources", lambda _: {"module": module})
    module.write_text("number = 1\n")
    measure = {"command": "emo eval", "read": {"letters": "{out}/{run}.json:letters.0"}}
    work = opened(sweep(tmp_path, recipe, measures={"length": measure}))
    pretend(work)
    task = work.tasks()[0]
    stage = task.stages[index]
    stage.note.unlink()
    commands: list[list[str]] = []

    def run(command: list[str], log: IO[bytes]) -> int:
        commands.append(command)
        module.write_text("number = 2\n")
        return 0

    work.commands.run = run  # type: ignore[method-assign]
    if not during:
        module.write_text("number = 2\n")
    with refused("stage-changed"):
        work.advance(task.run, stage)
    assert len(commands) == during and not stage.done


def test_all_files_in_a_list_count(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.yaml", "b.yaml")]
    for file in files:
        file.write_text("name: task\n")
    tasks = ",".join(map(str, files))
    for words in (["--tasks", tasks], [f"--tasks={tasks}"]):
        assert command_origin(["emo", "eval", *words], tmp_path / "out").keys() >= {
            f"content of {file}" for file in files
        }


def test_sources_are_all_imports_of_a_module() -> None:
    """Sources include direct and indirect imports, imports within functions, __init__ and YAML files."""
    assert find_sources("emo.eval.cli").keys() >= {
        "emo/eval/icl/tasks/sst2.yaml",
        "emo/eval/judging/prompts.yaml",
    }
    files = find_sources("emo.experiments.known_truth.study").keys()
    assert files >= {"emo/experiments/__init__.py", "emo/experiments/known_truth/bigram.py"}
    assert files >= {"emo/pipeline/loss/objectives.py", "emo/eval/generation/distributions.py"}
    assert files.isdisjoint({"emo/experiments/sweeps/sweep.py", "emo/experiments/known_truth/oracle.py"})
    # A function imports this file.
    assert "emo/experiments/sweeps/report.py" in find_sources("emo.experiments.cli")


def test_a_folder_with_the_name_of_an_import_is_no_source(tmp_path: Path) -> None:
    """Weights & Biases makes a folder wandb/ where it is used."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "mine.py").write_text("import wandb, other\n")
    (tmp_path / "other.py").touch()
    files = [path.name for path in find_plugin_sources(f"{tmp_path}/mine.py:loss")]
    assert files == ["mine.py", "other.py"]


# --- workers ------------------------------------------------------------------------------------------------

# Two workers, each with a shell that waits for a child process.
SWEEP = """
import itertools, os, sys
from emo.experiments.sweeps.workers import CommandPool, StoppedError
workers, number = CommandPool(), itertools.count()

def work():
    path = f"{sys.argv[1]}/{next(number)}"
    command = f"sleep 600 & echo $$ $! > {path}.part; mv {path}.part {path}; wait"
    workers.run(["sh", "-c", command], sys.stdout.buffer)

try:
    workers.run_threads(work, 2)
except StoppedError:
    sys.exit(75)
"""


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_no_process_outlives_the_sweep(tmp_path: Path, number: int, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", SWEEP, str(tmp_path)], cwd=REPO)
    wait_for(lambda: all((tmp_path / name).exists() for name in "01"), "commands of two workers")
    children = [int(pid) for name in "01" for pid in (tmp_path / name).read_text().split()]
    assert len(children) == 4 and all(map(lives, children))
    process.send_signal(number)
    assert process.wait(timeout=120) == code
    wait_for(lambda: not any(map(lives, children)), "end of what was started")


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the driver have some GPUs, whose ids are GPU-0a, GPU-1a, ..."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: count)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda number: number)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}a")


def test_threads_have_different_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5,6,7,2")
    workers = CommandPool(ranks=2)
    both = threading.Barrier(2)

    def work() -> None:
        both.wait()  # neither thread works twice
        with (tmp_path / "log").open("ab") as output:
            assert workers.run(["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], output) == 0

    workers.divide_gpus(2)
    workers.run_threads(work, 2)
    assert sorted((tmp_path / "log").read_text().split()) == ["4,5", "6,7"]
    with refused("option-value"):
        workers.divide_gpus(3)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, "0 1"),
        ("1", "1"),
        ("GPU-1a,0", "1 0"),
        ("", ""),
        ("-1", ""),
        ("1,-1,0", "1"),
        ("MIG-1", ""),
        ("7", ""),
    ],
)
def test_only_gpus_that_cuda_can_use_count(
    setting: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 2)
    if setting is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert visible_gpus() == expected.split()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert not visible_gpus()


def test_other_threads_finish_their_command_after_a_failure(tmp_path: Path) -> None:
    """The first worker fails. The second worker finishes its command and starts no further one."""
    workers, codes, first = CommandPool(), [], iter([True, False])

    def work() -> None:
        with (tmp_path / "log").open("ab") as output:
            if next(first):
                wait_for(lambda: (tmp_path / "begun").exists(), "other worker")
                raise ValueError("the first fails")
            command = f"touch {tmp_path}/begun; sleep 1; kill -KILL $$"
            codes.append(workers.run(["sh", "-c", command], output))
            codes.append(workers.run(["true"], output))

    with pytest.raises(ValueError, match="the first fails"):
        workers.run_threads(work, 2)
    assert codes == [137]
