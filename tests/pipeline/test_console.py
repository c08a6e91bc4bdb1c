"""What a person sees: lines where something happens, plain or as JSON, and a log of the rest."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

from emo.pipeline.report.console import Console, Kind, Progress
from emo.pipeline.run_dir import LOG
from tests.conftest import REPO


def console(kind: Kind) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(kind, stream), stream


def logger_of(shown: Console) -> logging.Logger:
    logger = logging.Logger("of this test")
    logger.addHandler(shown)
    return logger


def test_plain_lines_come_every_few_seconds_and_cannot_act() -> None:
    shown, stream = console("lines")
    for step in range(1, 40):
        shown._clock = lambda step=step: float(step)  # type: ignore[misc]
        shown.progress(Progress(step, 2000, {}))
        shown.record({"step": step, "loss": 2.0}, Progress(step, 2000, {}))
    shown.record({"step": 2000}, Progress(2000, 2000, {}))  # the last one always
    shown.event("step 40  \x1b[2Jgone\rover", "validation", step=40)
    for _ in range(2):
        logger_of(shown).info("step 41: once")
        logger_of(shown).warning("step 42")
    steps = [text for line in stream.getvalue().splitlines() for text in line.split() if text[0].isdigit()]
    assert steps == ["1/2,000", "11/2,000", "21/2,000", "31/2,000", "2,000/2,000", "40", "41:", "42", "42"]
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_json_lines_hold_every_record() -> None:
    shown, stream = console("json")
    shown.record({"step": 20, "loss": 2.0, "demd": None}, Progress(20, 30, {}))
    logger_of(shown).info("saved: %s", "x", extra={"event_fields": {"event": "saved", "step": 3}})
    logger_of(shown).warning("late")
    records = [json.loads(line) | {"time": 0} for line in stream.getvalue().splitlines()]
    assert records == [
        {"event": "train", "time": 0, "step": 20, "loss": 2.0, "demd": None},
        {"event": "saved", "time": 0, "step": 3},
        {"event": "message", "time": 0, "level": "warning", "text": "late"},
    ]


def test_what_compilers_print_goes_to_the_log(tmp_path: Path) -> None:
    """A child process and a C library write to descriptor 1; Python's print is the user's."""

    def run(program: str) -> tuple[str, str]:
        text = "import os, sys\nfrom pathlib import Path\n"
        text += f"from emo.pipeline.report.console import Console, split\nchatter = split()\n{program}"
        command = [sys.executable, "-c", text, str(tmp_path)]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    program = (
        "os.system('echo g++ -c before')\nprint('hello')\n"
        "chatter.move(Path(sys.argv[1]), main=True)\nos.system('echo g++ -c after')\n"
        "with Console(chatter=chatter).compiling():\n    print('Time to load op')\n"
        "print('bye', file=sys.stderr)\n"
    )
    assert run(program) == ("hello\n", "bye\n")
    first, *others = (tmp_path / LOG).read_text().splitlines()
    assert first.startswith("--- ") and others == ["g++ -c before", "g++ -c after", "Time to load op"]
    # Before there is a run directory, what a library printed may be the only explanation of a failure.
    assert run("os.write(1, b'nvcc: not found\\n')\nchatter.show()\n") == ("", "nvcc: not found\n")


def test_a_lost_reader_breaks_no_rank() -> None:
    program = "import sys; from emo.pipeline.report.console import split; split(); sys.stdin.readline()\n"
    program += "for _ in range(3): print('a line')\nsys.stderr.write('went on')"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    rank = subprocess.Popen([sys.executable, "-c", program], cwd=REPO, text=True, **pipes)
    assert rank.stdin is not None and rank.stdout is not None and rank.stderr is not None
    rank.stdout.close()
    rank.stdin.write("go\n")
    rank.stdin.flush()
    assert rank.stderr.read() == "went on" and rank.wait() == 0
