"""Write and start a small sweep of real training runs, and read its progress."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from emo.experiments.sweeps.design import read_experiment
from emo.experiments.sweeps.stages import read_stage_note
from emo.experiments.sweeps.sweep import RunTask, Sweep
from tests.helpers.launching import RECIPE, popen

MEASURE = (
    "import json, sys, pathlib; name, out = sys.argv[1:]; path = pathlib.Path(out) / f'{name}.json'; "
    "path.write_text(json.dumps({'letters': [len(name)], 'made': 1}))"
)
EXPERIMENT = """
axes:
  objective: { mle: { objective.name: mle }, emo: { objective.name: emo } }
  seed: { train.seed: [1, 2] }
repeat: seed
compare: { axis: objective, baseline: mle }
questions:
  helps: { text: "Does EMO help?", better: emo, than: [mle], outcome: validation_nll }
"""


def small_recipe(root: Path) -> Path:
    """Write the recipe of a tiny model on a text of one line, for tests that do not train."""
    (root / "text.txt").write_text("A line.\n")
    tree = yaml.safe_load(RECIPE) | {"output_dir": str(root / "run")}
    tree["data"] |= {"dir": str(root / "data"), "root": str(root)}
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def sweep(tmp_path: Path, recipe: Path, **changes: Any) -> Path:
    """Write an experiment on a recipe and return its path. `changes` replace its sections."""
    script, path = tmp_path / "measure.py", tmp_path / "sweep.yaml"
    script.write_text(MEASURE)
    command = f"python {script} {{run}} {{out}}"
    measures = {"length": {"command": command, "read": {"letters": "{out}/{run}.json:letters.0"}}}
    tree = {"out": str(tmp_path / "out"), "recipe": str(recipe), "measures": measures}
    path.write_text(yaml.safe_dump(tree | yaml.safe_load(EXPERIMENT) | changes, sort_keys=False))
    return path


def opened(path: Path, *overrides: str) -> Sweep:
    return Sweep(read_experiment(path, list(overrides)), lambda _: None)


def pretend(
    work: Sweep,
    nll: dict[str, float] | None = None,
    tasks: Iterable[RunTask] | None = None,
    letters: dict[str, float] | None = None,
) -> None:
    """Write the results that real stages of `tasks` write, or by default those of all runs."""
    for run, stages in tasks or [RunTask(run, work.stages(run)) for run in work.runs]:
        directory = work.directory(run)
        directory.mkdir(parents=True, exist_ok=True)
        record = {"step": 3, "set": "validation", "validation_nll": (nll or {}).get(run.name, 1.0)}
        (directory / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        text = json.dumps({"letters": [(letters or {}).get(run.name, len(run.name))], "made": 1})
        (work.experiment.out / f"{run.name}.json").write_text(text)
        for stage in stages:
            if stage.directory is not None:
                stage.directory.mkdir(parents=True, exist_ok=True)
            is_measure = stage.name in work.experiment.measures
            stage.write(1.0, work.read_measure(run, stage.name) if is_measure else None)


def start(path: Path, *arguments: str) -> subprocess.Popen[str]:
    return popen([sys.executable, "-m", "emo", "sweep", str(path), *arguments])


def notes(out: Path) -> dict[str, int]:
    """Return the modification time (ns) of the note of each completed stage."""
    results = [path for path in (out / "notes").rglob("*.json") if "seconds" in read_stage_note(path)]
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in results}
