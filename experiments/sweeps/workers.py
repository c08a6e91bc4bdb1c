"""The workers of one sweep process: threads that run commands, and that all end together.

When one fails, the others finish the command that they are at. When the sweep is asked to stop, so are their
commands, and all are waited for.

    python -m emo.experiments.sweeps.workers PID COMMAND...

is what they start: a command in a process group of its own. SIGTERM and SIGINT become a SIGTERM to the whole
group, so that trainers save; what is left of it after GRACE seconds, or at a second signal, is killed. When
the process PID, which waits for it, is gone, the group is killed at once: nothing stands beside what the same
command starts anew.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType
from typing import IO

from emo.common.errors import ExitCode
from emo.pipeline.control.stop import die_with_parent

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
        self._stopped = threading.Event()  # and those that run are asked to end

    def together(self, work: Callable[[], None], count: int) -> None:
        """Call `work` in `count` threads; for the main thread alone.

        Raises the error of one of them, or StoppedError after a SIGTERM, once all have ended.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_IGN)  # commands that save what they have are not hurried
            raise StoppedError

        previous = signal.signal(signal.SIGTERM, stop)
        try:
            with ThreadPoolExecutor(count) as pool:
                futures = [pool.submit(work) for _ in range(count)]
                try:
                    wait(futures, return_when=FIRST_EXCEPTION)
                    self._over.set()
                    wait(futures)
                except BaseException:
                    self._over.set()
                    self._stopped.set()
                    raise
        finally:
            signal.signal(signal.SIGTERM, previous)
        for error in (future.exception() for future in futures):
            if error is not None and not isinstance(error, EndedError):
                raise error

    def run(self, command: list[str], output: IO[bytes]) -> int:
        """Return the exit code of a command. Raises EndedError when it was not begun, or was asked to end."""
        self.wait(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "emo.experiments.sweeps.workers", str(os.getpid()), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,  # Ctrl-C reaches it through `together` alone
        )
        while process.poll() is None:
            if self._stopped.wait(TICK):
                process.terminate()
                process.wait()
                raise EndedError
        return process.returncode

    def wait(self, seconds: float) -> None:
        """Raise EndedError as soon as no further command is to be begun."""
        if self._over.wait(seconds):
            raise EndedError


def environment() -> dict[str, str]:
    """Return the environment of commands, in which programs beside this Python come before others."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(argv: list[str]) -> int:
    """Return the exit code of the command; as in shells, 128 and the number of the signal that killed it."""
    parent, command = int(argv[0]), argv[1:]
    requests: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: requests.append(number))
    program = sys.executable if command[0] == "python" else command[0]
    try:
        child = subprocess.Popen([program, *command[1:]], start_new_session=True, preexec_fn=die_with_parent)
    except OSError as error:
        print(f"error: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return ExitCode.MISTAKE

    def sent(number: int) -> bool:
        """Send a signal to the command's group; return whether any process of it is left."""
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return False
        return True

    deadline = None
    while child.poll() is None or (deadline is not None and sent(0)):
        orphaned = os.getppid() != parent
        if deadline is None and (requests or orphaned):
            deadline = time.monotonic() + GRACE
            sent(signal.SIGTERM)
        if deadline is not None and (orphaned or len(requests) > 1 or time.monotonic() > deadline):
            sent(signal.SIGKILL)
            break
        time.sleep(TICK)
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
