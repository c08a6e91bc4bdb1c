"""Stop requests: a signal, a file named STOP in the run directory, a time limit, or a launcher that is gone.

Standard library only, because the launch script starts a `Watch` before anything heavy is imported: importing
takes seconds and loading a large model minutes, and a request may arrive at any time.

What a request does depends on how far the rank is:
starting   (no process group yet) the rank ends at once; nobody waits for it but the launcher
loading    the request is noted, and the ranks agree on it before the first step; without a launcher a rank
           ends at once
training   the request is noted, and the ranks agree on the step after which they save and end (see engine.py)
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
TICK = 0.2  # seconds between looks at the launchers
KILL_AFTER = 30.0  # seconds between the signal that a launcher passes on and its SIGKILL, unless it is told
MARGIN = 10.0  # of them in which a rank ends its launcher instead
REPORTS = "PIPELINE_RANK_REPORTS"  # a directory; set by launch/supervise.py and train.sbatch
CONSOLE = "PIPELINE_CONSOLE"  # name of the socket that gives ranks the standard output (output.py)
SUPERVISOR = "PIPELINE_SUPERVISOR"  # process of launch/supervise.py
CALLED = "PIPELINE_COMMAND"  # the console script that the user gave; set by launch/supervise.py
HARDWARE = "hardware"  # the code of a FailureError whose cause is a device of this host
CHOSEN_PORT = "PIPELINE_PORT"  # where ranks meet, if launch/supervise.py and not the user chose it

EARLY = "stopped (%s) before the run was opened"
RESUME = "run the same command again to resume"

STARTING, LOADING, TRAINING = range(3)


def leave_early() -> None:
    """End at once with STOPPED on a request from now on, until other handlers take the place of these.

    For the processes that start ranks, while they import and check: nothing has begun yet.
    """

    def leave(number: int, _: object) -> None:
        os.write(2, f"{EARLY % signal.Signals(number).name}; {RESUME}\n".encode())
        os._exit(ExitCode.STOPPED)

    for number in REQUESTS:
        signal.signal(number, leave)


class Watch:
    """Notices that this rank is asked to stop, or that the processes that started it are gone.

    One per process, started from the main thread before any other thread: signals are blocked here, and so in
    every thread to come, and are taken from the queue by a thread of its own, which learns who sent them and
    does not wait for the main thread, however long that is inside a collective.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.launcher_gone = False
        self.advanced = False  # whether a step was done: what fails from then on is worth another start
        self._phase = STARTING
        self._report = _open_report()
        self._blamed = ""  # the node, once a device of it has failed
        self._kill_at: float | None = None  # when the launcher is going to kill this rank, less a margin
        # A torchrun that starts ranks again stops them where a node is gone, for which they wait in vain;
        # without it nobody would start them.
        self._restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
        signal.pthread_sigmask(signal.SIG_BLOCK, [*REQUESTS, PARENT_DIED])
        die_with_parent(PARENT_DIED)
        self._chain = launchers()
        self._orphan = _born_orphan(self._chain)
        threading.Thread(target=self._run, name="stop requests", daemon=True).start()

    def enter_group(self) -> None:
        """Note that the rank is in the process group: from now on a request is agreed on."""
        self._phase = LOADING

    def enter_training(self) -> None:
        """Note that the first step is next: from now on there is something to save."""
        self._phase = TRAINING

    def blame_node(self) -> None:
        """Report that a device of this node has failed: train.sbatch keeps the next start away from it."""
        self._blamed = f" {node_name()}"

    def report_exit(self, code: int) -> None:
        """Tell whoever collects the codes of the ranks, if anybody does, how this one ended."""
        if self._report is not None:
            os.pwrite(self._report, f"{os.getpid()} {int(code)}{self._blamed}\n".encode(), 0)

    @property
    def is_in_group(self) -> bool:
        """Return whether the rank is in the process group."""
        return self._phase > STARTING

    @property
    def reason(self) -> str | None:
        """Return why to stop, or None."""
        return self.signal or ("the launcher is gone" if self.launcher_gone else None)

    def _run(self) -> None:
        while True:
            info = signal.sigtimedwait([*REQUESTS, PARENT_DIED], TICK)
            if info is not None and info.si_signo in REQUESTS:
                name = signal.Signals(info.si_signo).name
                self.signal = self.signal or name
                if self._phase == STARTING:
                    self._leave(EARLY % name)
                if info.si_pid == self._chain[0] and self._kill_at is None and not self._restarts:
                    self._kill_at = time.monotonic() + _grace(command_line(info.si_pid))
            pairs = itertools.pairwise(self._chain)
            gone = os.getppid() != self._chain[0] or any(_parent(c) not in (pid, None) for c, pid in pairs)
            if (self._orphan or gone) and not self.launcher_gone:
                self.launcher_gone = True
                if os.getppid() != self._chain[0]:
                    self._end_deepspeed()  # it takes the death of its launch.py by a signal for success
                if self._phase < TRAINING:
                    self._leave("the launcher is gone, and there is nothing to save")
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._kill_at = None
                self._outlive_launcher()

    def _outlive_launcher(self) -> None:
        """End the launcher before it kills this rank in the middle of a long step or save.

        Only if the other ranks of this host live: else it is right to end this one, which waits for them.
        """
        parent = os.getppid()
        words = command_line(parent)[:5]
        names = {"deepspeed.launcher.launch", "torch.distributed.run"}
        is_launcher = any(word in names or Path(word).name == "torchrun" for word in words)
        if self._phase < TRAINING or parent != self._chain[0] or not is_launcher:
            return
        import psutil

        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        with contextlib.suppress(psutil.Error):
            siblings = psutil.Process(parent).children()
            if sum(p.status() != psutil.STATUS_ZOMBIE for p in siblings) < ranks:
                return
        _say(f"{self.signal}: this step takes longer than the launcher waits; the ranks save without it")
        self._end_deepspeed()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(parent, signal.SIGKILL)

    def _end_deepspeed(self) -> None:
        if len(self._chain) > 1 and _is_deepspeed(self._chain[1]):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._chain[1], signal.SIGTERM)

    def _leave(self, why: str) -> None:
        _say(f"{why}; exit code {ExitCode.STOPPED}; {RESUME}")
        self.report_exit(ExitCode.STOPPED)
        os._exit(ExitCode.STOPPED)


class StopRequest:
    """The ways in which a run is asked to stop."""

    def __init__(self, run_dir: Path, minutes: float | None, watch: Watch) -> None:
        self.file = run_dir / STOP
        self.watch = watch
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def reason(self) -> str | None:
        """Return why to stop, or None. Cheap enough to ask at every step."""
        if self.watch.reason is not None:
            return self.watch.reason
        if self._deadline is not None and time.monotonic() > self._deadline:
            return "the time limit train.max_minutes"
        if self.file.exists():
            return f"the file {self.file}"
        return None


def launchers() -> list[int]:
    """Return the processes that started this one, nearest first, as far as the run depends on them.

    The parent; under DeepSpeed's launch.py also the `deepspeed` command, which passes no signals on and,
    killed, would leave the ranks running; above that launch/supervise.py, if it is there.
    """
    chain = [os.getppid()]
    if "deepspeed.launcher.launch" in command_line(chain[0]):
        chain.append(_parent(chain[0]) or 1)
        if REPORTS in os.environ and _is_deepspeed(chain[1]):
            chain.append(_parent(chain[1]) or 1)
    return chain


def _born_orphan(chain: list[int]) -> bool:
    """Return whether a launcher had died before this process could look at it."""
    if "CROSS_RANK" in os.environ and len(chain) == 1:  # DeepSpeed's launch.py sets it
        return True
    if len(chain) < 2 or _is_deepspeed(chain[1]):
        return len(chain) > 2 and os.environ.get(SUPERVISOR, "") not in ("", str(chain[2]))
    return chain[1] == 1 or REPORTS in os.environ


def _is_deepspeed(pid: int) -> bool:
    """Return whether a process is the `deepspeed` command."""
    names = {"deepspeed", "ds", "deepspeed.launcher.runner"}
    return any(Path(part).name in names for part in command_line(pid)[:3])


def _grace(launcher: list[str]) -> float:
    """Return the seconds that a rank may take for a request before its launcher, a command line, kills it.

    DeepSpeed's launch.py waits KILL_AFTER; torchrun as long as its --shutdown-timeout or environment says.
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
    """Return the command line of a process; empty when it is gone."""
    with contextlib.suppress(OSError):
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    return []


def _parent(pid: int) -> int | None:
    """Return the parent of a process; 0 when it is gone, None when it cannot be read just now."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:  # too many open files, for example
        return None


def node_name() -> str:
    """Return the name that the scheduler knows this host by."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("NODE_NAME") or socket.gethostname()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have this child process sent a signal when its parent ends, however it ends."""
    with contextlib.suppress(AttributeError):  # a system without it
        LIBC.prctl(1, int(number))  # PR_SET_PDEATHSIG


def _open_report() -> int | None:
    """Return this rank's report for launch/supervise.py, locked as long as the rank lives; None without it.

    train.sbatch reads only the code in it, so a shared file system may be without locks.
    """
    directory = os.environ.get(REPORTS)
    if directory is None or not Path(directory).is_dir():
        return None
    report = os.open(f"{directory}/rank-{os.environ.get('RANK', '0')}", os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):
        fcntl.flock(report, fcntl.LOCK_EX)
    os.pwrite(report, f"{os.getpid()}\n".encode(), 0)
    return report


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # Ctrl-C may have ended the reader of a pipe, too
        os.write(2, f"{text}\n".encode())
