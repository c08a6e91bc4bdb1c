"""`emo top`: show what the ranks of a run do, or did last, from its files. Imports no large library."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from emo.common.errors import UserError
from emo.common.io.untrusted import number
from emo.common.report.numbers import DASH, formatted
from emo.common.text import align, counted, duration, printable
from emo.data_prep.shards.progress import describe_progress, is_data_directory

from ..control.heartbeat import find_late_rank, read_ranks
from ..control.run_dir import ALIVE, ENDED, RANKS, read_heartbeat

HEAD = ("rank", "host", "doing", "step", "age", "alone", "memory", "temperature")
FIGURES = {"seconds": "{:.3g} s", "memory_gib": "{:.1f} GiB", "temperature": "{:.0f} C"}
REFRESH = 2.0  # seconds
CLEAR = "\x1b[H\x1b[J"


def show_ranks(run_dir: Path) -> None:
    """Print the table of ranks. On a terminal it is refreshed until the run is over.

    The directory may also be one of prepared data.
    """
    if is_data_directory(run_dir):
        print(describe_progress(run_dir))
        return
    while True:
        text, is_over = format_ranks(run_dir, time.time())
        live = sys.stdout.isatty() and not is_over
        print(CLEAR * live + text, flush=True)
        if not live:
            return
        time.sleep(REFRESH)


def format_ranks(run_dir: Path, now: float) -> tuple[str, bool]:
    """Return a line about the run with a table of its ranks, and whether the run is over.

    Raises UserError if no launch has started.
    """
    states = read_ranks(run_dir)
    beat = read_heartbeat(run_dir)
    if not states:
        problem = f"{run_dir / RANKS} has no files: no launch has started in {run_dir}"
        raise UserError(f"{problem}. Give the output_dir of a run.", code="no-ranks")
    alive = now - _number(beat, "time") < ALIVE and beat.get("doing") not in ENDED
    step = formatted(max(_number(state, "step") for state in (beat, *states.values())))
    doing = f"{'' if alive else 'over, last '}{beat.get('doing')}"
    hosts = counted(len({state.get("host") for state in states.values()}), "host")
    ranks = f"{counted(len(states), 'rank')} on {hosts}"
    lines = [f"{run_dir}: {doing}, step {step}, {_age(beat, now)} ago; {ranks}"]
    lines += [reason] if (reason := find_late_rank(run_dir)) else []
    rows = [HEAD, *(_row(rank, state, now) for rank, state in states.items())]
    return "\n".join(map(printable, [*lines, *align(rows)])), not alive


def _row(rank: int, state: Mapping[str, object], now: float) -> tuple[str, ...]:
    """Return the cells of a rank."""
    texts = (str(rank), str(state.get("host")), str(state.get("doing")), formatted(state.get("step")))
    return (*texts, _age(state, now), *(formatted(state.get(key), form) for key, form in FIGURES.items()))


def _age(state: Mapping[str, object], now: float) -> str:
    then = number(state.get("time"))
    return DASH if then is None else duration(max(0.0, now - then))


def _number(state: Mapping[str, object], key: str) -> float:
    """Return a number of a rank's file, or minus infinity."""
    value = number(state.get(key))
    return -math.inf if value is None else value
