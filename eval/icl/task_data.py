"""Rows of a task, read from files or the hub and converted to one format.

A canonical row contains the inputs as text, `label` (the label's name), `group`, and `row` (its number in the
full split).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from emo.common.errors import UserError, nearest, one_line
from emo.common.io.untrusted import parse_json
from emo.data_prep.selection.similarity.contamination import row_digest, row_text
from emo.data_prep.sources.files import read_text

from ..results import store
from ..results.rows import evenly_spaced, load_from_hub
from .tasks import GROUP, LABEL, ROW, Hub, Row, Task

POOL_PER_ROW = 10  # with --limit: demonstration candidates per test row


class TaskData(NamedTuple):
    """The rows of a task. The split "train" has the demonstrations and "test" the queries."""

    rows: dict[str, list[Row]]
    digests: dict[str, str]  # of each split: rows and columns in the order of the data
    texts: list[str | None]  # digest of each test row's text, by which contamination reports identify it
    pool: int  # demonstration candidates before `limit` removed some


def load_data(task: Task, source: str, limit: int | None = None, shots: int | None = None) -> TaskData:
    """Return a task's rows.

    Args:
        task: The task.
        source: A directory with <task>/<split>.jsonl[.zst], or `hub`.
        limit: Number of evenly spaced test rows, which keeps the shares of groups and labels. If it removes
            rows and demonstrations are retrieved, the pool has at most POOL_PER_ROW times as many rows.
        shots: Demonstrations per prompt (None: the task's default). The pool must have at least as many rows.
    """
    rows: dict[str, list[Row]] = {}
    texts: list[str | None] = []
    for role, split in (("train", task.spec.splits.demonstrations), ("test", task.spec.splits.test)):
        raw, where = hub_rows(task, split) if source == "hub" else _file_rows(task, split, source)
        rows[role] = []
        for i, row in enumerate(raw):
            rows[role].append(_canonical(task, row, i, f"{where} row {i}"))
            if role == "test":
                text = row_text(row)
                texts.append(None if text is None else row_digest(text))
        if not rows[role]:
            raise UserError(f"{where} has no rows", code="no-rows")
    pool = rows["train"] = rows["train"][: task.prompt.pool_first]
    count = task.spec.shots.count if shots is None else shots
    retrieved = task.spec.shots.by == "retrieval"
    if limit is not None and limit < len(rows["test"]):
        rows["test"] = evenly_spaced(rows["test"], limit)
        texts = evenly_spaced(texts, limit)
        if retrieved:
            rows["train"] = evenly_spaced(pool, max(count, POOL_PER_ROW * limit))
    if retrieved and len(pool) < count:
        raise UserError(
            f"task {task.name} needs {count} demonstrations but has {len(pool)} rows. Lower --num_fewshot.",
            code="too-few-rows",
        )
    digests = {role: store.digest_json([list(row.items()) for row in part]) for role, part in rows.items()}
    return TaskData(rows, digests, texts, len(pool))


def _file_rows(task: Task, split: str, source: str) -> tuple[Iterator[Row], str]:
    """Return the rows of a split's file under `source`, and the path of the file."""
    directory = Path(source) / task.name
    names = (f"{split}.jsonl", f"{split}.jsonl.zst")
    path = next((directory / name for name in names if (directory / name).is_file()), None)
    if path is None:
        raise UserError(
            f"{directory} has no {' or '.join(names)}. Set --data to its parent directory.",
            code="no-task-data",
        )

    def rows() -> Iterator[Row]:
        for number, line in enumerate(read_text(path).split("\n"), start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                if "\\ud" in line.lower():
                    json.dumps(row, ensure_ascii=False).encode()  # raises for a lone surrogate
            except ValueError as error:
                raise UserError(
                    f"{path} line {number} is not a JSON row: {one_line(error, 120)}", code="not-json"
                ) from None
            yield row

    return rows(), str(path)


def require_hub(task: Task) -> Hub:
    """Return the data set of a task on the hub. Raises UserError if the task names none."""
    if task.spec.hub is None:
        raise UserError(f"task {task.name} has no hub id. Set --data to a directory.", code="hub")
    return task.spec.hub


def hub_rows(task: Task, split: str) -> tuple[Iterable[Row], str]:
    """Return the rows of a split on the hub, with labels by name, and the name of the split for errors."""
    from datasets import ClassLabel, load_dataset

    hub = require_hub(task)
    where = f"{hub.path} {split}"
    data = load_from_hub(where, lambda: load_dataset(hub.path, hub.name, split=split, revision=hub.revision))
    for column, feature in data.features.items():
        if isinstance(feature, ClassLabel):  # replace numbers by the data set's names
            names = [None if v is None or v < 0 else feature.int2str(v) for v in data[column]]
            data = data.remove_columns(column).add_column(column, names)
    return data, where


def _canonical(task: Task, row: Row, index: int, where: str) -> Row:
    number = row.get(ROW)
    canonical: Row = {ROW: number if type(number) is int else index}
    for name, spec in task.columns.items():
        canonical[name] = _text(row, spec.column, where)
        for old, new in spec.replace.items():
            canonical[name] = canonical[name].replace(old, new)
    column = next((name for name in task.spec.label.columns if name in row), None)
    if column is None:
        raise UserError(
            f"{where} has none of the label columns {', '.join(task.spec.label.columns)}", code="label"
        )
    value = row[column]
    if not isinstance(value, str | int) or (type(value), value) not in task.label_of:
        labels = ", ".join(str(value) for _, value in task.label_of)
        raise UserError(
            f"{where}: column {column} has an unknown label {value!r}. Known labels: {labels}", code="label"
        )
    canonical[LABEL] = task.label_of[type(value), value]
    canonical[GROUP] = _text(row, task.spec.group, where) if task.spec.group else ""
    return canonical


def _text(row: Row, column: str, where: str) -> str:
    """Return the text of a column, or of an element as in choices.0. Numbers become text."""
    name, dot, element = column.partition(".")
    if name not in row:
        raise UserError(f"{where} has no column {name}. {nearest(name, row)}", code="column")
    value = row[name]
    if dot:
        try:
            value = value[int(element)]
        except (IndexError, ValueError, TypeError, KeyError):
            raise UserError(f"{where}: column {name} has no element {element}", code="column") from None
    infinite = isinstance(value, float) and not math.isfinite(value)  # integers may be too large for it
    number = isinstance(value, int | float) and not isinstance(value, bool) and not infinite
    if not (isinstance(value, str) or number):
        raise UserError(f"{where}: column {column} is {repr(value)[:60]}, not text", code="not-text")
    return str(value)
