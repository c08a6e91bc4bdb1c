"""What a start clears away before DeepSpeed compiles something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from emo.pipeline.planning.host import compiling

STARTING = """
import sys
from emo.pipeline.planning.host import compiling
with compiling():
    print("inside", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's lock of a build, in a directory of builds of its own."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def test_a_killed_build_does_not_hang_the_next_start(left: Path) -> None:
    with compiling():
        assert not left.exists()


def test_a_build_under_way_is_not_touched(left: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", STARTING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "inside\n"
    left.touch()
    with compiling():
        assert left.exists()
    other.kill()
    other.communicate()
    with compiling():
        assert not left.exists()
