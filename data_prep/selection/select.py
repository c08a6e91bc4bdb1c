"""The selection of rows: deduplication, limits, and the shard of each row.

One job makes the plan from all parts of the scan, with queries of DuckDB. DuckDB holds the table of all rows
and keeps on disk what does not fit into MEMORY. The result depends only on the rows and the settings.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from emo.common.errors import FailureError, UserError, one_line

from ..config import VALIDATION, DataConfig, describe_set
from ..sources.reader import SourceReader
from ..sources.spec import CODE, REASONS, SELECTION, UNREADABLE
from .arrow import array_of
from .near import near_groups
from .plan import GROUP_ROWS, Plan, Summary
from .scan import BEYOND_LIMIT, COLUMNS, ScanPart

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY = "1GB"
MAX_THREADS = 4  # each takes memory
SPILL = "spill"  # directory of data that do not fit into memory


def select(
    config: DataConfig,
    inputs: list[SourceReader],
    parts: list[ScanPart],
    path: Path,
    threads: int,
    first_fault: Callable[[], str],
) -> Plan:
    """Write the rows that shards take to a file and return the plan.

    Weights are applied before duplicates are dropped. Of equal rows that their sources use, one remains: a
    training row is preferred, then the row with the most copies, then the first. If no copy is trained on,
    each validation set keeps one: its loss does not depend on the other sets. Raises UserError if an input,
    if strict, or a split has no rows left.

    Args:
        config: the data section of the recipe.
        inputs: the readers of the sources.
        parts: the parts of the scan, in order.
        path: the file to write.
        threads: threads of DuckDB, at most MAX_THREADS are used.
        first_fault: returns the problem of the first rejected row, for the error if all are rejected.
    """
    import duckdb

    spill = path.parent / SPILL
    limits: Any = {"memory_limit": MEMORY, "threads": max(1, min(threads, MAX_THREADS))}
    try:
        with contextlib.closing(duckdb.connect(config=limits | {"temp_directory": str(spill)})) as db:
            scanned = load_rows(db, parts)
            sources = _source_summaries(config, inputs, parts, _count_reasons(db, len(inputs)))
            select_rows(db, config, len(inputs), scanned, path)
            summary = _summarize(db, config, inputs, sources, first_fault)
    except duckdb.OutOfMemoryException as error:
        raise FailureError(
            f"comparing the rows takes more memory or disk than available ({one_line(error)}). Free space in "
            f"{path.parent} and run prepare again",
            code="selection-out-of-memory",
        ) from None
    finally:
        shutil.rmtree(spill, ignore_errors=True)
    return Plan(path, np.concatenate([part.pieces for part in parts]), summary)


# --- queries ----------------------------------------------------------------------------------------------


def load_rows(db: DuckDBPyConnection, parts: list[ScanPart]) -> str:
    """Make the table `rows` and the view `live` of used rows. Return a query of all parts."""
    counts = [int(part.pieces[:, 3].sum()) for part in parts]
    files = [_quote(part.path) for part in parts]
    starts = zip(files, (np.cumsum(counts) - counts).tolist(), strict=True)
    numbered = f"(VALUES {', '.join(f'({file}, {start})' for file, start in starts)}) parts(filename, start)"
    read = f"read_parquet([{', '.join(files)}], file_row_number = true, filename = true)"
    scanned = f"(SELECT *, start + file_row_number AS row FROM {read} JOIN {numbered} USING (filename))"
    columns = ", ".join(name for name in COLUMNS if name != "reason")
    db.execute(f"""
        CREATE TABLE rows AS SELECT row, {columns},
            CASE WHEN reason = 0 AND copies = 0 THEN {CODE["weight"]} ELSE reason END AS reason
        FROM {scanned};
        CREATE VIEW live AS SELECT * FROM rows WHERE reason = 0""")
    return scanned


def select_rows(db: DuckDBPyConnection, config: DataConfig, inputs: int, scanned: str, path: Path) -> None:
    """Deduplicate and limit the rows, assign them to shards, and write the used ones to a file.

    Args:
        db: a connection with the table `rows`.
        config: the data section of the recipe.
        inputs: the number of inputs.
        scanned: a query of all parts of the scan.
        path: the file to write.
    """
    if config.dedup != "none":
        _drop_copies(db, "duplicate", "hash", "live")
    if config.dedup == "near":
        near_groups(db, scanned, config.near_threshold)
        _drop_copies(db, "near_duplicate", "head", "(live JOIN near USING (row))")
    if config.limit_rows is not None:
        _limit_rows(db, config.limit_rows, inputs)
    # The characters before each row of its split determine its shard.
    db.execute(f"""
        COPY (
            WITH amounts AS (SELECT row, split, copies, chars::BIGINT * copies AS amount FROM live)
            SELECT row, copies, (split * {config.shards}
                + (sum(amount) OVER (PARTITION BY split ORDER BY row) - amount) * {config.shards}
                // greatest(1, sum(amount) OVER (PARTITION BY split)))::INTEGER AS shard
            FROM amounts ORDER BY shard, row
        ) TO {_quote(path)} (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {GROUP_ROWS})""")


def _quote(path: Path) -> str:
    return "'{}'".format(str(path).replace("'", "''"))


def _drop_copies(db: DuckDBPyConnection, reason: str, group: str, rows: str) -> None:
    """Reject the rows that have a preferred row in their group.

    A group with a training row (split 0) keeps one row. Any other group keeps one row of each split.
    """
    db.execute(f"""
        UPDATE rows SET reason = {CODE[reason]} WHERE row IN (
            SELECT row FROM (
                SELECT row, split,
                    min(split) OVER (PARTITION BY {group}) AS best_split,
                    row_number() OVER (PARTITION BY {group}, split ORDER BY copies DESC, row) AS place
                FROM {rows}
                WHERE {group} IN (SELECT {group} FROM {rows} GROUP BY {group} HAVING count(*) > 1))
            WHERE place > 1 OR (best_split = 0 AND split > 0))""")


def _limit_rows(db: DuckDBPyConnection, limit: int, inputs: int) -> None:
    """Keep `limit` training rows, copies included: the first rows of each source, in proportion."""
    available = np.zeros(inputs, np.int64)
    used = "SELECT source, sum(copies)::BIGINT FROM live WHERE split = 0 GROUP BY source"
    for source, count in db.execute(used).fetchall():
        available[source] = count
    total = int(available.sum())
    if total <= limit:
        return
    quota = available * limit // total
    sources = np.flatnonzero(available)
    by_remainder = np.argsort((quota - available * (limit / total))[sources], kind="stable")
    quota[sources[by_remainder][: limit - int(quota.sum())]] += 1
    quotas = [array_of(np.arange(inputs)), array_of(quota)]
    db.register("quotas", pa.Table.from_arrays(quotas, names=["source", "quota"]))
    db.execute(f"""
        CREATE TEMP TABLE fewer AS
        WITH due AS (
            SELECT row, copies, quota - (sum(copies) OVER (PARTITION BY source ORDER BY row) - copies) AS room
            FROM live JOIN quotas USING (source) WHERE split = 0)
        SELECT row, greatest(0, room)::USMALLINT AS copies FROM due WHERE room < copies;
        UPDATE rows SET copies = fewer.copies FROM fewer WHERE fewer.row = rows.row;
        UPDATE rows SET reason = {CODE["limit"]} WHERE reason = 0 AND copies = 0""")


def _count_reasons(db: DuckDBPyConnection, inputs: int) -> np.ndarray:
    """Return the number of rows by input and reason, int64 [inputs, REASONS]. Reason 0: the row is used."""
    counts = np.zeros((inputs, len(REASONS)), np.int64)
    query = "SELECT source, reason, count(*) FROM rows GROUP BY ALL"
    for source, reason, count in db.execute(query).fetchall():
        counts[source, reason] = count
    return counts


# --- summary ----------------------------------------------------------------------------------------------


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
    if not reasons[[0, CODE["weight"]]].any() and not rejected.keys().isdisjoint(UNREADABLE):
        raise UserError(
            f"{source['name']} has no usable row ({_list_reasons(rejected)}). Convert it to UTF-8, "
            "remove it, or set data.strict=false to skip and count",
            code="not-utf8",
        )


class _SplitCounts(NamedTuple):
    """The used rows, int64."""

    copies: np.ndarray  # [inputs, splits]
    rows: np.ndarray  # [splits], copies not counted
    chars: np.ndarray  # [splits]


def _count_splits(db: DuckDBPyConnection, inputs: int, splits: int) -> _SplitCounts:
    counts = _SplitCounts(
        np.zeros((inputs, splits), np.int64), np.zeros(splits, np.int64), np.zeros(splits, np.int64)
    )
    query = """
        SELECT source, split, count(*), sum(copies)::BIGINT, sum(chars::BIGINT * copies)::BIGINT
        FROM live GROUP BY ALL"""
    for source, split, rows, copies, chars in db.execute(query).fetchall():
        counts.copies[source, split] = copies
        counts.rows[split] += rows
        counts.chars[split] += chars
    return counts


def _summarize(
    db: DuckDBPyConnection,
    config: DataConfig,
    inputs: list[SourceReader],
    sources: list[dict[str, Any]],
    first_fault: Callable[[], str],
) -> Summary:
    """Return the counts of rows per input and in total. Raises UserError for a split without rows.

    The counts are also added to `sources`.
    """
    reasons = _count_reasons(db, len(inputs))
    counts = _count_splits(db, len(inputs), len(config.splits))
    for source, copies, of_source in zip(sources, counts.copies.tolist(), reasons, strict=True):
        source |= dict(zip(config.splits, copies, strict=True)) | {"rejected": _rejected(of_source)}
    rejected = _rejected(reasons.sum(axis=0))
    if not counts.rows[0]:
        raise UserError(_no_training_rows(config, counts, rejected, first_fault), code="no-training-rows")
    codes = ", ".join(str(CODE[reason]) for reason in SELECTION[:2])
    query = f"SELECT split, count(*) FROM rows WHERE reason IN ({codes}) GROUP BY split"
    dropped: dict[int, int] = dict(db.execute(query).fetchall())
    notes = []
    for number, name in enumerate(config.validation_sets, 1):
        left = counts.rows[number]
        if not left:
            members = reasons[[reader.split == number for reader in inputs]].sum(axis=0)
            problem = _no_validation_rows(config, name, _rejected(members))
            raise UserError(
                f"the {describe_set(name)} is empty: {problem}, or none", code="no-validation-rows"
            )
        if (gone := dropped.get(number, 0)) > left:
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
