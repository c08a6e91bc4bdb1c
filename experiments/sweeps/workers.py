"""Threads that run the commands of one sweep process and stop together.

If one thread fails, the others finish their current commands. When the sweep must stop, it stops its commands
and waits for them.

    python -m emo.experiments.sweeps.workers PID COMMAND...

runs a command in its own process group. SIGTERM and SIGINT are passed on to the group as SIGTERM, so that
trainers save. The group is killed after GRACE seconds, at a second signal, or when its parent PID is gone.
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

import pynvml

from emo.common.errors import ExitCode, UserError
from emo.common.text import counted
from emo.pipeline.control.stop import die_with_parent

TICK = 0.1  # seconds
GRACE = 60.0


class StoppedError(BaseException):
    """The sweep must stop. Like KeyboardInterrupt, it is not caught by handlers of Exception."""


class PoolClosedError(Exception):
    """This thread must not start further commands, because another one failed or the sweep stops."""


class CommandPool:
    """Threads that run commands and stop together. Each thread has different GPUs.

    ranks: GPUs of a thread, on a host with GPUs.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._gpus: list[str] = []  # of all threads
        self._thread = threading.local()
        self._closed = threading.Event()  # no further command starts
        self._stopped = threading.Event()  # running commands are stopped

    def divide_gpus(self, count: int) -> None:
        """Give `count` threads different GPUs. Raises UserError if this host has too few.

        On a host without GPUs, or without this call, commands get no GPUs.
        """
        self._gpus = visible_gpus()
        if self._gpus and len(self._gpus) < count * self._ranks:
            needed = f"--jobs {count} and {counted(self._ranks, 'GPU')} per run"
            problem = f"{needed} need {count * self._ranks} GPUs, and {len(self._gpus)} can be used here"
            raise UserError(f"{problem}. Lower --jobs or `ranks`", code="option-value")

    def run_threads(self, work: Callable[[], None], count: int) -> None:
        """Call `work` in `count` threads, from the main thread.

        Raises the first error of a thread, or StoppedError after a SIGTERM, when all threads have ended.
        """

        def start(number: int) -> None:
            self._thread.gpus = self._gpus[number * self._ranks :][: self._ranks]
            work()

        def stop(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_IGN)  # a repeated signal must not cut off the commands
            raise StoppedError

        previous = signal.signal(signal.SIGTERM, stop)
        try:
            with ThreadPoolExecutor(count) as pool:
                futures = [pool.submit(start, number) for number in range(count)]
                try:
                    wait(futures, return_when=FIRST_EXCEPTION)
                    self._closed.set()
                    wait(futures)
                except BaseException:
                    self._closed.set()
                    self._stopped.set()
                    raise
        finally:
            signal.signal(signal.SIGTERM, previous)
        for error in (future.exception() for future in futures):
            if error is not None and not isinstance(error, PoolClosedError):
                raise error

    @property
    def gpus(self) -> list[str]:
        """The GPUs of this thread, none on a host without GPUs."""
        return getattr(self._thread, "gpus", [])

    def run(self, command: list[str], output: IO[bytes]) -> int:
        """Run a command and return its exit code.

        Raises PoolClosedError if it was not started, or was stopped.
        """
        self.wait(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "emo.experiments.sweeps.workers", str(os.getpid()), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=command_environment() | ({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}),
            start_new_session=True,  # Ctrl-C reaches it through `run_threads` only
        )
        while process.poll() is None:
            if self._stopped.wait(TICK):
                process.terminate()
                process.wait()
                raise PoolClosedError
        return process.returncode

    def wait(self, seconds: float) -> None:
        """Wait. Raises PoolClosedError as soon as no further command may start."""
        if self._closed.wait(seconds):
            raise PoolClosedError


def visible_gpus() -> list[str]:
    """Return the numbers of the GPUs that this process may use, none without a driver."""
    if os.environ.get("DS_ACCELERATOR", "cuda") != "cuda":
        return []
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        ids = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
    except pynvml.NVMLError:
        return []
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return [str(number) for number in range(count)]
    visible = []
    for name in map(str.strip, names.split(",")):
        matching = [
            number for number, uuid in enumerate(ids) if name.startswith("GPU-") and uuid.startswith(name)
        ]
        if name.isdecimal() and int(name) < count:
            visible.append(name)
        elif len(matching) == 1:
            visible.append(str(matching[0]))
        else:  # CUDA ignores the names from the first invalid one on
            break
    return visible


def command_environment() -> dict[str, str]:
    """Return the environment of commands. Programs next to this Python come first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(argv: list[str]) -> int:
    """Run a command in its own process group. Returns its exit code, or 128 + N if signal N killed it."""
    parent = int(argv[0])
    command = argv[1:]
    requests: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: requests.append(number))
    program = sys.executable if command[0] == "python" else command[0]
    try:
        child = subprocess.Popen([program, *command[1:]], start_new_session=True, preexec_fn=die_with_parent)
    except OSError as error:
        print(f"error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return ExitCode.MISTAKE

    def signal_group(number: int) -> bool:
        """Signal the command's group, and return whether any process of it is left."""
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return False
        return True

    deadline = None
    while child.poll() is None or (deadline is not None and signal_group(0)):
        is_orphan = os.getppid() != parent
        if deadline is None and (requests or is_orphan):
            deadline = time.monotonic() + GRACE
            signal_group(signal.SIGTERM)
        if deadline is not None and (is_orphan or len(requests) > 1 or time.monotonic() > deadline):
            signal_group(signal.SIGKILL)
            break
        time.sleep(TICK)
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
