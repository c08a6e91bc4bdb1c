"""Rows of a task: read from files or the hub, and brought into one form.

A canonical row holds the inputs as text, `label` as the label's name, `group`, and `row`, its number in the
full split.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emo.common.errors import UserError, nearest, one_line
from emo.common.untrusted import parse_json
from emo.data_prep.inputs import read_text
from emo.eval import store
from emo.eval.icl.tasks import GROUP, LABEL, ROW, Task

if TYPE_CHECKING:
    from datasets import DatasetDict


@dataclass(frozen=True)
class TaskData:
    """Canonical rows by split, "train" (where demonstrations come from) and "test", and their digests."""

    canonical: dict[str, list[dict[str, Any]]]
    digests: dict[str, str]  # of the rows and of their columns, in the order in which they were read

    @cached_property
    def rows(self) -> DatasetDict:
        """The rows as OpenICL takes them."""
        from datasets import Dataset, DatasetDict

        return DatasetDict({split: Dataset.from_list(rows) for split, rows in self.canonical.items()})


def load_data(task: Task, source: str, limit: int | None = None, shots: int | None = None) -> TaskData:
    """Return a task's rows from a directory (<source>/<task>/<split>.jsonl[.zst]) or, for `hub`, the hub.

    limit: evenly spaced test rows, so that every group and label keeps its share.
    shots: demonstrations per prompt (None: the task's own number); UserError when the pool has fewer rows.
    """
    canonical: dict[str, list[dict[str, Any]]] = {}
    raw: Iterable[dict[str, Any]]
    for role, split in (("train", task.spec.splits.demonstrations), ("test", task.spec.splits.test)):
        if source == "hub":
            raw, where = hub_rows(task, split)
        else:
            directory = Path(source) / task.name
            names = (f"{split}.jsonl", f"{split}.jsonl.zst")
            path = next((directory / name for name in names if (directory / name).is_file()), None)
            if path is None:
                raise UserError(f"no {' or '.join(names)} in {directory}; --data names the one above it")
            raw, where = _read_lines(path), str(path)
        canonical[role] = [_canonical(task, row, i, f"{where} row {i}") for i, row in enumerate(raw)]
        if not canonical[role]:
            raise UserError(f"{where} has no rows")
    canonical["train"] = canonical["train"][: task.prompt.pool_first]
    if limit is not None and limit < len(canonical["test"]):
        n = len(canonical["test"])
        canonical["test"] = [canonical["test"][i * n // limit] for i in range(limit)]
    count, pool = task.spec.shots.count if shots is None else shots, len(canonical["train"])
    if task.spec.shots.by == "retrieval" and pool < count:
        raise UserError(
            f"task {task.name}: {count} demonstrations wanted of {pool} rows; lower --num_fewshot"
        )
    digests = {k: store.digest([list(row.items()) for row in rows]) for k, rows in canonical.items()}
    return TaskData(canonical, digests)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if "\\ud" in line.lower():
                json.dumps(row, ensure_ascii=False).encode()  # fails for half of a surrogate pair
        except ValueError as error:
            raise UserError(f"{path} line {number} is not JSON: {one_line(error, 120)}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} is not an object")
        yield row


def hub_rows(task: Task, split: str) -> tuple[Iterable[dict[str, Any]], str]:
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


def _canonical(task: Task, row: dict[str, Any], index: int, where: str) -> dict[str, Any]:
    """Return a row's inputs as text, its label by name, its group, and its number in the full split."""
    number = row.get(ROW)
    canonical: dict[str, Any] = {ROW: number if type(number) is int else index}
    for name, spec in task.columns.items():
        canonical[name] = _text(row, spec.column, where)
        for old, new in spec.replace.items():
            canonical[name] = canonical[name].replace(old, new)
    label_column = next((c for c in task.spec.label.columns if c in row), None)
    if label_column is None:
        raise UserError(f"{where}: none of the label columns {', '.join(task.spec.label.columns)}")
    value = row[label_column]
    for name, accepted in task.spec.label.names.items():
        if any(type(a) is type(value) and a == value for a in accepted):
            canonical[LABEL] = name
            break
    else:
        known = ", ".join(str(a) for values in task.spec.label.names.values() for a in values)
        raise UserError(f"{where}: column {label_column}: unknown label {value!r}; known: {known}")
    canonical[GROUP] = _text(row, task.spec.group, where) if task.spec.group else ""
    return canonical


def _text(row: dict[str, Any], column: str, where: str) -> str:
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
    if not isinstance(value, str | int | float):
        raise UserError(f"{where}: column {column} is {repr(value)[:60]}, not text")
    return str(value)
