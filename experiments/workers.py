"""The workers of one sweep process: threads that run commands, and that all end together.

When one fails, the others finish the command that they are at. When the sweep is asked to stop, so are their
commands, and all are waited for.

    python -m emo.experiments.workers PID COMMAND...

is what they start: a command in a process group of its own. SIGTERM and SIGINT become a SIGTERM to the whole
group, so that trainers save; what is left of it after GRACE seconds, or at a second signal, is killed. When
the process PID, which waits for it, is gone, the group is killed at once: nothing stands beside what the same
command starts anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import FrameType
from typing import IO

import psutil

from emo.common.errors import ExitCode
from emo.pipeline.stop import die_with_parent

TICK = 0.1  # seconds
GRACE = 60.0


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
        """Call `work` in `count` threads; for the main thread alone.

        Raises the first error of any of them, or StoppedError after a SIGTERM, once all have ended.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_IGN)  # commands that save what they have are not hurried
            raise StoppedError

        errors: list[BaseException] = []
        previous = signal.signal(signal.SIGTERM, stop)
        try:
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
        finally:
            signal.signal(signal.SIGTERM, previous)
        if errors:
            raise errors[0]

    def run(self, command: list[str], output: IO[bytes], environment: dict[str, str]) -> int:
        """Return the exit code of a command. Raises EndedError when it was not begun, or was asked to end."""
        with self._lock:
            self.wait(0)
            process = subprocess.Popen(
                [sys.executable, "-m", "emo.experiments.workers", str(os.getpid()), *command],
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


def main(argv: list[str]) -> int:
    """Return the exit code of the command; as in shells, 128 and the number of the signal that killed it."""
    parent, command = int(argv[0]), argv[1:]
    requests: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: requests.append(number))
    try:
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)
    except OSError as error:
        print(f"error: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return ExitCode.MISTAKE

    def lives() -> bool:
        """Return whether a process of the group has not ended."""
        for process in psutil.process_iter(["status"]):
            with contextlib.suppress(OSError):
                if os.getpgid(process.pid) == child.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    return True
        return False

    deadline, orphaned = None, False
    while child.poll() is None or (deadline is not None and lives()):
        orphaned = orphaned or os.getppid() != parent
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if deadline is None and (requests or orphaned):
                deadline = time.monotonic() + GRACE
                os.killpg(child.pid, signal.SIGTERM)
            if deadline is not None and (orphaned or len(requests) > 1 or time.monotonic() > deadline):
                os.killpg(child.pid, signal.SIGKILL)
        time.sleep(TICK)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
