"""The duration and the memory of preparation: what each job records, and what is predicted."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from emo.common.io.files import write_text
from emo.common.io.mirror import refresh
from emo.common.text import duration

FILES = "costs-*.json"  # one of each job
MIB = 1 << 20


class Costs(NamedTuple):
    """The costs of preparation on each machine."""

    reading: float  # seconds
    selection: float
    shards: float
    memory: float  # bytes, of all processes

    def shown(self) -> dict[str, str]:
        """Return the costs as text by name."""
        stages = self._asdict() | {"total": sum(self[:3])}
        memory = stages.pop("memory") / MIB
        texts = {name: duration(seconds) for name, seconds in stages.items()}
        return texts | {"memory": f"{memory:,.0f} MiB"}


class Stopwatch:
    """Measures the stages of a job."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.largest = 0.0  # peak memory in bytes of a process that is no child

    @contextlib.contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the duration of a block to a stage, a field of Costs."""
        began = time.monotonic()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began

    def save(self, directory: Path, job: tuple[int, int], workers: int) -> None:
        """Write the costs of job (i, n) if it had all stages. workers: number of its worker processes."""
        if self.seconds.keys() < set(Costs._fields[:3]):
            return
        costs = Costs(**self.seconds, memory=peak_memory(workers, self.largest))
        write_text(
            directory / FILES.replace("*", f"{job[0]}-of-{job[1]}"), json.dumps(costs._asdict()) + "\n"
        )


def peak_memory(workers: int, elsewhere: float = 0.0) -> float:
    """Return the peak memory of this process and its workers in bytes. elsewhere: of a worker of Ray."""
    mine, child = (
        resource.getrusage(who).ru_maxrss * 1024.0 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return mine + workers * (elsewhere or (child if workers > 1 else 0))


def read_costs(directory: Path) -> Costs | None:
    """Return the highest costs of the jobs that prepared a directory, or None if it has no records."""
    refresh(directory, [FILES])
    with contextlib.suppress(OSError, ValueError, TypeError):
        jobs = [Costs(**json.loads(path.read_text(encoding="utf-8"))) for path in directory.glob(FILES)]
        return Costs(*map(max, zip(*jobs, strict=True))) if jobs else None
    return None
