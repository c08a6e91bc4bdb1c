"""What the ranks of a run do right now, or did last, from its files alone. Nothing heavy is imported."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

from emo.common.errors import UserError
from emo.common.io.untrusted import number
from emo.common.report.numbers import DASH, formatted
from emo.common.text import counted, printable

from ..control.heartbeat import find_late_rank, read_ranks
from ..control.run_dir import ALIVE, ENDED, RANKS, read_heartbeat
from ..monitor.console import duration

HEAD = ("rank", "host", "doing", "step", "age", "alone", "memory", "temperature")
REFRESH = 2.0  # seconds
CLEAR = "\x1b[H\x1b[J"


def show(run_dir: Path) -> None:
    """Print the table; on a terminal again and again, until the run is over or Ctrl-C."""
    while True:
        text, over = table(run_dir, time.time())
        live = sys.stdout.isatty() and not over
        print(CLEAR * live + text, flush=True)
        if not live:
            return
        time.sleep(REFRESH)


def table(run_dir: Path, now: float) -> tuple[str, bool]:
    """Return the run in a line and its ranks in a table, and whether it is over.

    Raises UserError where no rank has begun to load.
    """
    states, beat = read_ranks(run_dir), read_heartbeat(run_dir)
    if not states:
        problem = f"{run_dir / RANKS} has no files: no launch has begun in {run_dir}"
        raise UserError(f"{problem}; give the output_dir of a run", code="no-ranks")
    alive = now - _number(beat, "time") < ALIVE and beat.get("doing") not in ENDED
    steps = [_number(state, "step") for state in (beat, *states.values())]
    doing = f"{'' if alive else 'over, last '}{beat.get('doing')}"
    summary = f"{run_dir}: {doing}, step {formatted(max(steps))}, {_age(beat, now)} ago"
    rows = [HEAD, *(_row(rank, state, now) for rank, state in states.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    hosts = counted(len({state.get("host") for state in states.values()}), "host")
    reason = find_late_rank(run_dir)
    first = [f"{summary}; {counted(len(states), 'rank')} on {hosts}", *([reason] if reason else [])]
    return "\n".join(map(printable, [*first, *lines])), not alive


def _row(rank: int, state: dict[str, Any], now: float) -> tuple[str, ...]:
    """Return the cells of a rank."""
    figures = (
        ("step", "{:,.0f}"),
        ("seconds", "{:.3g} s"),
        ("memory_gib", "{:.1f} GiB"),
        ("temperature", "{:.0f} C"),
    )
    step, *measured = (formatted(state.get(key), form) for key, form in figures)
    return (str(rank), str(state.get("host")), str(state.get("doing")), step, _age(state, now), *measured)


def _age(state: dict[str, Any], now: float) -> str:
    then = number(state.get("time"))
    return DASH if then is None else duration(max(0.0, now - then))


def _number(state: dict[str, Any], key: str) -> float:
    """Return a number of a rank's file; minus infinity where it says none."""
    value = number(state.get(key))
    return -math.inf if value is None else value
