"""data.limit_tokens: the training rows that fit into a number of tokens, and their shards.

The training rows of all sources take turns in proportion: row k of the n rows of a source is due at
(k + 0.5) / n. Of rows that are due at the same time, the one with the lowest number comes first. All units
count the tokens of their rows that are due up to some time, and add them up by intervals of time. In the
interval that reaches the limit the rows are compared one by one. The tokens of earlier units give the shards
of a unit's rows.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from emo.common.errors import UserError
from emo.common.parallel import WorkerPool

from ..config import TRAIN, DataConfig
from .buckets import Chunk, read_buckets
from .plan import COLUMNS, ROWS, Plan, PlannedRows, write_table
from .select import COPIES, Selection, unpacked

WIDTH = 3  # of a counted row: when it is due, the row with its copies, and the tokens of a copy
INTERVALS = WIDTH << 9
LAST = np.uint64(2**64 - 1)


class _End(NamedTuple):
    """The last row within the limit. If all rows are within it, `due` is LAST."""

    due: np.uint64  # bits of a float
    row: np.uint64  # with its copies
    copies: int  # that are used
    amounts: np.ndarray  # int64 [units]: the tokens of the rows up to this one, copies included


class TokenLimit:
    """Selects the training rows within data.limit_tokens, in one of the jobs that share the work.

    The sources are used in proportion. Rows are assigned to the shards again, by their tokens. Text has a
    quota of tokens for each shard, whose sum is the limit in complete blocks. Instructions are not cut: less
    than one example is missing.
    """

    def __init__(self, config: DataConfig, plan: Plan, workers: WorkerPool, selection: Selection) -> None:
        """Make all stages, together with other jobs. Raises UserError if the limit takes nothing.

        Args:
            config: The data section of the recipe.
            plan: The plan without the limit.
            workers: Count tokens, see `encode.counting`.
            selection: The selection of the rows of the plan.
        """
        self.config = config
        self.plan = plan
        self.workers = workers
        self.inputs = inputs = selection.inputs
        self.stages = selection.stages
        self.rows = selection.rows
        self.training = selection.limited.used(0)
        self.available = np.bincount(self.training.source, self.training.rows, len(inputs)).astype(np.int64)
        names = config.domains_of(TRAIN)
        numbers = (names.index(each.source.domain_name) if each.split == 0 else 0 for each in inputs)
        self.domains = np.array([*numbers])  # int64 [inputs]
        self.groups = config.shards, len(names)
        self.name = f"tokens-{plan.summary['tokenizer']['fingerprint'][:16]}"  # it may have been changed
        self._times = [0.0]  # up to which tokens are counted
        self._counted: list[list[Path]] = []  # by time and unit
        self._sums = np.zeros((len(self.stages.units), 0), np.int64)  # by unit and interval: tokens
        self._taken = self._run()  # files of `_assign_shards`

    def _run(self) -> list[Path]:
        limit, block = self.config.limit_tokens, self.config.sequence_len
        is_text = self.config.kind == "text"
        assert limit is not None
        if is_text and limit < block:
            raise _nothing_error(limit, f"a block has {block:,}")
        wanted = limit // block * block if is_text else limit
        target = wanted + (not is_text)  # the row that reaches it is the last
        while True:
            end = self._find_end(target)
            paths = self._assign_shards(target, end)
            if not is_text:
                return paths
            blocks = self._count_blocks(paths)
            missing = wanted - int(blocks.sum()) * block  # lost at the ends of shards and domains
            if missing <= 0 or end.due == LAST:
                quotas = _trim(blocks, max(0, -missing // block)) * block
                self.plan.summary["token_quotas"] = quotas.tolist()
                return paths
            target = int(end.amounts.sum()) + missing

    def _count_more(self, target: int) -> None:
        """Count the tokens of about as many more rows as are missing for `target` tokens."""
        rows = int(self.available.sum())
        begin = self._times[-1]
        if begin:
            estimate = begin * min(4, 1.05 * target / max(1, int(self._sums.sum())))
        else:
            copies = int(self.training.copies.sum())
            estimate = 3 * target * copies / max(1, self.plan.summary["chars"][TRAIN]) / rows
        end = min(1.0, max(estimate, begin + 256 / rows))
        name = f"{self.name}-{len(self._counted)}"
        paths = self.stages.run(name, lambda number: self._count_unit(number, begin, end), 2)
        sums = np.concatenate(list(read_buckets(paths, 1))).astype(np.int64)
        self._sums = np.concatenate([self._sums, sums.reshape(-1, INTERVALS)], axis=1)
        self._counted.append(paths)
        self._times.append(end)

    def _count_unit(self, number: int, begin: float, end: float) -> Iterator[Chunk]:
        """Yield the rows of a unit that are due in [begin, end), and then the sums of their tokens."""
        records = _joined(read_buckets([self.rows[number]], 0, 0), 2)
        rows = records[:, 0].astype(np.int64)
        inputs = self.plan.inputs_of(rows)
        earlier = self.training.where(self.training.unit < number)
        before = np.bincount(earlier.source, earlier.rows, len(self.inputs)).astype(np.int64)
        rank = before[inputs] + np.arange(len(rows)) - np.searchsorted(inputs, inputs)
        due = (rank + 0.5) / self.available[inputs]
        taken = (due >= begin) & (due < end)
        rows, due, (_, copies) = rows[taken], due[taken], unpacked(records[taken, 1])
        counts = self.workers.map(self.plan.read_once(self.inputs, rows))
        tokens = np.concatenate([np.zeros(0, np.int64), *counts]).astype(np.uint64)
        packed = rows.astype(np.uint64) << np.uint64(COPIES) | copies
        yield np.stack([due.view(np.uint64), packed, tokens], axis=1), np.zeros(len(rows))
        sums = np.bincount(_intervals(due, begin, end), tokens * copies, INTERVALS).astype(np.uint64)
        yield sums.reshape(-1, WIDTH), np.ones(INTERVALS // WIDTH)

    def _find_end(self, target: int) -> _End:
        """Return the row whose tokens reach a target."""
        while self._times[-1] < 1 and int(self._sums.sum()) < target:
            self._count_more(target)
        ends = np.cumsum(self._sums.sum(axis=0))
        if ends[-1] < target:
            return _End(LAST, LAST, 0, self._sums.sum(axis=1))
        interval = int(np.searchsorted(ends, target))
        time, inside = divmod(interval, INTERVALS)

        def candidates(number: int) -> Iterator[Chunk]:
            records = _joined(read_buckets([self._counted[time][number]], 0), WIDTH)
            due = records[:, 0].copy().view(np.float64)
            records = records[_intervals(due, *self._times[time : time + 2]) == inside]
            yield records, np.zeros(len(records))

        found = _joined(read_buckets(self.stages.run(f"{self.name}-end-{target}", candidates, 1), 0), WIDTH)
        due, packed, tokens = found[np.lexsort((found[:, 1], found[:, 0]))].T
        rows, copies = unpacked(packed)
        copies = copies.astype(np.int64)
        amount = copies * tokens.astype(np.int64)
        before = int(ends[interval]) - int(amount.sum())
        at = int(np.searchsorted(before + np.cumsum(amount), target))
        if self.config.kind != "text":  # the row is beyond the limit; some of its copies may be within
            copies[at] = (target - 1 - before - int(amount[:at].sum())) // int(tokens[at])
            amount[at] = copies[at] * int(tokens[at])
            if not before + int(amount[: at + 1].sum()):
                raise _nothing_error(target - 1, f"the first example has {int(tokens[at]):,}")
        amounts = self._sums[:, :interval].sum(axis=1)
        np.add.at(amounts, self.stages.units_of(rows[: at + 1]), amount[: at + 1])
        return _End(due[at], packed[at], int(copies[at]), amounts)

    def _assign_shards(self, target: int, end: _End) -> list[Path]:
        """Return files of the used rows with their shards, and of the tokens of each shard and domain.

        Each shard gets consecutive rows with about the same number of tokens.
        """
        shards, domains = self.groups
        begins = np.cumsum(end.amounts) - end.amounts
        total = max(1, int(end.amounts.sum()))

        def assigned(number: int) -> Iterator[Chunk]:
            records = _joined(read_buckets([paths[number] for paths in self._counted], 0), WIDTH)
            due, packed, _ = records.T
            records = records[(due < end.due) | ((due == end.due) & (packed <= end.row))]
            _, packed, tokens = records[np.argsort(records[:, 1])].T
            rows, copies = unpacked(packed)
            copies[packed == end.row] = end.copies
            amount = (tokens * copies).astype(np.int64)
            before = begins[number] + np.cumsum(amount) - amount
            # Rows without tokens may come last.
            shard = np.minimum(before * shards // total, shards - 1)
            group = shard * domains + self.domains[self.plan.inputs_of(rows.astype(np.int64))]
            groups, at = np.unique(group, return_inverse=True)
            sums = np.bincount(at, amount, len(groups))
            yield np.stack([groups, sums.astype(np.int64)], axis=1).astype(np.uint64), np.zeros(len(groups))
            placed = shard.astype(np.uint64) << np.uint64(COPIES) | copies
            used = np.stack([rows, placed], axis=1)[copies > 0]
            yield used, np.ones(len(used))

        return self.stages.run(f"{self.name}-shards-{target}", assigned, 2)

    def _count_blocks(self, paths: list[Path]) -> np.ndarray:
        """Return the number of complete blocks in each shard, int64 [shards]."""
        totals = np.zeros(self.groups, np.int64)
        for batch in read_buckets(paths, 0):
            group, tokens = batch.astype(np.int64).T
            np.add.at(totals.reshape(-1), group, tokens)
        return (totals // self.config.sequence_len).sum(axis=1)

    def save(self) -> Plan:
        """Replace the training rows of the plan by those within the limit, and return it."""
        config = self.config
        summary = self.plan.summary
        rows, copies = np.zeros((2, len(self.inputs)), np.int64)

        def kept() -> Iterator[PlannedRows]:
            for batch in read_buckets(self._taken, 1):
                planned = PlannedRows(batch[:, 0], *unpacked(batch[:, 1]))
                inputs = self.plan.inputs_of(planned.row.astype(np.int64))
                np.add.at(rows, inputs, 1)
                np.add.at(copies, inputs, planned.copies.astype(np.int64))
                yield planned

        others = self.plan.rows(config.shards, config.shards * len(config.splits))
        write_table(self.plan.path.with_name(ROWS), COLUMNS, itertools.chain(kept(), others))
        dropped = (self.available - rows).tolist()
        for source, fewer, count in zip(summary["sources"], dropped, copies.tolist(), strict=True):
            source[TRAIN] = count
            for rejected in (source["rejected"], summary["rejected"]) if fewer else ():
                rejected["limit"] = rejected.get("limit", 0) + fewer
        return Plan(self.plan.path, summary)


def _joined(batches: Iterator[np.ndarray], width: int) -> np.ndarray:
    """Return all records of batches, uint64 [records, width]."""
    return np.concatenate([np.zeros((0, width), np.uint64), *batches])


def _intervals(due: np.ndarray, begin: float, end: float) -> np.ndarray:
    """Return the interval of each time in [begin, end), int64."""
    return np.minimum(((due - begin) / (end - begin) * INTERVALS).astype(np.int64), INTERVALS - 1)


def _nothing_error(limit: int, required: str) -> UserError:
    return UserError(
        f"data.limit_tokens={limit} is too small: {required} tokens. Set that or more",
        code="limit-takes-nothing",
    )


def _trim(blocks: np.ndarray, surplus: int) -> np.ndarray:
    """Return the blocks of each shard, in total `surplus` fewer, removed from the longest shards."""
    total = int(blocks.sum()) - surplus
    levels = range(int(blocks.max()) + 1)
    level = bisect_right(levels, total, key=lambda x: int(np.minimum(blocks, x).sum())) - 1
    trimmed = np.minimum(blocks, level)
    trimmed[np.flatnonzero(blocks > level)[: total - int(trimmed.sum())]] += 1
    return trimmed
