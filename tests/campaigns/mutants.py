"""Check that the test suite notices mutants: python -m tests.campaigns.mutants

Each mutant of `mutants.json` changes one line. It is killed if the tests of its file fail. Survivors are
listed. Some change nothing important, and the others show that a test is missing. --jobs run in parallel, in
copies of the working tree under build/mutants/. --only selects files whose path contains a text. --write
records which mutants are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.campaign import Campaign, conduct, copy_checkout
from tests.conftest import REPO

MUTANTS = Path(__file__).with_suffix(".json")
COPIES = REPO / "build" / "mutants"
SECONDS = 600  # for the tests of one mutant. A hung test counts as failed.


def tests_fail(tree: Path, tests: list[str]) -> bool:
    """Run tests in a copy until the first failure. Return True if one fails or they do not end."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    environment = {"SHARED_DATA": str(REPO.parent / "shared" / "data")} | os.environ
    environment |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"cwd": tree, "env": environment, "capture_output": True, "timeout": SECONDS}
    try:
        codes = {0, pytest.ExitCode.NO_TESTS_COLLECTED}
        code = subprocess.run([*command, "-m", "not launch", *tests], **options).returncode
        if code in codes:  # tests that start real runs are slow, so they come last
            code = subprocess.run([*command, "-m", "launch", *tests], **options).returncode
        code = 0 if code in codes else code
    except subprocess.TimeoutExpired:
        return True
    return code != 0


def killed(tree: Path, mutant: dict[str, Any], tests: list[str]) -> bool | str:
    """Return whether the tests of a mutant's file fail, or a message if its line is not there once."""
    path = tree / mutant["file"]
    original = path.read_text(encoding="utf-8")
    if original.count(mutant["before"] + "\n") != 1:
        return f"{mutant['file']}: not there once: {mutant['before'].strip()}"
    path.write_text(original.replace(mutant["before"] + "\n", mutant["after"] + "\n"), encoding="utf-8")
    try:
        return tests_fail(tree, tests)
    finally:
        path.write_text(original, encoding="utf-8")


def run(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    plan = json.loads(MUTANTS.read_text(encoding="utf-8"))
    mutants = [mutant for mutant in plan["mutants"] if args.only in mutant["file"]]
    trees: queue.Queue[Path] = queue.Queue()
    for job in range(args.jobs):
        shutil.rmtree(COPIES / str(job), ignore_errors=True)
        trees.put(copy_checkout(COPIES / str(job)))

    def fails(tests: list[str], mutant: dict[str, Any] | None = None) -> bool | str:
        tree = trees.get()
        try:
            return killed(tree, mutant, tests) if mutant else tests_fail(tree, tests)
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(args.jobs) as pool:
        suites = [plan["tests"][mutant["file"]] for mutant in mutants]
        each = [list(tests) for tests in sorted(set(map(tuple, suites)))]
        broken = [tests for tests, bad in zip(each, pool.map(fails, each), strict=True) if bad]
        if broken:
            sys.exit(f"these tests fail without a mutant: {broken}")
        verdicts = list(pool.map(fails, suites, mutants))
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        change = f"{mutant['before'].strip()}  ->  {mutant['after'].strip()}"
        if isinstance(verdict, str):
            show(mutant["file"], change, verdict, False)
            continue
        if not verdict:
            lost = bool(mutant.get("killed"))
            show(mutant["file"], change, "survives, and was killed" if lost else "survives", not lost)
        mutant["killed"] = verdict
    if args.write:
        MUTANTS.write_text(json.dumps(plan, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    show("all", f"{len(mutants)} mutants", f"{verdicts.count(True)} killed", True)


if __name__ == "__main__":
    sys.exit(conduct("mutants", run, __doc__, jobs=2, only="", write=False))
