"""Run a sweep of 2 objectives x 2 seeds with kills, and as a Slurm array job on this machine.

    python -m tests.campaigns.sweep [--kills 20] [--seed 0] [--parts kills study slurm]

kills   All processes of the sweep are killed at seeded random moments, within half of the undisturbed time,
        and the same command is run again. No finished stage may be repeated, and the table must equal the
        table of the undisturbed sweep.
study   A known-truth study is killed and run again in the same way, and its results.json is compared.
slurm   `emo sweep --slurm` writes an array job, whose workers share the runs. The table must be the same.
        Needs root and Debian's packages, as the cluster campaign does.

Prints a table, writes runs/sweep.json, and exits with code 1 if something was repeated or differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.campaigns.campaign import Campaign, can_install, conduct
from tests.campaigns.cluster import OVER, SLURM, Job, slurm_cluster
from tests.helpers.launching import tiny_recipe
from tests.helpers.sweeping import notes, start, sweep

WORKERS = 2


def table(out: Path) -> str:
    return (out / "table.md").read_text() if (out / "table.md").is_file() else ""


def finished(path: Path, out: Path, *options: str) -> str:
    """Run a sweep to the end and return its table."""
    output, _ = (process := start(path, f"out={out}", *options)).communicate(timeout=1800)
    assert process.returncode == 0, output
    return table(out)


def kills(path: Path, expected: str, count: int, took: float, rng: random.Random, show: Campaign) -> None:
    """Kill one sweep after the other, until there were `count` kills. Each must produce the same table.

    took: duration of an undisturbed sweep in seconds.
    """
    killed, sweeps, repeated, equal, most = 0, 0, 0, True, 0
    while killed < count:
        sweeps += 1
        out, done = path.parent / f"killed-{sweeps}", dict[str, int]()
        while killed < count:
            process = start(path, f"out={out}", "--jobs", str(1 + killed % 2))
            try:
                process.communicate(timeout=rng.uniform(0.5, max(20, took / 2)))
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its commands end with it
                process.wait()
            killed += 1
            before, done = done, notes(out)
            repeated += sum(done.get(name) != when for name, when in before.items())
            most = max(most, len(done))
            print(f"kill {killed}: {len(done)} stages done", flush=True)
        equal &= finished(path, out) == expected
        repeated += sum(notes(out).get(name) != when for name, when in done.items())
    show("kills", f"{killed} kills of {sweeps} sweeps: the table", "the same" if equal else "DIFFERS", equal)
    stages = len(notes(path.parent / "undisturbed"))
    show("kills", f"stages done before a kill, of {stages}", str(most), most > 1)
    show("kills", "stages done twice", str(repeated), repeated == 0)


def study(directory: Path, count: int, rng: random.Random, show: Campaign) -> None:
    """Kill studies until there were `count` kills. Their results must equal an undisturbed study's."""

    def start_study(name: str) -> subprocess.Popen[bytes]:
        axes = ["vocabularies=[12,30]", "draws=[20,40]", "truths=3", "selection=1", "steps=200"]
        file = ["experiments/configs/known-truth-quick.yaml", "--jobs", "2", f"out={directory / name}", *axes]
        command = [sys.executable, "-m", "emo.experiments.known_truth.study", *file]
        return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)

    began = time.monotonic()
    assert start_study("whole").wait() == 0
    took, killed, runs, equal = time.monotonic() - began, 0, 0, True
    expected = (directory / "whole/results.json").read_bytes()
    while killed < count:
        runs += 1
        while killed < count:
            process = start_study(f"killed-{runs}")
            try:
                process.wait(timeout=rng.uniform(0.3 * took, took))
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                killed += 1
        assert start_study(f"killed-{runs}").wait() == 0
        equal &= (directory / f"killed-{runs}/results.json").read_bytes() == expected
    show("study", f"{killed} kills of {runs} studies: the results", "the same" if equal else "DIFFER", equal)


def array(path: Path, expected: str, show: Campaign) -> None:
    out, file = path.parent / "array", path.parent / "array.sbatch"
    finished(path, out, "--slurm", str(file), "--workers", str(WORKERS))  # only writes the job
    with slurm_cluster(path.parent / "slurm") as environment:
        shape = ("--cpus-per-task=1", "--gpus=0", "--mem=1500")
        states = OVER.findall(Job(environment, path.parent / "array-%a.log", *shape, file).wait())
    logs = [log.read_text() for log in sorted(path.parent.glob("array-*.log"))]
    worked = sum(": train" in text for text in logs)
    good = states == ["COMPLETED"] * WORKERS and table(out) == expected
    words = f"{WORKERS} workers, {worked} of them trained: the same table"
    show("slurm", "an array job", words, good, f"{states} {[text[-300:] for text in logs]}")


def run(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    rng = random.Random(args.seed)
    if "study" in args.parts:
        study(directory, args.kills, rng, show)
    if not {"kills", "slurm"} & set(args.parts):
        return
    path = sweep(directory, tiny_recipe(directory, max_steps=3))
    began = time.monotonic()
    expected = finished(path, directory / "undisturbed")
    if "kills" in args.parts:
        kills(path, expected, args.kills, time.monotonic() - began, rng, show)
    if "slurm" in args.parts and can_install(show, "slurm", SLURM):
        array(path, expected, show)


if __name__ == "__main__":
    sys.exit(conduct("sweep", run, __doc__, parts=["kills", "study", "slurm"], kills=20, seed=0))
