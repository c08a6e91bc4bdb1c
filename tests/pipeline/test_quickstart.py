"""The quickstart: what it runs is there, the comparison is fair, it stops when asked, its last lines work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import emo.launch.quickstart as quickstart
from emo.__main__ import EVALUATION, modules
from emo.data_prep.cli import main as data_prep
from emo.eval.cli import parser
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.planning.plan import print_plan
from tests.conftest import REPO
from tests.helpers.evaluating import tiny_model

TRAIN = ["launch/continual.sh", "--num_gpus", "2", "--"]


def commands() -> list[list[str]]:
    return [command for _, side_by_side in quickstart.steps() for command in side_by_side]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, RunConfig]:
    """The training runs by the names of their directories."""
    monkeypatch.chdir(REPO)
    settings = [command[4:] for command in commands() if command[:4] == TRAIN]
    result = [load_config(Path(recipe), overrides) for recipe, *overrides in settings]
    return {config.output_dir.name: config for config in result}


def test_every_step_uses_what_an_earlier_one_made(runs: dict[str, RunConfig]) -> None:
    base = runs["pretrain"]
    for name in ("mle", "emo"):
        assert runs[name].model.path == str(base.output_dir / "export")
        assert runs[name].data.tokenizer == str(base.data.dir / "tokenizer")
    words = [command[3:] for command in commands() if command[1:3] == ["-m", "emo"]]
    parsed = [parser().parse_args(w) for w in words if EVALUATION.split(":")[0] in modules(w[0])]
    for entry in parsed:
        if entry.command in ("eval", "generate"):
            assert entry.model in {str(config.output_dir / "export") for config in runs.values()}
    scored = [entry.name for entry in parsed if entry.command == "eval"]
    (report,) = (entry for entry in parsed if entry.command == "report")
    trained = dict(entry.split("=") for entry in report.run)
    assert list(trained) == scored and set(trained.values()) == {str(c.output_dir) for c in runs.values()}
    recipes = [command[4] for command in commands() if command[3:4] == ["prepare"]]
    assert [load_config(Path(path), []).data for path in recipes] == [base.data, runs["emo"].data]


WAITING = """
import sys
sys.path.insert(0, {repo!r})
from emo.launch import quickstart
wait = [sys.executable, "-c", "import os, time; os.write(1, b'up' + bytes([10])); time.sleep(600)"]
quickstart.steps = lambda: [("Wait", [wait, wait]), ("Never", [["false"]])]
sys.exit(quickstart.quickstart(["quickstart"]))
"""


def test_a_request_to_stop_reaches_every_command() -> None:
    """A container sends SIGTERM to this process alone."""
    command, pipe = [sys.executable, "-c", WAITING.format(repo=str(REPO))], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert process.stdout is not None
    output = ""
    while output.count("up\n") < 2:
        line = process.stdout.readline()
        assert line, process.communicate()
        output += line
    process.terminate()
    _, complaints = process.communicate(timeout=30)
    assert process.returncode == 75 and "run the same command again" in complaints
    assert output.startswith(quickstart.ABOUT)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nothing of it is left


def test_the_lines_to_run_next_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's file is prepared, training with it is planned, evaluation and report are understood."""
    monkeypatch.chdir(REPO)
    model = tiny_model(tmp_path / "model")
    diary = tmp_path / "own.jsonl"
    diary.write_text("".join(json.dumps({"text": f"Page {i} of my diary. " * 20}) + "\n" for i in range(120)))
    (prepare,), (train,), (evaluate, report) = quickstart.following(str(diary))
    assert Path(prepare[0]).absolute() == Path(sys.executable)
    elsewhere = [f"data.dir={tmp_path / 'data'}", f"data.tokenizer={model}"]
    assert prepare[1:3] == ["-m", "emo"] and data_prep([*prepare[3:], *elsewhere]) == 0
    assert train[:4] == TRAIN
    recipe, *overrides = train[4:]
    print_plan(load_config(Path(recipe), [*overrides, *elsewhere, f"model.path={model}"]), quickstart.RANKS)
    scored = parser().parse_args(evaluate[3:])
    config = load_config(Path(recipe), overrides)
    assert scored.model == str(config.output_dir / "export")
    reported = parser().parse_args(report[3:])
    assert reported.run == [f"{scored.name}={config.output_dir}"] and reported.results == [scored.output_path]
