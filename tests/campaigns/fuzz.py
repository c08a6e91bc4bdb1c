"""Fuzz every parser of untrusted files: python -m tests.campaigns.fuzz

Each target runs for --seconds in a separate process with a memory limit. hypothesis shrinks a crash before it
is printed. Add it to the target's `crashes` in tests/helpers/fuzz_targets.py.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
import traceback
from pathlib import Path

import psutil

from tests.campaigns.campaign import Campaign, conduct
from tests.helpers import fuzz_targets  # noqa: F401 - registers the targets
from tests.helpers.fuzzing import TARGETS, fuzz
from tests.helpers.killing import FORK

MEMORY = 2 << 30  # bytes that a target may add to its memory
ROUND = 500  # examples until the limit is set again, because pyarrow leaks memory with every damaged .zst


def _fuzz_for(name: str, seconds: float, seed: int) -> None:
    """Fuzz a target for some seconds in a child process, which exits with code 1 at a crash."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, -1))
        try:
            fuzz(name, ROUND, seed)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        seed += 1


def run(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    for name in args.only:
        process = FORK.Process(target=_fuzz_for, args=(name, args.seconds, args.seed))
        process.start()
        process.join()
        show("fuzz", name, f"exit code {process.exitcode}", process.exitcode == 0)


if __name__ == "__main__":
    sys.exit(conduct("fuzz", run, __doc__, seconds=600.0, seed=int(time.time()), only=list(TARGETS)))
