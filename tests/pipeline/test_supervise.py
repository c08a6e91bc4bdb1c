"""launch/supervise.py: signals reach the ranks, all ranks are waited for, the exit code is the run's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emo.common.errors import ExitCode
from emo.launch.supervise import verdict
from tests.conftest import REPO

DONE, FAILURE, MISTAKE, STOPPED = ExitCode.DONE, ExitCode.FAILURE, ExitCode.MISTAKE, ExitCode.STOPPED

# A stand-in for the `deepspeed` command and its launch.py in one: two ranks, and no thought of signals.
DEEPSPEED = """#!{python}
import os, subprocess, sys
command = [sys.executable, *(one for one in sys.argv[1:] if not one.startswith("--"))]
print("chatter of a launcher, called with", *sys.argv[1:], flush=True)
if "fail" in sys.argv:
    sys.exit("no host answers")
started = [subprocess.Popen(command, env=os.environ | {{"RANK": str(rank)}}) for rank in range(2)]
codes = [process.wait() for process in started]
sys.exit(max(code & 255 for code in codes))
"""
RANK = """
import os, sys, time
from pathlib import Path
from emo.pipeline.report.console import split
from emo.pipeline.stop import StopRequest, Watch
watch = Watch()
chatter = split()
watch.joined(); watch.trains()
stop = StopRequest(Path("."), None, watch)
os.write(1, b"chatter of a library\\n")
print("ready", flush=True)
while stop.reason is None:
    time.sleep(0.05)
time.sleep(float(sys.argv[1]))  # a slow step
watch.ended(int(sys.argv[2]))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("launcher", "ranks", "requested", "expected"),
    [
        (0, [DONE, DONE], False, DONE),
        (0, [None, None], False, FAILURE),  # launch.py was killed, and the ranks with it
        (0, [STOPPED, STOPPED], False, STOPPED),  # launch.py was killed, and the ranks saved
        (-9, [STOPPED, STOPPED], True, STOPPED),
        (1, [DONE, DONE], False, FAILURE),  # a rank on another host
        (247, [FAILURE, None], False, FAILURE),
        (1, [MISTAKE, None], False, MISTAKE),  # NCCL aborted the one that was left
        (2, [FAILURE, None], False, MISTAKE),  # a rank on another host said so
        (2, [], False, MISTAKE),  # an unknown option of deepspeed
        (-15, [], True, STOPPED),
        (0, [], False, FAILURE),  # launch.py was killed before a rank had started
        (130, [], False, FAILURE),  # deepspeed itself was interrupted: no rank has said that it saved
    ],
)
def test_the_verdict(launcher: int, ranks: list[int | None], requested: bool, expected: ExitCode) -> None:
    """A run that did not finish never ends with 0."""
    assert verdict(launcher, ranks, requested) == expected


def stand_in(directory: Path) -> None:
    (directory / "deepspeed").write_text(DEEPSPEED.format(python=sys.executable))
    (directory / "deepspeed").chmod(0o755)


class Supervised:
    """A stand-in run under the real supervisor, as a shell in a terminal starts it."""

    def __init__(self, directory: Path, slow: float, code: int) -> None:
        stand_in(directory)
        (directory / "rank.py").write_text(RANK)
        command = [sys.executable, "launch/supervise.py", str(directory / "rank.py"), str(slow), str(code)]
        environment = os.environ | {"PYTHONPATH": str(REPO), "PATH": f"{directory}:{os.environ['PATH']}"}
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, cwd=REPO, env=environment, start_new_session=True, **streams)
        assert self.process.stdout is not None
        output = ""
        while output.count("ready") < 2:  # two processes write; their lines may run into each other
            line = self.process.stdout.readline()
            assert line, f"it ended with {self.process.wait()}: {output}"
            output += line
        assert "chatter" not in output, "a user sees what is for users"

    def end(self, disturb: Callable[[], object]) -> tuple[int, float]:
        """Exit code and seconds after a disturbance."""
        begun = time.monotonic()
        disturb()
        self.said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, time.monotonic() - begun


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_reaches_the_ranks_and_all_are_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, which a terminal sends to the whole group, in a slow step; or the launcher is killed."""
    run = Supervised(tmp_path, slow=1, code=STOPPED)
    launcher = int(subprocess.check_output(["pgrep", "-P", str(run.process.pid)]))
    target = launcher if number == signal.SIGKILL else -run.process.pid  # a process, or its whole group
    code, seconds = run.end(lambda: os.kill(target, number))
    assert code == STOPPED
    assert seconds > 1


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    run = Supervised(tmp_path, slow=300, code=STOPPED)
    os.killpg(run.process.pid, signal.SIGINT)
    time.sleep(1)
    code, _ = run.end(lambda: os.killpg(run.process.pid, signal.SIGINT))
    assert code == FAILURE
    assert "error: killed or aborted without a word: rank 0, 1" in run.said


def test_a_launcher_that_fails_by_itself_is_heard(tmp_path: Path) -> None:
    """Its output is no chatter then: nobody else can say what was wrong."""
    stand_in(tmp_path)
    command = [sys.executable, "launch/supervise.py", "rank.py", "--master_port=1", "--", "fail"]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == FAILURE and done.stdout == ""
    assert "no host answers" in done.stderr and "called with --master_port=1 rank.py" in done.stderr


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["nowhere.yaml"], 2), (["--stps"], 2)])
def test_help_and_mistakes_are_answered_without_the_launcher(arguments: list[str], code: int) -> None:
    """Nothing that takes seconds is started: no `deepspeed` is on the path here."""
    command = [sys.executable, "launch/supervise.py", "launch/continual.sh", *arguments]
    done = subprocess.run(command, cwd=REPO, env=os.environ | {"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "usage: ./launch/continual.sh" in done.stdout + done.stderr or arguments == ["nowhere.yaml"]
    assert "is not installed" not in done.stderr
