"""Stop requests of limits and files, and the supervisor's exit code and signals, without processes."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emo.common.errors import ExitCode
from emo.launch.supervise import Supervisor, run_exit_code
from emo.pipeline.control import stop
from emo.pipeline.control.stop import SUPERVISOR, StopRequest

DONE, FAILURE, MISTAKE, STOPPED = ExitCode.DONE, ExitCode.FAILURE, ExitCode.MISTAKE, ExitCode.STOPPED


def test_a_time_limit_and_a_file_request_a_stop(tmp_path: Path) -> None:
    watch: Any = SimpleNamespace(reason=None)  # a SignalWatch would block signals in this process
    assert StopRequest(tmp_path, 60, watch).reason is None
    assert "max_minutes" in (StopRequest(tmp_path, 1e-9, watch).reason or "")
    (tmp_path / "STOP").touch()
    assert "STOP" in (StopRequest(tmp_path, 60, watch).reason or "")


@pytest.mark.parametrize(
    ("launcher", "ranks", "requested", "expected"),
    [
        (0, [DONE, DONE], False, DONE),
        (0, [None, None], False, FAILURE),  # launch.py and the ranks were killed
        (0, [STOPPED, STOPPED], False, STOPPED),  # launch.py was killed, and the ranks saved
        (-9, [STOPPED, STOPPED], True, STOPPED),
        (1, [DONE, DONE], False, FAILURE),  # a rank on another host failed
        (247, [FAILURE, None], False, FAILURE),
        (1, [MISTAKE, None], False, MISTAKE),  # NCCL aborted the other rank
        (2, [FAILURE, None], False, MISTAKE),  # a rank on another host made a mistake
        (2, [], False, MISTAKE),  # an unknown option of deepspeed
        (-15, [], True, STOPPED),
        (0, [], False, FAILURE),  # launch.py was killed before a rank had started
        (130, [], False, FAILURE),  # deepspeed was interrupted, and no rank reports that it saved
    ],
)
def test_the_exit_code_of_a_run_follows_its_ranks(
    launcher: int, ranks: list[int | None], requested: bool, expected: ExitCode
) -> None:
    assert run_exit_code(launcher, ranks, requested) == expected


def test_a_supervisor_is_known_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process id identifies it, because the command line of `emo train` does not name supervise.py."""
    monkeypatch.setenv(SUPERVISOR, "7")
    monkeypatch.setattr(stop, "_is_deepspeed", lambda pid: True)
    assert not stop._is_orphan([9, 8, 7])
    assert stop._is_orphan([9, 8, 1])


def test_ranks_of_a_hostfile_are_stopped_by_a_file(tmp_path: Path) -> None:
    """Signals do not reach them, and the launcher kills them if it gets one."""
    supervisor = Supervisor(["--hostfile=hosts"], ["launch/continual.sh"], [], tmp_path / "reports")
    ended: list[bool] = []
    supervisor._launcher = SimpleNamespace(terminate=lambda: ended.append(True))  # type: ignore[assignment]
    for run_dir in (tmp_path / "not-yet", tmp_path):
        supervisor._notified.clear()
        supervisor._pass_on(signal.SIGTERM, run_dir)
    assert ended == [True] and (tmp_path / "STOP").exists()
