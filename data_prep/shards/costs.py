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
from emo.common.text import duration

FILES = "costs-*.json"  # one of each job
FORECAST = "forecast.json"  # of `plan --data`
MIB = 1 << 20


class Costs(NamedTuple):
    """The costs of preparation on each machine."""

    reading: float  # seconds
    selection: float
    shards: float
    cpu: float  # seconds, of all processes
    memory: float  # bytes, of all processes
    workers: int

    def shown(self) -> dict[str, str]:
        """Return the costs as text by name."""
        times = dict(zip(self._fields, self[:3], strict=False)) | {"total": sum(self[:3]), "CPU": self.cpu}
        texts = {name: duration(seconds) for name, seconds in times.items()}
        return texts | {"memory": f"{self.memory / MIB:,.0f} MiB"}


class Stopwatch:
    """Measures the stages of a job."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._cpu = -cpu_seconds()
        self._largest = 0.0  # peak memory in bytes of a task

    @contextlib.contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the duration of a block to a stage, a field of Costs."""
        began = time.monotonic()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began

    def add_task(self, cpu: float, memory: float) -> None:
        """Add the CPU seconds and the peak memory in bytes of a task that no child process ran."""
        self._cpu += cpu
        self._largest = max(self._largest, memory)

    def save(self, directory: Path, job: tuple[int, int], workers: int) -> None:
        """Write the costs of job (i, n) if it had all stages. workers: number of its worker processes."""
        if self.seconds.keys() < set(Costs._fields[:3]):
            return
        cpu = self._cpu + cpu_seconds()
        memory = peak_memory(workers, self._largest)
        costs = Costs(**self.seconds, cpu=cpu, memory=memory, workers=workers)
        write_text(
            directory / FILES.replace("*", f"{job[0]}-of-{job[1]}"), json.dumps(costs._asdict()) + "\n"
        )


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def peak_memory(workers: int, elsewhere: float = 0.0) -> float:
    """Return the peak memory of this process and its workers in bytes.

    elsewhere: the peak of a Ray worker, if Ray runs the workers.
    """
    mine, child = (
        resource.getrusage(who).ru_maxrss * 1024.0 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return mine + workers * (elsewhere or (child if workers > 1 else 0))


def read_costs(directory: Path) -> Costs | None:
    """Return the highest costs of the jobs that prepared a directory, or None if it has no records."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        jobs = [Costs(**json.loads(path.read_text(encoding="utf-8"))) for path in directory.glob(FILES)]
        return Costs(*map(max, zip(*jobs, strict=True))) if jobs else None
    return None
