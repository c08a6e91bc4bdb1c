"""What a person sees: one line of progress, lines where something happens, plain, quiet or as JSON."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from emo.pipeline.report.console import (
    BOLD,
    Console,
    Handler,
    Kind,
    Pace,
    Progress,
    Survivor,
    duration,
    open_console,
    upcoming,
)
from emo.pipeline.run_dir import LOG
from tests.conftest import REPO


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def progress(step: int = 5) -> Progress:
    return Progress(step, 2000, 2.3456, 41_200.4, 750.0, "validation at 200")


def console(kind: Kind, clock: Clock | None = None) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(kind, stream, clock=clock or Clock()), stream


def test_tokens_per_second_and_time_left_know_pauses() -> None:
    """An hour of validation slows no token down, and comes again in what is left."""
    pace = Pace()
    pace.pause(1000)  # loading
    pace.step(500.0, 10)  # compiles
    assert pace.tokens_per_s == pytest.approx(0.02) and pace.left(2) == pytest.approx(1000)
    for _ in range(10):
        pace.step(2.0, 10)
    assert pace.tokens_per_s == 5 and pace.left(30) == 60
    pace.pause(20.0)
    assert pace.tokens_per_s == 5
    assert pace.left(30) == 120  # as much again is spent in pauses
    for _ in range(40):
        pace.step(1.0, 10)
    assert pace.tokens_per_s == 10, "the last steps count"
    assert pace.left(0) == 0


def test_nothing_is_said_before_anything_is_known() -> None:
    assert Pace().tokens_per_s is None and Pace().left(10) is None
    assert Progress(1, 2, float("nan"), None, None, "").line() == "step 1/2  loss not finite"


def test_durations_and_what_comes_next() -> None:
    durations = {
        0.4: "0 s",
        59.6: "1 min",
        750: "12 min",
        3599: "1 h 00 min",
        11100: "3 h 05 min",
        2e5: "2 d 7 h",
    }
    assert {seconds: duration(seconds) for seconds in durations} == durations
    for step, validation, save, text in (
        (120, 200, 500, "validation at 200"),
        (200, 200, 300, "save at 300"),
        (999, 500, 250, "validation and save at 1,000"),
        (5, 0, 0, ""),
        (1999, 200, 500, ""),  # the last step does all of it anyway
    ):
        assert upcoming(step, 2000, {"validation": validation, "save": save}) == text


def test_plain_lines_come_every_few_seconds() -> None:
    clock = Clock()
    shown, stream = console("lines", clock)
    for step in range(1, 40):
        clock.now += 1.0
        shown.progress(lambda step=step: progress(step))  # type: ignore[misc]
        shown.record({"step": step, "loss": 2.0}, lambda step=step: progress(step))  # type: ignore[misc]
    shown.record({"step": 2000}, lambda: progress(2000))  # the last one always
    shown.event("validation", "step 40  validation: loss 2", BOLD, step=40)
    lines = stream.getvalue().splitlines()
    steps = ["1/2,000", "11/2,000", "21/2,000", "31/2,000", "2,000/2,000", "40"]
    assert [line.split()[1] for line in lines] == steps
    assert lines[0] == "step 1/2,000  loss 2.346  41,200 tokens/s  12 min left  validation at 200"
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_json_lines_hold_every_record() -> None:
    shown, stream = console("json")
    logger = logging.Logger("of this test")
    logger.addHandler(Handler(shown))
    shown.progress(progress)
    shown.record({"step": 20, "loss": 2.0, "demd": None}, progress)
    shown.event("stopped", "stopped after step 20", step=20, reason="SIGTERM")
    logger.info("saved: %s", "x", extra={"event_fields": {"event": "saved", "step": 3}})
    logger.warning("late")
    records = [json.loads(line) | {"time": 0} for line in stream.getvalue().splitlines()]
    assert records == [
        {"event": "train", "time": 0, "step": 20, "loss": 2.0, "demd": None},
        {"event": "stopped", "time": 0, "step": 20, "reason": "SIGTERM"},
        {"event": "saved", "time": 0, "step": 3},
        {"event": "message", "time": 0, "level": "warning", "text": "late"},
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("quiet", ["warning: step 7 skipped", "error: broken", "finished after 8 steps"]),
     ("silent", ["error: broken"])],
)  # fmt: skip
def test_quiet_and_other_ranks_leave_what_matters(kind: Kind, expected: list[str]) -> None:
    shown, stream = console(kind)
    shown.record({"step": 1}, progress)
    shown.event("saved", "saved: step-000001")
    shown.message("resumed from x")
    shown.message("step 7 skipped", logging.WARNING)
    shown.message("broken", logging.ERROR)
    shown.event("finished", "finished after 8 steps")
    assert stream.getvalue().splitlines() == expected


def test_what_is_said_twice_is_shown_once() -> None:
    shown, stream = console("lines")
    for text in ("attention: sdpa", "resumed from x", "attention: sdpa"):
        shown.message(text)
    for _ in range(2):
        shown.message("late", logging.WARNING)
    assert stream.getvalue().splitlines() == ["attention: sdpa", "resumed from x", *2 * ["warning: late"]]


def test_text_from_data_cannot_act_on_the_terminal() -> None:
    shown, stream = console("lines")
    shown.event("sample", "step 5  sample: \x1b[2Jgone\rover")
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def on_a_terminal(program: str, **environment: str) -> str:
    """What a program writes to a terminal of 60 columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    rest = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM", "COLUMNS")}
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, cwd=REPO, stdout=follower, env=rest | environment)
    os.close(follower)
    output = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while part := os.read(leader, 65536):
            output += part
    assert process.wait(60) == 0
    os.close(leader)
    return output.decode()


PROGRAM = """
import itertools, logging
from emo.pipeline.report import console as c
shown = c.open_console(False, False, True, None)
clock = itertools.count()
shown._clock = lambda: float(next(clock))
for step in (1, 2, 3):
    shown.progress(lambda: c.Progress(step, 2000, 2.0, 41200.0, 750.0, "validation and save at 200"))
    if step == 2:
        shown.event("validation", "step 2/2,000  validation: loss 2", c.BOLD)
shown.message("careful", logging.WARNING)
shown.close()
print("the end")
"""


@pytest.mark.parametrize(
    ("environment", "live", "colour"),
    [({"TERM": "xterm"}, True, True), ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
     ({"TERM": "dumb"}, False, False)],
)  # fmt: skip
def test_a_terminal_has_one_line_that_moves(environment: dict[str, str], live: bool, colour: bool) -> None:
    text = on_a_terminal(PROGRAM, **environment)
    parts = text.replace("\n", "\r").split("\r")
    drawn = [part for part in parts if part.startswith("step") and "loss 2 " in part]
    assert bool(drawn) == live
    assert all(len(part) <= 60 for part in drawn), "a line that wraps cannot be drawn over"
    assert ("\x1b[1mstep 2/2,000" in text) == ("\x1b[33mwarning" in text) == colour
    lines = [line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").splitlines()]
    assert "the end" in lines, "what follows has a line of its own"


def run_split(program: str, *arguments: str) -> tuple[str, str]:
    """Run a program after `split`; return what it shows on standard output and standard error."""
    text = "import os, subprocess, sys\nfrom pathlib import Path\n"
    text += "from emo.pipeline.report.console import split\n"
    text += f"chatter = split()\n{program}"
    command = [sys.executable, "-c", text, *arguments]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_what_compilers_print_goes_to_the_log(tmp_path: Path) -> None:
    """A child process and a C library write to descriptor 1; Python's print is the user's."""
    program = (
        "subprocess.run(['echo', 'g++ -c before'])\nprint('hello')\n"
        "chatter.move(Path(sys.argv[1]), main=True)\n"
        "subprocess.run(['echo', 'g++ -c after'])\n"
        "with chatter.prints():\n    print('Time to load op')\n"
        "print('bye', file=sys.stderr)\n"
    )
    assert run_split(program, str(tmp_path)) == ("hello\n", "bye\n")
    first, *others = (tmp_path / LOG).read_text().splitlines()
    assert first.startswith("--- ") and others == ["g++ -c before", "g++ -c after", "Time to load op"]
    # Before there is a run directory, what a library printed may be the only explanation of a failure.
    failed = run_split("os.write(1, b'nvcc: not found\\n')\nchatter.show()\n")
    assert failed == ("", "nvcc: not found\n")


def test_a_stream_without_a_reader_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Survivor(io.StringIO()))
    assert open_console(False, False, True, None).kind == "lines"
    assert open_console(False, True, True, None).kind == "quiet"
    assert open_console(True, False, True, None).kind == "json"
    assert open_console(True, False, False, None).kind == "silent"
