"""What a results directory shows: models by name, and for each the results of its tasks.

OUT/models/NAME/model.json      path, digest of the weights, what the trainer said about it
OUT/models/NAME/TASK.json       a view: key into the store, digest of the weights, where the rows came from,
                                and a copy of the result
OUT/models/NAME/samples.json    sampled text

Other files there, and files that cannot be trusted, are skipped with a line: whoever made them may have meant
them to mislead the reader, or to end the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import UserError, nearest
from common.text import printable
from eval import store
from eval.icl.scores import EXTRA_SCORES, SCORES

if TYPE_CHECKING:
    from eval.model import EvaluatedModel

MODELS, MODEL, SAMPLES = "models", "model.json", "samples.json"
COUNTABLE = 2**53  # floats can no longer count beyond it

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=COUNTABLE)]
Score = Literal[*SCORES, *EXTRA_SCORES]  # type: ignore[valid-type]


class Stored(BaseModel):
    """The least that a file must hold; the rest is kept as it is."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @classmethod
    def fits(cls, value: Any) -> TypeGuard[dict[str, Any]]:
        """Return whether a value from a file is one."""
        try:
            cls.model_validate(value)
        except (ValidationError, RecursionError):
            return False
        return True


class Facts(Stored):
    """The facts that the trainer left of a model, as far as it did."""

    step: Count | None = None
    tokens: Count | None = None
    objective: str | None = None
    origin: str | None = None
    run: str | None = None


class Description(Stored):
    """model.json."""

    name: str
    path: str
    weights: str
    dtype: str
    facts: Facts


class Interval(Stored):
    low: float
    high: float


class Accuracy(Stored):
    accuracy: Share | None
    n: Count


class Conditions(Stored):
    compared: dict[str, str | int | float | bool | None]
    noted: dict[str, str | int | float | bool | None]


class Demonstration(Stored):
    text: str
    label: str


class Mistake(Stored):
    """A wrong answer that the report shows."""

    id: Count
    text: str
    gold: str
    prediction: str
    scores: dict[str, float]
    demonstrations: list[Demonstration]


class Result(Stored):
    """The result of a task."""

    title: str
    version: str
    retriever: str
    score: Score
    accuracy: Share
    chance: Share
    majority: Share
    macro_f1: Share
    n: Annotated[int, Field(gt=0, le=COUNTABLE)]
    shots: Count
    leaked: Count
    rows_shortened: Count
    rows_cut: Count
    interval: Interval
    scores: dict[Score, Accuracy]
    groups: dict[str, Any]
    clean: Accuracy
    conditions: Conditions
    labels: Annotated[list[str], Field(min_length=1)]
    confusion: list[list[Count]]
    worst: list[Mistake]

    @model_validator(mode="after")
    def _square(self) -> Self:
        if {len(self.labels)} != {len(self.confusion), *map(len, self.confusion)}:
            raise ValueError("a row and a column of the confusion per label")
        return self


class HubSet(Stored):
    """A data set of the hub, as a task file names it."""

    path: str
    name: str | None
    revision: str | None


class Rows(Stored):
    """The origin of the test rows of a result."""

    from_hub: bool  # otherwise from files, which may hold anything
    hub: HubSet | None  # the data set that the task is about
    split: str


class View(Stored):
    """TASK.json."""

    key: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # the name of a directory of the store
    weights: str
    result: dict[str, Any]
    rows: Rows | None = None  # None: it was made before this was noted


class Sample(Stored):
    prefix: str
    text: str
    ended: bool


class Samples(Stored):
    """samples.json."""

    weights: str
    samples: list[Sample]


class Record(Stored):
    """A row of a task, as far as all records have it."""

    row: Count
    gold: str
    group: str
    prediction: str


Say = Callable[[str], None]


class Outcome(NamedTuple):
    """A test row, and whether a model got it right."""

    row: int
    gold: str
    group: str
    right: bool


@dataclass
class Model:
    """One evaluated model: its description, its result per task, its text and its training log."""

    name: str
    description: dict[str, Any]
    results: dict[str, dict[str, Any]]
    keys: dict[str, str]
    out: Path
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # task -> Rows, where that is known
    unreadable: dict[str, str] = field(default_factory=dict)  # task -> why its result is left out
    samples: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    _outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """step, tokens, objective, run: as far as the trainer left them."""
        return self.description["facts"]

    def records(self, task: str) -> list[dict[str, Any]]:
        """Per-row records of a task, in row order. UserError when files of the store are damaged."""
        records = store.read_records(self.out, self.keys[task], self.results[task]["n"])
        if not all(map(Record.fits, records)):
            raise UserError(f"{self.name}, {task}: its records are no rows of a task; evaluate it again")
        return records

    def outcomes(self, task: str) -> list[Outcome]:
        """Every row of a task and whether it was right; read once. UserError like `records`."""
        if task not in self._outcomes:
            self._outcomes[task] = [
                Outcome(r["row"], r["gold"], r["group"], r["prediction"] == r["gold"])
                for r in self.records(task)
            ]
        return self._outcomes[task]


def only_answer(result: dict[str, Any]) -> str | None:
    """The label that a model answers on every row of a task, although more than one is right; else None."""
    answered = [
        label for label, *counts in zip(result["labels"], *result["confusion"], strict=True) if any(counts)
    ]
    several = sum(any(counts) for counts in result["confusion"]) > 1
    return answered[0] if len(answered) == 1 and several else None


def claim_name(model: EvaluatedModel, out: Path, say: Say) -> None:
    """Describe the model under its name, which stands for one model in one dtype.

    Views of other weights, or in another dtype, under the same name are removed.
    """
    directory = out / MODELS / model.name
    described = store.read_json(directory / MODEL)
    before = (described["weights"], described["dtype"]) if Description.fits(described) else None
    if before is not None and before != (model.digest, model.dtype):
        alike = before[0] == model.digest
        difference = (
            f"{model.dtype} instead of {before[1]}" if alike else "other weights than in the last run"
        )
        say(f"{model.name}: {difference}; its earlier results are no longer shown")
        for path in (p for p in directory.glob("*.json") if p.is_file()):
            if path.name == SAMPLES or View.fits(store.read_json(path)):
                path.unlink(missing_ok=True)
    facts = {
        "name": model.name,
        "path": model.given,
        "weights": model.digest,
        "tokenizer": model.tokenizer_digest,
        "dtype": model.dtype,
        "facts": model.facts,
    }
    store.replace(directory / MODEL, store.dump(facts))


def read_models(outs: Sequence[Path], say: Say | None = None) -> list[Model]:
    """All models evaluated under some results directories. say: told which files are skipped (stderr).

    UserError when a directory has none, or when one name stands for two models.
    """
    tell = say or _on_stderr
    models = []
    for out in outs:
        of_directory = list(_models(out, tell))
        if not of_directory:
            raise UserError(
                f"no results in {out}; make them with: python -m eval run --model DIR --data DIR --out {out}"
            )
        models += of_directory
    names = [m.name for m in models]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UserError(f"two directories hold a model {twice!r}; evaluate one under another --name")
    return models


def pick(models: Sequence[Model], name: str) -> Model:
    """The model called `name`, or UserError with the nearest name or all of them."""
    for model in models:
        if model.name == name:
            return model
    raise UserError(f"no results of a model {name!r}; {nearest(name, [m.name for m in models])}")


def _models(out: Path, say: Say) -> Iterator[Model]:
    for directory in sorted(p for p in (out / MODELS).glob("*") if p.is_dir()):
        description = store.read_json(directory / MODEL)
        if not Description.fits(description) or description["name"] != directory.name:
            say(f"skipped {directory}: {MODEL} is missing or damaged; evaluate the model again")
            continue
        views, unreadable = _views(directory, description["weights"], say)
        yield Model(
            name=description["name"],
            description=description,
            results={task: view["result"] for task, view in views.items()},
            keys={task: view["key"] for task, view in views.items()},
            rows={task: view["rows"] for task, view in views.items() if view.get("rows")},
            out=out,
            unreadable=unreadable,
            samples=_samples(directory / SAMPLES, description["weights"], say),
        )


def _views(directory: Path, weights: str, say: Say) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The results of these weights by task, and why others are left out."""
    views: dict[str, dict[str, Any]] = {}
    unreadable: dict[str, str] = {}
    for path in sorted(directory.glob("*.json")):
        if path.name in (MODEL, SAMPLES) or not path.is_file():
            continue
        view: Any = store.read_json(path)
        fault = _fault(view, directory.parents[1])
        if fault is not None:
            unreadable[path.stem] = fault
            say(f"skipped {path}: {fault}")
        elif view["weights"] == weights:
            views[path.stem] = view
    return views, unreadable


def _fault(view: Any, out: Path) -> str | None:
    """Return what keeps a file from being shown as a result of the results directory `out`."""
    if not View.fits(view):
        return "damaged, or not a result"
    if not Result.fits(view["result"]):
        return "a result of another version; evaluate it again"
    sealed = store.unsealed(out / store.STORE / view["key"] / store.RESULT)
    if sealed is not None and store.digest(sealed) != store.digest(view["result"]):
        return "it differs from the result that the store has sealed; evaluate it again, which restores it"
    return None


def _samples(path: Path, weights: str, say: Say) -> list[dict[str, Any]]:
    """Text sampled from these weights."""
    value = store.read_json(path)
    if Samples.fits(value):
        return value["samples"] if value["weights"] == weights else []
    if path.is_file():
        say(f"skipped {path}: damaged; sample again with python -m eval generate")
    return []


def _on_stderr(text: str) -> None:
    print(printable(text), file=sys.stderr)
