"""Which rows are used, how often, and in which shard: queries over the parts of the scan.

DuckDB holds the table of all rows; what does not fit into MEMORY waits on disk. What is decided depends on
the rows and the settings alone.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from emo.common.errors import FailureError, UserError, one_line
from emo.data_prep.arrow import array_of
from emo.data_prep.config import VALIDATION, DataConfig, set_called
from emo.data_prep.inputs import Input
from emo.data_prep.near import near_groups
from emo.data_prep.plan import GROUP
from emo.data_prep.rows import CODE, REASONS
from emo.data_prep.scan import COLUMNS, Part, Seen, by_reason, require_usable

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY = "1GB"
THREADS = 4  # at most: each takes memory
SPILL = "spill"  # directory of what does not fit into memory


def select(
    config: DataConfig, inputs: list[Input], parts: list[Part], path: Path, threads: int
) -> dict[str, Any]:
    """Write the rows that shards take to `path`, see plan.py; return what became of the rows.

    Weights come before duplicates, so that of equal rows one remains that its source uses; among those a
    training row is preferred, then the one with the most copies, then the first. Where none is trained on,
    each validation set keeps one: what it measures does not depend on the other sets. Raises UserError when
    a split is left without rows.
    """
    import duckdb

    summaries: dict[int, Seen] = {}
    for each in (each for part in parts for each in part.notes):
        if each.input in summaries:
            summaries[each.input].add(each)
        else:
            summaries[each.input] = each
    for number, opened in enumerate(inputs):
        require_usable(opened, summaries[number], config.strict)
    spill = path.parent / SPILL
    options: Any = {
        "memory_limit": MEMORY,
        "threads": max(1, min(threads, THREADS)),
        "temp_directory": str(spill),
    }
    try:
        with contextlib.closing(duckdb.connect(config=options)) as db:
            write_selected(db, config, len(inputs), parts, path)
            return _summary(db, config, inputs, summaries)
    except duckdb.OutOfMemoryException as error:
        raise FailureError(
            f"comparing the rows takes more memory or disk than there is ({one_line(error)}); make room in "
            f"{path.parent} and run prepare again",
            code="selection-out-of-memory",
        ) from None
    finally:
        shutil.rmtree(spill, ignore_errors=True)


def write_selected(
    db: DuckDBPyConnection, config: DataConfig, inputs: int, parts: list[Part], path: Path
) -> None:
    """Deduplicate, limit and deal out; leave the table `rows`, and the view `live` of those that are used."""
    counts = [int(part.pieces[:, 3].sum()) for part in parts]
    files = [_quoted(part.path) for part in parts]
    starts = zip(files, (np.cumsum(counts) - counts).tolist(), strict=True)
    numbered = f"(VALUES {', '.join(f'({file}, {start})' for file, start in starts)}) parts(filename, start)"
    read = f"read_parquet([{', '.join(files)}], file_row_number = true, filename = true)"
    scanned = f"{read} JOIN {numbered} USING (filename)"
    columns = ", ".join(name for name in COLUMNS if name != "reason")
    db.execute(f"""
        CREATE TABLE rows AS SELECT start + file_row_number AS row, {columns},
            CASE WHEN reason = 0 AND copies = 0 THEN {CODE["weight"]} ELSE reason END AS reason
        FROM {scanned};
        CREATE VIEW live AS SELECT * FROM rows WHERE reason = 0""")
    if config.dedup != "none":
        _drop_copies(db, "duplicate", "hash", "live")
    if config.dedup == "near":
        near_groups(
            db,
            f"SELECT start + file_row_number AS row, signature, bands FROM {scanned}",
            config.near_threshold,
        )
        _drop_copies(db, "near_duplicate", "head", "(live JOIN near USING (row))")
    if config.limit_rows is not None:
        _limit(db, config.limit_rows, inputs)
    # The characters before each row of its split decide its shard.
    db.execute(f"""
        COPY (
            WITH amounts AS (SELECT row, split, copies, chars::BIGINT * copies AS amount FROM live)
            SELECT row, copies, (split * {config.shards}
                + (sum(amount) OVER (PARTITION BY split ORDER BY row) - amount) * {config.shards}
                // greatest(1, sum(amount) OVER (PARTITION BY split)))::INTEGER AS shard
            FROM amounts ORDER BY shard, row
        ) TO {_quoted(path)} (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {GROUP})""")


def _quoted(path: Path) -> str:
    return "'{}'".format(str(path).replace("'", "''"))


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
    used = "SELECT source, sum(copies)::BIGINT FROM live WHERE split = 0 GROUP BY source"
    for source, count in db.execute(used).fetchall():
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


def _summary(
    db: DuckDBPyConnection, config: DataConfig, inputs: list[Input], summaries: dict[int, Seen]
) -> dict[str, Any]:
    """Return what became of the rows, per input and in all. Raises UserError for a split without rows."""
    rejected = np.zeros((len(inputs), len(REASONS)), np.int64)
    for source, reason, count in db.execute(
        "SELECT source, reason, count(*) FROM rows GROUP BY ALL"
    ).fetchall():
        rejected[source, reason] = count
    used = np.zeros((len(inputs), len(config.splits)), np.int64)
    rows, chars = np.zeros((2, len(config.splits)), np.int64)
    totals = """
        SELECT source, split, count(*), sum(copies)::BIGINT, sum(chars::BIGINT * copies)::BIGINT
        FROM live GROUP BY ALL"""
    for source, split, count, copies, amount in db.execute(totals).fetchall():
        used[source, split] = copies
        rows[split] += count
        chars[split] += amount
    sources = []
    for number, opened in enumerate(inputs):
        noted = summaries[number]
        facts: dict[str, Any] = {"format": opened.spec.format, "weight": opened.source.weight}
        facts |= {"rows": noted.rows, "columns": noted.columns, "columns_not_read": noted.not_read}
        facts |= {"messages_left_out": noted.messages}
        facts |= dict(zip(config.splits, used[number].tolist(), strict=True))
        sources.append(noted.identity | facts | {"rejected": by_reason(rejected[number])})
    reasons = by_reason(rejected.sum(axis=0))
    if not rows[0]:
        if config.validation_fraction and rows[1]:
            raise UserError(
                f"no row is left to train on: data.validation_fraction={config.validation_fraction} takes "
                f"all {rows[1]:,} of them; set a smaller one",
                code="no-training-rows",
            )
        listed = ", ".join(f"{n} {reason}" for reason, n in reasons.items())
        raise UserError(
            f"no row of the sources can be trained on: {listed or 'there are none'}", code="no-training-rows"
        )
    for number, name in enumerate(config.validation_sets, 1):
        if not rows[number]:
            members = [rejected[i] for i, opened in enumerate(inputs) if opened.split == number]
            raise _no_validation(
                config, name, by_reason(np.sum(members, axis=0, initial=0)) if members else {}
            )
    return {
        "sources": sources,
        "rejected": reasons,
        "chars": dict(zip(config.splits, chars.tolist(), strict=True)),
    }


def _no_validation(config: DataConfig, name: str, rejected: dict[str, int]) -> UserError:
    key = "data.validation" if name == VALIDATION else f"data.validation.{name}"
    if config.validation_fraction:
        reason = f"data.validation_fraction={config.validation_fraction:g} takes no row; set a larger one"
    else:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in rejected.items())
        reason = f"its sources have no usable row of their own ({reasons}); give other {key} sources"
    return UserError(f"the {set_called(name)} is empty: {reason}, or none", code="no-validation-rows")
