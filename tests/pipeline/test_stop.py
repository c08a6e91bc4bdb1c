"""Every way to ask for a stop sets the flag, and nothing else does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import stop
from pipeline.stop import StopRequest


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {n: signal.getsignal(n) for n in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_a_request(tmp_path: Path, number: signal.Signals) -> None:
    request = StopRequest(tmp_path)
    assert request.reason is None
    os.kill(os.getpid(), number)
    assert request.reason == number.name


def test_a_file_is_a_request(tmp_path: Path) -> None:
    request = StopRequest(tmp_path)
    (tmp_path / "STOP").touch()
    assert "STOP" in (request.reason or "")


def test_a_time_limit_is_a_request(tmp_path: Path) -> None:
    assert StopRequest(tmp_path, minutes=60).reason is None
    assert "max_minutes" in (StopRequest(tmp_path, minutes=1e-9).reason or "")


def test_a_lost_launcher_is_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = StopRequest(tmp_path)
    monkeypatch.setattr(stop.os, "getppid", lambda: 1)
    assert request.reason == "the launcher is gone"
