"""What a results directory shows: models by name, and for each the results of its tasks.

OUT/models/NAME/model.json      path, digest of the weights, what the trainer said about it
OUT/models/NAME/TASK.json       a view: key into the store, digest of the weights, where the rows came from,
                                and a copy of the result
OUT/models/NAME/samples.json    sampled text

Other files there, and views that differ from what the store has sealed, are skipped with a line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emo.common.errors import UserError, nearest
from emo.common.text import printable

from . import store

if TYPE_CHECKING:
    from ..model import EvaluatedModel

MODELS, MODEL, SAMPLES = "models", "model.json", "samples.json"
VIEW = {"key", "weights", "rows", "result"}
# What a result of this version holds, among others.
RESULT = {
    "title", "version", "retriever", "shots", "conditions", "labels", "chance", "majority", "score", "scores",
    "accuracy", "interval", "n", "macro_f1", "confusion", "groups", "leaked", "clean", "rows_shortened",
    "rows_cut", "worst",
}  # fmt: skip

Say = Callable[[str], None]


# Row number, id, gold label and group of every test row, and whether a model got it right.
Outcomes = tuple[list[tuple[int, Any, str, str]], list[bool]]


@dataclass(eq=False)
class Model:
    """One evaluated model: its description, its views by task, its text and its training log."""

    name: str
    description: dict[str, Any]
    out: Path
    views: dict[str, dict[str, Any]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)  # task -> why its result is left out
    samples: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    _outcomes: dict[str, Outcomes] = field(default_factory=dict)
    _texts: dict[str, list[str | None]] = field(default_factory=dict)
    _lost: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """Return step, tokens, objective and run, as far as the trainer left them."""
        return self.description["facts"]

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """Return the result of every task that has a readable one."""
        return {task: view["result"] for task, view in self.views.items()}

    def records(self, task: str) -> list[dict[str, Any]]:
        """Return per-row records of a task, in row order. UserError when files of the store are damaged."""
        view = self.views[task]
        return store.read_records(self.out, view["key"], view["result"]["n"])

    def outcomes(self, task: str) -> Outcomes:
        """Return every row of a task and whether it was right; read once. UserError like `records`."""
        if task not in self._outcomes:
            records = self.records(task)
            rows = [(r["row"], r["id"], r["gold"], r["group"]) for r in records]
            self._outcomes[task] = rows, [r["prediction"] == r["gold"] for r in records]
            self._texts[task] = [r.get("text") for r in records]
            self._lost[task] = [(r.get("dropped", 0), r.get("cut", 0)) for r in records]
        return self._outcomes[task]

    def texts(self, task: str) -> list[str | None]:
        """Return the digest of every row's text, by which contamination reports name it."""
        self.outcomes(task)
        return self._texts[task]

    def lost(self, task: str) -> list[tuple[int, int]]:
        """Return how many demonstrations, and tokens of its text, every row lost to the context."""
        self.outcomes(task)
        return self._lost[task]


def only_answer(result: dict[str, Any]) -> str | None:
    """Return the label that a model answers on every row of a task, where several are right; else None."""
    columns = zip(result["labels"], *result["confusion"], strict=True)
    answered = [label for label, *counts in columns if any(counts)]
    several = sum(any(counts) for counts in result["confusion"]) > 1
    return answered[0] if len(answered) == 1 and several else None


def claim_name(model: EvaluatedModel, out: Path, say: Say) -> None:
    """Describe the model under its name, which stands for one model in one dtype.

    Views of other weights, or in another dtype, under the same name are removed.
    """
    directory = out / MODELS / model.name
    before = _description(directory)
    if before is not None and (before["weights"], before["dtype"]) != (model.digest, model.dtype):
        same = before["weights"] == model.digest
        other = f"{model.dtype} instead of {before['dtype']}" if same else "other weights"
        say(f"{model.name}: {other} than in the last run; its earlier results are no longer shown")
        for path in directory.glob("*.json"):
            view = store.read_json(path)
            if path.name != MODEL and isinstance(view, dict) and "weights" in view:
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
    """Return all models evaluated under some results directories. say: gets the skipped files (stderr).

    UserError when a directory has none, or when one name stands for two models.
    """
    tell = say or (lambda text: print(printable(text), file=sys.stderr))
    models: dict[str, Model] = {}
    for out in outs:
        before = len(models)
        for directory in sorted(path for path in (out / MODELS).glob("*") if path.is_dir()):
            description = _description(directory)
            if description is None:
                tell(f"skipped {directory}: {MODEL} is missing or damaged; evaluate the model again")
                continue
            if directory.name in models:
                problem = (
                    f"two directories hold a model {directory.name!r}; evaluate one under another --name"
                )
                raise UserError(problem)
            model = models[directory.name] = Model(directory.name, description, out)
            for path in sorted(path for path in directory.glob("*.json") if path.name != MODEL):
                view: Any = store.read_json(path)
                if (fault := _fault(view, out)) is not None:
                    tell(f"skipped {path}: {fault}")
                    model.unreadable |= {} if path.name == SAMPLES else {path.stem: fault}
                elif view["weights"] == description["weights"] and path.name == SAMPLES:
                    model.samples = view["samples"]
                elif view["weights"] == description["weights"]:
                    model.views[path.stem] = view
        if len(models) == before:
            raise UserError(
                f"no results in {out}; make them with: emo eval --model DIR --data DIR --output_path {out}"
            )
    return list(models.values())


def pick(models: Sequence[Model], name: str) -> Model:
    """Return the model called `name`, or raise UserError with the nearest name or all of them."""
    for model in models:
        if model.name == name:
            return model
    raise UserError(f"no results of a model {name!r}; {nearest(name, [m.name for m in models])}")


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which step-9 comes before step-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _description(directory: Path) -> dict[str, Any] | None:
    """Return the description of the model in a directory, if it is one of that name."""
    value: Any = store.read_json(directory / MODEL)
    whole = isinstance(value, dict) and value.keys() >= {"name", "path", "weights", "dtype", "facts"}
    return value if whole and value["name"] == directory.name else None


def _fault(view: Any, out: Path) -> str | None:
    """Return what keeps a value from being shown, as a view on the results directory `out` or as samples."""
    if not isinstance(view, dict) or not (view.keys() >= {"weights", "samples"} or view.keys() >= VIEW):
        return "damaged, or of another version; run the command that wrote it again"
    if "samples" in view:
        return None
    if not view["result"].keys() >= RESULT:
        return "a result of another version; evaluate it again"
    sealed = store.unsealed(out / store.STORE / view["key"] / store.RESULT)
    if sealed is not None and store.digest(sealed) != store.digest(view["result"]):
        return "it differs from the result that the store has sealed; evaluate it again, which restores it"
    return None
