"""The one command: every word leads to a room, which says a first word before it loads what takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from emo.__main__ import COMMANDS, main
from tests.conftest import REPO


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"train"}))  # which becomes another program
def test_every_command_answers_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(main([command, "--help"]))
    assert not end.value.code
    assert "usage: emo " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("prepar", "prepare"),
        ("prepare x --wrkers 3", "--workers"),
        ("sweep oracle.yaml --dry-rnu", "--dry_run"),
    ],
)
def test_a_mistake_is_answered_with_what_is_nearest(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(main(words.split()))
    assert end.value.code == 2
    assert f"{meant}?" in capsys.readouterr().err


def test_without_the_packages_a_line_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "emo", "--version"],  # -S: no site-packages
        env={"PATH": os.environ["PATH"]},
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


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
LINES = {
    "prepare": ["prepare", RECIPE],
    "sniff": ["sniff", "DIR/a.csv"],
    "plan": ["plan", RECIPE, "--gpus", "8xA100-80G"],
    "score": ["score", RECIPE, "--model", "DIR"],
    "report": ["report", "DIR/run"],
    "eval": ["eval", "--model", "DIR", "--data", "DIR", "--tasks", "sst2"],
    "generate": ["generate", "--model", "DIR", "--data", "DIR"],
    "quality": ["quality", "DIR"],
}


@pytest.mark.parametrize("command", LINES)
def test_the_first_word_comes_before_the_libraries(tmp_path: Path, command: str) -> None:
    words = [word.replace("DIR", str(tmp_path)) for word in LINES[command]]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    code = f"import os; os.dup2(1, 3)\n{WATCHED}"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=REPO, capture_output=True, text=True)
    output, _, loaded = done.stdout.partition("\n")
    assert output and not loaded.strip(), f"{output} comes after {loaded}"
