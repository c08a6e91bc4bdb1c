"""python -m experiments.leash PID COMMAND...: a command that ends, with all that it started, when it is to.

It runs in a process group of its own. SIGTERM and SIGINT become a SIGTERM to the whole group, so that
trainers save; what is left of it after GRACE seconds, or at a second signal, is killed. When the process
PID, which waits for it, is gone, the group is killed at once: nothing stands beside what the same command
starts anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil

from common.exit_codes import ExitCode
from pipeline.stop import die_with_parent

TICK = 0.1  # seconds
GRACE = 60.0


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
    deadline, orphaned = None, False
    while child.poll() is None or (deadline is not None and _lives(child.pid)):
        orphaned = orphaned or os.getppid() != parent
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if deadline is None and (requests or orphaned):
                deadline = time.monotonic() + GRACE
                os.killpg(child.pid, signal.SIGTERM)
            if deadline is not None and (orphaned or len(requests) > 1 or time.monotonic() > deadline):
                os.killpg(child.pid, signal.SIGKILL)
        time.sleep(TICK)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _lives(group: int) -> bool:
    """Return whether a process of the group has not ended."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
