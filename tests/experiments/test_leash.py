"""A command on a leash ends as it would without, and with all that it started when it is to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPO
from tests.helpers.launching import wait_for


def start(*command: str) -> subprocess.Popen[str]:
    whole = [sys.executable, "-m", "experiments.leash", str(os.getpid()), *command]
    return subprocess.Popen(whole, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", -signal.SIGKILL), ("kill -TERM $$", -signal.SIGTERM)],
)
def test_it_ends_as_its_command_does(command: str, code: int) -> None:
    process = start("sh", "-c", command)
    process.communicate(timeout=120)
    assert process.returncode == code


def test_a_command_that_is_not_there_is_one_line() -> None:
    process = start("/nowhere/program")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said == "error: /nowhere/program cannot be run: No such file or directory\n"


def test_a_second_signal_kills_what_does_not_end(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    deaf = f"trap : TERM; echo $$ > {file}.part; mv {file}.part {file}; while :; do sleep 1; done"
    process = start("sh", "-c", deaf)
    wait_for(file.exists, "start of the command")
    stubborn = psutil.Process(int(file.read_text()))
    process.terminate()
    time.sleep(0.3)  # two signals that wait to be taken are one
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert not stubborn.is_running()
