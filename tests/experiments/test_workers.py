"""Workers of one process and their commands: however they end, they end together and leave nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from emo.experiments.workers import Workers
from tests.conftest import REPO
from tests.helpers.launching import wait_for

# Two workers, each at a shell that has started another program and waits for it.
SWEEP = """
import itertools, os, sys
from emo.experiments.workers import StoppedError, Workers
workers, number = Workers(), itertools.count()

def work():
    path = f"{sys.argv[1]}/{next(number)}"
    command = f"sleep 600 & echo $$ $! > {path}.part; mv {path}.part {path}; wait"
    workers.run(["sh", "-c", command], sys.stdout.buffer, dict(os.environ))

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
    workers, codes = Workers(), []
    first = iter([True, False])

    def work() -> None:
        with (tmp_path / "log").open("ab") as output:
            if next(first):
                wait_for(lambda: (tmp_path / "begun").exists(), "other worker")
                raise ValueError("the first fails")
            command = f"touch {tmp_path}/begun; sleep 1; exit 3"
            codes.append(workers.run(["sh", "-c", command], output, dict(os.environ)))
            codes.append(workers.run(["true"], output, dict(os.environ)))

    with pytest.raises(ValueError, match="the first fails"):
        workers.together(work, 2)
    assert codes == [3]


def leashed(*command: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "emo.experiments.workers", str(os.getpid()), *command]
    return subprocess.Popen(words, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_leash_ends_as_its_command_does() -> None:
    for command, code in (["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -KILL $$"], 137), (["/nowhere"], 2):
        process = leashed(*command)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code and output.count("\n") == (code == 2)
