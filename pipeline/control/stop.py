"""Stop requests: a signal, a file named STOP in the run directory, a time limit, or a launcher that died.

The launch script starts a `SignalWatch` before it imports large libraries, because imports take seconds,
loading a large model takes minutes, and a request may arrive at any time. So this module needs the standard
library only. A request's effect depends on the phase of the rank:

starting   (no process group yet) the rank exits at once
loading    the ranks agree on the request before the first step, but exit at once if the launcher died
training   the ranks agree on the step after which they save and exit (engine/totals.py)
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import itertools
import os
import signal
import socket
import threading
import time
from pathlib import Path

from emo.common.errors import ExitCode

from .run_dir import STOP

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PARENT_DIED = signal.SIGUSR2  # sent by the kernel
LIBC = ctypes.CDLL(None)
TICK = 0.2  # seconds between two checks of the launchers
KILL_AFTER = 30.0  # seconds from the signal that a launcher passes on to its SIGKILL, unless it has an option
MARGIN = 10.0  # seconds before that SIGKILL in which a rank kills its launcher instead
REPORTS = "PIPELINE_RANK_REPORTS"  # a directory; set by launch/supervise.py and train.sbatch
CONSOLE = "PIPELINE_CONSOLE"  # name of the socket that gives ranks the standard output (output.py)
SUPERVISOR = "PIPELINE_SUPERVISOR"  # process of launch/supervise.py
CALLED = "PIPELINE_COMMAND"  # the console script that the user gave; set by launch/supervise.py
HARDWARE = "hardware"  # code of a FailureError that a device of this host caused
CHOSEN_PORT = "PIPELINE_PORT"  # where ranks meet, if launch/supervise.py and not the user chose it

EARLY = "stopped (%s) before the run was opened"
RESUME = "run the same command again to resume"

STARTING, LOADING, TRAINING = range(3)


def leave_early() -> None:
    """Make requests exit with STOPPED. For processes that start ranks, until they set other handlers."""

    def leave(number: int, _: object) -> None:
        os.write(2, f"{EARLY % signal.Signals(number).name}; {RESUME}\n".encode())
        os._exit(ExitCode.STOPPED)

    for number in REQUESTS:
        signal.signal(number, leave)


class SignalWatch:
    """Notices requests to stop this rank, and the death of the processes that started it.

    Start one per process, from the main thread before any other thread. It blocks the signals in this thread
    and so in all later ones. Its own thread takes them from the queue. That thread learns who sent a signal,
    and does not wait for the main thread, which may be inside a long collective.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.launcher_gone = False
        self.advanced = False  # whether a step was taken, after which failures are worth another start
        self._phase = STARTING
        self._report = _open_report()
        self._blamed_node = ""
        self._kill_at: float | None = None  # when to kill the launcher, before it kills this rank
        # A torchrun with restarts stops ranks that wait for a lost node. Only torchrun can start them again.
        self._restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
        signal.pthread_sigmask(signal.SIG_BLOCK, [*REQUESTS, PARENT_DIED])
        die_with_parent(PARENT_DIED)
        self._launchers = find_launchers()
        self._orphan = _is_orphan(self._launchers)
        threading.Thread(target=self._run, name="stop requests", daemon=True).start()

    def enter_group(self) -> None:
        """Start the phase `loading`: the rank has joined the process group."""
        self._phase = LOADING

    def enter_training(self) -> None:
        """Start the phase `training`, in which there is something to save."""
        self._phase = TRAINING

    def blame_node(self) -> None:
        """Report a failed device. train.sbatch then excludes this node from the next start."""
        self._blamed_node = f" {node_name()}"

    def report_exit(self, code: int) -> None:
        """Write this rank's exit code to its report, if there is one."""
        if self._report is not None:
            os.pwrite(self._report, f"{os.getpid()} {int(code)}{self._blamed_node}\n".encode(), 0)

    @property
    def is_in_group(self) -> bool:
        """Return whether the rank has joined the process group."""
        return self._phase > STARTING

    @property
    def reason(self) -> str | None:
        """Return why to stop, or None."""
        return self.signal or ("the launcher is gone" if self.launcher_gone else None)

    def _run(self) -> None:
        while True:
            info = signal.sigtimedwait([*REQUESTS, PARENT_DIED], TICK)
            if info is not None and info.si_signo in REQUESTS:
                self._handle_request(info)
            self._check_launchers()
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._kill_at = None
                self._kill_launcher()

    def _handle_request(self, info: signal.struct_siginfo) -> None:
        name = signal.Signals(info.si_signo).name
        self.signal = self.signal or name
        if self._phase == STARTING:
            self._exit(EARLY % name)
        if info.si_pid == self._launchers[0] and self._kill_at is None and not self._restarts:
            self._kill_at = time.monotonic() + _grace_seconds(command_line(info.si_pid))

    def _check_launchers(self) -> None:
        parent_gone = os.getppid() != self._launchers[0]
        pairs = itertools.pairwise(self._launchers)
        gone = parent_gone or any(_parent(child) not in (pid, None) for child, pid in pairs)
        if self.launcher_gone or not (gone or self._orphan):
            return
        self.launcher_gone = True
        if parent_gone:
            self._end_deepspeed()  # which takes a launch.py that a signal killed for a success
        if self._phase < TRAINING:
            self._exit("the launcher is gone, and there is nothing to save")

    def _kill_launcher(self) -> None:
        """Kill the launcher before it kills this rank in the middle of a long step or save.

        Not if another rank of this host has died: then the launcher is right, because this rank waits for it.
        """
        parent = os.getppid()
        command = command_line(parent)[:5]
        modules = {"deepspeed.launcher.launch", "torch.distributed.run"}
        is_launcher = any(part in modules or Path(part).name == "torchrun" for part in command)
        if self._phase < TRAINING or parent != self._launchers[0] or not is_launcher:
            return
        import psutil

        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        with contextlib.suppress(psutil.Error):
            siblings = psutil.Process(parent).children()
            if sum(p.status() != psutil.STATUS_ZOMBIE for p in siblings) < ranks:
                return
        _print(f"{self.signal}: this step takes longer than the launcher waits; the ranks save without it")
        self._end_deepspeed()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(parent, signal.SIGKILL)

    def _end_deepspeed(self) -> None:
        if len(self._launchers) > 1 and _is_deepspeed(self._launchers[1]):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._launchers[1], signal.SIGTERM)

    def _exit(self, why: str) -> None:
        _print(f"{why}; exit code {ExitCode.STOPPED}; {RESUME}")
        self.report_exit(ExitCode.STOPPED)
        os._exit(ExitCode.STOPPED)


class StopRequest:
    """All the ways to request a stop of a run."""

    def __init__(self, run_dir: Path, minutes: float | None, watch: SignalWatch) -> None:
        """minutes: limit of this launch's duration."""
        self.file = run_dir / STOP
        self.watch = watch
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def reason(self) -> str | None:
        """Return why to stop, or None. Cheap enough for every step."""
        if self.watch.reason is not None:
            return self.watch.reason
        if self._deadline is not None and time.monotonic() > self._deadline:
            return "the time limit train.max_minutes"
        if self.file.exists():
            return f"the file {self.file}"
        return None


def find_launchers() -> list[int]:
    """Return the processes that started this one and that the run depends on, nearest first.

    The first is the parent. If it is DeepSpeed's launch.py, the `deepspeed` command follows, which passes no
    signals on and leaves the ranks running if it is killed, and then launch/supervise.py, if it runs.
    """
    pids = [os.getppid()]
    if "deepspeed.launcher.launch" in command_line(pids[0]):
        pids.append(_parent(pids[0]) or 1)
        if REPORTS in os.environ and _is_deepspeed(pids[1]):
            pids.append(_parent(pids[1]) or 1)
    return pids


def _is_orphan(launchers: list[int]) -> bool:
    """Return whether a launcher died before this process looked for it."""
    if len(launchers) == 1:
        return "CROSS_RANK" in os.environ  # set by DeepSpeed's launch.py
    if not _is_deepspeed(launchers[1]):
        return launchers[1] == 1 or REPORTS in os.environ
    return len(launchers) > 2 and str(launchers[2]) != os.environ.get(SUPERVISOR)


def _is_deepspeed(pid: int) -> bool:
    """Return whether a process is the `deepspeed` command."""
    names = {"deepspeed", "ds", "deepspeed.launcher.runner"}
    return any(Path(part).name in names for part in command_line(pid)[:3])


def _grace_seconds(launcher: list[str]) -> float:
    """Return how long a rank may continue after a request before it must kill its launcher.

    DeepSpeed's launch.py kills ranks after KILL_AFTER, torchrun after its --shutdown-timeout. `launcher` is a
    command line.
    """
    seconds = KILL_AFTER
    if "deepspeed.launcher.launch" not in launcher:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        names = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        default = next((os.environ[name] for name in names if name in os.environ), KILL_AFTER)
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=float, default=default)
        seconds = parser.parse_known_args(launcher)[0].shutdown_timeout
    return max(seconds - MARGIN, seconds / 2)


def command_line(pid: int) -> list[str]:
    """Return the command line of a process, empty if it has ended."""
    with contextlib.suppress(OSError):
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    return []


def _parent(pid: int) -> int | None:
    """Return the parent of a process: 0 if it has ended, None if its parent cannot be read now."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:  # too many open files, for example
        return None


def node_name() -> str:
    """Return the scheduler's name of this host."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("NODE_NAME") or socket.gethostname()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends."""
    with contextlib.suppress(AttributeError):  # systems other than Linux
        LIBC.prctl(1, int(number))  # PR_SET_PDEATHSIG


def _open_report() -> int | None:
    """Open this rank's report for launch/supervise.py and lock it while the rank lives. None without REPORTS.

    train.sbatch reads only the exit code, so its file system may lack locks.
    """
    directory = os.environ.get(REPORTS)
    if directory is None or not Path(directory).is_dir():
        return None
    report = os.open(f"{directory}/rank-{os.environ.get('RANK', '0')}", os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):
        fcntl.flock(report, fcntl.LOCK_EX)
    os.pwrite(report, f"{os.getpid()}\n".encode(), 0)
    return report


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # Ctrl-C may have ended the reader of a pipe, too
        os.write(2, f"{text}\n".encode())
