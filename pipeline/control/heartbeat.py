"""What every rank does and since when, by files of their own; and which rank was late when others gave up.

Each rank rewrites ranks/rank-N.json at log windows and when it turns to something else. Where a collective
fails, the ranks that waited in it leave traces beside that: NCCL's flight recorder writes its own, gloo's is
written by `ranks.missed`. Who left none, or had done least, was late. Nothing heavy is imported.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

from emo.common.io.untrusted import read_json

from .run_dir import ENDED, RANKS, TRACE
from .stop import node_name

COPY = "PIPELINE_HEARTBEAT"  # a file for a container's health check, which cannot know the run directory
BEAT = 5.0  # seconds between two writes of it
State = dict[str, Any]
# What reading a damaged pickle, or one of other content, raises.
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError)


class Liveness:
    """One rank's file; the first rank of a host also writes the host's COPY, unless that is rank 0's."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = run_dir / RANKS / f"rank-{rank}.json"
        first = rank > 0 and os.environ.get("LOCAL_RANK") == "0"
        self._copy = Path(os.environ[COPY]) if first and os.environ.get(COPY) else None
        self._facts: State = {"rank": rank, "host": node_name(), "pid": os.getpid()}
        self._copied = -math.inf

    def write(self, state: State, **facts: Any) -> None:
        """Write what this rank does, with what was measured of it last."""
        self._facts |= facts
        self._put(self._path, state)
        self._copied = -math.inf
        self.copy(state)

    def copy(self, state: State) -> None:
        """Write the host's copy, if the last one is BEAT seconds old."""
        if self._copy is not None and time.monotonic() - self._copied >= BEAT:
            self._copied = time.monotonic()
            self._put(self._copy, state)

    def close(self) -> None:
        """Take the copy away: this host trains no more."""
        if self._copy is not None:
            self._copy.unlink(missing_ok=True)

    def _put(self, path: Path, state: State) -> None:
        part = path.with_name(f".{path.name}")
        with contextlib.suppress(OSError):  # where the disk is full, what must be written reports it
            part.write_text(json.dumps({"time": time.time()} | state | self._facts), encoding="utf-8")
            part.replace(path)


def read_ranks(run_dir: Path) -> dict[int, State]:
    """Return what the ranks of the last launch have written, by rank."""
    states = {}
    for path in (run_dir / RANKS).glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            state = read_json(path)
            states[int(state["rank"])] = dict(state)
    return dict(sorted(states.items()))


class Trace(NamedTuple):
    """Where a rank stood when it gave up."""

    progress: tuple[int, int]  # collectives that it had asked for, and that had begun on its device
    waits_in: str  # the collective, and the line that called it


class _Plain(pickle.Unpickler):
    """Reads containers, texts and numbers; a pickle that names a class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"{module}.{name} is no plain value")


def read_traces(run_dir: Path) -> dict[int, Trace]:
    """Return the traces that ranks have left, by rank; those that are not whole are left out."""
    traces = {}
    for path in (run_dir / RANKS).glob(f"{TRACE}*"):
        with contextlib.suppress(*DAMAGED), path.open("rb") as file:
            traces[int(path.name.removeprefix(TRACE))] = _trace(file)
    return traces


def _trace(file: IO[bytes]) -> Trace:
    content = _Plain(file).load()
    groups, entries = content["pg_status"].values(), content["entries"]
    counts = [
        sum(max(0, int(group[f"last_{what}_collective"])) for group in groups)
        for what in ("enqueued", "started")
    ]
    entry = next((e for e in entries if e["state"] == "started"), entries[-1])
    lines = (f"{Path(f['filename']).name}:{f['line']}" for f in entry.get("frames", ()) if _ours(f))
    where = next((f" ({line})" for line in lines), "")
    return Trace((counts[0], counts[1]), entry["profiling_name"].partition(":")[2] + where)


def _ours(frame: dict[str, Any]) -> bool:
    return "site-packages" not in frame["filename"]


def accounted(run_dir: Path) -> bool:
    """Return whether every rank has left a trace or has ended."""
    traces = read_traces(run_dir)
    return all(rank in traces or s.get("doing") in ENDED for rank, s in read_ranks(run_dir).items())


def late(run_dir: Path) -> str | None:
    """Return which rank others waited for in vain, and in what; None where no traces tell."""
    states, traces = read_ranks(run_dir), read_traces(run_dir)
    if not traces:
        return None
    least = min(trace.progress for trace in traces.values())
    furthest = max(traces.values(), key=lambda trace: trace.progress)
    behind = [rank for rank in states if rank not in traces]
    if not behind and least < furthest.progress:
        behind = [rank for rank in states if traces[rank].progress == least]
    if not behind:
        return None
    state, more = states[behind[0]], f" and {len(behind) - 1} more" * (len(behind) > 1)
    who = f"rank {behind[0]} on {state.get('host')}{more} ({state.get('doing')})"
    return f"the first that was late: {who}; others waited in {furthest.waits_in}"
