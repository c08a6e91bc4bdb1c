"""All long work shows progress, on a terminal or elsewhere."""

from __future__ import annotations

import os
import re
import time

import pytest

from emo.common.cli import progress
from emo.eval import cli


def test_long_work_shows_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the innermost activity prints, with the time left. Short work prints nothing."""
    monkeypatch.setattr(progress, "QUIET", 0.05)
    with progress.show_activity("outer"), progress.show_activity("inner", 40, "text") as advance:
        advance(20)
        time.sleep(0.12)
        time.sleep(0.12)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("inner: ") for line in lines)
    assert re.fullmatch(r"inner: 20 of 40 texts, about 0 s left", lines[-1])
    monkeypatch.setattr(progress, "QUIET", 10)
    with progress.show_activity("short", 3, "row") as advance:
        advance(3)
    assert capsys.readouterr().err == "" and progress._activities == []


@pytest.mark.parametrize(("name", "speaks"), [("chat", False), ("generate", True)])
def test_waiting_threads_sleep_and_chat_shows_no_progress_between_messages(
    name: str, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []

    def run(*_: object) -> int:
        shown.append(len(progress._activities))
        return 0

    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(cli.chat, "run", run)
    monkeypatch.setattr(cli.generation, "run", run)
    assert cli.main([name, "--model", "m", *([] if name == "chat" else ["--prefix", "a"])]) == 0
    assert shown == [int(speaks)] and os.environ["OMP_WAIT_POLICY"] == "passive"
