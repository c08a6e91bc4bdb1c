"""A sweep of 2 objectives x 2 seeds: killed over and over, and as an array job of Slurm on this machine.

    python -m tests.campaigns.sweep [--kills 20] [--seed 0] [--parts kills slurm]

kills   all processes of the sweep are killed at seeded random moments, within half of what it takes
        undisturbed, and the same command is run again. Nothing that was done may be done again, and the table
        must be that of the undisturbed sweep.
slurm   `emo sweep --slurm` writes an array job; its workers share the runs; the same table. Needs root
        and Debian's packages, as the cluster campaign does.

Prints a table, writes runs/sweep.json, and exits 1 when something was repeated or differs.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.campaigns.campaign import Campaign, can_install, options
from tests.campaigns.cluster import OVER, SLURM, ask, slurm_cluster, state_of
from tests.helpers.launching import tiny_recipe
from tests.helpers.sweeping import notes, start, sweep

WORKERS = 2


def finished(path: Path, out: Path) -> str:
    output, _ = (process := start(path, f"out={out}")).communicate(timeout=1800)
    assert process.returncode == 0, output
    return (out / "table.md").read_text()


def kills(path: Path, expected: str, count: int, took: float, rng: random.Random, show: Campaign) -> None:
    """Kill sweeps, one after the other until there were `count` kills; each must end with the same table.

    took: seconds of an undisturbed sweep.
    """
    killed, sweeps, repeated, equal, most = 0, 0, 0, True, 0
    while killed < count:
        sweeps += 1
        out = path.parent / f"killed-{sweeps}"
        remaining: dict[str, int] = {}
        while killed < count:
            process = start(path, f"out={out}", "--jobs", str(1 + killed % 2))
            try:
                process.communicate(timeout=rng.uniform(0.5, max(20, took / 2)))
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
            killed += 1
            now = notes(out)
            repeated += sum(now.get(name) != when for name, when in remaining.items())
            remaining, most = now, max(most, len(now))
            print(f"kill {killed}: {len(now)} stages done", flush=True)
        equal &= finished(path, out) == expected
        repeated += sum(notes(out).get(name) != when for name, when in remaining.items())
    show("kills", f"{killed} kills of {sweeps} sweeps: the table", "the same" if equal else "DIFFERS", equal)
    stages = len(notes(path.parent / "undisturbed"))
    show("kills", f"stages done before a kill, of {stages}", str(most), most > 1)
    show("kills", "stages done twice", str(repeated), repeated == 0)


def array(path: Path, expected: str, show: Campaign) -> None:
    out, job = path.parent / "array", path.parent / "array.sbatch"
    process = start(path, f"out={out}", "--slurm", str(job), "--workers", str(WORKERS))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    with slurm_cluster(path.parent / "slurm") as environment:
        shape = ["--cpus-per-task=1", "--gpus=0", "--mem=1500", f"--output={path.parent}/array-%a.log"]
        queued = ask(environment, "sbatch", "--parsable", *shape, job)
        states = OVER.findall(state_of(environment, queued))
    logs = {p.name: p.read_text() for p in sorted(path.parent.glob("array-*.log"))}
    worked = sum(": train" in text for text in logs.values())
    table = (out / "table.md").read_text() if (out / "table.md").is_file() else ""
    good = states == ["COMPLETED"] * WORKERS and table == expected
    words = f"{WORKERS} workers, {worked} of them trained: the same table"
    show("slurm", "an array job", words, good, f"{states} {[text[-300:] for text in logs.values()]}")


def main() -> int:
    args = options(__doc__, ["kills", "slurm"], kills=20, seed=0).parse_args()
    show = Campaign("sweep")
    with tempfile.TemporaryDirectory() as directory:
        path = sweep(Path(directory), tiny_recipe(Path(directory), max_steps=3))
        began = time.monotonic()
        expected = finished(path, Path(directory) / "undisturbed")
        took = time.monotonic() - began
        if "kills" in args.parts:
            kills(path, expected, args.kills, took, random.Random(args.seed), show)
        if "slurm" in args.parts and can_install(show, "slurm", SLURM):
            array(path, expected, show)
    return show.finish(vars(args))


if __name__ == "__main__":
    raise SystemExit(main())
