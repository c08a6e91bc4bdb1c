"""Fuzzing of every parser: files of others, damaged in every way. python -m tests.campaigns.fuzz

Each target has a process of its own with a limit on memory; one that is killed by what it reads is a crash
as well. What crashed is kept in tests/helpers/fuzz_corpus.json, and tried first from then on, here and in the
suite.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.campaigns.campaign import Campaign
from tests.helpers import fuzz_judging, fuzz_targets  # noqa: F401 - they register them
from tests.helpers.fuzzing import TARGETS, Bench, Crash, Input, bench, corpus, given, remember

MEMORY = 2 << 30  # bytes that a target may take beside what it has
RENEWED = 500  # inputs; then what it has is looked at again: pyarrow loses some space with every damaged .zst


def fuzz(name: str, seconds: float, seed: int, note: Path) -> dict[str, object]:
    """Try inputs on a target for so long: how many, and the crashes, whose inputs are remembered.

    note: gets each input before it is tried, for whoever finds this process killed.
    """
    tried, crashes = 0, set()
    with bench(name) as trial:
        began, known = time.monotonic(), iter(corpus().get(name, []))
        while time.monotonic() - began < seconds:
            if tried % RENEWED == 0:
                resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, -1))
            one = next(known, None) or given(trial, random.Random(f"{seed} {tried}"))
            tried += 1
            crash = _attempt(trial, one, note)
            if crash is not None and crash.kind not in crashes:
                crashes.add(crash.kind)
                remember(name, one)
                print(f"{name}: {crash}", flush=True)
    return {"tried": tried, "crashes": sorted(crashes)}


def _attempt(trial: Bench, one: Input, note: Path) -> Crash | None:
    """What came of an input that should not."""
    note.write_bytes(one.file.encode() + b"\n" + one.content)
    try:
        trial(one)
    except Crash as error:
        return error
    return None


def _apart(name: str, seconds: float, seed: int, show: Campaign) -> None:
    """`fuzz` in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        note, report = Path(directory) / "note", Path(directory) / "report"

        def inside() -> None:
            report.write_text(json.dumps(fuzz(name, seconds, seed, note)))

        process = multiprocessing.get_context("fork").Process(target=inside)
        process.start()
        process.join()
        if report.is_file():
            found = json.loads(report.read_text())
            crashes = found["crashes"]
            show("fuzz", name, f"{found['tried']:,} inputs, {len(crashes)} crashes", not crashes)
            return
        if note.is_file():
            file, _, content = note.read_bytes().partition(b"\n")
            remember(name, Input(file.decode(), content))
        show("fuzz", name, f"its process ended with {process.exitcode}", False)


def main() -> int:
    """Run the campaign; 0 when nothing crashed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="for each target (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(TARGETS), default=list(TARGETS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of what is drawn (the time)")
    args = parser.parse_args()
    show = Campaign("fuzz")
    for name in args.only:
        _apart(name, args.seconds, args.seed, show)
    return show.finish({"seconds": args.seconds, "seed": args.seed})


if __name__ == "__main__":
    sys.exit(main())
