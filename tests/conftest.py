"""Shared fixtures: real data where it is present, and one thread per process so that ranks do not fight."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path, PosixPath
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# In workers and commands, text opened without an encoding warns, which is an error (see pyproject.toml).
os.environ.setdefault("PYTHONWARNDEFAULTENCODING", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Commands are started many times, and need not compile the sources each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import hypothesis
import pytest
import torch
from tqdm import tqdm

sys.dont_write_bytecode = False
torch.set_num_threads(1)
# Examples are slow on a busy machine.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")
# By default forks share a lock for bars, which one that a test kills would hold for ever.
tqdm.set_lock(threading.RLock())

REPO = Path(__file__).resolve().parents[1]
NO_DATA = "no real data (make data fetches what is public, SHARED_DATA=DIR names where it is)"
NO_TIME = "no time (make test runs them all)"
BEGAN = time.monotonic()


class RealData(PosixPath):
    """A place among the real data: a step to what is not there skips the test."""

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        path = super().__truediv__(name)
        if not path.exists():
            pytest.skip(NO_DATA)
        return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of real data: $SHARED_DATA, that beside the checkout, or what `make data` fetched.

    Skips where there is none of them, and where a test asks for what its directory does not have.
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
    """Skip what cannot begin in time, so that `make test-fast` ends when it says, on a busy machine too."""
    within = item.config.getoption("--within")
    if within is not None and time.monotonic() - BEGAN > within:
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was not tried, and why."""
    reports = [item for item in terminalreporter.stats.get("skipped", []) if len(item.longrepr) == 3]
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark tests of real runs, and begin with their files, which take longest: workers then end together.

    `-k objectives` takes all tests of the loss library.
    """
    for item in items:
        if item.path.is_relative_to(REPO / "tests" / "unit" / "loss"):
            item.extra_keyword_matches.add("objectives")
        if item.path.is_relative_to(REPO / "tests" / "launch"):
            item.add_marker("launch")
    items.sort(key=lambda item: item.get_closest_marker("launch") is None)
