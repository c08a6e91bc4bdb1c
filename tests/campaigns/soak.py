"""Kill a run repeatedly, and damage checkpoints in every known way.

    python -m tests.campaigns.soak [--kills 20] [--seed 0] [--parts kills damage disks stops]

kills   A 2-rank ZeRO-3 run is disturbed up to --kills times at seeded random moments (while it starts,
        trains, saves or resumes), started again by the same command, and finished. The launchers `deepspeed`
        and `emo train` take turns, and VICTIMS lists the victims. Every loss must equal the undisturbed run's
        bit for bit. No unfinished launch may exit with code 0, except `deepspeed` before its ranks listen.
damage  The newest checkpoint of a run is damaged. The run must resume from the one before, and finish with
        the losses of the undisturbed run.
disks   A disk fills up while a checkpoint is written. One line must report it, and older checkpoints stay.
stops   The time of a start that resumes is compared with a cold start.

Prints a table, writes runs/soak.json, and exits with code 1 if anything was lost, wrong or hung.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from emo.pipeline.control.run_dir import (
    COMPLETE,
    EXPORT,
    HF,
    STATE,
    checkpoint_problem,
    checkpoints,
    read_metrics,
    step_of,
)
from tests.campaigns.campaign import Campaign, conduct
from tests.helpers import launching
from tests.helpers.launching import Losses, losses

# Victims are killed with -9. Ctrl-C goes to the foreground process group instead, while a step takes longer
# than the 30 seconds after which DeepSpeed's launcher kills its ranks.
EXPORTING = "everything while it exports"
CTRL_C = "Ctrl-C in a slow step"
VICTIMS = ["deepspeed", "launch.py", "rank 0", "rank 1", "everything", EXPORTING, CTRL_C]


def undisturbed(recipe: Path, run_dir: Path, *options: str) -> Losses:
    done = launching.run(2, str(recipe), f"output_dir={run_dir}", *options)
    assert done.returncode == 0, done.stdout
    return losses(run_dir)


def last_step(run_dir: Path) -> int:
    return int((read_metrics(run_dir) or [{"step": 0}])[-1]["step"])


def kills(recipe: Path, args: argparse.Namespace, show: Campaign) -> None:
    """Disturb one run repeatedly. It must end with the right losses, and each exit code must be right."""
    count, rng, run_dir = args.kills, random.Random(args.seed), recipe.parent / "killed"
    settings = [f"train.max_steps={50 * count}", "train.save_steps=5", "train.eval_rows=2"]
    expected = undisturbed(recipe, recipe.parent / "whole", *settings)
    arguments = [str(recipe), f"output_dir={run_dir}", *settings]
    resumed, slowest, honest, unheard = 0, 0.0, True, 0
    order = [victim for _ in range(count) for victim in rng.sample(VICTIMS, len(VICTIMS))][:count]
    for number, victim in enumerate(order):
        make = launching.launch_command if number % 2 else launching.train_command
        exports = f"train.export_checkpoints={str(victim == EXPORTING).lower()}"
        process, steps = launching.popen(make(2, *arguments, exports)), len(read_metrics(run_dir))
        disturb(process, run_dir, rng, victim)
        died = time.monotonic()
        output, _ = process.communicate(timeout=600)
        launching.wait_until_gone(run_dir)
        slowest = max(slowest, time.monotonic() - died)
        resumed += "resumed from" in output
        finished = (run_dir / EXPORT).is_dir()
        if process.returncode == 0 and not finished:
            # Plain `deepspeed` exits with code 0 if launch.py is killed before the ranks listen.
            early = victim == "launch.py" and make is launching.launch_command
            early = early and len(read_metrics(run_dir)) == steps
            unheard += early
            honest = honest and early
        words = f"{number + 1}: {victim} of {make.__name__}: exit code {process.returncode}"
        print(f"{words}; checkpoints {[step_of(d) for d in checkpoints(run_dir)]}", flush=True)
        if finished:
            break
    done = launching.run(2, *arguments)
    equal = done.returncode == 0 and losses(run_dir) == expected
    otherwise = f"LOSSES DIFFER {done.stdout[-600:]}"
    show("kills", f"{count} kills, {resumed} resumes", "losses bit-equal", equal, otherwise)
    words = f"none, but {unheard} of plain `deepspeed` before its ranks listen" if unheard else "none"
    show("kills", "no unfinished life ended with 0", words, honest, "one did")
    show("kills", "slowest end of all ranks after a kill", f"{slowest:.1f} s", slowest < 90)


def disturb(process: subprocess.Popen[str], run_dir: Path, rng: random.Random, victim: str) -> None:
    """Disturb a run while it starts, some time after this launch's first step, or in an export.

    All processes are killed if the victim does not exist yet.
    """

    def wait_for(condition: Callable[[], object], event: str) -> None:
        launching.wait_for(lambda: process.poll() is not None or condition(), event)

    if victim == EXPORTING:
        wait_for(lambda: any(run_dir.glob(f"step-*.partial/{HF}*")), "export")
    elif victim != CTRL_C and rng.random() < 0.5:
        time.sleep(rng.uniform(0.5, 14))
    else:
        before = last_step(run_dir)
        wait_for(lambda: last_step(run_dir) > before, "step of this life")
        time.sleep(rng.uniform(0, 1.5))
    if victim == CTRL_C:
        if process.poll() is None:
            with launching.slow_step(run_dir):
                os.killpg(process.pid, signal.SIGINT)
        return
    target = None if victim.startswith("everything") else launching.member(run_dir, victim)
    for item in [target] if target is not None else launching.processes_of(run_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            item.kill()


def _largest(directory: Path) -> Path:
    return max((directory / "state").rglob("*.pt"), key=lambda p: p.stat().st_size)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _forge(directory: Path, **changes: object) -> None:
    marker = json.loads((directory / COMPLETE).read_text())
    marker["files"][_largest(directory).relative_to(directory).as_posix()] |= changes
    (directory / COMPLETE).write_text(json.dumps(marker))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated file": lambda d: os.truncate(_largest(d), _largest(d).stat().st_size - 10),
    "empty file": lambda d: _largest(d).write_bytes(b""),
    "flipped bit": lambda d: _flip(_largest(d)),
    "file of zeros": lambda d: _largest(d).write_bytes(bytes(_largest(d).stat().st_size)),
    "missing rank file": lambda d: _largest(d).unlink(),
    # content of an older step under the newest step's name
    "file of another step": lambda d: shutil.copy(_largest(checkpoints(d.parent)[-2]), _largest(d)),
    "stray file": lambda d: (d / "state" / "stray.pt").write_bytes(b"x"),
    "missing COMPLETE": lambda d: (d / COMPLETE).unlink(),
    "empty COMPLETE": lambda d: (d / COMPLETE).write_text(""),
    "torn COMPLETE": lambda d: os.truncate(d / COMPLETE, 40),
    "COMPLETE without files": lambda d: (d / COMPLETE).write_text('{"files": {}}'),
    "COMPLETE of another kind": lambda d: (d / COMPLETE).write_text('["files"]'),
    "COMPLETE with a wrong size": lambda d: _forge(d, size=1),
    "COMPLETE with a wrong hash": lambda d: _forge(d, sha256="0" * 64),
    "COMPLETE of the step before": lambda d: shutil.copy(checkpoints(d.parent)[-2] / COMPLETE, d / COMPLETE),
    "torn state.json": lambda d: (d / STATE).write_text("{"),
    "missing state.json": lambda d: (d / STATE).unlink(),
    "latest pointing nowhere": lambda d: (_largest(d).unlink(), (d / "latest").write_text("gone")),
    "a partial left behind": lambda d: d.rename(d.with_name(d.name + ".partial")),
    "an empty directory": lambda d: (shutil.rmtree(d), d.mkdir()),
}


def damage(recipe: Path, args: argparse.Namespace, show: Campaign) -> None:
    settings = ["train.max_steps=12", "train.save_steps=3", "train.save_total_limit=3", "train.eval_rows=2"]
    origin = recipe.parent / "origin"
    expected = undisturbed(recipe, origin, *settings)
    shutil.rmtree(origin / "export")
    for name, harm in DAMAGE.items():
        run_dir = recipe.parent / name.replace(" ", "-")
        shutil.copytree(origin, run_dir)
        harm(checkpoints(run_dir)[-1])
        done = launching.run(2, str(recipe), f"output_dir={run_dir}", *settings)
        right = done.returncode == 0 and losses(run_dir) == expected and "step-000009" in done.stdout
        show("damage", name, "resumed from step 9", right, done.stdout[-300:])
        shutil.rmtree(run_dir)


def disks(recipe: Path, args: argparse.Namespace, show: Campaign) -> None:
    """Fill up a disk while a checkpoint is written, once by bytes and once by the number of files."""
    undisturbed(recipe, recipe.parent / "measured")
    item = checkpoints(recipe.parent / "measured")[-1]
    size = sum(p.stat().st_size for p in item.rglob("*") if p.is_file())
    settings = ["train.max_steps=40", "train.save_steps=2", "train.save_total_limit=99"]
    for case, room in (("no room", f"size={int(3.5 * size)}"), ("no inodes", "size=64m,nr_inodes=40")):
        with tempfile.TemporaryDirectory() as mount:
            command = ["mount", "-t", "tmpfs", "-o", room, "tmpfs", mount]
            if subprocess.run(command, capture_output=True).returncode:
                show("disks", case, "skipped: mounting needs root", True)
                continue
            try:
                done = launching.run(2, str(recipe), f"output_dir={mount}/run", *settings)
                remaining = checkpoints(Path(mount) / "run")
                right = done.returncode not in (0, 75) and len(re.findall("^error: ", done.stdout, re.M)) == 1
                right = right and bool(remaining) and all(checkpoint_problem(d) is None for d in remaining)
                words = f"one line, {len(remaining)} checkpoints left"
                show("disks", case, words, right, done.stdout[-3000:])
            finally:
                subprocess.run(["umount", "-l", mount], check=True)


def stops(recipe: Path, args: argparse.Namespace, show: Campaign) -> None:
    """Compare the time to the first step of a resume and of a cold start, as medians of three."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(3):
        run_dir = recipe.parent / f"start-{number}"
        for seconds in times:
            before, begun = last_step(run_dir), time.monotonic()
            process = launching.start(2, str(recipe), f"output_dir={run_dir}", "train.max_steps=5000")
            launching.wait_for_step(run_dir, before + 1)
            seconds.append(time.monotonic() - begun)
            (run_dir / "STOP").touch()
            process.communicate(timeout=120)
    cold, warm = map(statistics.median, times)
    ratio = warm / cold
    show("stops", "resume to first step / cold start", f"{ratio:.2f} (target <= 1.2)", ratio <= 1.2)


PARTS = {"kills": kills, "damage": damage, "disks": disks, "stops": stops}


def soak(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    recipe = launching.tiny_recipe(directory)
    for part in args.parts:
        PARTS[part](recipe, args, show)


if __name__ == "__main__":
    sys.exit(conduct("soak", soak, __doc__, parts=[*PARTS], kills=20, seed=0))
