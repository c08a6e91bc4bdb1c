"""What a person sees: one line of progress, lines where something happens, plain, quiet or as JSON."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.report.console import (
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
from pipeline.run_dir import LOG
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


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.4, "0 s"),
        (59.6, "1 min"),
        (750, "12 min"),
        (3599, "1 h 00 min"),
        (11100, "3 h 05 min"),
        (2e5, "2 d 7 h"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("step", "validation", "save", "said"),
    [
        (120, 200, 500, "validation at 200"),
        (200, 200, 300, "save at 300"),
        (999, 500, 250, "validation and save at 1,000"),
        (5, 0, 0, ""),
        (1999, 200, 500, ""),  # the last step does all of it anyway
    ],
)
def test_what_comes_next(step: int, validation: int, save: int, said: str) -> None:
    assert upcoming(step, 2000, {"validation": validation, "save": save}) == said


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
    assert [line.split()[1] for line in lines] == [
        "1/2,000",
        "11/2,000",
        "21/2,000",
        "31/2,000",
        "2,000/2,000",
        "40",
    ]
    assert lines[0] == "step 1/2,000  loss 2.346  41,200 tokens/s  12 min left  validation at 200"
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_json_lines_hold_every_record() -> None:
    shown, stream = console("json")
    shown.progress(progress)
    for step in (10, 20):
        shown.record({"step": step, "loss": 2.0, "demd": None}, progress)
    shown.event("stopped", "stopped after step 20", step=20, reason="SIGTERM")
    shown.message("resumed from x", logging.INFO)
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [f["event"] for f in found] == ["train", "train", "stopped", "message"]
    assert found[1] | {"time": 0} == {"event": "train", "time": 0, "step": 20, "loss": 2.0, "demd": None}
    assert found[2]["reason"] == "SIGTERM" and found[3]["level"] == "info"


def test_quiet_leaves_warnings_and_the_end() -> None:
    shown, stream = console("quiet")
    shown.record({"step": 1}, progress)
    shown.event("saved", "saved: step-000001")
    shown.message("resumed from x")
    shown.message("step 7 skipped", logging.WARNING)
    shown.event("finished", "finished after 8 steps")
    assert stream.getvalue().splitlines() == ["warning: step 7 skipped", "finished after 8 steps"]


def test_other_ranks_show_errors_alone() -> None:
    shown, stream = console("silent")
    shown.event("finished", "finished after 8 steps")
    shown.message("a warning", logging.WARNING)
    shown.message("broken", logging.ERROR)
    assert stream.getvalue() == "error: broken\n"


def test_what_is_said_twice_is_shown_once() -> None:
    shown, stream = console("lines")
    for text in ("attention: sdpa", "resumed from x", "attention: sdpa"):
        shown.message(text)
    for _ in range(2):
        shown.message("late", logging.WARNING)
    assert stream.getvalue().splitlines() == ["attention: sdpa", "resumed from x", *2 * ["warning: late"]]


def test_a_log_record_may_be_an_event() -> None:
    shown, stream = console("json")
    logger = logging.Logger("of this test")
    logger.addHandler(Handler(shown))
    logger.info("saved: %s", "x", extra={"event_fields": {"event": "saved", "step": 3}})
    logger.warning("late")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["step"]) == ("saved", 3)
    assert (second["event"], second["level"], second["text"]) == ("message", "warning", "late")


def test_text_from_data_cannot_act_on_the_terminal() -> None:
    shown, stream = console("lines")
    shown.event("sample", "step 5  sample: \x1b[2Jgone\rover")
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def on_a_terminal(program: str, **environment: str) -> str:
    """What a program writes to a terminal of 60 columns."""
    leader, follower = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPO, stdout=follower, env=kept | environment
    )
    os.close(follower)
    found = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        found += part
    assert process.wait(60) == 0
    os.close(leader)
    return found.decode()


PROGRAM = """
import itertools, logging
from pipeline.report import console as c
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
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_a_terminal_has_one_line_that_moves(environment: dict[str, str], live: bool, colour: bool) -> None:
    said = on_a_terminal(PROGRAM, **environment)
    drawn = [
        part for part in said.replace("\n", "\r").split("\r") if part.startswith("step") and "loss 2 " in part
    ]
    assert bool(drawn) == live
    assert all(len(part) <= 60 for part in drawn), "a line that wraps cannot be drawn over"
    assert ("\x1b[1mstep 2/2,000" in said) == ("\x1b[33mwarning" in said) == colour
    left = [line.rsplit("\r", 1)[-1] for line in said.replace("\r\n", "\n").splitlines()]
    assert "the end" in left, "what follows has a line of its own"


def test_what_compilers_print_goes_to_the_log(tmp_path: Path) -> None:
    """A child process and a C library write to descriptor 1; Python's print is the user's."""
    program = (
        "import os, subprocess, sys\nfrom pathlib import Path\nfrom pipeline.report.console import split\n"
        "chatter = split()\n"
        "subprocess.run(['echo', 'g++ -c before'])\nprint('hello')\n"
        "chatter.move(Path(sys.argv[1]), main=True)\n"
        "subprocess.run(['echo', 'g++ -c after'])\n"
        "with chatter.prints():\n    print('Time to load op')\n"
        "print('bye', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=REPO, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "bye\n")
    first, *others = (tmp_path / LOG).read_text().splitlines()
    assert first.startswith("--- ") and others == ["g++ -c before", "g++ -c after", "Time to load op"]


def test_chatter_is_shown_where_a_start_fails(tmp_path: Path) -> None:
    """Before there is a run directory, what a library printed may be the only explanation."""
    program = (
        "import os, sys\nfrom pipeline.report.console import split\nchatter = split()\n"
        "os.write(1, b'nvcc: not found\\n')\nchatter.show()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "nvcc: not found\n")


def test_a_stream_without_a_reader_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Survivor(io.StringIO()))
    assert open_console(False, False, True, None).kind == "lines"
    assert open_console(False, True, True, None).kind == "quiet"
    assert open_console(True, False, True, None).kind == "json"
    assert open_console(True, False, False, None).kind == "silent"
