"""Workers of one process and their commands: however they end, they end together and leave nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from experiments.crew import Crew
from tests.conftest import REPO
from tests.helpers.launching import wait_for

# Two workers, each at a shell that has started another program and waits for it.
SWEEP = """
import itertools, os, pathlib, sys
from experiments.crew import Crew, StoppedError, stoppable
crew, number = Crew(), itertools.count()

def work():
    place = f"{sys.argv[1]}/{next(number)}"
    command = f"sleep 600 & echo $$ $! > {place}.part; mv {place}.part {place}; wait"
    crew.run(["sh", "-c", command], sys.stdout.buffer, dict(os.environ))

try:
    with stoppable():
        crew.together(work, 2)
except StoppedError:
    sys.exit(75)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9), (signal.SIGINT, -2)]
)
def test_nothing_outlives_the_sweep(tmp_path: Path, number: int, code: int) -> None:
    command = [sys.executable, "-c", SWEEP, str(tmp_path)]
    process = subprocess.Popen(
        command,
        cwd=REPO,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(lambda: all((tmp_path / name).exists() for name in "01"), "commands of two workers")
    children = [int(pid) for name in "01" for pid in (tmp_path / name).read_text().split()]
    assert len(children) == 4 and all(map(psutil.pid_exists, children))
    os.kill(process.pid, number)
    process.communicate(timeout=120)
    assert process.returncode == code
    wait_for(lambda: not any(map(lives, children)), "end of what was started")


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_others_finish_what_they_are_at(tmp_path: Path) -> None:
    """The first worker fails; the second one's command is not cut off, and it begins no other."""
    crew, done = Crew(), []
    first = iter([True, False])

    def work() -> None:
        with (tmp_path / "log").open("ab") as output:
            if next(first):
                wait_for(lambda: (tmp_path / "begun").exists(), "other worker")
                raise ValueError("the first fails")
            command = f"touch {tmp_path}/begun; sleep 1; exit 3"
            done.append(crew.run(["sh", "-c", command], output, dict(os.environ)))
            done.append(crew.run(["true"], output, dict(os.environ)))

    with pytest.raises(ValueError, match="the first fails"):
        crew.together(work, 2)
    assert done == [3]
