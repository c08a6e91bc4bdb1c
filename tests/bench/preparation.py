"""Measure the preparation of much text: CPU time and memory per gigabyte, and the gain of scanning jobs."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from emo.data_prep.config import load_data_config
from emo.data_prep.prepare import Preparation
from tests.bench import common
from tests.helpers.corpus import tiny_tokenizer

GB = 10**9
WORDS = 300  # per document
VOCABULARY = 20_000
JOBS = 4
CHILD = """
import sys, time
from pathlib import Path
from emo.data_prep.config import load_data_config
from emo.data_prep.checks import planned_inputs
from emo.data_prep.prepare import prepare
from emo.data_prep.selection.scan import Scan
recipe, share = sys.argv[1:]
config = load_data_config(Path(recipe), [])
if share:
    scan = Scan(config, planned_inputs(config), None, config.dir / ".new/scan")
    print("ready", flush=True)
    sys.stdin.readline()
    scan.run(float(share), 1, lambda: False, str)
else:
    prepare(config, (0, 1), 1, False, False, str)
status = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(time.process_time(), peak / 1024, flush=True)
"""


def write_text(path: Path, size: int) -> None:
    """Write about `size` bytes of different documents of made-up words, one per line."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, length)) for length in rng.integers(2, 12, VOCABULARY)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            drawn = np.minimum(rng.zipf(1.3, (256, WORDS)), VOCABULARY) - 1
            file.writelines(" ".join([words[i] for i in row]) + "\n" for row in drawn.tolist())


def recipe_of(work: Path, name: str, dedup: str) -> Path:
    recipe = work / f"{name}.yaml"
    keys = {"dir": str(work / name), "root": str(work), "tokenizer": str(tiny_tokenizer()), "dedup": dedup}
    keys |= {"sequence_len": 1024, "shards": 16, "validation_fraction": 0.01}
    recipe.write_text(json.dumps({"data": keys | {"sources": [{"files": "text.txt", "format": "lines"}]}}))
    return recipe


def start(recipe: Path, share: float | None = None) -> subprocess.Popen[str]:
    """Start a preparation, or a scan from a `share` of the text on, which waits for a line of input."""
    command = [sys.executable, "-c", CHILD, str(recipe), "" if share is None else str(share)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=common.REPO, **pipes)


def finish(child: subprocess.Popen[str]) -> tuple[float, float]:
    """Return the CPU seconds and the peak resident MiB of a child."""
    out, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"a preparation ended with {child.returncode}")
    seconds, peak = out.split()[-2:]
    return float(seconds), float(peak)


def sizes(report: common.Report, work: Path, gigabytes: list[float], dedup: str, rounds: int) -> None:
    """Compare complete preparations of less and of more text by one process, in turn."""
    ordered = sorted(set(gigabytes))
    seconds: common.Times[float] = {size: [] for size in ordered}  # per GB
    peaks: common.Times[float] = {size: [] for size in ordered}  # MiB
    with tempfile.TemporaryDirectory(dir=work) as directory:
        texts = {size: Path(directory) / f"{size}" / "text.txt" for size in ordered}
        for size, text in texts.items():
            text.parent.mkdir()
            write_text(text, int(size * GB))
        for _, size in common.turns(ordered, rounds):
            text = texts[size]
            took, peak = finish(start(recipe_of(text.parent, "out", dedup)))
            shutil.rmtree(text.parent / "out")
            seconds[size].append(took * GB / text.stat().st_size)
            peaks[size].append(peak)
    for size in ordered:
        cpu, peak = (statistics.median(values[size]) for values in (seconds, peaks))
        report.row(part=f"dedup: {dedup}", gb=size, cpu_s_per_gb=round(cpu, 1), peak_mib=round(peak))
    small, large = ordered[0], ordered[-1]
    for figure, values in (("CPU time of a GB", seconds), ("peak memory", peaks)):
        value = common.ratio(values, large, small)
        report.ratio(f"{figure}, {large:g} / {small:g} GB, dedup: {dedup}", value, at_most=1.1)


def scanning(report: common.Report, work: Path, gigabytes: float, rounds: int) -> None:
    """Compare the wall time of the scan by one job and by several parallel jobs."""
    write_text(work / "text.txt", int(gigabytes * GB))
    times: common.Times[int] = {1: [], JOBS: []}
    for number, jobs in common.turns((1, JOBS), rounds):
        recipe = recipe_of(work, f"scan-{number}-{jobs}", "exact")
        config = load_data_config(recipe, [])
        config.dir.mkdir()
        Preparation(config, 1, str).set_up()
        children = [start(recipe, job / jobs) for job in range(jobs)]
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        began = time.perf_counter()
        for child in children:
            print(file=child.stdin, flush=True)
        for child in children:
            finish(child)
        times[jobs].append(time.perf_counter() - began)
    for jobs, took in times.items():
        wall = statistics.median(took)
        rate = round(gigabytes * 1000 / wall, 1)
        report.row(part="scan", jobs=jobs, gb=gigabytes, wall_s=round(wall, 2), mb_s=rate)
    report.ratio(f"scan, {JOBS} jobs / 1 job, speed", common.ratio(times, 1, JOBS), at_least=1.8)


def main() -> int:
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--sizes", nargs="+", type=float, default=[0.1, 0.5], metavar="GB", help="of text")
    parser.add_argument("--dedup", nargs="+", choices=("exact", "near"), default=["exact"])
    args = parser.parse_args()
    report = common.Report("preparation", judged=not args.quick)
    if args.quick:
        args.sizes, args.rounds = [0.01, 0.02], 1
    with tempfile.TemporaryDirectory() as work:
        for dedup in args.dedup:
            sizes(report, Path(work), args.sizes, dedup, args.rounds)
        scanning(report, Path(work), min(args.sizes), args.rounds)
    return report.finish(**vars(args))


if __name__ == "__main__":
    sys.exit(main())
