"""The selection of rows: deduplication, limits, and the shard of each row.

All jobs make the stages of the selection together, in units of a limited number of rows, see stages.py. Sums
over earlier units give the limits and the shards of a unit's rows. The result depends only on the rows and
the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from emo.common.errors import UserError
from emo.common.io.files import remove_matching
from emo.common.io.objects import forget_listings

from ..config import VALIDATION, DataConfig, describe_set
from ..sources.reader import SourceReader
from ..sources.spec import CODE, REASONS, SELECTION, UNREADABLE
from .buckets import Chunk, DamagedError, read_buckets
from .compare import MOST_ROWS, MOST_SPLITS
from .plan import COLUMNS, GROUP_ROWS, PIECES, ROWS, Plan, Summary, write_table
from .scan import BEYOND_LIMIT, ScanPart
from .similar import drop_similar
from .stages import PlanFinishedError, Stages, drop_equal

COPIES = 16  # bits, after the shard
COMPARED = [CODE[reason] for reason in SELECTION[:2]]


class Totals(NamedTuple):
    """Sums over the rows with the same unit, source, split and reason, int64 [sums]."""

    unit: np.ndarray
    source: np.ndarray
    split: np.ndarray
    reason: np.ndarray
    rows: np.ndarray
    copies: np.ndarray
    chars: np.ndarray  # copies included

    def used(self, split: int | None = None) -> Totals:
        """Return the sums of used rows, of one split or of all."""
        taken = self.reason == 0
        return self.where(taken if split is None else taken & (self.split == split))

    def where(self, mask: np.ndarray) -> Totals:
        """Return some of the sums."""
        return Totals(*(column[mask] for column in self))


class Selection:
    """The selection of rows by one job.

    Weights are applied before duplicates are dropped. Of equal rows that their sources use, one remains: a
    training row is preferred, then the row with the most copies, then the first. If no copy is trained on,
    each validation set keeps one: its loss does not depend on the other sets.
    """

    def __init__(
        self, config: DataConfig, inputs: list[SourceReader], parts: list[ScanPart], directory: Path
    ) -> None:
        """Args:
        config: the data section of the recipe.
        inputs: the readers of the sources.
        parts: the parts of the scan, in order.
        directory: the directory of all stages.
        """
        self.config = config
        self.inputs = inputs
        self.parts = parts
        self.directory = directory
        self.totals: Totals  # before data.limit_rows
        self.limited: Totals
        self.rows: list[Path] = []  # the used rows of each unit, by split
        self._quotas: np.ndarray | None = None  # see `_quotas`

    def run(self, first: float, ended: Callable[[], bool], say: Callable[[str], None]) -> bool:
        """Make all stages, together with other jobs. Return False if another job has finished the plan.

        Args:
            first: The unit that this job begins with, from 0 to 1.
            ended: Returns whether another job has finished the plan.
            say: Prints a line for the user.
        """
        rows = sum(sum(part.groups) for part in self.parts)
        if rows > MOST_ROWS or len(self.config.splits) > MOST_SPLITS:
            raise UserError(
                f"the sources have {rows:,} rows for {len(self.config.splits):,} sets. Prepare at most "
                f"{MOST_ROWS:,} rows and {MOST_SPLITS:,} sets at once",
                code="too-many-rows",
            )
        self.stages = Stages(self.config, self.parts, self.directory, first, ended, say)
        return self.share(self._run)

    def share(self, make: Callable[[], object]) -> bool:
        """Make stages with a function. Return False if another job has finished the plan.

        Damaged files are made again.
        """
        left = [make]
        while left:
            try:
                left[-1]()
                left.pop()
            except PlanFinishedError:
                return False
            except Exception as error:  # of any reader, as the job that finishes the plan removes all files
                forget_listings()
                if self.stages.ended():
                    return False
                if not isinstance(error, DamagedError):
                    raise
                self.stages.say(f"{error}; making it again")
                remove_matching(error.path.parent, [error.path.name])
                left.append(self._run)
        return True

    def _run(self) -> None:
        config = self.config
        stages = self.stages
        stages.dropped = []
        self._quotas = None
        if config.dedup != "none":
            drop_equal(stages, CODE["duplicate"])
        if config.dedup == "near":
            drop_similar(stages, CODE["near_duplicate"], config.near_threshold)
        self.totals = self.limited = self._add_up(stages, "totals")
        if config.limit_rows is not None:
            self._quotas = _quotas(self.totals.used(0), config.limit_rows, len(self.inputs))
        if self._quotas is not None:
            self.limited = self._add_up(stages, "limited")
        self.rows = stages.run("rows", lambda number: self._rows(stages, number), 1)

    def plan(self, path: Path, first_fault: Callable[[], str]) -> Plan:
        """Write the pieces to a file, the used rows to another next to it, and return the plan, after `run`.

        Raises UserError if an input, if strict, or a split has no rows left.

        first_fault: returns the problem of the first rejected row, for the error if all are rejected.
        """
        before = _count_reasons(self.totals, len(self.inputs))
        before[:, 0] += before[:, COMPARED].sum(axis=1)
        before[:, COMPARED] = 0
        sources = _source_summaries(self.config, self.inputs, self.parts, before)
        summary = _summarize(self.limited, self.config, self.inputs, sources, first_fault)
        write_table(path.with_name(ROWS), COLUMNS, self.used_rows())
        write_table(path, PIECES, self._pieces())
        return Plan(path, summary)

    # --- stages -------------------------------------------------------------------------------------------

    def _columns(self, stages: Stages, number: int) -> dict[str, np.ndarray]:
        """Return the rows of a unit with their final copies and reasons, and `amount`, all characters."""
        columns = stages.units[number].read("source", "split", "copies", "chars", "reason")
        reasons, copies = columns["reason"], columns["copies"].astype(np.int64)
        reasons[(reasons == 0) & (copies == 0)] = CODE["weight"]
        stages.drop(number, reasons)
        if self._quotas is not None:
            earlier = self.totals.used(0)
            earlier = earlier.where(earlier.unit < number)
            left = self._quotas.copy()
            np.subtract.at(left, earlier.source, earlier.copies)
            training = np.flatnonzero((reasons == 0) & (columns["split"] == 0))
            source, wanted = columns["source"][training], copies[training]
            begins = np.flatnonzero(np.diff(source, prepend=-1))
            before = np.cumsum(wanted) - wanted
            before -= np.repeat(before[begins], np.diff(np.append(begins, len(source))))
            copies[training] = np.clip(left[source] - before, 0, wanted)
            reasons[training[copies[training] == 0]] = CODE["limit"]
        return columns | {"copies": copies, "amount": copies * columns["chars"]}

    def _add_up(self, stages: Stages, name: str) -> Totals:
        """Return the sums over the rows of all units."""
        splits = len(self.config.splits)

        def totals_of(number: int) -> Iterator[Chunk]:
            columns = self._columns(stages, number)
            kinds = columns["source"] * np.int64(splits) + columns["split"]
            kinds = kinds * len(REASONS) + columns["reason"]
            begins = np.flatnonzero(np.diff(kinds, prepend=-1))
            runs = np.diff(np.append(begins, len(kinds)))
            kinds, groups = np.unique(kinds[begins], return_inverse=True)
            sums = np.zeros((3, len(kinds)), np.int64)
            for total, values in zip(sums, (runs, columns["copies"], columns["amount"]), strict=True):
                np.add.at(total, groups, values if values is runs else np.add.reduceat(values, begins))
            rest, reason = np.divmod(kinds, len(REASONS))
            table = [np.full(len(kinds), number), *np.divmod(rest, splits), reason, *sums]
            yield np.stack(table, axis=1).astype(np.uint64), np.zeros(len(kinds))

        tables = read_buckets(stages.run(name, totals_of, 1), 0)
        empty = np.zeros((0, len(Totals._fields)), np.uint64)
        return Totals(*np.concatenate([empty, *tables]).astype(np.int64).T)

    def _rows(self, stages: Stages, number: int) -> Iterator[Chunk]:
        """Yield the used rows of a unit with their shards, a chunk for each split.

        The characters before each row of its split determine its shard.
        """
        shards = self.config.shards
        columns = self._columns(stages, number)
        for split in range(len(self.config.splits)):
            used = self.limited.used(split)
            total = max(1, int(used.chars.sum()))
            bounds = [-(-shard * total // shards) for shard in range(1, shards)]
            index = np.flatnonzero((columns["reason"] == 0) & (columns["split"] == split))
            amount = columns["amount"][index]
            before = int(used.chars[used.unit < number].sum()) + np.cumsum(amount) - amount
            shard = split * shards + np.searchsorted(np.array(bounds, np.int64), before, side="right")
            packed = (shard << COPIES) | columns["copies"][index]
            records = np.stack([stages.units[number].first + index, packed], axis=1)
            yield records.astype(np.uint64), np.zeros(len(index))

    def used_rows(self) -> Iterator[list[np.ndarray]]:
        """Yield the used rows of all units in order of the shards, as COLUMNS."""
        for split in range(len(self.config.splits)):
            for batch in read_buckets(self.rows, 0, split):
                for start in range(0, len(batch), GROUP_ROWS):
                    row, packed = batch[start : start + GROUP_ROWS].T
                    yield [row, *unpacked(packed)]

    def _pieces(self) -> Iterator[list[np.ndarray]]:
        """Yield the pieces of all parts, as PIECES."""
        first = 0
        for part in self.parts:
            pieces = part.pieces().T
            ends = first + np.cumsum(pieces[3])
            yield [ends - pieces[3], *pieces]
            first += int(pieces[3].sum())


def unpacked(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and the copies that numbers were packed from, both uint64."""
    return numbers >> np.uint64(COPIES), numbers & np.uint64((1 << COPIES) - 1)


def _quotas(training: Totals, limit: int, inputs: int) -> np.ndarray | None:
    """Return how many training rows, copies included, each source may use, int64 [inputs].

    They are the first rows of each source, in proportion. None: all.
    """
    available = np.zeros(inputs, np.int64)
    np.add.at(available, training.source, training.copies)
    total = int(available.sum())
    if total <= limit:
        return None
    quota = (available.astype(object) * limit // total).astype(np.int64)  # the product may exceed int64
    sources = np.flatnonzero(available)
    by_remainder = np.argsort((quota - available * (limit / total))[sources], kind="stable")
    quota[sources[by_remainder][: limit - int(quota.sum())]] += 1
    return quota


# --- summary ----------------------------------------------------------------------------------------------


def _count_reasons(totals: Totals, inputs: int) -> np.ndarray:
    """Return the number of rows by input and reason, int64 [inputs, REASONS]. Reason 0: the row is used."""
    counts = np.zeros((inputs, len(REASONS)), np.int64)
    np.add.at(counts, (totals.source, totals.reason), totals.rows)
    return counts


def _rejected(counts: np.ndarray) -> dict[str, int]:
    """Return the number of rejected rows by reason. counts: int64 [REASONS]."""
    return {reason: n for reason, n in zip(REASONS, counts.tolist(), strict=True) if reason and n}


def _list_reasons(rejected: Mapping[str, int]) -> str:
    """Return counts by reason as text, such as `24 bad roles, 1 empty`."""
    return ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in rejected.items())


def _source_summaries(
    config: DataConfig, inputs: list[SourceReader], parts: list[ScanPart], counts: np.ndarray
) -> list[dict[str, Any]]:
    """Return the scan's facts about each input, as the manifest has them.

    Raises UserError, if strict, for an input without rows, or without usable rows because it is not UTF-8.

    counts: int64 [inputs, REASONS], before rows are compared.
    """
    sources: list[dict[str, Any]] = []
    for reader, rows in zip(inputs, counts.sum(axis=1).tolist(), strict=True):
        facts = {"format": reader.spec.format, "weight": reader.source.weight, "rows": rows}
        sources.append(facts | {"messages_left_out": 0, "fields_left_out": {}})
    for number, messages, fields, facts in (entry for part in parts for entry in part.inputs):
        sources[number] |= facts
        sources[number]["messages_left_out"] += messages
        totals = sources[number]["fields_left_out"]
        totals |= {field: totals.get(field, 0) + count for field, count in sorted(fields.items())}
    for source, reasons in zip(sources, counts, strict=True):
        if config.strict and not source.get(BEYOND_LIMIT):
            _require_rows(source, reasons)
    return sources


def _require_rows(source: Mapping[str, Any], reasons: np.ndarray) -> None:
    if not source["rows"]:
        raise UserError(
            f"{source['name']} has no rows. Remove it, or set data.strict=false to skip it", code="no-rows"
        )
    rejected = _rejected(reasons)
    unreadable = rejected.keys() & {*UNREADABLE}
    if unreadable and not reasons[[0, CODE["weight"]]].any():
        advice = "Convert it to UTF-8"
        code = "not-utf8"
        if unreadable == {"control_characters"}:
            advice = "Remove the control characters"
            code = "control-characters"
        raise UserError(
            f"{source['name']} has no usable row ({_list_reasons(rejected)}). {advice}, remove the source, "
            "or set data.strict=false to skip and count",
            code=code,
        )


class _SplitCounts(NamedTuple):
    """The used rows, int64."""

    copies: np.ndarray  # [inputs, splits]
    rows: np.ndarray  # [splits], copies not counted
    chars: np.ndarray  # [splits]


def _count_splits(totals: Totals, inputs: int, splits: int) -> _SplitCounts:
    used = totals.used()
    counts = _SplitCounts(
        np.zeros((inputs, splits), np.int64), np.zeros(splits, np.int64), np.zeros(splits, np.int64)
    )
    np.add.at(counts.copies, (used.source, used.split), used.copies)
    np.add.at(counts.rows, used.split, used.rows)
    np.add.at(counts.chars, used.split, used.chars)
    return counts


def _summarize(
    totals: Totals,
    config: DataConfig,
    inputs: list[SourceReader],
    sources: list[dict[str, Any]],
    first_fault: Callable[[], str],
) -> Summary:
    """Return the counts of rows per input and in total. Raises UserError for a split without rows.

    The counts are also added to `sources`.
    """
    reasons = _count_reasons(totals, len(inputs))
    counts = _count_splits(totals, len(inputs), len(config.splits))
    for source, copies, of_source in zip(sources, counts.copies.tolist(), reasons, strict=True):
        source |= dict(zip(config.splits, copies, strict=True)) | {"rejected": _rejected(of_source)}
    rejected = _rejected(reasons.sum(axis=0))
    if not counts.rows[0]:
        raise UserError(_no_training_rows(config, counts, rejected, first_fault), code="no-training-rows")
    copies = totals.where(np.isin(totals.reason, COMPARED))
    dropped = np.bincount(copies.split, copies.rows, len(config.splits)).astype(int).tolist()
    notes = []
    for number, name in enumerate(config.validation_sets, 1):
        left = counts.rows[number]
        if not left:
            members = reasons[[reader.split == number for reader in inputs]].sum(axis=0)
            problem = _no_validation_rows(config, name, _rejected(members))
            raise UserError(
                f"the {describe_set(name)} is empty: {problem}, or none", code="no-validation-rows"
            )
        if (gone := dropped[number]) > left:
            notes.append(
                f"note: {gone:,} of {left + gone:,} rows of the {describe_set(name)} are copies of training "
                f"rows or of each other and are dropped: {left:,} are left"
            )
    chars = dict(zip(config.splits, counts.chars.tolist(), strict=True))
    return {"sources": sources, "rejected": rejected, "chars": chars, "notes": notes}


def _no_training_rows(
    config: DataConfig, counts: _SplitCounts, rejected: dict[str, int], first_fault: Callable[[], str]
) -> str:
    if config.validation_fraction and counts.rows[1]:
        return (
            f"no row is left to train on: data.validation_fraction={config.validation_fraction:g} takes all "
            f"{counts.rows[1]:,} of them. Set a smaller fraction"
        )
    first = first_fault()
    problem = f"no row of the sources can be trained on: {_list_reasons(rejected) or 'there are none'}"
    return problem + (f"; the first: {first}" if first else "")


def _no_validation_rows(config: DataConfig, name: str, rejected: dict[str, int]) -> str:
    if config.validation_fraction:
        return f"data.validation_fraction={config.validation_fraction:g} takes no row. Set a larger fraction"
    key = "data.validation" if name == VALIDATION else f"data.validation.{name}"
    return f"its sources have no usable separate row ({_list_reasons(rejected)}). Set other {key} sources"
