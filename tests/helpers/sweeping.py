"""A small sweep with real training runs: its file, starting it, and what it has done so far."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from experiments.stages import read_note
from tests.helpers.launching import popen

MEASURE = (
    "import json, sys, pathlib; name, out = sys.argv[1:]; path = pathlib.Path(out) / f'{name}.json'; "
    "path.write_text(json.dumps({'letters': [len(name)], 'made': 1}))"
)


def sweep(tmp_path: Path, recipe: Path, **changes: Any) -> Path:
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    tree = {
        "out": str(tmp_path / "out"),
        "recipe": str(recipe),
        "axes": {
            "objective": {"mle": {"objective.name": "mle"}, "emo": {"objective.name": "emo"}},
            "seed": {"train.seed": [1, 2]},
        },
        "repeat": "seed",
        "measures": {
            "length": {
                "command": f"python {script} {{run}} {{out}}",
                "read": {"letters": "{out}/{run}.json:letters.0"},
            }
        },
        "compare": {"axis": "objective", "baseline": "mle"},
        "questions": {
            "helps": {"text": "Does EMO help?", "better": "emo", "than": ["mle"], "outcome": "validation_nll"}
        },
    } | changes
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def start(path: Path, *arguments: str) -> subprocess.Popen[str]:
    return popen([sys.executable, "-m", "experiments", "run", str(path), *arguments])


def notes(out: Path) -> dict[str, int]:
    """When the note of each stage that is done was written."""
    found = [path for path in (out / "notes").rglob("*.json") if "seconds" in read_note(path)]
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in found}
