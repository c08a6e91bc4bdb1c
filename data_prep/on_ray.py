"""`prepare --on ray`: each unit of the scan and each shard is a task that Ray places, runs and repeats.

Tasks that select rows share the units by leases, like jobs. Other tasks hold no leases. The process that
starts the tasks makes the plan and the manifests. Tasks communicate by files in the directory of the data,
like all jobs, so that a later job of any kind continues their work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any

from emo.common.cli.progress import progress
from emo.common.errors import FailureError
from emo.common.io.files import Hashes
from emo.common.io.objects import forget_listings
from emo.common.on_ray import connect, run_tasks
from emo.common.parallel import WorkerPool

from .config import DataConfig
from .prepare import LoadedPlan, Preparation, Say, prepare
from .selection.row_units import divide_rows
from .selection.scan import Scan, scanner
from .selection.select import Selection
from .selection.token_limit import TokenLimit
from .shards.costs import cpu_seconds, peak_memory
from .shards.format import HASHES, ShardInfo


def prepare_on_ray(config: DataConfig, workers: int, force: bool, say: Say) -> None:
    """Make all shards with tasks of Ray.

    Args:
        config: The data section of the recipe.
        workers: CPUs of a local cluster.
        force: Discard prepared data and start over.
        say: Prints a line for the user.
    """
    # Nodes have other working directories.
    config = config.model_copy(update={"dir": config.dir.absolute(), "root": config.root.absolute()})
    with connect(workers):
        prepare(config, (0, 1), workers, force, False, say, RayPreparation)


class RayPreparation(Preparation):
    """A preparation whose units and shards are tasks of the connected cluster."""

    _alone = False
    _selected: tuple[bool, bool] | None = None  # (limit, alone) of the selection that tasks have made

    def scan(self, first: float, alone: bool = False) -> Scan:
        """Make the missing parts of all units. The arguments concern other jobs, which tasks do not need."""
        scan = self.open_scan()
        left = [unit.number for unit in scan.units if not scan.is_complete(unit)]
        done = 0
        total = sum(scan.units[number].size for number in left)
        with progress("reading", total, self.say) as advance, self.stopwatch.time("reading"):
            for number, _ in self._run_tasks(_make_part, left):
                done += scan.units[number].size
                advance(done)
        forget_listings()
        missing = [unit.number for unit in scan.units if not scan.is_complete(unit)]
        if missing:
            raise FailureError(
                f"part {missing[0]} of the sources is not in {self.new}. Set a data.dir that all nodes share",
                code="not-shared",
            )
        return scan

    def select(self, scan: Scan, first: float, alone: bool = False) -> Selection | None:
        """Let tasks make the units, one for each CPU at most, and return the selection."""
        self._alone = alone
        self._select_in_tasks(len(divide_rows([scan.parts[unit.number] for unit in scan.units])), False)
        return super().select(scan, first, alone)

    def limit(self, selection: Selection) -> TokenLimit:
        """Let tasks count the tokens, and return the limit."""
        self._select_in_tasks(len(selection.stages.units), True)
        return super().limit(selection)

    def _select_in_tasks(self, units: int, limit: bool) -> None:
        import ray

        step = -(-units // max(1, int(ray.cluster_resources().get("CPU", 1))))
        begins = range(0, units, step) if units > 1 and (limit, self._alone) != self._selected else ()
        with self.stopwatch.time("selection"):
            for _ in self._run_tasks(_select, begins, units, self._alone, limit):
                pass
        self._selected = limit, self._alone

    def make_shards(self, loaded: LoadedPlan, shards: list[int], hashes: Hashes) -> list[ShardInfo]:
        began = time.perf_counter()
        infos = []
        with self.stopwatch.time("shards"):
            for _, info in self._run_tasks(_make_shard, shards):
                self.say_shard(info)
                infos.append(info)
        self.say_rate(infos, time.perf_counter() - began)
        return infos

    def _run_tasks(
        self, function: Callable[..., Any], numbers: Iterable[int], *arguments: Any
    ) -> Iterator[tuple[int, Any]]:
        """Yield each number with the result of its task, as they end, and record what the task took.

        A task calls the function with the configuration, its number and the arguments.
        """

        @wraps(function)
        def measured(*values: Any) -> tuple[Any, float, float]:
            began = cpu_seconds()
            return function(*values), cpu_seconds() - began, peak_memory(1)

        for number, (result, *costs) in run_tasks(
            measured, self.config.model_dump_json(), numbers, *arguments
        ):
            self.stopwatch.add_task(*costs)
            yield number, result


@cache
def _job(config: str) -> Preparation:
    """Return the job of this process, by the JSON text of its configuration."""
    job = Preparation(DataConfig.model_validate_json(config), 1, lambda line: None)
    job.refresh()
    return job


@cache
def _scan(config: str) -> tuple[Scan, WorkerPool]:
    scan = _job(config).open_scan()
    return scan, WorkerPool(1, scanner, scan.config, scan.chat)


@cache
def _loaded(config: str) -> LoadedPlan:
    job = _job(config)
    job.refresh()
    return job.load(Hashes(job.config.dir / HASHES))


def _make_part(config: str, number: int) -> None:
    """In a task: make the part of a unit."""
    scan, pool = _scan(config)
    scan.make_part(scan.units[number], pool, lambda count: None)


def _select(config: str, number: int, units: int, alone: bool, limit: bool) -> None:
    """In a task: select rows together with other tasks, beginning with unit `number`.

    limit: also those within data.limit_tokens.
    """
    scan, _ = _scan(config)
    job = _job(config)
    forget_listings()
    if not all(map(scan.is_complete, scan.units)):
        return
    selection = job.select(scan, number / units, alone)
    if limit and selection is not None:
        job.refresh()
        selection.share(lambda: job.limit(selection))


def _make_shard(config: str, shard: int) -> ShardInfo:
    """In a task: make a shard."""
    job = _job(config)
    (info,) = job.make_shards(_loaded(config), [shard], Hashes(job.config.dir / HASHES))
    return info
