"""Which rows are used, how often, and in which shard: queries on hashes, counts and signatures.

DuckDB holds the table of all rows; what does not fit into MEMORY waits on disk. What is decided depends on
the table and the settings alone.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from common.errors import FailureError, one_line
from data_prep.arrow import array_of, numbers_of
from data_prep.config import DataConfig
from data_prep.grams import mixed
from data_prep.rows import CODE, REASONS
from data_prep.scan.near import near_groups
from data_prep.scan.parts import Part

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY = "1GB"
THREADS = 4  # at most: each takes memory
SPILL = "spill"  # directory of what does not fit into memory
BATCH = 1 << 17  # rows that come back at a time
_SPLIT_SALT, _WEIGHT_SALT = 1, 2
COLUMNS = {  # of the table of rows
    "row": pa.int64(),
    "source": pa.int32(),  # the input that it is from
    "split": pa.uint16(),
    "copies": pa.uint16(),
    "hash": pa.uint64(),
    "chars": pa.uint32(),
    "reason": pa.uint8(),  # index into REASONS; 0: usable
}


class Selection(NamedTuple):
    """What becomes of each row, and how many each thing becomes of."""

    shard: np.ndarray  # int32 [rows], on disk: training shards, then each validation set's; -1: unused
    copies: np.ndarray  # uint16 [rows], on disk
    rejected: np.ndarray  # int64 [inputs, REASONS]
    used: np.ndarray  # int64 [inputs, splits]: copies
    rows: np.ndarray  # int64 [splits]
    chars: np.ndarray  # int64 [splits], copies counted


def select(
    parts: list[Part],
    config: DataConfig,
    weights: np.ndarray,
    splits: np.ndarray,
    place: Path,
    threads: int = 1,
) -> Selection:
    """Split, weigh, deduplicate, limit and deal out.

    weights: float [inputs]; splits: uint16 [inputs], numbers among config.splits; `place`: for columns.
    Weights come before duplicates, so that of equal rows one remains that its source uses; among those a
    training row is preferred, then the one with the most copies, then the first. Where none is trained on,
    each validation set keeps one: what it measures does not depend on the other sets.
    """
    import duckdb

    spill = place / SPILL
    options = {"memory_limit": MEMORY, "threads": max(1, min(threads, THREADS)), "temp_directory": str(spill)}
    try:
        with contextlib.closing(duckdb.connect(config=options)) as db:  # type: ignore[arg-type]
            return _select(db, parts, config, weights, splits, place)
    except duckdb.OutOfMemoryException as error:
        raise FailureError(
            f"comparing the rows takes more memory or disk than there is ({one_line(error)}); make room in "
            f"{place} and run prepare again",
            code="selection-out-of-memory",
        ) from None
    finally:
        shutil.rmtree(spill, ignore_errors=True)


def _select(
    db: DuckDBPyConnection,
    parts: list[Part],
    config: DataConfig,
    weights: np.ndarray,
    splits: np.ndarray,
    place: Path,
) -> Selection:
    fields = pa.schema(list(COLUMNS.items()))
    scanned = _scanned(parts, config, weights, splits)
    batches = (pa.RecordBatch.from_arrays(list(map(array_of, rows)), schema=fields) for rows in scanned)
    db.register("scanned", pa.RecordBatchReader.from_batches(fields, batches))
    db.execute("CREATE TABLE rows AS SELECT * FROM scanned")
    db.execute("CREATE VIEW live AS SELECT * FROM rows WHERE reason = 0")
    if config.dedup != "none":
        _drop_copies(db, "duplicate", "hash", "live")
    if config.dedup == "near":
        near_groups(db, [part.signatures() for part in parts], config.near_threshold)
        _drop_copies(db, "near_duplicate", "head", "(live JOIN near USING (row))")
    if config.limit_rows is not None:
        _limit(db, config.limit_rows, len(splits))
    # The characters before each row of its split decide its shard.
    db.execute(f"""
        CREATE TABLE dealt AS
        WITH amounts AS (SELECT row, split, copies, chars::BIGINT * copies AS amount FROM live)
        SELECT row, copies, split * {config.shards}
            + (sum(amount) OVER (PARTITION BY split ORDER BY row) - amount) * {config.shards}
            // greatest(1, sum(amount) OVER (PARTITION BY split)) AS shard
        FROM amounts""")
    shard, copies = place / "shard.column", place / "copies.column"
    with shard.open("wb") as shards, copies.open("wb") as times:
        query = """
            SELECT coalesce(shard, -1)::INTEGER, coalesce(dealt.copies, 0)::USMALLINT
            FROM rows LEFT JOIN dealt USING (row) ORDER BY rows.row"""
        for batch in db.sql(query).to_arrow_reader(BATCH):
            shards.write(numbers_of(batch.column(0)).tobytes())
            times.write(numbers_of(batch.column(1)).tobytes())
    rejected = np.zeros((len(splits), len(REASONS)), np.int64)
    used = np.zeros((len(splits), len(config.splits)), np.int64)
    rows, chars = np.zeros((2, len(config.splits)), np.int64)
    for source, reason, count in _all(db, "SELECT source, reason, count(*) FROM rows GROUP BY ALL"):
        rejected[source, reason] = count
    totals = "SELECT source, split, count(*), sum(copies), sum(chars::BIGINT * copies) FROM live GROUP BY ALL"
    for source, split, count, times_used, amount in _all(db, totals):
        used[source, split] = times_used
        rows[split] += count
        chars[split] += amount
    return Selection(
        _column(shard, np.dtype(np.int32)), _column(copies, np.dtype(np.uint16)), rejected, used, rows, chars
    )


def _scanned(
    parts: list[Part], config: DataConfig, weights: np.ndarray, splits: np.ndarray
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the columns of the table, some rows at a time, with their splits and copies."""
    fractions = weights % 1
    start = 0
    for part in parts:
        for rows in part.rows():
            copies = np.floor(weights).astype(np.uint16)[rows.source]
            if fractions.any():
                drawn = _uniform(rows.hashes, config.seed, _WEIGHT_SALT) < fractions[rows.source]
                copies += drawn.astype(np.uint16)
            if config.validation_fraction:
                drawn = _uniform(rows.hashes, config.seed, _SPLIT_SALT) < config.validation_fraction
                split = drawn.astype(np.uint16)
            else:
                split = splits[rows.source].astype(np.uint16)
            reasons = np.where((rows.reasons == 0) & (copies == 0), CODE["weight"], rows.reasons)
            numbers = np.arange(start, start + len(copies))
            start += len(copies)
            yield numbers, rows.source, split, copies, rows.hashes, rows.chars, reasons.astype(np.uint8)


def _drop_copies(db: DuckDBPyConnection, reason: str, group: str, rows: str) -> None:
    """Mark the rows that have a better one in their group.

    A group with a training row (split 0) keeps one row, any other keeps one of each split.
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


def _limit(db: DuckDBPyConnection, limit: int, inputs: int) -> None:
    """Keep `limit` training rows, copies counted: of each source its first ones, in proportion."""
    have = np.zeros(inputs, np.int64)
    for source, count in _all(db, "SELECT source, sum(copies) FROM live WHERE split = 0 GROUP BY source"):
        have[source] = count
    total = int(have.sum())
    if total <= limit:
        return
    quota = have * limit // total
    sources = np.flatnonzero(have)
    by_remainder = np.argsort((quota - have * (limit / total))[sources], kind="stable")
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


def _all(db: DuckDBPyConnection, query: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, row)) for row in db.execute(query).fetchall()]


def _column(path: Path, dtype: np.dtype) -> np.ndarray:
    """Return the numbers in a file, mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def deal(amount: np.ndarray, shards: int) -> np.ndarray:
    """Return the shard of each row, int64 [rows]: consecutive rows of about equal amounts in all.

    amount: int64 [rows], characters or tokens.
    """
    begins = np.cumsum(amount) - amount
    return begins * shards // max(1, int(amount.sum()))


def in_turn(source: np.ndarray) -> np.ndarray:
    """Return an order of rows, int64 [rows]: any beginning has each source's first rows in proportion.

    source: int [rows], ascending.
    """
    have = np.bincount(source)
    rank = np.arange(len(source)) - (np.cumsum(have) - have)[source]
    return np.argsort((rank + 0.5) / have[source], kind="stable")


def _uniform(hashes: np.ndarray, seed: int, salt: int) -> np.ndarray:
    """Return a number in [0, 1) for each content hash, independent for each salt."""
    return mixed(hashes + np.uint64((seed * 4 + salt) * 0x9E3779B97F4A7C15 % 2**64)) / 2.0**64
