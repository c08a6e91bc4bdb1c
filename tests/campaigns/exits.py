"""Which exit code the user sees: every launcher, every victim, every signal, measured.

    python -m tests.campaigns.exits [--launchers deepspeed script torchrun python] [--only TEXT]

A run on two CPU ranks is disturbed while it trains, while it starts, or in the middle of a step that takes
longer than a launcher waits. Measured are the exit code of the command, whether all its processes ended, and
whether the step under way was saved. Prints the table behind docs/operations.md, writes runs/exits.json, and
exits 1 when a run that did not finish ended with 0, lost what it could have saved, or left a process behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from emo.pipeline.run_dir import checkpoints, step_of
from tests.campaigns.campaign import Campaign, options
from tests.helpers import launching

LONG = ["train.max_steps=100000", "train.lr_scheduler_type=constant", "train.save_steps=0"]
INT, TERM, USR1, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL
ABRT = signal.SIGABRT  # as NCCL's watchdog
# Victim, signals and moment. `terminal` is the foreground process group, as for Ctrl-C; `command` is what the
# user started. A `slow` step takes longer than launchers wait before they kill.
HIT = (TERM, USR1, KILL)
COMMON = [("terminal", (INT,), "training"), ("command", HIT, "training"), ("rank 1", HIT, "training")]
BELOW = [("launch.py", (TERM, KILL), "training"), ("rank 0", (KILL,), "training")]
SLOW = [("terminal", (INT,), "slow")]
STARTING = [("command", (KILL,), "starting"), ("rank 1", (TERM, USR1), "starting")]
SCRIPT = [("rank 1", (ABRT,), "training"), ("deepspeed", (TERM, KILL), "training")]
CELLS = {
    "deepspeed": [*COMMON, *BELOW, *SLOW, *STARTING],
    "script": [*COMMON, *SCRIPT, *BELOW, *SLOW, *STARTING],
    "torchrun": [*COMMON, *SLOW],
    "python": [("command", (INT, *HIT), "training"), ("command", (TERM, USR1), "starting")],
}


Outcome = tuple[int, bool, float, float]


def command(name: str) -> list[str]:
    """Return a launcher's command without arguments, on a port that nobody else uses."""
    if name == "deepspeed":
        return launching.launch_command(2)
    if name == "script":
        return launching.script_command(2)
    if name == "python":
        return [str(launching.BIN / "python"), "launch/continual.sh"]
    torchrun = [str(launching.BIN / "torchrun"), "--nproc-per-node=2"]
    return [*torchrun, f"--master-port={launching.free_port()}", "launch/continual.sh"]


def newest(run_dir: Path) -> int:
    return max((step_of(directory) for directory in checkpoints(run_dir)), default=0)


def start(name: str, run_dir: Path, *settings: str) -> subprocess.Popen[str]:
    arguments = [str(run_dir.parent / "recipe.yaml"), f"output_dir={run_dir}", *settings]
    return launching.popen([*command(name), *arguments], stdout=run_dir.with_suffix(".log").open("a"))


def disturb(name: str, home: Path, victim: str, number: signal.Signals, when: str) -> Outcome:
    """Send a run a signal; see how it ends.

    Returns its exit code as a shell shows it, whether a step was saved after the signal, and seconds until
    the command returned, and until its last process was gone.
    """
    run_dir = home / f"{name}-{victim}-{number.name}-{when}".replace(" ", "")
    process = start(name, run_dir, *LONG)
    try:
        if when == "starting":
            launching.wait_for(lambda: name == "python" or launching.member(run_dir, "rank 1"), "rank 1")
            time.sleep(1.5)  # past the first lines of the launch script, in its imports
        else:
            launching.wait_for_step(run_dir, 2)
        with launching.slow_step(run_dir) if when == "slow" else contextlib.nullcontext():
            if victim == "terminal":
                os.killpg(process.pid, number)
            elif victim == "command":
                process.send_signal(number)
            else:
                member = launching.member(run_dir, victim)
                assert member is not None, f"no {victim}"
                member.send_signal(number)
        begun, before = time.monotonic(), newest(run_dir)
        code = process.wait(300)
        after = time.monotonic() - begun
        launching.wait_until_gone(run_dir)
        saved = newest(run_dir) > before
        return code if code >= 0 else 128 - code, saved, after, time.monotonic() - begun
    finally:
        for item in launching.processes_of(run_dir):
            item.kill()


def measure(name: str, home: Path, only: str, show: Campaign) -> None:
    code = start(name, home / f"mistake-{name}", "train.learning_rate=-1").wait(120)
    show(name, "a mistake in the recipe", f"exit code {code}", code == 2 or name == "torchrun")
    for victim, numbers, when in CELLS[name]:
        for number in numbers:
            case = f"{number.name} to {victim}, {when}"
            if only not in case:
                continue
            code, saved, after, quiet = disturb(name, home, victim, number, when)
            words = f"exit code {code} after {after:.0f} s, all ended after {quiet:.0f} s"
            lost = when != "starting" and number not in (KILL, ABRT) and not saved
            show(name, case, words + (", saved" if saved else ""), code != 0 and not lost)


def main() -> int:
    parser = options(__doc__)
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
