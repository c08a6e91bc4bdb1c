"""Sweeps repeat nothing, share work, choose on development data, say what failed, and leave nobody behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from emo.common.errors import ExitCode, UserError
from emo.experiments import report
from emo.experiments.cli import main
from emo.experiments.design import Run
from emo.experiments.report import gather
from emo.experiments.stages import Stage
from emo.experiments.sweep import Sweep
from emo.experiments.workers import Workers
from emo.pipeline.config import load_config
from tests.conftest import REPO
from tests.experiments.test_design import RECIPE
from tests.helpers.killing import FORK
from tests.helpers.launching import wait_for
from tests.helpers.sweeping import notes, opened, pretend, sweep


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emo.experiments.sweep.POLL", 0.1)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("A line.\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(root=tmp_path))
    return tmp_path / "recipe.yaml"


TRAINING = """import json, pathlib, sys, time
directory = pathlib.Path(sys.argv[-1])
time.sleep(0.3)
directory.mkdir(parents=True, exist_ok=True)
record = {"step": 3, "set": "validation", "validation_nll": len(directory.name)}
(directory / "metrics.jsonl").write_text(json.dumps(record) + "\\n")
"""


def _run(path: Path) -> None:
    """In a fork: the command `run`, whose preparation and training are a script that sleeps."""
    script, training = path.with_name("training"), Sweep.training
    script.write_text(f"#!{sys.executable}\n{TRAINING}")
    script.chmod(0o755)

    def short(self: Sweep, run: Run) -> list[Stage]:
        stages = training(self, run)
        return [replace(s, command=[str(script), str(s.directory)]) for s in stages]

    Sweep.training = short  # type: ignore[method-assign]
    sys.exit(main(["sweep", str(path), "--jobs", "2"]))


def test_a_killed_sweep_repeats_nothing(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainings are pretended here; tests/campaigns/sweep.py kills real ones."""
    path, out = sweep(tmp_path, recipe), tmp_path / "out"
    assert main(["sweep", str(path), "--dry_run"]) == 0  # libraries are loaded once, for all forks
    draw, before, kills = random.Random(0), dict[str, int](), 0
    while True:
        process = FORK.Process(target=_run, args=(path,))
        process.start()
        process.join(draw.uniform(0.5, 2.5) if kills < 4 else None)
        if not process.is_alive():
            assert process.exitcode == 0
            break
        process.kill()
        process.join()
        kills += 1
        assert notes(out).items() >= before.items()  # nothing that was done was done again
        before = notes(out)
    assert notes(out).items() >= before.items() and kills
    results, table = json.loads((out / "results.json").read_text()), (out / "table.md").read_text()
    assert [row["labels"]["objective"] for row in results["rows"]] == ["mle", "emo"]
    assert all(row["measures"]["validation_nll"]["n"] == 2 for row in results["rows"])
    assert main(["sweep", str(path), "--jobs", "2"]) == 0
    assert "to do now 0 of 4 runs" in capsys.readouterr().out
    assert (out / "table.md").read_text() == table


def test_the_table_pairs_by_repetition(tmp_path: Path, recipe: Path) -> None:
    work = opened(sweep(tmp_path, recipe))
    with pytest.raises(UserError) as error:
        gather(work)
    assert error.value.code == "not-done"
    program, *words = work.stages(work.runs[-1])[1].command
    assert program == "deepspeed" and words[2].endswith("launch/continual.sh")
    assert load_config(Path(words[3]), words[4:]) == work.config(work.runs[-1])
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
    work = opened(sweep(tmp_path, recipe))
    pretend(work, {"emo-1": float("nan"), "emo-2": float("nan")})
    results = gather(work)
    assert [verdict["answer"] for verdict in results["verdicts"].values()] == ["undecided"]
    assert results["lacking"] == {"validation_nll": ["emo-1", "emo-2"]}
    assert "No number of validation_nll: emo-1, emo-2." in report.sweep(results).markdown()
    (tmp_path / "out/emo-1.json").write_text("{}")
    with pytest.raises(UserError, match=r"emo-1.json:letters.0") as error:
        gather(work)
    assert error.value.code == "no-number"


@pytest.mark.parametrize(("code", "expected"), [(2, ExitCode.MISTAKE), (3, ExitCode.FAILURE)])
def test_a_failure_is_reported_once_whoever_met_it(
    tmp_path: Path, recipe: Path, code: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers; each would try the same command."""
    path = sweep(tmp_path, recipe, before={"corpus": f"python -c 'raise SystemExit({code})'"})
    assert main(["sweep", str(path), "--jobs", "2"]) == expected
    assert capsys.readouterr().err.count("error") == 1


def test_measures_against_the_baseline_wait_for_it(tmp_path: Path, recipe: Path) -> None:
    command = "python -c pass {baseline_run} {baseline} {export}"
    measures = {"gap": {"command": command, "read": {"gap": "{out}/x.json:x"}}}
    work = opened(sweep(tmp_path, recipe, measures=measures))
    tasks = {task.run.name: task for task in work.tasks()}
    assert list(tasks)[:2] == ["mle-1", "mle-2"]  # baselines first
    exports = [str(tmp_path / f"out/runs/{name}/export") for name in ("mle-2", "emo-2")]
    assert tasks["emo-2"].stages[-1].command[-3:] == ["mle-2", *exports]
    pretend(work)
    work.stages(work.runs[0])[-1].note.unlink()  # mle-1 is not trained
    for name, can_be_done in (("emo-1", False), ("emo-2", True)):
        task = tasks[name]
        assert work.advance(task.run, task.stages[-1]) == task.done == can_be_done


def test_what_runs_share_is_done_once_before_them(tmp_path: Path, recipe: Path) -> None:
    """Each time the corpus is made, its file has a letter more."""
    corpus, script = tmp_path / "a corpus", tmp_path / "count.py"
    script.write_text(
        "import sys, pathlib, time; time.sleep(0.5); pathlib.Path(sys.argv[1]).open('a').write('x')"
    )
    changes = {"names": {"corpus": str(corpus)}, "before": {"corpus": f"python {script} {{corpus}}"}}
    path = sweep(tmp_path, recipe, measures={}, **changes)
    sweeps = [opened(path) for _ in range(3)]
    assert sweeps[0].before()[0].command[-1] == str(corpus)  # one word, whatever is in it
    pretend(sweeps[0])
    workers = [threading.Thread(target=work.work) for work in sweeps]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    sweeps[0].work()
    assert corpus.read_text() == "x"
    other = opened(path, "names.corpus=/elsewhere")
    assert not any(stage.done for task in other.tasks() for stage in task.stages)


def test_only_what_was_chosen_is_measured_on_test_data(tmp_path: Path, recipe: Path) -> None:
    """gamma is chosen by `dev` for EMO alone; `test` is measured of what was chosen."""
    axes = {
        "objective": {"mle": {"objective.name": "mle"}, "emo": {"objective.name": "emo"}},
        "gamma": {"train.learning_rate": [0.1, 0.25]},
        "seed": {"train.seed": [1, 2]},
    }
    letters = "{out}/{run}.json:letters.0"
    measures = {
        "texts": {"command": "python -c pass {run} dev"},
        "dev": {"command": "python -c pass {run}", "read": {"dev": letters}},
        "test": {
            "command": "python -c pass {run} test",
            "read": {"score": [letters, "{out}/{run}.json:made"]},
        },
    }
    choose = {"axis": "gamma", "by": "dev", "least": False, "where": {"objective": ["emo"]}}
    work = opened(sweep(tmp_path, recipe, axes=axes, measures=measures, choose=choose, questions={}))
    trials = work.tasks()
    names = {task.run.name: [stage.name for stage in task.stages] for task in trials}
    assert names == {run: ["prepare", "train", "texts", "dev"] for run in ("emo-0.1-1", "emo-0.25-1")}
    pretend(work, tasks=trials)
    tasks = work.tasks()  # the longer name has the better score
    assert [task.run.name for task in tasks] == ["mle-1", "mle-2", "emo-0.25-1", "emo-0.25-2"]
    assert [stage.name for stage in tasks[2].stages if not stage.done] == ["test"]
    pretend(work, tasks=tasks)
    results = gather(work)
    assert [row["chosen"]["gamma"] for row in results["rows"]] == ["-", "0.25"]
    assert results["rows"][0]["measures"]["score"]["mean"] == 3  # the mean of 5 and 1
    assert [row["at_end"] for row in results["rows"]] == [[], ["gamma"]]  # 0.1 and 0.25 were tried
    assert "0.25 (end)" in report.sweep(results).markdown()


# Two workers, each at a shell that has started another program and waits for it.
SWEEP = """
import itertools, os, sys
from emo.experiments.workers import StoppedError, Workers
workers, number = Workers(), itertools.count()

def work():
    path = f"{sys.argv[1]}/{next(number)}"
    command = f"sleep 600 & echo $$ $! > {path}.part; mv {path}.part {path}; wait"
    workers.run(["sh", "-c", command], sys.stdout.buffer)

try:
    workers.together(work, 2)
except StoppedError:
    sys.exit(75)
"""


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_nothing_outlives_the_sweep(tmp_path: Path, number: int, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP, str(tmp_path)],
        cwd=REPO,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(lambda: all((tmp_path / name).exists() for name in "01"), "commands of two workers")
    children = [int(pid) for name in "01" for pid in (tmp_path / name).read_text().split()]
    assert len(children) == 4 and all(map(lives, children))
    os.kill(process.pid, number)
    process.communicate(timeout=120)
    assert process.returncode == code
    wait_for(lambda: not any(map(lives, children)), "end of what was started")


def test_the_others_finish_their_command(tmp_path: Path) -> None:
    """The first worker fails; the second one's command is not cut off, and it begins no other."""
    workers, codes, first = Workers(), [], iter([True, False])

    def work() -> None:
        with (tmp_path / "log").open("ab") as output:
            if next(first):
                wait_for(lambda: (tmp_path / "begun").exists(), "other worker")
                raise ValueError("the first fails")
            command = f"touch {tmp_path}/begun; sleep 1; kill -KILL $$"
            codes.append(workers.run(["sh", "-c", command], output))
            codes.append(workers.run(["true"], output))

    with pytest.raises(ValueError, match="the first fails"):
        workers.together(work, 2)
    assert codes == [137]
