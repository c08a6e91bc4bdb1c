"""The long campaign: a run killed over and over, and checkpoints damaged in every way we could think of.

    python -m tests.campaigns.soak [--kills 20] [--seed 0] [--parts kills damage disks stops]

kills   one 2-rank ZeRO-3 run, disturbed at seeded random moments (while it starts, trains, saves or resumes)
        and started again by the same command, until that has happened so often and it is finished. The
        launcher is the `deepspeed` command or launch/continual.sh in turn; the victims are in VICTIMS. Every
        logged loss must equal the undisturbed run's bit for bit, and no unfinished life may end with 0.
damage  the newest checkpoint of a run is damaged; the run must say so, resume from the one before, and end
        with the losses of the undisturbed run.
disks   a disk fills up while a checkpoint is written; one line says so and every older one stays.
stops   time of a start that resumes beside one that does not.

Prints a table, writes runs/soak.json, and exits 1 when anything was lost, wrong or hung.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
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

from emo.pipeline.run_dir import COMPLETE, EXPORT, HF, STATE, checkpoints, problem, read_metrics, step_of
from tests.campaigns.campaign import Campaign
from tests.helpers import launching
from tests.helpers.launching import Losses, losses


def undisturbed(recipe: Path, run_dir: Path, *options: str) -> Losses:
    done = launching.run(2, str(recipe), f"output_dir={run_dir}", *options)
    assert done.returncode == 0, done.stdout
    return losses(run_dir)


# Killed with -9, but for Ctrl-C, which goes to the foreground process group while a step takes longer than
# the 30 seconds after which DeepSpeed's launcher kills its ranks.
EXPORTING = "everything while it exports"
VICTIMS = ["deepspeed", "launch.py", "rank 0", "rank 1", "everything", EXPORTING, "Ctrl-C in a slow step"]


def kills(recipe: Path, count: int, rng: random.Random, show: Campaign) -> bool:
    """Disturb one run `count` times; whether it ended with the right losses and told the truth each time."""
    options = [f"train.max_steps={50 * count}", "train.save_steps=5", "train.eval_rows=2"]
    expected = undisturbed(recipe, recipe.parent / "whole", *options)
    run_dir = recipe.parent / "killed"
    arguments = [str(recipe), f"output_dir={run_dir}", *options]
    resumed, slowest, honest, unheard = 0, 0.0, True, 0
    order = [victim for _ in range(-(-count // len(VICTIMS))) for victim in rng.sample(VICTIMS, len(VICTIMS))]
    for number, victim in enumerate(order[:count]):
        make = launching.launch_command if number % 2 else launching.script_command
        process = launching.popen(
            make(2, *arguments, f"train.export_checkpoints={str(victim == EXPORTING).lower()}")
        )
        steps = len(read_metrics(run_dir))
        _wait_for_the_moment(process, run_dir, rng, victim)
        died = _strike(process, run_dir, victim)
        output, _ = process.communicate(timeout=600)
        launching.wait_until_gone(run_dir)
        slowest = max(slowest, time.monotonic() - died)
        resumed += "resumed from" in output
        finished = (run_dir / EXPORT).is_dir()
        if process.returncode == 0 and not finished:
            # Killed before the ranks listen, launch.py takes plain `deepspeed` with it, which returns 0.
            early = victim == "launch.py" and make is launching.launch_command
            early = early and len(read_metrics(run_dir)) == steps
            unheard += early
            honest = honest and early
        remaining = [step_of(d) for d in checkpoints(run_dir)]
        code = process.returncode
        print(
            f"{number + 1}: {victim} of {make.__name__}: exit code {code}; checkpoints {remaining}",
            flush=True,
        )
        if finished:
            break
    done = launching.run(2, *arguments)
    equal = done.returncode == 0 and losses(run_dir) == expected
    words = "losses bit-equal" if equal else f"LOSSES DIFFER {done.stdout[-600:]}"
    show("kills", f"{count} kills, {resumed} resumes", words, equal)
    words = f"none, but {unheard} of plain `deepspeed` before its ranks listen" if unheard else "none"
    show("kills", "no unfinished life ended with 0", words if honest else "one did", honest)
    show("kills", "slowest end of all ranks after a kill", f"{slowest:.1f} s", slowest < 90)
    return equal and honest and slowest < 90


def _wait_for_the_moment(
    process: subprocess.Popen[str], run_dir: Path, rng: random.Random, victim: str
) -> None:
    """Some time while the run starts, some time after this life's first step, or in an export."""
    if victim == EXPORTING:
        exports = f"step-*.partial/{HF}*"
        launching.wait_for(lambda: process.poll() is not None or any(run_dir.glob(exports)), "export")
        return
    if not victim.startswith("Ctrl-C") and rng.random() < 0.5:
        time.sleep(rng.uniform(0.5, 14))
        return
    before = (read_metrics(run_dir) or [{"step": 0}])[-1]["step"]
    launching.wait_for(
        lambda: process.poll() is not None or (read_metrics(run_dir) or [{"step": 0}])[-1]["step"] > before,
        "step of this life",
    )
    time.sleep(rng.uniform(0, 1.5))


def _strike(process: subprocess.Popen[str], run_dir: Path, victim: str) -> float:
    """Disturb the run; when that was over. A victim that is not there yet means everything."""
    if victim.startswith("Ctrl-C"):
        if process.poll() is None:
            with launching.slow_step(run_dir):
                os.killpg(process.pid, signal.SIGINT)
        return time.monotonic()
    target = None if victim.startswith("everything") else launching.member(run_dir, victim)
    for item in [target] if target is not None else launching.processes_of(run_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            item.kill()
    return time.monotonic()


def _largest(directory: Path) -> Path:
    return max((p for p in (directory / "state").rglob("*.pt")), key=lambda p: p.stat().st_size)


def _edit(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(bytes(data))


def _flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def _forge(directory: Path, **changes: object) -> None:
    """COMPLETE that says something else of the largest file."""
    marker = json.loads((directory / COMPLETE).read_text())
    name = _largest(directory).relative_to(directory).as_posix()
    marker["files"][name].update(changes)
    (directory / COMPLETE).write_text(json.dumps(marker))


def _swap(directory: Path) -> None:
    """The newest step's name on the content of an older one, with its own marker."""
    older = checkpoints(directory.parent)[-2]
    shutil.copy(_largest(older), _largest(directory))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated file": lambda d: _edit(_largest(d), lambda b: b.__delitem__(slice(-10, None))),
    "empty file": lambda d: _largest(d).write_bytes(b""),
    "flipped bit": lambda d: _edit(_largest(d), _flip),
    "file of zeros": lambda d: _largest(d).write_bytes(bytes(_largest(d).stat().st_size)),
    "missing rank file": lambda d: _largest(d).unlink(),
    "file of another step": _swap,
    "stray file": lambda d: (d / "state" / "stray.pt").write_bytes(b"x"),
    "missing COMPLETE": lambda d: (d / COMPLETE).unlink(),
    "empty COMPLETE": lambda d: (d / COMPLETE).write_text(""),
    "torn COMPLETE": lambda d: _edit(d / COMPLETE, lambda b: b.__delitem__(slice(40, None))),
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


def damage(recipe: Path, show: Campaign) -> bool:
    """Every damage to the newest checkpoint, one after the other."""
    options = ["train.max_steps=12", "train.save_steps=3", "train.save_total_limit=3", "train.eval_rows=2"]
    origin = recipe.parent / "origin"
    expected = undisturbed(recipe, origin, *options)
    shutil.rmtree(origin / "export")
    good = True
    for name, harm in DAMAGE.items():
        run_dir = recipe.parent / name.replace(" ", "-")
        shutil.copytree(origin, run_dir)
        harm(checkpoints(run_dir)[-1])
        done = launching.run(2, str(recipe), f"output_dir={run_dir}", *options)
        right = done.returncode == 0 and losses(run_dir) == expected and "step-000009" in done.stdout
        show("damage", name, "resumed from step 9" if right else done.stdout[-300:], right)
        good = good and right
        shutil.rmtree(run_dir)
    return good


def disks(recipe: Path, show: Campaign) -> bool:
    """A disk that fills up while a checkpoint is written: once by bytes, once by number of files."""
    undisturbed(recipe, recipe.parent / "measured")
    item = checkpoints(recipe.parent / "measured")[-1]
    bytes_ = sum(p.stat().st_size for p in item.rglob("*") if p.is_file())
    good = True
    for case, size in (("no room", f"size={int(3.5 * bytes_)}"), ("no inodes", "size=64m,nr_inodes=40")):
        with tempfile.TemporaryDirectory() as name:
            mount = Path(name) / "disk"
            mount.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(mount)]
            if subprocess.run(command, capture_output=True).returncode:
                show("disks", case, "skipped: mounting needs root", True)
                continue
            try:
                options = ["train.max_steps=40", "train.save_steps=2", "train.save_total_limit=99"]
                done = launching.run(2, str(recipe), f"output_dir={mount / 'run'}", *options)
                output = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
                remaining = checkpoints(mount / "run")
                right = done.returncode not in (0, 75) and len(output) == 1 and bool(remaining)
                right = right and all(problem(d) is None for d in remaining)
                words = f"one line, {len(remaining)} checkpoints left" if right else done.stdout[-3000:]
                show("disks", case, words, right)
                good = good and right
            finally:
                subprocess.run(["umount", "-l", str(mount)], check=True)
    return good


def stops(recipe: Path, show: Campaign) -> bool:
    """Time to the first step: resuming beside a cold start, median of three."""
    cold, warm = [], []
    for number in range(3):
        run_dir = recipe.parent / f"start-{number}"
        for times in (cold, warm):
            before = (read_metrics(run_dir) or [{"step": 0}])[-1]["step"]
            begun = time.monotonic()
            process = launching.start(2, str(recipe), f"output_dir={run_dir}", "train.max_steps=5000")
            launching.wait_for_step(run_dir, int(before) + 1)
            times.append(time.monotonic() - begun)
            (run_dir / "STOP").touch()
            process.communicate(timeout=120)
    ratio = statistics.median(warm) / statistics.median(cold)
    show("stops", "resume to first step / cold start", f"{ratio:.2f} (target <= 1.2)", ratio <= 1.2)
    return ratio <= 1.2


def main() -> int:
    """Run the campaign; 0 when nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", default=["kills", "damage", "disks", "stops"])
    args = parser.parse_args()
    show = Campaign("soak")
    with tempfile.TemporaryDirectory() as directory:
        recipe = launching.tiny_recipe(Path(directory))
        if "kills" in args.parts:
            kills(recipe, args.kills, random.Random(args.seed), show)
        if "damage" in args.parts:
            damage(recipe, show)
        if "disks" in args.parts:
            disks(recipe, show)
        if "stops" in args.parts:
            stops(recipe, show)
    return show.finish(vars(args))


if __name__ == "__main__":
    sys.exit(main())
