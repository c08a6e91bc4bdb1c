"""A real sweep: killed and started again it repeats nothing, and its table is the same."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.exit_codes import ExitCode
from experiments import report
from experiments.__main__ import main
from experiments.design import Run, read_experiment
from experiments.table import gather
from experiments.work import Work, _port
from tests.helpers.launching import tiny_recipe
from tests.helpers.sweeping import notes, start, sweep


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(tmp_path_factory.mktemp("recipe"), steps=3)


@pytest.mark.slow
def test_a_killed_sweep_repeats_nothing(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objectives = {name: {"objective.name": name} for name in ("mle", "emo")}
    axes = {"objective": objectives, "seed": {"train.seed": [1]}}
    path, out = sweep(tmp_path, recipe, axes=axes), tmp_path / "out"
    process = start(path)
    time.sleep(random.Random(0).uniform(8, 16))
    os.killpg(process.pid, signal.SIGKILL)  # tests/campaigns/sweep.py does it twenty times
    process.communicate()
    kept = notes(out)
    process = start(path)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said
    assert notes(out).items() >= kept.items()  # nothing that was done was done again
    results = json.loads((out / "results.json").read_text())
    assert [row["labels"]["objective"] for row in results["rows"]] == ["mle", "emo"]
    assert all(row["measures"]["validation_nll"]["n"] == 1 for row in results["rows"])
    assert results["verdicts"]["helps"]["answer"] in ("yes", "no", "undecided")
    before = (out / "table.md").read_text()
    assert main(["run", str(path), "--jobs", "2"]) == 0
    assert "to do now 0 of 2 runs" in capsys.readouterr().out
    assert (out / "table.md").read_text() == before


def pretend(work: Work, nll: dict[str, float], runs: Iterable[Run] | None = None, whole: bool = True) -> None:
    """Leave what real stages leave; `whole`: also what is measured of chosen runs alone."""
    for run in work.runs if runs is None else runs:
        directory = work.directory(run)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "metrics.jsonl").write_text(
            json.dumps({"step": 3, "set": "validation", "validation_nll": nll[run.name]}) + "\n"
        )
        for stage in (work.whole(run) if whole else work.trial(run)).stages:
            if stage.place is not None:
                stage.place.mkdir(parents=True, exist_ok=True)
            stage.finish(1.0)
        (work.experiment.out / f"{run.name}.json").write_text(json.dumps({"letters": [len(run.name)]}))


def test_the_table_pairs_by_repetition(tmp_path: Path, recipe: Path) -> None:
    work = Work(read_experiment(sweep(tmp_path, recipe), []))
    pretend(work, {"mle-1": 2.0, "mle-2": 3.0, "emo-1": 1.5, "emo-2": 2.4})
    results = gather(work)
    mle, emo = results["rows"]
    assert mle["measures"]["validation_nll"]["mean"] == 2.5
    gap = emo["differences"]["validation_nll"]
    assert gap["mean"] == pytest.approx(-0.55)
    assert gap["p_holm"] == gap["p"]
    assert emo["measures"]["letters"]["mean"] == 5
    assert "Does EMO help?" in report.sweep(results).markdown()


def test_runs_without_a_number_decide_nothing_and_are_named(tmp_path: Path, recipe: Path) -> None:
    work = Work(read_experiment(sweep(tmp_path, recipe), []))
    pretend(work, {"mle-1": 2.0, "mle-2": 3.0, "emo-1": float("nan"), "emo-2": float("nan")})
    results = gather(work)
    assert [v["answer"] for v in results["verdicts"].values()] == ["undecided"]
    assert results["lacking"] == {"validation_nll": ["emo-1", "emo-2"]}
    assert "No number of dev nats: emo-1, emo-2." in report.sweep(results).markdown()


def test_each_validation_set_is_a_measure(tmp_path: Path, recipe: Path) -> None:
    """By its name, and how it changed; what is not finite is not there, and not what was before."""
    work = Work(read_experiment(sweep(tmp_path, recipe), []))
    run = work.runs[0]
    work.directory(run).mkdir(parents=True)
    records = [
        {"step": 0, "set": "home", "validation_nll": 3.0},
        {"step": 0, "set": "abroad", "validation_nll": 4.0},
        {"step": 3, "set": "home", "validation_nll": 2.0, "validation_change": -1.0},
        {"step": 3, "set": "abroad", "validation_nll": None, "validation_change": None},
    ]
    (work.directory(run) / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert work.values(run) == {"validation_nll:home": 2.0, "validation_change:home": -1.0}


def test_an_unfinished_experiment_has_no_table(tmp_path: Path, recipe: Path) -> None:
    with pytest.raises(UserError, match="4 runs are not done"):
        gather(Work(read_experiment(sweep(tmp_path, recipe), [])))


def test_another_command_is_another_stage(tmp_path: Path, recipe: Path) -> None:
    work = Work(read_experiment(sweep(tmp_path, recipe), []))
    pretend(work, dict.fromkeys((run.name for run in work.runs), 1.0))
    assert all(task.done for task in work.tasks())
    changed = Work(read_experiment(sweep(tmp_path, recipe, set={"train.steps": 4}), []))
    assert not any(task.done for task in changed.tasks())


def test_a_number_that_is_not_there_is_named(tmp_path: Path, recipe: Path) -> None:
    work = Work(read_experiment(sweep(tmp_path, recipe), []))
    pretend(work, dict.fromkeys((run.name for run in work.runs), 1.0))
    (work.experiment.out / "emo-1.json").write_text("{}")
    with pytest.raises(UserError, match=r"emo-1.json:letters.0 holds no number"):
        gather(work)


def test_a_failing_stage_names_its_log(tmp_path: Path, recipe: Path) -> None:
    measures = {"broken": {"command": "python -c 'raise SystemExit(3)'", "read": {"x": "{out}/x.json:x"}}}
    work = Work(read_experiment(sweep(tmp_path, recipe, measures=measures), []), lambda _: None)
    pretend(work, dict.fromkeys((run.name for run in work.runs), 1.0))
    work.whole(work.runs[0]).stages[-1].note.unlink()
    with pytest.raises(UserError, match=r"mle-1: broken ended with code 3 .*\.broken\.log"):
        work.work()


def test_a_failed_attempt_is_told_by_its_own_last_line(tmp_path: Path, recipe: Path) -> None:
    """The log holds every attempt; the second one of these is killed without a word."""
    once = "import os, pathlib, sys; p = pathlib.Path(sys.argv[1]); d = p.exists(); p.touch(); "
    script = tmp_path / "twice.py"
    script.write_text(f"{once}os.kill(os.getpid(), 9) if d else sys.exit('error: the first')")
    path = sweep(tmp_path, recipe, before={"corpus": f"python {script} {tmp_path}/there"})
    with pytest.raises(UserError, match=r"ended with code 1 .*: error: the first"):
        Work(read_experiment(path, []), lambda _: None).work()
    with pytest.raises(UserError, match=r"before: corpus ended with code -9 \(") as told:
        Work(read_experiment(path, []), lambda _: None).work()
    assert "the first" not in str(told.value)


@pytest.mark.parametrize(("code", "expected"), [(2, ExitCode.MISTAKE), (3, ExitCode.FAILURE)])
def test_a_failure_is_told_once_whoever_met_it(
    tmp_path: Path, recipe: Path, code: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers; each would try the same command."""
    path = sweep(tmp_path, recipe, before={"corpus": f"python -c 'raise SystemExit({code})'"})
    assert main(["run", str(path), "--jobs", "2"]) == expected
    said = capsys.readouterr()
    assert said.out.count("before: corpus\n") == 2  # the plan's line, and one attempt
    assert said.err.count("error") == 1


def test_a_sweep_that_is_asked_to_stop_says_so(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "stop.py"
    script.write_text(
        "import os, psutil, signal, time\n"
        "os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGTERM)\n"  # above it is what leads it
        "time.sleep(600)\n"
    )
    path = sweep(tmp_path, recipe, before={"corpus": f"python {script}"})
    assert main(["run", str(path), "--jobs", "2"]) == ExitCode.STOPPED
    assert "run the same command again" in capsys.readouterr().err
    assert not (tmp_path / "out/notes").exists()


def test_runs_meet_at_ports_of_their_own() -> None:
    """Whose turn it is changes nothing: what another process holds is passed by."""
    usual = _port("a run")
    assert usual == _port("a run") != _port("another run")
    with socket.socket() as taken:
        taken.bind(("", usual))
        taken.listen()
        assert _port("a run") == usual + 1


def test_measures_against_the_baseline_wait_for_it(tmp_path: Path, recipe: Path) -> None:
    measures = {
        "gap": {
            "command": "python -c pass {baseline_run} {baseline} {export}",
            "read": {"gap": "{out}/x.json:x"},
        },
    }
    work = Work(read_experiment(sweep(tmp_path, recipe, measures=measures), []), lambda _: None)
    tasks = {task.run.name: task for task in work.tasks()}
    assert list(tasks)[:2] == ["mle-1", "mle-2"]  # baselines first
    assert tasks["emo-2"].stages[-1].command[-3:] == [
        "mle-2",
        str(tmp_path / "out/runs/mle-2/export"),
        str(tmp_path / "out/runs/emo-2/export"),
    ]
    pretend(work, dict.fromkeys((run.name for run in work.runs), 1.0))
    work.whole(work.runs[0]).stages[-1].note.unlink()  # mle-1 is not trained
    assert not work._do(tasks["emo-1"])
    assert work._do(tasks["emo-2"])
    assert tasks["emo-2"].done


COUNT = "import sys, pathlib, time; time.sleep(0.5); pathlib.Path(sys.argv[1]).open('a').write('x')"


def with_before(tmp_path: Path, recipe: Path, **more: Any) -> Path:
    """A sweep whose corpus is made first: here a letter more in a file, each time that it is made."""
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    tree = {"names": {"where": str(tmp_path / "a place")}, "before": {"corpus": f"python {script} {{where}}"}}
    return sweep(tmp_path, recipe, **tree, **more)


def test_what_runs_share_is_done_once_before_them(tmp_path: Path, recipe: Path) -> None:
    path = with_before(tmp_path, recipe, measures={})
    works = [Work(read_experiment(path, []), lambda _: None) for _ in range(3)]
    assert works[0].before()[0].command[-1] == str(tmp_path / "a place")  # one word, whatever is in it
    pretend(works[0], dict.fromkeys((run.name for run in works[0].runs), 1.0))
    workers = [threading.Thread(target=work.work) for work in works]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert (tmp_path / "a place").read_text() == "x"
    works[0].work()
    assert (tmp_path / "a place").read_text() == "x"


def test_another_corpus_means_other_runs(tmp_path: Path, recipe: Path) -> None:
    path = with_before(tmp_path, recipe)
    work = Work(read_experiment(path, []))
    pretend(work, dict.fromkeys((run.name for run in work.runs), 1.0))
    assert all(task.done for task in work.tasks())
    other = Work(read_experiment(path, ["names.where=/elsewhere"]))
    assert not any(stage.done for task in other.tasks() for stage in task.stages)


def test_a_measure_follows_those_before_it(tmp_path: Path, recipe: Path) -> None:
    """What `quality` says of texts is old when `generate` wrote others."""
    measures = {
        name: {"command": f"python -c pass {name}", "read": {name: "{out}/x.json:x"}} for name in ("a", "b")
    }
    work = Work(read_experiment(sweep(tmp_path, recipe, measures=measures), []))
    pretend(work, dict.fromkeys((run.name for run in work.runs), 1.0))
    measures["a"]["command"] += " more"
    changed = Work(read_experiment(sweep(tmp_path, recipe, measures=measures), []))
    done = [stage.done for stage in changed.tasks()[0].stages]
    assert done == [True, True, False, False]  # preparation and training stay


def test_a_failing_stage_before_all_runs_names_its_log(tmp_path: Path, recipe: Path) -> None:
    before = {"corpus": "python -c 'raise SystemExit(3)'"}
    work = Work(read_experiment(sweep(tmp_path, recipe, before=before), []), lambda _: None)
    with pytest.raises(UserError, match=r"before: corpus ended with code 3 .*before\.corpus\.log"):
        work.work()


def chosen_by_a_measure(tmp_path: Path, recipe: Path) -> Work:
    """gamma is chosen by `dev` for EMO alone; `test` is measured of what was chosen."""
    axes = {
        "objective": {"mle": {"objective.name": "mle"}, "emo": {"objective.name": "emo"}},
        "gamma": {"train.lr": [0.1, 0.2]},
        "seed": {"train.seed": [1, 2]},
    }
    measures = {
        "texts": {"command": "python -c pass {run} dev"},
        "dev": {"command": "python -c pass {run}", "read": {"dev": "{out}/{run}.json:letters.0"}},
        "test": {
            "command": "python -c pass {run} test",
            "read": {"score": ["{out}/{run}.json:letters.0", "{out}/{run}.json:made"]},
        },
    }
    choose = {"axis": "gamma", "by": "dev", "least": False, "where": {"objective": ["emo"]}}
    path = sweep(tmp_path, recipe, axes=axes, measures=measures, choose=choose, questions={})
    return Work(read_experiment(path, []), lambda _: None)


def test_only_what_was_chosen_is_measured_on_test_data(tmp_path: Path, recipe: Path) -> None:
    work = chosen_by_a_measure(tmp_path, recipe)
    first = {task.run.name: [stage.name for stage in task.stages] for task in work.tasks()}
    assert first == {key: ["prepare", "train", "texts", "dev"] for key in ("emo-0.1-1", "emo-0.2-1")}
    done = (run for run in work.runs if run.name in first)
    pretend(work, dict.fromkeys((run.name for run in work.runs), 1.0), done, whole=False)
    for name, letters in (("emo-0.1-1", 4), ("emo-0.2-1", 5)):
        (work.experiment.out / f"{name}.json").write_text(json.dumps({"letters": [letters], "made": 1}))
    then = work.tasks()
    assert [task.run.name for task in then] == ["mle-1", "mle-2", "emo-0.2-1", "emo-0.2-2"]
    assert [stage.name for stage in then[2].stages if not stage.done] == ["test"]
    pretend(work, dict.fromkeys((run.name for run in work.runs), 1.0), (task.run for task in then))
    for task in then:
        text = json.dumps({"letters": [5], "made": 1})
        (work.experiment.out / f"{task.run.name}.json").write_text(text)
    results = gather(work)
    assert [row["chosen"]["gamma"] for row in results["rows"]] == ["-", "0.2"]
    assert results["rows"][0]["measures"]["score"]["mean"] == 3  # the mean of 5 and 1
    assert [row["at_end"] for row in results["rows"]] == [[], ["gamma"]]  # 0.1 and 0.2 were tried
    assert "0.2 (end)" in report.sweep(results).markdown()
