"""The one command: its rooms, its mistakes, its exit codes, and a first word before what takes seconds."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import emo.data_prep.cli
import emo.eval.cli
import emo.pipeline.cli
from emo.__main__ import COMMANDS, main
from emo.common.errors import DiskFullError, FailureError, UserError, outcome
from tests.conftest import REPO


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"train"}))  # which becomes another program
def test_every_command_answers_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(main([command, "--help"]))
    assert not end.value.code
    assert "usage: emo " in capsys.readouterr().out


def test_without_the_packages_a_line_says_so() -> None:
    command = [sys.executable, "-S", "-m", "emo", "--version"]  # -S: no site-packages
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


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
    "plan": ["plan", RECIPE, "--gpus", "8xA100-80G"],
    "report": ["report", "DIR/run"],
    "eval": ["eval", "--model", "DIR", "--data", "DIR", "--tasks", "sst2"],
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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("no such key"), 2),
        (FailureError("a worker was killed"), 1),
        (DiskFullError("no space left"), 1),
        (OSError(errno.ESTALE, "Stale file handle"), 1),
        (OSError("nobody knows"), 1),
        (PermissionError(errno.EACCES, "Permission denied"), 2),
        (FileNotFoundError("not in the cache, and the hub cannot be reached"), 2),  # without a number
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1),  # of a connection: the output is still read
        (KeyboardInterrupt(), 130),
        (None, 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_command_ends_with_the_same_code_and_a_line(
    error: BaseException | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(args: object) -> int:
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr(emo.data_prep.cli, "_run", work)
    monkeypatch.setattr(emo.pipeline.cli, "_report", work)
    monkeypatch.setattr(emo.eval.cli, "_compare", work)
    monkeypatch.setattr(sys, "argv", ["eval", "compare", "a", "b"])
    assert outcome(lambda: work(None)) == code
    assert capsys.readouterr().err.count("\n") == (error is not None)
    assert emo.data_prep.cli.main(["inspect", "x"]) == code
    assert emo.pipeline.cli.main(["report", "x"]) == code
    assert emo.eval.cli.main() == code


def test_what_is_misspelt_is_answered_with_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("repot x", "report x --ovr step", "report x --out y", "report x --over stps"):
        with pytest.raises(SystemExit) as end:
            emo.pipeline.cli.main(words.split())
        assert end.value.code == 2
    meant = re.findall(r"mean (\S+)\?", capsys.readouterr().err)
    assert meant == ["report", "--over", "--output_path", "step"]


@pytest.mark.parametrize("size", [1, 10**6])  # what is written at the end, and what fails at once
def test_a_reader_that_leaves_ends_the_command_quietly(size: int) -> None:
    program = "import sys; from emo.common.errors import outcome; "
    program += f"sys.exit(outcome(lambda: print('x' * {size}) or 0))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", program], env={}, **pipes)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
