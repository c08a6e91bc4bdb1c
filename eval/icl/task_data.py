"""Rows of a task: read from files or the hub, and brought into one form.

A canonical row holds the inputs as text, `label` as the label's name, `group`, and `row`, its number in the
full split.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from emo.common.errors import UserError, nearest, one_line
from emo.common.io.untrusted import parse_json
from emo.data_prep.selection.contamination import digest, row_text
from emo.data_prep.sources.files import read_text

from ..generation.prefixes import evenly
from ..results import store
from .tasks import GROUP, LABEL, ROW, Row, Task

POOL_PER_ROW = 10  # with --limit: rows that demonstrations are chosen from, per test row


class TaskData(NamedTuple):
    """Canonical rows by split, "train" (where demonstrations come from) and "test", and their digests."""

    rows: dict[str, list[Row]]
    digests: dict[str, str]  # of the rows and of their columns, in the order in which they were read
    texts: list[str | None]  # of every test row: the digest by which contamination reports name it
    pool: int  # rows that demonstrations could come from, of which `limit` may have left some out


def load_data(task: Task, source: str, limit: int | None = None, shots: int | None = None) -> TaskData:
    """Return a task's rows from a directory (<source>/<task>/<split>.jsonl[.zst]) or, for `hub`, the hub.

    limit: evenly spaced test rows, so that every group and label keeps its share; where it leaves rows out
    and demonstrations are retrieved, it also bounds the pool, to POOL_PER_ROW as many evenly spaced rows.
    shots: demonstrations per prompt (None: the task's own number); UserError when the pool has fewer rows.
    """
    rows: dict[str, list[Row]] = {}
    texts: list[str | None] = []
    for role, split in (("train", task.spec.splits.demonstrations), ("test", task.spec.splits.test)):
        raw, where = hub_rows(task, split) if source == "hub" else _file_rows(task, split, source)
        rows[role] = []
        for i, row in enumerate(raw):
            rows[role].append(_canonical(task, row, i, f"{where} row {i}"))
            if role == "test":
                texts.append(None if (text := row_text(row)) is None else digest(text))
        if not rows[role]:
            raise UserError(f"{where} has no rows")
    pool = rows["train"] = rows["train"][: task.prompt.pool_first]
    count, retrieved = task.spec.shots.count if shots is None else shots, task.spec.shots.by == "retrieval"
    if limit is not None and limit < len(rows["test"]):
        rows["test"], texts = evenly(rows["test"], limit), evenly(texts, limit)
        if retrieved:
            rows["train"] = evenly(pool, max(count, POOL_PER_ROW * limit))
    if retrieved and len(pool) < count:
        raise UserError(
            f"task {task.name}: {count} demonstrations wanted of {len(pool)} rows; lower --num_fewshot"
        )
    digests = {role: store.digest([list(row.items()) for row in part]) for role, part in rows.items()}
    return TaskData(rows, digests, texts, len(pool))


def _file_rows(task: Task, split: str, source: str) -> tuple[Iterator[Row], str]:
    """Return the rows of a split's file under `source`, and its path."""
    directory = Path(source) / task.name
    names = (f"{split}.jsonl", f"{split}.jsonl.zst")
    path = next((directory / name for name in names if (directory / name).is_file()), None)
    if path is None:
        raise UserError(f"no {' or '.join(names)} in {directory}; --data names the one above it")

    def rows() -> Iterator[Row]:
        for number, line in enumerate(read_text(path).split("\n"), start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                if "\\ud" in line.lower():
                    json.dumps(row, ensure_ascii=False).encode()  # fails for half of a surrogate pair
            except ValueError as error:
                raise UserError(f"{path} line {number} is no JSON row: {one_line(error, 120)}") from None
            yield row

    return rows(), str(path)


def hub_rows(task: Task, split: str) -> tuple[Iterable[Row], str]:
    """Return a split as the hub has it, labels by name, and what to call it; UserError if there is none."""
    from datasets import ClassLabel, load_dataset

    hub = task.spec.hub
    if hub is None:
        raise UserError(f"task {task.name} has no hub id; give --data DIRECTORY")
    where = f"{hub.path} {split}"
    try:
        data = load_dataset(hub.path, hub.name, split=split, revision=hub.revision)
    except Exception as error:  # datasets raises a dozen kinds: no network, no such id, no such split
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        raise UserError(f"cannot load {where} from the hub ({reason}); give --data DIRECTORY") from None
    for column, feature in data.features.items():
        if isinstance(feature, ClassLabel):  # numbers become the names that the data set itself gives them
            names = [None if v is None or v < 0 else feature.int2str(v) for v in data[column]]
            data = data.remove_columns(column).add_column(column, names)
    return data, where


def _canonical(task: Task, row: Row, index: int, where: str) -> Row:
    """Return a row's inputs as text, its label by name, its group, and its number in the full split."""
    number = row.get(ROW)
    canonical: Row = {ROW: number if type(number) is int else index}
    for name, spec in task.columns.items():
        canonical[name] = _text(row, spec.column, where)
        for old, new in spec.replace.items():
            canonical[name] = canonical[name].replace(old, new)
    column = next((name for name in task.spec.label.columns if name in row), None)
    if column is None:
        raise UserError(f"{where}: none of the label columns {', '.join(task.spec.label.columns)}")
    value = row[column]
    if not isinstance(value, str | int) or (type(value), value) not in task.label_of:
        labels = ", ".join(str(value) for _, value in task.label_of)
        raise UserError(f"{where}: column {column}: unknown label {value!r}; known: {labels}")
    canonical[LABEL] = task.label_of[type(value), value]
    canonical[GROUP] = _text(row, task.spec.group, where) if task.spec.group else ""
    return canonical


def _text(row: Row, column: str, where: str) -> str:
    """Return the text of a column or, as in choices.0, of its element; numbers are spelt out."""
    name, dot, element = column.partition(".")
    if name not in row:
        raise UserError(f"{where}: no column {name}; {nearest(name, row)}")
    value = row[name]
    if dot:
        try:
            value = value[int(element)]
        except (IndexError, ValueError, TypeError, KeyError):
            raise UserError(f"{where}: column {name} has no element {element}") from None
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (isinstance(value, str) or number):
        raise UserError(f"{where}: column {column} is {repr(value)[:60]}, not text", code="not-text")
    return str(value)
