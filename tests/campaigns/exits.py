"""Measure the exit code that the user sees for every launcher, victim and signal.

    python -m tests.campaigns.exits [--parts deepspeed script torchrun python] [--only TEXT]

A run on two CPU ranks (one with `python`) is disturbed while it trains, while it starts, or in the middle of
a step that takes longer than a launcher waits. The campaign measures the exit code of the command, whether
all its processes ended, and whether the current step was saved. It prints the table behind
docs/reference/exit-codes.md and writes runs/exits.json. It exits with code 1 if an unfinished run exits with
code 0, loses a step that it could have saved, or leaves a process behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from emo.pipeline.control.run_dir import checkpoints, step_of
from tests.campaigns.campaign import Campaign, conduct
from tests.helpers import launching

LONG = ["train.max_steps=100000", "train.lr_scheduler_type=constant", "train.save_steps=0"]
LAUNCHERS = ["deepspeed", "script", "torchrun", "python"]
# Launchers, victim, signals and moment. `terminal` is the foreground process group, as for Ctrl-C. `command`
# is the user's command. NCCL's watchdog sends ABRT. A `slow` step takes longer than launchers wait.
CELLS = [
    ("deepspeed script torchrun", "terminal", "INT", "training"),
    ("deepspeed script torchrun", "command", "TERM USR1 KILL", "training"),
    ("deepspeed script torchrun", "rank 1", "TERM USR1 KILL", "training"),
    ("script", "rank 1", "ABRT", "training"),
    ("script", "deepspeed", "TERM KILL", "training"),
    ("deepspeed script", "launch.py", "TERM KILL", "training"),
    ("deepspeed script", "rank 0", "KILL", "training"),
    ("deepspeed script torchrun", "terminal", "INT", "slow"),
    ("deepspeed script", "command", "KILL", "starting"),
    ("deepspeed script", "rank 1", "TERM USR1", "starting"),
    ("python", "command", "INT TERM USR1 KILL", "training"),
    ("python", "command", "TERM USR1", "starting"),
]


def cells(name: str) -> Iterator[tuple[str, signal.Signals, str]]:
    for launchers, victim, signals, when in CELLS:
        if name in launchers.split():
            for word in signals.split():
                yield victim, signal.Signals[f"SIG{word}"], when


def newest(run_dir: Path) -> int:
    return max((step_of(directory) for directory in checkpoints(run_dir)), default=0)


def start(name: str, run_dir: Path, *settings: str) -> subprocess.Popen[str]:
    """Start a run with a launcher, on a free port."""
    command = [str(launching.BIN / name), "launch/continual.sh"]
    if name == "deepspeed":
        command = launching.launch_command(2)
    elif name == "script":
        command = launching.train_command(2)
    elif name == "torchrun":
        command[1:1] = ["--nproc-per-node=2", f"--master-port={launching.free_port()}"]
    command += [str(run_dir.parent / "recipe.yaml"), f"output_dir={run_dir}", *settings]
    return launching.popen(command, stdout=run_dir.with_suffix(".log").open("a"))


def disturb(
    process: subprocess.Popen[str], run_dir: Path, victim: str, number: signal.Signals, when: str
) -> tuple[int, bool, float, float]:
    """Send a signal to a run and wait for its end.

    Return the exit code as a shell shows it, whether a step was saved after the signal, the seconds until
    the command returned, and the seconds until its last process was gone.
    """
    if when == "starting":
        alone = run_dir.name.startswith("python")
        launching.wait_for(lambda: alone or launching.member(run_dir, "rank 1"), "rank 1")
        time.sleep(1.5)  # now the launch script is importing modules
    else:
        launching.wait_for_step(run_dir, 2)
    with launching.slow_step(run_dir) if when == "slow" else contextlib.nullcontext():
        if victim == "terminal":
            os.killpg(process.pid, number)
        else:
            member = process if victim == "command" else launching.member(run_dir, victim)
            assert member is not None, f"no {victim}"
            member.send_signal(number)
    begun, before = time.monotonic(), newest(run_dir)
    code = process.wait(300)
    after = time.monotonic() - begun
    launching.wait_until_gone(run_dir)
    return code if code >= 0 else 128 - code, newest(run_dir) > before, after, time.monotonic() - begun


def measure(name: str, directory: Path, only: str, show: Campaign) -> None:
    code = start(name, directory / f"mistake-{name}", "train.learning_rate=-1").wait(120)
    show(name, "a mistake in the recipe", f"exit code {code}", code == 2 or name == "torchrun")
    for victim, number, when in cells(name):
        case = f"{number.name} to {victim}, {when}"
        if only not in case:
            continue
        run_dir = directory / f"{name}-{victim}-{number.name}-{when}".replace(" ", "")
        try:
            process = start(name, run_dir, *LONG)
            code, saved, after, quiet = disturb(process, run_dir, victim, number, when)
        finally:
            for item in launching.processes_of(run_dir):
                item.kill()
        words = f"exit code {code} after {after:.0f} s, all ended after {quiet:.0f} s"
        lost = when != "starting" and number.name not in ("SIGKILL", "SIGABRT") and not saved
        show(name, case, words + (", saved" if saved else ""), code != 0 and not lost)


def exits(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    launching.tiny_recipe(directory)
    for name in args.parts:
        measure(name, directory, args.only, show)


if __name__ == "__main__":
    sys.exit(conduct("exits", exits, __doc__, parts=LAUNCHERS, only=""))
