"""Heartbeats of the ranks, and the diagnosis of a collective that timed out.

Each rank rewrites ranks/rank-N.json at log windows and whenever its activity changes. When a collective
fails, the ranks that waited in it leave traces next to that file: NCCL's flight recorder writes its own, and
`world.diagnose_hang` writes gloo's. The rank that left no trace, or that had done the least, was late.

Nothing heavy is imported here.
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
BEAT = 5.0  # seconds between two writes of that file
RankState = dict[str, object]  # the content of a rank's file
# What reading a pickle raises that is damaged or holds something else.
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError)


class RankHeartbeat:
    """The file of one rank. On hosts without rank 0 the first rank also writes the host's copy."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = run_dir / RANKS / f"rank-{rank}.json"
        first_of_host = rank > 0 and os.environ.get("LOCAL_RANK") == "0"
        self._copy = Path(os.environ[COPY]) if first_of_host and os.environ.get(COPY) else None
        self._facts: RankState = {"rank": rank, "host": node_name(), "pid": os.getpid()}
        self._copied = -math.inf

    def write(self, state: RankState, **facts: object) -> None:
        """Write the rank's activity, with the latest measurements."""
        self._facts |= facts
        self._replace(self._path, state)
        self._copied = -math.inf
        self.write_copy(state)

    def write_copy(self, state: RankState) -> None:
        """Write the host's copy, if the last one is BEAT seconds old."""
        if self._copy is not None and time.monotonic() - self._copied >= BEAT:
            self._copied = time.monotonic()
            self._replace(self._copy, state)

    def close(self) -> None:
        """Remove the copy: this host no longer trains."""
        if self._copy is not None:
            self._copy.unlink(missing_ok=True)

    def _replace(self, path: Path, state: RankState) -> None:
        partial = path.with_name(f".{path.name}")
        with contextlib.suppress(OSError):  # on a full disk the writers of checkpoints report the error
            partial.write_text(json.dumps({"time": time.time()} | state | self._facts), encoding="utf-8")
            partial.replace(path)


def read_ranks(run_dir: Path) -> dict[int, RankState]:
    """Return the heartbeats of the last launch, by rank."""
    states = {}
    for path in (run_dir / RANKS).glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            state = read_json(path)
            states[int(state["rank"])] = dict(state)
    return dict(sorted(states.items()))


class Trace(NamedTuple):
    """The state of a rank when a collective failed."""

    progress: tuple[int, int]  # numbers of collectives that were enqueued, and that started on the device
    waits_in: str  # name of the collective, and the line that called it


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, strings and numbers. Rejects a pickle that names a class or function."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"{module}.{name} is no plain value")


def read_traces(run_dir: Path) -> dict[int, Trace]:
    """Return the traces that ranks have left, by rank. Damaged ones are skipped."""
    traces = {}
    for path in (run_dir / RANKS).glob(f"{TRACE}*"):
        with contextlib.suppress(*DAMAGED), path.open("rb") as file:
            traces[int(path.name.removeprefix(TRACE))] = _parse_trace(file)
    return traces


def _parse_trace(file: IO[bytes]) -> Trace:
    content = _PlainUnpickler(file).load()
    groups = content["pg_status"].values()
    entries = content["entries"]
    counts = [
        sum(max(0, int(group[f"last_{what}_collective"])) for group in groups)
        for what in ("enqueued", "started")
    ]
    entry = next((e for e in entries if e["state"] == "started"), entries[-1])
    frames = (f for f in entry.get("frames", ()) if "site-packages" not in f["filename"])
    where = next((f" ({Path(f['filename']).name}:{f['line']})" for f in frames), "")
    return Trace((counts[0], counts[1]), entry["profiling_name"].partition(":")[2] + where)


def is_accounted_for(run_dir: Path) -> bool:
    """Return whether every rank has left a trace or has ended."""
    traces = read_traces(run_dir)
    return all(rank in traces or s.get("doing") in ENDED for rank, s in read_ranks(run_dir).items())


def find_late_rank(run_dir: Path) -> str | None:
    """Describe the rank that others waited for, and the collective. None without traces that show it."""
    states = read_ranks(run_dir)
    traces = read_traces(run_dir)
    if not traces:
        return None
    least = min(trace.progress for trace in traces.values())
    furthest = max(traces.values(), key=lambda trace: trace.progress)
    behind = [rank for rank in states if rank not in traces]
    if not behind and least < furthest.progress:
        behind = [rank for rank in states if traces[rank].progress == least]
    if not behind:
        return None
    state = states[behind[0]]
    more = f" and {len(behind) - 1} more" * (len(behind) > 1)
    who = f"rank {behind[0]} on {state.get('host')}{more} ({state.get('doing')})"
    return f"the first that was late: {who}; others waited in {furthest.waits_in}"
