"""A command says its first word before it loads what takes seconds, whatever the machine is busy with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

HEAVY = {"torch", "transformers", "datasets", "deepspeed", "numpy", "scipy", "pyarrow", "pandas", "rich"}
# Ends the process at the first thing that it prints, and says what is loaded by then.
WATCHED = f"""
import os, runpy, sys
class First:
    def write(self, text):
        if text.strip():
            os.write(3, (text.strip() + chr(10) + ' '.join({HEAVY!r} & sys.modules.keys())).encode())
            os._exit(0)
    def flush(self): pass
    def isatty(self): return False
sys.stdout = sys.stderr = First()
runpy.run_module('emo', run_name='__main__', alter_sys=True)
"""
RECIPE = "launch/recipes/stories260k-tinystories.yaml"
COMMANDS = {
    "prepare": ["prepare", RECIPE],
    "sniff": ["sniff", "DIR/a.csv"],
    "plan": ["plan", RECIPE, "--gpus", "8xA100-80G"],
    "score": ["score", RECIPE, "--model", "DIR"],
    "report": ["report", "DIR/run"],
    "eval": ["eval", "--model", "DIR", "--data", "DIR", "--tasks", "sst2"],
    "generate": ["generate", "--model", "DIR", "--data", "DIR"],
    "quality": ["quality", "DIR"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_word_comes_before_the_libraries(tmp_path: Path, command: str) -> None:
    words = [word.replace("DIR", str(tmp_path)) for word in COMMANDS[command]]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    code = f"import os; os.dup2(1, 3)\n{WATCHED}"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=REPO, capture_output=True, text=True)
    output, _, loaded = done.stdout.partition("\n")
    assert output and not loaded.strip(), f"{output} comes after {loaded}"
