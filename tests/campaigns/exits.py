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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.run_dir import checkpoints, step_of
from tests.campaigns.campaign import Campaign
from tests.helpers import launching

PYTHON = str(launching.BIN / "python")
LONG = ["train.steps=100000", "train.schedule=constant", "train.save_every=0"]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL]


def commands(names: list[str]) -> dict[str, tuple[Callable[[], list[str]], list[str]]]:
    """Each launcher's command without arguments, and the victims below it."""
    ranks = ["rank 0", "rank 1"]
    torchrun = [str(launching.BIN / "torchrun"), "--nproc-per-node=2"]
    known: dict[str, tuple[Callable[[], list[str]], list[str]]] = {
        "deepspeed": (lambda: launching.launch_command(2), ["terminal", "command", "launch.py", *ranks]),
        "script": (
            lambda: launching.script_command(2),
            ["terminal", "command", "deepspeed", "launch.py", *ranks],
        ),
        "torchrun": (
            lambda: [*torchrun, f"--master-port={launching.free_port()}", "launch/continual.sh"],
            ["terminal", "command", *ranks],
        ),
        "python": (lambda: [PYTHON, "launch/continual.sh"], ["command"]),
    }
    return {name: known[name] for name in names if name in known}


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
        arguments = [str(run_dir.parent / "recipe.yaml"), f"run_dir={run_dir}", *options]
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


def disturb(name: str, make: Callable[[], list[str]], home: Path, victim: str, number: int, when: str) -> End:
    """One cell: a run in its second life, or in its first when it is hit while it starts."""
    run_dir = home / f"{name}-{victim}-{signal.Signals(number).name}-{when}".replace(" ", "")
    slow = ["train.batch=12000"] if when == "slow" else []
    run = Run(make(), run_dir, *LONG, *slow)
    if when == "starting":
        launching.wait_for(lambda: name == "python" or launching.member(run_dir, "rank 1"), "rank 1")
        time.sleep(1.5)  # past the first lines of the launch script, in its imports
    elif when == "slow":
        launching.wait_for(lambda: "steps 0 to" in run.log.read_text(), "the first step")
    else:
        launching.wait_for_step(run_dir, 2)
    run.hit(victim, number)
    return run.end()


def mistake(make: Callable[[], list[str]], home: Path) -> int:
    """The exit code of a recipe with a mistake."""
    run = Run(make(), home / "mistake", "train.lr=-1")
    return run.process.wait(120)


def cells(name: str, victims: list[str]) -> Iterator[tuple[str, int, str]]:
    """Victim, signal and moment of every measurement of one launcher."""
    for victim in victims:
        for number in SIGNALS:
            if victim != "terminal" or number == signal.SIGINT:
                yield victim, number, "training"
    for victim in ("command", "launch.py", "rank 1"):
        if victim in victims:
            yield victim, signal.SIGKILL, "starting"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        yield victims[-1], number, "starting"
    if "terminal" in victims:
        yield "terminal", signal.SIGINT, "slow"


def measure(
    name: str, make: Callable[[], list[str]], victims: list[str], home: Path, only: str, show: Campaign
) -> None:
    """All cells of one launcher."""
    code = mistake(make, home)
    show(name, "a mistake in the recipe", f"exit code {code}", code == 2 or name == "torchrun")
    for victim, number, when in cells(name, victims):
        what = f"{signal.Signals(number).name} to {victim}, {when}"
        if only not in what:
            continue
        end = disturb(name, make, home, victim, number, when)
        words = f"exit code {end.code} after {end.after:.0f} s, all ended after {end.quiet:.0f} s"
        words += ", saved" if end.saved else ""
        lost = when != "starting" and number != signal.SIGKILL and not end.saved
        show(name, what, words, end.code != 0 and not lost)


def main() -> int:
    """Measure; 0 when every run that did not finish said so, saved what it could and left nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["deepspeed", "script", "torchrun", "python"]
    parser.add_argument("--launchers", nargs="+", default=names, choices=names)
    parser.add_argument("--only", default="", help="cells whose description contains this")
    args = parser.parse_args()
    show = Campaign("exits")
    with tempfile.TemporaryDirectory() as directory:
        launching.tiny_recipe(Path(directory))
        for name, (make, victims) in commands(args.launchers).items():
            measure(name, make, victims, Path(directory), args.only, show)
    return show.finish(vars(args))


if __name__ == "__main__":
    sys.exit(main())
