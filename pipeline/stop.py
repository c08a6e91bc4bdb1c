"""Stop requests: a signal, a file named STOP in the run directory, a time limit, or a launcher that is gone.

A request only sets a flag. The trainer shares the flag over all ranks at each step (see engine.py), so that
they agree on the step at which they save once and end with `EXIT_STOPPED`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import FrameType

import psutil

from pipeline.run_dir import STOP

# sysexits' EX_TEMPFAIL: nothing is wrong; run the same command again to go on.
EXIT_STOPPED = 75


class StopRequest:
    """Whether this process has been asked to stop."""

    def __init__(self, run_dir: Path, minutes: float | None = None) -> None:
        self.file = run_dir / STOP
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._signal: str | None = None
        self._launchers = _launchers()
        self._orphaned = len(self._launchers) == 2 and self._launchers[1] == 1 and not _is_deepspeed(1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name

    @property
    def reason(self) -> str | None:
        """Why to stop, or None. Cheap enough to ask at every step."""
        if self._signal is not None:
            return self._signal
        if self._deadline is not None and time.monotonic() > self._deadline:
            return "the time limit train.max_minutes"
        if self.file.exists():
            return f"the file {self.file}"
        if self._orphaned or _launchers() != self._launchers:
            return "the launcher is gone"
        return None


def _is_deepspeed(pid: int) -> bool:
    """Whether a process is the `deepspeed` command, as it may be the first of a container."""
    with contextlib.suppress(psutil.Error):
        return any(Path(part).name == "deepspeed" for part in psutil.Process(pid).cmdline())
    return False


def _launchers() -> list[int]:
    """The process that started this one and, under DeepSpeed's launcher, the command that started that.

    The `deepspeed` command of a single node passes no signals on; killed, it would leave the ranks running.
    """
    parent = os.getppid()
    try:
        process = psutil.Process(parent)
        if "deepspeed.launcher.launch" in process.cmdline():
            return [parent, process.ppid()]
    except psutil.Error:
        pass
    return [parent]
