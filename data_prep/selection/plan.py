"""The plan: which rows are used, how often, and in which shard.

One job makes it from all parts of the scan, by queries of DuckDB, which holds the table of all rows and lets
wait on disk what does not fit into MEMORY. What is decided depends on the rows and the settings alone.

It is a Parquet file with a row for each row that is used (ROWS), in order of the shards; its metadata hold
the pieces that rows are read in, and a summary of what became of all rows. A job reads the row groups that
have rows of its shards.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from emo.common.errors import FailureError, UserError, one_line
from emo.common.io.files import part_file
from emo.common.parallel import WorkerPool

from ..config import TRAIN, VALIDATION, DataConfig, set_called
from ..sources.inputs import AGAIN, Extent, Input
from ..sources.rows import CODE, REASONS, SELECTION, UNREADABLE, Payload, RowSpec
from .arrow import array_of, numbers_of
from .near import near_groups
from .scan import BEYOND_LIMIT, COLUMNS, ScanPart

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY = "1GB"
THREADS = 4  # at most: each takes memory
SPILL = "spill"  # directory of what does not fit into memory
PASSES = 1024  # times that a shard's sources are gone through at most, to spread the copies of rows
GROUP = 1 << 17  # rows of a row group
LARGEST = 1 << 30  # bytes of what its metadata say at most
ROWS = {"row": pa.int64(), "shard": pa.int32(), "copies": pa.uint16()}  # shard: counted through all splits
SAMPLED = 16  # runs of rows in a sample, about, and rows of each


class Part(NamedTuple):
    """Rows that a shard takes of a payload."""

    name: str  # of the input
    payload: Payload
    spec: RowSpec
    check: int  # checksum that the payload had when it was scanned
    copies: np.ndarray  # uint16 [rows of the payload]; 0: not of this shard
    domain: str  # of all of its rows
    shard: int = 0  # that takes it, counted through all splits
    number: int = 0  # among the parts of the shard


class Rows(NamedTuple):
    """Rows that are used."""

    row: np.ndarray  # int64, ascending within a shard
    shard: np.ndarray  # int32
    copies: np.ndarray  # uint16: times that a row is used


class Plan:
    """The rows that each shard takes; `path` holds ROWS, in order of shard and row."""

    def __init__(self, path: Path, pieces: np.ndarray, summary: dict[str, Any]) -> None:
        """pieces: int64 [pieces, 5], input, start, length, rows, checksum.

        summary: per source identity and counts; rejected rows by reason; characters per split.
        """
        self.path, self.pieces, self.summary = path, pieces, summary
        self.ends = np.cumsum(pieces[:, 3])  # the row after the last of each piece
        with _opened(path) as file:
            self._metadata = file.metadata
        groups = [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]
        column = self._metadata.schema.names.index("shard")
        bounds = [group.column(column).statistics for group in groups]
        self._bounds = [(int(bound.min), int(bound.max)) for bound in bounds]  # shards of each group

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        schema = pa.schema(list(ROWS.items()))
        options: Any = {"compression": "zstd", "write_page_checksum": True}
        summary = {"summary": self.summary, "pieces": self.pieces.ravel().tolist()}
        packed = base64.b64encode(zlib.compress(json.dumps(summary).encode(), 1))  # whose checksum is checked
        with (
            _opened(self.path) as rows,
            part_file(path) as file,
            pq.ParquetWriter(file, schema, **options) as writer,
        ):
            for number in range(rows.num_row_groups):
                group = rows.read_row_group(number)
                arrays = [array_of(numbers_of(group[name])) for name in ROWS]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema), GROUP)
            writer.add_key_value_metadata({"plan": packed.decode()})

    @staticmethod
    def load(path: Path) -> Plan:
        """Return the plan that `save` wrote. Raises ValueError and others where it is damaged."""
        with _opened(path) as file:
            packed = base64.b64decode(file.metadata.metadata[b"plan"], validate=True)
        tree = json.loads(zlib.decompress(packed))
        return Plan(path, np.array(tree["pieces"], np.int64).reshape(-1, 5), tree["summary"])

    def rows(self, first: int, last: int) -> Rows:
        """Return the rows of the shards from `first` to before `last`, in order."""
        groups = []
        for number, (least, most) in enumerate(self._bounds):
            if least < last and most >= first:
                groups.append(number)
        try:
            with pq.ParquetFile(self.path, metadata=self._metadata, page_checksum_verification=True) as file:
                table = file.read_row_groups(groups, columns=list(ROWS))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise UserError(f"{self.path} is damaged ({error}); {AGAIN}", code="plan-damaged") from None
        rows = Rows(*(numbers_of(table[name]) for name in ROWS))
        begin, end = np.searchsorted(rows.shard, (first, last)).tolist()
        return Rows(*(column[begin:end] for column in rows))

    def inputs_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of the inputs that rows are from, int64."""
        return self.pieces[np.searchsorted(self.ends, rows, side="right"), 0]

    def parts(self, inputs: list[Input], shard: int) -> Iterator[Part]:
        """Yield what shard `shard` (counted through all splits) encodes, in order.

        Its sources are gone through in passes, over which the copies of a row are spread evenly; a row
        without copies comes in the pass that corresponds to its place, so that those keep their order.
        """
        rows, _, copies = self.rows(shard, shard + 1)
        copies = copies.astype(np.int64)  # the products below are larger than uint16
        passes = min(int(copies.max(initial=0)), PASSES)
        position = (np.arange(len(rows)) + 0.5) / max(1, len(rows))
        before, done = np.zeros(len(rows), np.int64), 0
        for number in range(1, passes + 1):
            due = copies if passes == 1 else np.ceil(number * copies / passes - position).astype(np.int64)
            times = due - before
            before = due
            for part in self._read(inputs, rows[times > 0], times[times > 0]):
                yield part._replace(shard=shard, number=done)
                done += 1

    def once(self, inputs: list[Input], rows: np.ndarray) -> Iterator[Part]:
        """Yield some rows, int64, ascending, each once."""
        return self._read(inputs, rows, np.ones(len(rows), np.int64))

    def training(self, inputs: list[Input], shards: int, step: int = 1) -> Iterator[Part]:
        """Yield every `step`-th training row, each once; `shards` of a split."""
        count = 0
        for shard in range(shards):
            rows = self.rows(shard, shard + 1).row
            yield from self.once(inputs, rows[-count % step :: step])
            count += len(rows)

    def sample(self) -> np.ndarray:
        """Return some rows that are used, int64, ascending: runs of them from all over the plan."""
        runs = []
        shards = np.unique(np.linspace(0, self._bounds[-1][1], SAMPLED).astype(np.int64)).tolist()
        for shard in shards:
            rows = self.rows(shard, shard + 1).row
            begins = np.linspace(0, max(0, len(rows) - SAMPLED), -(-SAMPLED // len(shards))).astype(np.int64)
            runs += [rows[begin : begin + SAMPLED] for begin in begins.tolist()]
        return np.unique(np.concatenate(runs))

    def _read(self, inputs: list[Input], rows: np.ndarray, times: np.ndarray) -> Iterator[Part]:
        """Yield rows, ascending, as often as they come, read from their inputs."""
        pieces, begins = np.unique(np.searchsorted(self.ends, rows, side="right"), return_index=True)
        bounds = [*begins.tolist(), len(rows)]
        numbered = list(enumerate(pieces.tolist()))
        for number, group in groupby(numbered, lambda item: int(self.pieces[item[1], 0])):
            members = list(group)
            opened = inputs[number]
            extents = (Extent(*self.pieces[piece, 1:3].tolist()) for _, piece in members)
            for (i, piece), payload in zip(members, opened.read(extents), strict=True):
                part = slice(bounds[i], bounds[i + 1])
                count, check = self.pieces[piece, 3:].tolist()
                copies = np.zeros(count, np.uint16)
                copies[rows[part] - (self.ends[piece] - count)] = times[part]
                yield Part(opened.name, payload, opened.spec, check, copies, opened.source.domain_name)


def _opened(path: Path) -> pq.ParquetFile:
    """Return a Parquet file of rows, with room for what its metadata say of millions of pieces."""
    limits: Any = {"thrift_string_size_limit": LARGEST, "thrift_container_size_limit": LARGEST}
    return pq.ParquetFile(path, page_checksum_verification=True, **limits)


def select(
    config: DataConfig,
    inputs: list[Input],
    parts: list[ScanPart],
    path: Path,
    threads: int,
    fault: Callable[[], str],
) -> Plan:
    """Write the rows that shards take to `path`; return the plan, with what became of the rows.

    fault: returns what is wrong with the first rejected row, for the error where all are.

    Weights come before duplicates, so that of equal rows one remains that its source uses; among those a
    training row is preferred, then the one with the most copies, then the first. Where none is trained on,
    each validation set keeps one: what it measures does not depend on the other sets. Raises UserError when
    an input, if strict, or a split is left without rows.
    """
    import duckdb

    spill = path.parent / SPILL
    limits: Any = {"memory_limit": MEMORY, "threads": max(1, min(threads, THREADS))}
    try:
        with contextlib.closing(duckdb.connect(config=limits | {"temp_directory": str(spill)})) as db:
            scanned = load_rows(db, parts)
            sources = _sources(config, inputs, parts, _reasons(db, len(inputs)))
            select_rows(db, config, len(inputs), scanned, path)
            summary = _summary(db, config, inputs, sources, fault)
    except duckdb.OutOfMemoryException as error:
        raise FailureError(
            f"comparing the rows takes more memory or disk than there is ({one_line(error)}); make room in "
            f"{path.parent} and run prepare again",
            code="selection-out-of-memory",
        ) from None
    finally:
        shutil.rmtree(spill, ignore_errors=True)
    return Plan(path, np.concatenate([part.pieces for part in parts]), summary)


def load_rows(db: DuckDBPyConnection, parts: list[ScanPart]) -> str:
    """Make the table `rows` and the view `live` of those that are used; return a query of all parts."""
    counts = [int(part.pieces[:, 3].sum()) for part in parts]
    files = [_quoted(part.path) for part in parts]
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
    """Deduplicate, limit and deal out the rows of so many inputs; write those that are used to `path`."""
    if config.dedup != "none":
        _drop_copies(db, "duplicate", "hash", "live")
    if config.dedup == "near":
        near_groups(db, scanned, config.near_threshold)
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


def _reasons(db: DuckDBPyConnection, inputs: int) -> np.ndarray:
    """Return the number of rows by input and reason, int64 [inputs, REASONS]; the first reason is none."""
    counts = np.zeros((inputs, len(REASONS)), np.int64)
    for source, reason, count in db.execute(
        "SELECT source, reason, count(*) FROM rows GROUP BY ALL"
    ).fetchall():
        counts[source, reason] = count
    return counts


def _rejected(counts: np.ndarray) -> dict[str, int]:
    """Return the rows by the reason for which they are not used; counts: int64 [REASONS]."""
    return {reason: n for reason, n in zip(REASONS, counts.tolist(), strict=True) if reason and n}


def _listed(rejected: Mapping[str, int]) -> str:
    """Return counts by reason in words, as in `24 bad roles, 1 empty`."""
    return ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in rejected.items())


def _sources(
    config: DataConfig, inputs: list[Input], parts: list[ScanPart], counts: np.ndarray
) -> list[dict[str, Any]]:
    """Return what the scan noted of each input; counts: see `_reasons`, before rows are compared.

    Raises UserError, if strict, for one without rows, or without a usable row because it is not UTF-8.
    """
    sources: list[dict[str, Any]] = []
    for opened, rows in zip(inputs, counts.sum(axis=1).tolist(), strict=True):
        facts = {"format": opened.spec.format, "weight": opened.source.weight, "rows": rows}
        sources.append(facts | {"messages_left_out": 0, "fields_left_out": {}})
    for number, messages, fields, facts in (entry for part in parts for entry in part.inputs):
        sources[number] |= facts
        sources[number]["messages_left_out"] += messages
        have = sources[number]["fields_left_out"]
        have |= {field: have.get(field, 0) + count for field, count in sorted(fields.items())}
    for source, reasons in zip(sources, counts, strict=True):
        if not config.strict or source.get(BEYOND_LIMIT):
            continue
        if not source["rows"]:
            raise UserError(
                f"{source['name']} has no rows; leave it out, or set data.strict=false to pass over it",
                code="no-rows",
            )
        rejected = _rejected(reasons)
        if not reasons[[0, CODE["weight"]]].any() and not rejected.keys().isdisjoint(UNREADABLE):
            raise UserError(
                f"{source['name']} has no usable row ({_listed(rejected)}); convert it to UTF-8, leave it "
                "out, or set data.strict=false to skip and count",
                code="not-utf8",
            )
    return sources


def _summary(
    db: DuckDBPyConnection,
    config: DataConfig,
    inputs: list[Input],
    sources: list[dict[str, Any]],
    fault: Callable[[], str],
) -> dict[str, Any]:
    """Return what became of the rows, per input and in all. Raises UserError for a split without rows."""
    counts = _reasons(db, len(inputs))
    used = np.zeros((len(inputs), len(config.splits)), np.int64)
    rows, chars = np.zeros((2, len(config.splits)), np.int64)
    totals = """
        SELECT source, split, count(*), sum(copies)::BIGINT, sum(chars::BIGINT * copies)::BIGINT
        FROM live GROUP BY ALL"""
    for number, split, count, copies, amount in db.execute(totals).fetchall():
        used[number, split] = copies
        rows[split] += count
        chars[split] += amount
    for source, copies, reasons in zip(sources, used.tolist(), counts, strict=True):
        source |= dict(zip(config.splits, copies, strict=True)) | {"rejected": _rejected(reasons)}
    alike = ", ".join(str(CODE[reason]) for reason in SELECTION[:2])
    query = f"SELECT split, count(*) FROM rows WHERE reason IN ({alike}) GROUP BY split"
    copied: dict[int, int] = dict(db.execute(query).fetchall())
    notes = []
    fraction = f"data.validation_fraction={config.validation_fraction:g} takes"
    rejected = _rejected(counts.sum(axis=0))
    if not rows[0]:
        if config.validation_fraction and rows[1]:
            reason = f"no row is left to train on: {fraction} all {rows[1]:,} of them; set a smaller one"
        else:
            first = fault()
            reason = f"no row of the sources can be trained on: {_listed(rejected) or 'there are none'}"
            reason += f"; the first: {first}" if first else ""
        raise UserError(reason, code="no-training-rows")
    for number, name in enumerate(config.validation_sets, 1):
        if rows[number]:
            continue
        reason = f"{fraction} no row; set a larger one"
        if not config.validation_fraction:
            key = "data.validation" if name == VALIDATION else f"data.validation.{name}"
            members = counts[[opened.split == number for opened in inputs]].sum(axis=0)
            listed = _listed(_rejected(members))
            reason = f"its sources have no usable row of their own ({listed}); give other {key} sources"
        raise UserError(f"the {set_called(name)} is empty: {reason}, or none", code="no-validation-rows")
    for number, name in enumerate(config.validation_sets, 1):
        if (gone := copied.get(number, 0)) > rows[number]:
            notes.append(
                f"note: {gone:,} of {rows[number] + gone:,} rows of the {set_called(name)} are like "
                f"training rows or like each other and are dropped: {rows[number]:,} are left"
            )
    totals_of = dict(zip(config.splits, chars.tolist(), strict=True))
    return {"sources": sources, "rejected": rejected, "chars": totals_of, "notes": notes}


def limit_tokens(
    config: DataConfig, plan: Plan, inputs: list[Input], workers: WorkerPool, path: Path
) -> Plan:
    """Return the plan with the training rows that data.limit_tokens takes: of each source its first ones, in
    proportion; its rows are written to `path`.

    `workers` count, see `encode.counting`. Rows are dealt to the shards anew, by their tokens. For text the
    summary then has a quota of tokens for each shard, whose sum is the limit in whole blocks. Instructions
    are not cut: less than one example is missing. The plan is held in memory, some 50 bytes a row.
    """
    limit, block = config.limit_tokens, config.sequence_len
    assert limit is not None
    training = plan.rows(0, config.shards)
    turns = in_turn(np.unique(plan.inputs_of(training.row), return_inverse=True)[1])
    order, copies = training.row[turns], training.copies[turns].astype(np.int64)
    step = max(256, 3 * limit * int(copies.sum()) // max(1, plan.summary["chars"][TRAIN]))
    tokens = np.zeros(0, np.int64)  # of one copy of the first rows in this order
    want = target = limit // block * block if config.kind == "text" else limit
    while True:
        while len(tokens) < len(order) and int((tokens * copies[: len(tokens)]).sum()) < target:
            rows = order[len(tokens) : len(tokens) + step]
            counted = np.concatenate(list(workers.map(plan.once(inputs, np.sort(rows)))))
            tokens = np.append(tokens, counted[np.argsort(np.argsort(rows))])
        ends = np.cumsum(tokens * copies[: len(tokens)])
        if config.kind == "instruct":
            count = int(np.searchsorted(ends, limit, side="right"))
            if count < len(tokens):  # some copies of the next
                copies[count] = (limit - (ends[count - 1] if count else 0)) // tokens[count]
            count = min(count + 1, len(tokens))
        else:
            count = min(int(np.searchsorted(ends, target)) + 1, len(tokens))
        shard, blocks = _dealt(config, plan, inputs, order[:count], (tokens * copies[: len(tokens)])[:count])
        short = want - int(blocks.sum()) * block
        if config.kind == "instruct" or short <= 0 or count == len(order):
            break
        target = int(ends[count - 1]) + short  # what the ends of shards and domains lose
    copies[count:] = 0
    if not copies.any() or limit < (block if config.kind == "text" else 1):
        least = block if config.kind == "text" else int(tokens[0])
        what = "a block has" if config.kind == "text" else "the first example has"
        raise UserError(
            f"data.limit_tokens={limit} takes nothing: {what} {least:,} tokens. Set that or more",
            code="limit-takes-nothing",
        )
    if config.kind == "text":
        plan.summary["token_quotas"] = (_trimmed(blocks, max(0, -short // block)) * block).tolist()
    sources, numbers = plan.summary["sources"], plan.inputs_of(order)
    gone = np.bincount(numbers[copies == 0], minlength=len(sources)).tolist()
    times = np.bincount(numbers, copies, len(sources)).astype(np.int64).tolist()
    for source, fewer, used in zip(sources, gone, times, strict=True):
        source[TRAIN] = used
        for rejected in (source["rejected"], plan.summary["rejected"]) if fewer else ():
            rejected["limit"] = rejected.get("limit", 0) + fewer
    taken = np.flatnonzero(copies[:count])
    taken = taken[np.argsort(order[taken])]
    others = plan.rows(config.shards, config.shards * len(config.splits))
    columns = zip(
        (order[taken], shard[taken].astype(np.int32), copies[taken].astype(np.uint16)), others, strict=True
    )
    table = pa.Table.from_arrays([array_of(np.concatenate(pair)) for pair in columns], list(ROWS))
    pq.write_table(table, path, row_group_size=GROUP)
    return Plan(path, plan.pieces, plan.summary)


def _dealt(
    config: DataConfig, plan: Plan, inputs: list[Input], rows: np.ndarray, amount: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the shard of each row, and the whole blocks in each shard.

    Of consecutive rows each shard gets about the same amount of tokens in all.
    """
    ascending = np.argsort(rows)
    begins = np.cumsum(amount[ascending]) - amount[ascending]
    shard = np.empty(len(rows), np.int64)
    # Rows without tokens may come last.
    shard[ascending] = np.minimum(begins * config.shards // max(1, int(amount.sum())), config.shards - 1)
    names = config.domains_of(TRAIN)
    domains = np.array([names.index(i.source.domain_name) if i.split == 0 else 0 for i in inputs])
    count = int(domains.max()) + 1
    group = shard * count + domains[plan.inputs_of(rows)]
    whole = np.bincount(group, amount, config.shards * count).astype(np.int64)
    return shard, (whole // config.sequence_len).reshape(config.shards, count).sum(axis=1)


def _trimmed(blocks: np.ndarray, surplus: int) -> np.ndarray:
    """Return the blocks of each shard with `surplus` less in all, taken from the longest."""
    total = int(blocks.sum()) - surplus
    level = (
        bisect_right(range(int(blocks.max()) + 1), total, key=lambda x: int(np.minimum(blocks, x).sum())) - 1
    )
    trimmed = np.minimum(blocks, level)
    trimmed[np.flatnonzero(blocks > level)[: total - int(trimmed.sum())]] += 1
    return trimmed


def in_turn(source: np.ndarray) -> np.ndarray:
    """Return an order of rows, int64 [rows]: any beginning has each source's first rows in proportion.

    source: int [rows], ascending.
    """
    have = np.bincount(source)
    rank = np.arange(len(source)) - (np.cumsum(have) - have)[source]
    return np.argsort((rank + 0.5) / have[source], kind="stable")
