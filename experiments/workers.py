"""The workers of one sweep process: threads that run commands, and that all end together.

When one fails, the others finish the command that they are at. When the sweep is asked to stop, so are their
commands, and all are waited for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import FrameType
from typing import IO


class StoppedError(BaseException):
    """The sweep was asked to stop. Nothing is wrong: as with Ctrl-C, no handler of errors may take it."""


class EndedError(Exception):
    """This worker has nothing more to do, as another one failed or the sweep stops."""


class Workers:
    """Threads that share their end, and the commands that they are at."""

    def __init__(self) -> None:
        self._over = threading.Event()  # no further command is begun
        self._stopped = False  # and those that run were asked to end
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def together(self, work: Callable[[], None], count: int) -> None:
        """Call `work` in `count` threads. Raises the first error of any of them, once all have ended."""
        errors: list[BaseException] = []
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(work) for _ in range(count)]
            try:
                for future in as_completed(futures):
                    error = future.exception()
                    if error is not None and not isinstance(error, EndedError):
                        errors.append(error)
                        self._over.set()
            except BaseException:
                self._over.set()
                with self._lock:
                    self._stopped = True
                    for process in self._running:
                        process.terminate()
                raise
        if errors:
            raise errors[0]

    def run(self, command: list[str], output: IO[bytes], environment: dict[str, str]) -> int:
        """Return the exit code of a command. Raises EndedError when it was not begun, or was asked to end."""
        with self._lock:
            self.wait(0)
            process = subprocess.Popen(
                [sys.executable, "-m", "experiments.leash", str(os.getpid()), *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches it through `together` alone
            )
            self._running.add(process)
        code = process.wait()
        with self._lock:
            self._running.discard(process)
            if self._stopped:
                raise EndedError
        return code

    def wait(self, seconds: float) -> None:
        """Raise EndedError as soon as no further command is to be begun."""
        if self._over.wait(seconds):
            raise EndedError


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise StoppedError in the main thread when SIGTERM comes within the block."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
