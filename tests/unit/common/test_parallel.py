"""Worker processes keep order and bounded memory, and report errors and killed workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from emo.common.errors import UserError
from emo.common.parallel import WorkerPool
from tests.conftest import REPO


def adding(amount: int) -> Callable[[int], tuple[int, int]]:
    """Return a function that returns the sum of an item and `amount`, and its process id."""

    def add(item: int) -> tuple[int, int]:
        if item < 0:
            raise UserError(f"{item} is below zero", code="test")
        return item + amount, os.getpid()

    return add


def dying() -> Callable[[float], bytes]:
    """Return a function that kills its process after some seconds while it returns a large result."""

    def answer(seconds: float) -> bytes:
        if seconds >= 0:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return bytes(48 << 20)

    return answer


@pytest.mark.parametrize("count", [1, 3])
def test_results_are_ordered_and_items_are_consumed_lazily(count: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(200):
            taken.append(item)
            yield item

    with WorkerPool(count, adding, 5) as workers:
        results = []
        for result, _ in workers.map(items()):
            results.append(result)
            assert len(taken) - len(results) <= 3 * count + 1
    assert results == list(range(5, 205))


def test_an_error_in_a_worker_is_raised_and_the_workers_exit() -> None:
    with WorkerPool(2, adding, 0) as workers:
        (_, pid), *_ = workers.map(range(4))
        with pytest.raises(UserError, match="-1"):
            list(workers.map([1, -1, 2]))
        assert [result for result, _ in workers.map([7, 8])] == [7, 8]
    assert pid != os.getpid() and not psutil.pid_exists(pid)


def test_a_worker_that_dies_in_the_middle_of_a_result_is_reported() -> None:
    """With a shared queue the parent would wait for the rest of the result."""
    with WorkerPool(2, dying) as workers, pytest.raises(UserError):
        list(workers.map([-1.0, 0.02, -1.0, -1.0, 0.02, 0.02]))


def test_modules_in_the_working_directory_do_not_hide_ours(tmp_path: Path) -> None:
    for name in ("emo", "tests"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')\n")
    code = f"""
import os, sys
sys.path[0] = {str(REPO)!r}  # as an installed command has another
from emo.common.parallel import WorkerPool
from tests.unit.common.test_parallel import adding
with WorkerPool(2, adding, 1) as workers: print([result for result, _ in workers.map([1, 2])])
assert "PYTHONSAFEPATH" not in os.environ
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "[2, 3]\n", done.stderr
