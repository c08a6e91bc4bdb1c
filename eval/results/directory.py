"""The contents of a results directory: models by name, and for each model the results of its tasks.

OUT/models/NAME/model.json      path, digest of the weights, facts that the trainer recorded
OUT/models/NAME/TASK.json       a view: key into the store, digest of the weights, origin of the rows, and a
                                copy of the result
OUT/models/NAME/samples.json    sampled text

Readers skip other files there, and views that differ from the sealed result of the store. They log each one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

from emo.common.errors import UserError, nearest
from emo.common.text import printable

from . import store

if TYPE_CHECKING:
    from . import stats

MODELS = "models"
MODEL = "model.json"
SAMPLES = "samples.json"
# Keys that every result with an accuracy has in this version.
RESULT = {
    "title", "version", "retriever", "shots", "conditions", "labels", "chance", "majority", "score", "scores",
    "accuracy", "interval", "n", "macro_f1", "confusion", "groups", "leaked", "clean", "rows_shortened",
    "rows_cut", "worst",
}  # fmt: skip

Record = dict[str, Any]  # of a test row or of a text, as stored
Say = Callable[[str], None]  # receives lines for the user


class Description(TypedDict):
    """An evaluated model, as model.json stores it."""

    name: str
    path: str
    weights: str
    tokenizer: str
    dtype: str
    facts: dict[str, Any]  # step, tokens, objective and run, if the trainer recorded them


class Conditions(TypedDict):
    """The inputs and settings of a result. Two results are comparable if all of `compared` is equal."""

    compared: dict[str, Any]
    noted: dict[str, str]


class MeasureNumbers(TypedDict):
    """The value of a metric whose rows are not right or wrong, for example a perplexity of lm-eval."""

    value: float
    scale: str  # of `stats.estimate_measure`, or "" if rows do not add up to the value
    higher_is_better: bool | None
    interval: dict[str, float] | None
    bounded: NotRequired[bool]  # whether the values of rows are from 0 to 1


class TaskResult(TypedDict):
    """The result of a task. It has either an accuracy and all keys of RESULT, or a measure."""

    task: str
    title: str
    version: str
    retriever: str
    shots: int
    conditions: Conditions
    score: str
    n: int
    rows_shortened: int
    rows_cut: int
    accuracy: NotRequired[float]
    correct: NotRequired[int]
    interval: NotRequired[dict[str, float]]
    openicl_accuracy: NotRequired[float]
    labels: NotRequired[list[str]]
    chance: NotRequired[float]
    majority: NotRequired[float]
    scores: NotRequired[dict[str, stats.AccuracyNumbers]]
    macro_f1: NotRequired[float | None]
    confusion: NotRequired[list[list[int]]]
    groups: NotRequired[dict[str, dict[str, float]]]
    leaked: NotRequired[int]
    clean: NotRequired[Mapping[str, object]]  # the accuracy without leaked rows
    worst: NotRequired[list[Record]]
    measure: NotRequired[MeasureNumbers]
    metrics: NotRequired[dict[str, float]]  # lm-eval's, or the values of `lengths`
    lengths: NotRequired[list[Record]]  # label, value, interval and note
    answers_cut: NotRequired[int | None]


class RowSource(TypedDict):
    """The origin of the test rows of a result."""

    from_hub: bool
    hub: dict[str, Any] | None  # path, name and revision of the data set
    split: str


class View(TypedDict):
    """A copy of a stored result, for reports."""

    key: str
    weights: str
    rows: RowSource
    result: TaskResult


class Lost(NamedTuple):
    """The parts of a prompt that the context had no space for."""

    demonstrations: int
    tokens: int  # of the row's text


class TaskRecords(NamedTuple):
    """The test rows of a task, with one entry per row in each list."""

    rows: list[tuple[int, Any, str, str]]  # row number, id, gold label and group
    correct: list[bool]
    texts: list[str | None]  # digest of the text, by which contamination reports identify the row
    lost: list[Lost]


@dataclass(eq=False)
class Model:
    """An evaluated model with its views by task, its sampled text and its training log."""

    name: str
    description: Description
    out: Path
    views: dict[str, View] = field(default_factory=dict)
    measures: dict[str, View] = field(default_factory=dict)  # views of results without accuracy
    unreadable: dict[str, str] = field(default_factory=dict)  # task -> why its result is skipped
    samples: list[Record] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    _records: dict[str, TaskRecords] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """The step, tokens, objective and run that the trainer recorded."""
        return self.description["facts"]

    @property
    def results(self) -> dict[str, TaskResult]:
        """The result of every task with a readable one."""
        return {task: view["result"] for task, view in self.views.items()}

    @property
    def all_results(self) -> dict[str, TaskResult]:
        """The results of all tasks, with and without an accuracy."""
        return {**self.results, **self.measured}

    @property
    def measured(self) -> dict[str, TaskResult]:
        """The result of every task without accuracy."""
        return {task: view["result"] for task, view in self.measures.items()}

    def read_records(self, task: str) -> list[Record]:
        """Return the records of a task in row order. Raises UserError if files of the store are damaged."""
        view = self.views.get(task) or self.measures[task]
        return store.read_row_records(self.out, view["key"], view["result"]["n"])

    def records(self, task: str) -> TaskRecords:
        """Return what comparisons need of the records of a task. They are read once."""
        if task not in self._records:
            records = self.read_records(task)
            self._records[task] = TaskRecords(
                [(r["row"], r["id"], r["gold"], r["group"]) for r in records],
                [is_right(r) for r in records] if task in self.views else [],
                [r.get("text") for r in records],
                [Lost(r.get("dropped", 0), r.get("cut", 0)) for r in records],
            )
        return self._records[task]


def is_right(record: Record) -> bool:
    """Return whether a row was answered correctly. Records of lm-eval's tasks have the outcome itself."""
    return bool(record["correct"] if "correct" in record else record["prediction"] == record["gold"])


def only_answer(result: TaskResult) -> str | None:
    """Return the label that a model predicts for every row, if the rows have several labels, else None."""
    columns = zip(result["labels"], *result["confusion"], strict=True)
    answered = [label for label, *counts in columns if any(counts)]
    several = sum(any(counts) for counts in result["confusion"]) > 1
    return answered[0] if len(answered) == 1 and several else None


def claim_name(description: Description, out: Path, say: Say) -> None:
    """Write a model's description under its name, which stands for one model and tokenizer.

    Views of other weights or of another tokenizer under the same name are removed. Each result has its own
    dtype, and comparisons refuse results that differ in it.
    """
    directory = out / MODELS / description["name"]
    before = _read_description(directory)
    change = ""
    if before is not None:
        changes = {
            "other weights": before["weights"] != description["weights"],
            "another tokenizer": before["tokenizer"] != description["tokenizer"],
        }
        change = next((name for name, changed in changes.items() if changed), "")
    if change:
        say(f"{description['name']}: {change} than in the last run. Its earlier results are hidden.")
        for path in directory.glob("*.json"):
            view = store.read_json_or_none(path)
            if path.name != MODEL and isinstance(view, dict) and "weights" in view:
                path.unlink(missing_ok=True)
    store.replace(directory / MODEL, store.dump(description))


def read_models(outs: Sequence[Path], say: Say | None = None) -> list[Model]:
    """Return all models evaluated under some results directories. say: receives skipped files (stderr).

    Raises UserError when a directory has no model, or when one name stands for two models.
    """
    warn = say or (lambda text: print(printable(text), file=sys.stderr))
    models: dict[str, Model] = {}
    for out in outs:
        before = len(models)
        for directory in sorted(path for path in (out / MODELS).glob("*") if path.is_dir()):
            description = _read_description(directory)
            if description is None:
                warn(f"skipped {directory}: {MODEL} is missing or damaged. Evaluate the model again.")
                continue
            if directory.name in models:
                raise UserError(
                    f"two results directories have a model {directory.name!r}. Evaluate one of them with "
                    "another --name.",
                    code="same-name",
                )
            model = models[directory.name] = Model(directory.name, description, out)
            _read_views(model, directory, warn)
        if len(models) == before:
            raise UserError(
                f"no results in {out}. Create them with: emo eval --model DIR --data DIR --output_path {out}",
                code="no-results",
            )
    return list(models.values())


def _read_views(model: Model, directory: Path, warn: Say) -> None:
    for path in sorted(path for path in directory.glob("*.json") if path.name != MODEL):
        view: Any = store.read_json_or_none(path)
        if (fault := _fault_of_view(view, model.out)) is not None:
            warn(f"skipped {path}: {fault}")
            if path.name != SAMPLES:
                model.unreadable[path.stem] = fault
        elif view["weights"] == model.description["weights"]:
            if path.name == SAMPLES:
                model.samples = view["samples"]
            else:
                kind = model.measures if "measure" in view["result"] else model.views
                kind[path.stem] = view


def find_model(models: Sequence[Model], name: str) -> Model:
    """Return the model called `name`, or raise UserError with the nearest name or all names."""
    for model in models:
        if model.name == name:
            return model
    raise UserError(
        f"no results of a model {name!r}. {nearest(name, [m.name for m in models])}", code="no-results"
    )


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts step-9 before step-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _read_description(directory: Path) -> Description | None:
    """Return the description of the model in a directory, if it is valid and has the directory's name."""
    value: Any = store.read_json_or_none(directory / MODEL)
    valid = isinstance(value, dict) and value.keys() >= Description.__required_keys__
    return value if valid and value["name"] == directory.name else None


def _fault_of_view(view: Any, out: Path) -> str | None:
    """Return why a view or file of samples under `out` cannot be used, or None."""
    kinds = {"weights", "samples"}, View.__required_keys__
    if not isinstance(view, dict) or not any(view.keys() >= keys for keys in kinds):
        return "damaged, or of another version. Run the command that wrote it again."
    if "samples" in view:
        return None
    if "measure" not in view["result"] and not view["result"].keys() >= RESULT:
        return "a result of another version. Evaluate it again."
    sealed = store.unsealed(out / store.STORE / view["key"] / store.RESULT)
    if sealed is not None and store.digest_json(sealed) != store.digest_json(view["result"]):
        return "it differs from the sealed result in the store. Evaluate it again to restore it."
    return None
