"""All long work shows progress, on a terminal or elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import re

import pytest

from emo.common.cli import progress
from emo.eval import cli
from tests.helpers.killing import wait_for


def test_long_work_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the innermost activity prints, with the time left. Short work prints nothing."""
    monkeypatch.setattr(progress, "QUIET", 0.05)
    with (
        contextlib.redirect_stderr(io.StringIO()) as err,
        progress.show_activity("outer"),
        progress.show_activity("inner", 40, "text") as advance,
    ):
        advance(20)
        wait_for(lambda: "left\n" in err.getvalue(), "line")
    lines = err.getvalue().splitlines()
    assert all(line.startswith("inner: ") for line in lines)
    assert re.fullmatch(r"inner: 20 of 40 texts, about \d+ s left", lines[-1])
    monkeypatch.setattr(progress, "QUIET", 60)
    with (
        contextlib.redirect_stderr(io.StringIO()) as err,
        progress.show_activity("short", 3, "row") as advance,
    ):
        advance(3)
    assert err.getvalue() == "" and progress._activities == []


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
