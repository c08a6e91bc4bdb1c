"""Stop requests: a signal, or a file named STOP in the run directory.

A request only sets a flag. The trainer shares the flag over all ranks at each step (see engine.py), so that
they agree on the step at which they save once and end with `EXIT_STOPPED`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

# sysexits' EX_TEMPFAIL: nothing is wrong; run the same command again to go on.
EXIT_STOPPED = 75


class StopRequest:
    """Whether this process has been asked to stop."""

    def __init__(self, run_dir: Path) -> None:
        self.file = run_dir / "STOP"
        self.signal: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name

    @property
    def reason(self) -> str | None:
        """Why to stop, or None."""
        if self.signal is not None:
            return self.signal
        return f"the file {self.file}" if self.file.exists() else None
