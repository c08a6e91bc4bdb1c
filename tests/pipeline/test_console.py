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
    Progress,
)
from emo.pipeline.run_dir import LOG
from tests.conftest import REPO


def console(kind: Kind) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(kind, stream, clock=lambda: 0.0), stream


def test_progress_knows_speed_pauses_and_what_comes_next() -> None:
    """An hour of validation slows no token down, and comes again in what is left."""
    progress = Progress(0, 50, {"validation": 25, "save": 40, "never": 0})
    assert str(progress) == "step 0/50  loss not finite  validation at 25"
    progress.pause(1000)  # loading
    progress.count(1, 500.0, 10, 2.3456)  # compiles
    assert str(progress) == "step 1/50  loss 2.346  0 tokens/s  6 h 48 min left  validation at 25"
    for step in range(2, 21):
        progress.count(step, 2.0, 10, 2.0)
    assert str(progress) == "step 20/50  loss 2  5 tokens/s  1 min left  validation at 25"
    progress.pause(38.0)  # as much again is spent in pauses
    assert str(progress) == "step 20/50  loss 2  5 tokens/s  2 min left  validation at 25"
    for step in range(21, 51):
        progress.count(step, 1.0, 10, 2.0)
        assert ("save at 40" in str(progress)) == (25 <= step < 40)
    assert str(progress) == "step 50/50  loss 2  10 tokens/s", "the last step does all of it anyway"
    both = Progress(999, 2000, {"validation": 500, "save": 250})
    assert str(both).endswith("validation and save at 1,000")


def test_plain_lines_come_every_few_seconds_and_cannot_act() -> None:
    shown, stream = console("lines")
    for step in range(1, 40):
        shown._clock = lambda step=step: float(step)  # type: ignore[misc]
        shown.progress(Progress(step, 2000, {}))
        shown.record({"step": step, "loss": 2.0}, Progress(step, 2000, {}))
    shown.record({"step": 2000}, Progress(2000, 2000, {}))  # the last one always
    shown.event("validation", "step 40  \x1b[2Jgone\rover", BOLD, step=40)
    for _ in range(2):
        shown.message("step 41: once")
        shown.message("step 42", logging.WARNING)
    steps = [text for line in stream.getvalue().splitlines() for text in line.split() if text[0].isdigit()]
    assert steps == ["1/2,000", "11/2,000", "21/2,000", "31/2,000", "2,000/2,000", "40", "41:", "42", "42"]
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_json_lines_hold_every_record() -> None:
    shown, stream = console("json")
    logger = logging.Logger("of this test")
    logger.addHandler(Handler(shown))
    shown.record({"step": 20, "loss": 2.0, "demd": None}, Progress(20, 30, {}))
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
progress = c.Progress(0, 2000, {"validation and much more than fits": 200})
for step in (1, 2, 3):
    progress.count(step, 0.1, 4120, 2.0)
    shown.progress(progress)
    if step == 2:
        shown.event("validation", "step 2/2,000  validation: loss 2", c.BOLD)
shown.message("careful", logging.WARNING)
shown.close()
print("the end")
"""


@pytest.mark.parametrize(
    ("environment", "live", "colour"),
    [({"TERM": "xterm"}, True, True), ({"TERM": "dumb"}, False, False)],
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


def test_what_compilers_print_goes_to_the_log(tmp_path: Path) -> None:
    """A child process and a C library write to descriptor 1; Python's print is the user's."""

    def run(program: str) -> tuple[str, str]:
        text = "import os, subprocess, sys\nfrom pathlib import Path\n"
        text += f"from emo.pipeline.report.console import Console, split\nchatter = split()\n{program}"
        command = [sys.executable, "-c", text, str(tmp_path)]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    program = (
        "subprocess.run(['echo', 'g++ -c before'])\nprint('hello')\n"
        "chatter.move(Path(sys.argv[1]), main=True)\n"
        "subprocess.run(['echo', 'g++ -c after'])\n"
        "with Console(chatter=chatter).compiling():\n    print('Time to load op')\n"
        "print('bye', file=sys.stderr)\n"
    )
    assert run(program) == ("hello\n", "bye\n")
    first, *others = (tmp_path / LOG).read_text().splitlines()
    assert first.startswith("--- ") and others == ["g++ -c before", "g++ -c after", "Time to load op"]
    # Before there is a run directory, what a library printed may be the only explanation of a failure.
    assert run("os.write(1, b'nvcc: not found\\n')\nchatter.show()\n") == ("", "nvcc: not found\n")
