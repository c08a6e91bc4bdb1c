"""Shared fixtures and settings. Each process has one thread, so that ranks do not compete for cores."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path, PosixPath
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Child processes warn about text opened without an encoding. Pytest's workers fail (see pyproject.toml).
os.environ.setdefault("PYTHONWARNDEFAULTENCODING", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests start many commands, which need not compile the sources each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import hypothesis
import pytest
import torch
from tqdm import tqdm

sys.dont_write_bytecode = False
torch.set_num_threads(1)
# Examples have no deadline, because they are slow on a busy machine.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")
# By default, forked processes share a lock for progress bars. A killed process would hold it forever.
tqdm.set_lock(threading.RLock())

REPO = Path(__file__).resolve().parents[1]
NO_DATA = "no real data (make data fetches what is public, SHARED_DATA=DIR names where it is)"
NO_TIME = "no time (make test runs them all)"
BEGAN = time.monotonic()


class RealData(PosixPath):
    """A path in the real data. Joining the name of a missing file skips the test."""

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        path = super().__truediv__(name)
        if not path.exists():
            pytest.skip(NO_DATA)
        return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the directory of real data: $SHARED_DATA, or ../shared/data, or data/ (written by `make data`).

    A test is skipped if the directory, or a file that the test needs from it, is missing.
    """
    setting = os.environ.get("SHARED_DATA")
    candidates = [Path(setting)] if setting else [REPO.parent / "shared" / "data", REPO / "data"]
    path = next((directory for directory in candidates if directory.is_dir()), None)
    if path is None:
        pytest.skip(NO_DATA)
    return RealData(path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, metavar="SECONDS", help="begin no test after so long")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that would start after `--within`, so that `make test-fast` has a bounded duration."""
    within = item.config.getoption("--within")
    if within is not None and time.monotonic() - BEGAN > within:
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the number of skipped tests for each reason."""
    reports = [item for item in terminalreporter.stats.get("skipped", []) if len(item.longrepr) == 3]
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark the tests of real runs, and run them first, then other files with slow tests.

    They take longest, so workers, which get whole files, end at similar times.
    `-k objectives` selects all tests of the loss library.
    """
    for item in items:
        if item.path.is_relative_to(REPO / "tests" / "unit" / "loss"):
            item.extra_keyword_matches.add("objectives")
        if item.path.is_relative_to(REPO / "tests" / "launch"):
            item.add_marker("launch")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.get_closest_marker("launch") is None, item.path not in slow))
