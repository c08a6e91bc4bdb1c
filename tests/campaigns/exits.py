"""Which exit code the user sees: every launcher, every victim, every signal, measured.

    python -m tests.campaigns.exits [--launchers deepspeed script torchrun python] [--only TEXT]

A run on two CPU ranks is disturbed while it trains, while it starts, or in the middle of a step that takes
longer than a launcher waits. Measured are the exit code of the command, whether all its processes ended, and
whether the step under way was saved. Prints the table behind docs/operations.md, writes runs/exits.json, and
exits 1 when a run that did not finish ended with 0, lost what it could have saved, or left a process behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from emo.pipeline.run_dir import checkpoints, step_of
from tests.campaigns.campaign import Campaign
from tests.helpers import launching

PYTHON = str(launching.BIN / "python")
LONG = ["train.max_steps=100000", "train.lr_scheduler_type=constant", "train.save_steps=0"]
INT, TERM, USR1, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL
ABRT = signal.SIGABRT  # as NCCL's watchdog
# Victim, signals and moment. `terminal` is the foreground process group, as for Ctrl-C; `command` is what the
# user started. A `slow` step takes longer than launchers wait before they kill.
COMMON = [
    ("terminal", (INT,), "training"),
    ("command", (TERM, USR1, KILL), "training"),
    ("rank 1", (TERM, USR1, KILL), "training"),
]
BELOW = [("launch.py", (TERM, KILL), "training"), ("rank 0", (KILL,), "training")]
STARTING = [("command", (KILL,), "starting"), ("rank 1", (TERM, USR1), "starting")]
SLOW = [("terminal", (INT,), "slow")]
CELLS = {
    "deepspeed": [*COMMON, *BELOW, *SLOW, *STARTING],
    "script": [
        *COMMON,
        ("rank 1", (ABRT,), "training"),
        ("deepspeed", (TERM, KILL), "training"),
        *BELOW,
        *SLOW,
        *STARTING,
    ],
    "torchrun": [*COMMON, *SLOW],
    "python": [("command", (INT, TERM, USR1, KILL), "training"), ("command", (TERM, USR1), "starting")],
}


def command(name: str) -> list[str]:
    """Each launcher's command without arguments, on a port of its own."""
    if name == "deepspeed":
        return launching.launch_command(2)
    if name == "script":
        return launching.script_command(2)
    if name == "python":
        return [PYTHON, "launch/continual.sh"]
    torchrun = [str(launching.BIN / "torchrun"), "--nproc-per-node=2"]
    return [*torchrun, f"--master-port={launching.free_port()}", "launch/continual.sh"]


class End(NamedTuple):
    """How a disturbed run ended."""

    code: int  # as a shell shows it
    saved: bool  # whether a step was saved after the disturbance
    after: float  # seconds until the command returned
    quiet: float  # seconds until its last process was gone


class Run:
    """A run that is going to be disturbed."""

    def __init__(self, command: list[str], run_dir: Path, *options: str) -> None:
        self.run_dir = run_dir
        self.log = run_dir.with_suffix(".log")
        arguments = [str(run_dir.parent / "recipe.yaml"), f"output_dir={run_dir}", *options]
        self.process = launching.popen([*command, *arguments], stdout=self.log.open("a"))

    def hit(self, victim: str, number: int) -> None:
        """Send a signal to a victim; `terminal` is the foreground process group, as Ctrl-C sends it."""
        if victim == "terminal":
            os.killpg(self.process.pid, number)
            return
        if victim == "command":
            self.process.send_signal(number)
            return
        process = launching.member(self.run_dir, victim)
        assert process is not None, f"no {victim}"
        process.send_signal(number)

    def end(self, timeout: float = 300) -> End:
        """Wait until the command and all its processes are gone."""
        begun, before = time.monotonic(), self._newest()
        code = self.process.wait(timeout)
        after = time.monotonic() - begun
        launching.wait_until_gone(self.run_dir, timeout)
        saved = self._newest() > before
        return End(code if code >= 0 else 128 - code, saved, after, time.monotonic() - begun)

    def _newest(self) -> int:
        return max((step_of(d) for d in checkpoints(self.run_dir)), default=0)


def disturb(name: str, home: Path, victim: str, number: signal.Signals, when: str) -> End:
    """One cell: how a run ended that got a signal."""
    run_dir = home / f"{name}-{victim}-{number.name}-{when}".replace(" ", "")
    run = Run(command(name), run_dir, *LONG)
    try:
        if when == "starting":
            launching.wait_for(lambda: name == "python" or launching.member(run_dir, "rank 1"), "rank 1")
            time.sleep(1.5)  # past the first lines of the launch script, in its imports
        else:
            launching.wait_for_step(run_dir, 2)
        if when == "slow":
            with launching.slow_step(run_dir):
                run.hit(victim, number)
        else:
            run.hit(victim, number)
        return run.end()
    finally:
        for process in launching.processes_of(run_dir):
            process.kill()


def mistake(name: str, home: Path) -> int:
    """The exit code of a recipe with a mistake."""
    run = Run(command(name), home / f"mistake-{name}", "train.learning_rate=-1")
    return run.process.wait(120)


def measure(name: str, home: Path, only: str, show: Campaign) -> None:
    """All cells of one launcher."""
    code = mistake(name, home)
    show(name, "a mistake in the recipe", f"exit code {code}", code == 2 or name == "torchrun")
    for victim, numbers, when in CELLS[name]:
        for number in numbers:
            case = f"{number.name} to {victim}, {when}"
            if only not in case:
                continue
            end = disturb(name, home, victim, number, when)
            words = f"exit code {end.code} after {end.after:.0f} s, all ended after {end.quiet:.0f} s"
            words += ", saved" if end.saved else ""
            lost = when != "starting" and number not in (KILL, ABRT) and not end.saved
            show(name, case, words, end.code != 0 and not lost)


def main() -> int:
    """Measure; 0 when every run that did not finish said so, saved what it could and left nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launchers", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--only", default="", help="cells whose description contains this")
    args = parser.parse_args()
    show = Campaign("exits")
    with tempfile.TemporaryDirectory() as directory:
        launching.tiny_recipe(Path(directory))
        for name in args.launchers:
            measure(name, Path(directory), args.only, show)
    return show.finish(vars(args))


if __name__ == "__main__":
    sys.exit(main())
