"""Task files: their keys, and the prompts that they define.

A new task is a new file in `eval/icl/tasks/`, or any file whose path is passed to `--tasks`.
docs/how-to/add-a-task.md has an example. Labels are compared by name, because copies of a data set number
them differently.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from emo.common.config.recipe import Section, load_section
from emo.common.errors import UserError, nearest
from emo.common.provenance import shipped

from ..results.directory import MODEL, SAMPLES, TaskResult

DIRECTORY = Path(__file__).parent / "tasks"
PAPER_ORDER = ("tweet_emotion", "sst2", "trec", "subj", "cr", "rotten_tomatoes", "ag_news", "mmlu")
# Columns of canonical rows, in addition to the inputs.
LABEL = "label"
GROUP = "group"
ROW = "row"
LABEL_SLOT = f"{{{LABEL}}}"
SLOT = re.compile(r"\{(\w+)\}")

Row = dict[str, Any]


class Hub(Section):
    """A data set on the hub, for `--data hub`."""

    path: str
    name: str | None = None
    revision: str | None = None


class Splits(Section):
    """The test split, and the split that demonstrations come from."""

    test: str = "test"
    demonstrations: str = "train"


class Column(Section):
    """A column of the data, and literal replacements in its text."""

    column: str
    replace: dict[str, str] = {}


class Label(Section):
    """The label column and, for each label, the data values that stand for it."""

    columns: list[str] = Field(min_length=1)  # the first one in the data is used
    # In the order that decides ties: the first label wins.
    names: dict[str, list[bool | str | int]] = Field(min_length=2)


class Shots(Section):
    """Demonstrations per prompt."""

    count: int = Field(8, ge=0)
    by: Literal["retrieval", "group"] = "retrieval"  # group: the first rows of the same group


class PromptVersion(Section):
    """A prompt version. {name} stands for an input, and {label} for the label's words."""

    text: str  # the query with a label, also used for demonstrations unless `demonstration` is set
    before: str = ""  # once, before the demonstrations
    demonstration: str | None = None
    words: dict[str, str] = {}  # label -> words (default: the label)
    order: list[str] | None = None  # another order of the labels
    channel: str | None = None  # label first, for the channel score
    pool_first: int | None = Field(None, gt=0)  # demonstrations from this many first rows only


class TaskSpec(Section):
    """A task file."""

    title: str
    about: str = Field("", exclude=True)  # what the task asks, for `emo tasks`; results do not depend on it
    hub: Hub | None = None
    splits: Splits = Splits()
    # Name in the prompts -> column ("choices.0": an element).
    input: dict[str, str | Column] = Field(min_length=1)
    group: str | None = None  # column. The score is the unweighted mean over its values.
    label: Label
    shots: Shots = Shots()
    metric: Literal["accuracy"] = "accuracy"
    prompts: dict[str, PromptVersion] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_consistency(self) -> TaskSpec:
        for name in self.input:
            if name in (LABEL, GROUP, ROW) or not re.fullmatch(r"\w+", name):
                raise ValueError(
                    f"input: the name {name!r} must consist of letters, digits and _, and must not be "
                    f"{LABEL}, {GROUP} or {ROW}"
                )
        values = [(type(v), v) for accepted in self.label.names.values() for v in accepted]
        if len(set(values)) != len(values):
            raise ValueError("label.names: a value stands for two labels")
        if self.shots.by == "group" and self.group is None:
            raise ValueError("shots.by: `group` needs the key `group`")
        for version, prompt in self.prompts.items():
            self._check_slots(f"prompts.{version}", prompt)
            self._check_labels(f"prompts.{version}", prompt)
        return self

    def _check_slots(self, where: str, prompt: PromptVersion) -> None:
        for part in ("text", "before", "demonstration", "channel"):
            template = getattr(prompt, part)
            if template is None:
                continue
            if unknown := set(SLOT.findall(template)) - {LABEL, *self.input}:
                raise ValueError(f"{where}.{part} uses {{{min(unknown)}}}, which `input` does not define")
            if re.search(r"\{[^{}]*\}", SLOT.sub("", template)):
                raise ValueError(f"{where}.{part} has braces that are not a slot of the form {{name}}")
            if (LABEL_SLOT in template) != (part != "before"):
                raise ValueError(f"{where}.{part} must {'not ' * (part == 'before')}contain {LABEL_SLOT}")
        if prompt.channel is not None and not SLOT.search(prompt.channel.rsplit(LABEL_SLOT, 1)[-1]):
            raise ValueError(f"{where}.channel must contain an input after the last {LABEL_SLOT}")

    def _check_labels(self, where: str, prompt: PromptVersion) -> None:
        labels = list(self.label.names)
        words = Counter(prompt.words.get(label, label) for label in labels)
        if same := [text for text, count in words.items() if count > 1]:
            raise ValueError(f"{where}.words: several labels have the words {same[0]!r}")
        if unknown := prompt.words.keys() - labels:
            raise ValueError(f"{where}: {min(unknown)!r} is not one of the labels {', '.join(labels)}")
        if prompt.order is not None and sorted(prompt.order) != sorted(labels):
            raise ValueError(f"{where}.order must list every label once: {', '.join(labels)}")


def fill(text: str, values: Mapping[str, Any]) -> str:
    """Return `text` with every {name} replaced by its value."""
    return SLOT.sub(lambda match: str(values[match.group(1)]), text)


@dataclass(frozen=True)
class Task:
    """A task file with the selected prompt version."""

    name: str
    spec: TaskSpec
    version: str

    @property
    def prompt(self) -> PromptVersion:
        return self.spec.prompts[self.version]

    @property
    def labels(self) -> list[str]:
        """The names of the labels in the order that decides ties."""
        return self.prompt.order or list(self.spec.label.names)

    @property
    def inputs(self) -> list[str]:
        return list(self.spec.input)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The inputs' columns by name."""
        inputs = self.spec.input.items()
        return {name: Column(column=c) if isinstance(c, str) else c for name, c in inputs}

    @cached_property
    def label_of(self) -> dict[tuple[type, bool | str | int], str]:
        """The labels by the type and the value that the data has for them."""
        names = self.spec.label.names.items()
        return {(type(value), value): name for name, accepted in names for value in accepted}

    def words(self, label: str) -> str:
        """Return the words of a label in the prompt."""
        return self.prompt.words.get(label, label)

    def text(self, row: Row) -> str:
        """Return the inputs of a row as one text, which identifies test rows that are also in the pool."""
        return "\n".join(row[name] for name in self.inputs)

    def channel(self) -> Task:
        """Return the task with the label before the text, for the channel score, or raise UserError."""
        text = self.prompt.channel
        if text is None:
            raise UserError(f"task {self.name}: prompts.{self.version} has no `channel` text", code="task")
        prompt = self.prompt.model_copy(update={"text": text, "demonstration": None})
        return replace(self, spec=self.spec.model_copy(update={"prompts": {self.version: prompt}}))

    def require_text(self, rows: list[Row]) -> None:
        """Raise UserError if a row of a `channel` task has no text after its label."""
        after = self.prompt.text.rsplit(LABEL_SLOT, 1)[1]
        for row in rows:
            if not fill(after, row).strip():
                where = f"task {self.name}, test row {row[ROW]}"
                raise UserError(f"{where}: the text after the label is empty in `channel`", code="channel")

    def identity(self) -> dict[str, object]:
        """Return the parts of the task that affect scores, besides data and retriever."""
        return {
            "prompt": self.prompt.model_dump(),
            "labels": [[label, self.words(label)] for label in self.labels],
            "inputs": [[name, c.column, list(c.replace.items())] for name, c in self.columns.items()],
            "group": self.spec.group,
        }


class ForeignTask(ABC):
    """A task that scores itself, such as one of another program. name: of its results."""

    name: str

    @abstractmethod
    def fingerprint(self) -> Any:
        """Return a JSON value that changes with the task, without loading anything."""

    @abstractmethod
    def load(self) -> Any:
        """Return the task as its program needs it. Raises UserError if the task or its data is at fault."""

    @abstractmethod
    def evaluate(self, job: Any) -> TaskResult:
        """Return the result of the model of a `Job`, computed unless it is known, and write its view."""


def known_tasks() -> list[str]:
    """Return the names of the built-in tasks, with the paper's eight first and in its order."""
    names = {path.stem for path in DIRECTORY.glob("*.yaml")}
    return [n for n in PAPER_ORDER if n in names] + sorted(names - set(PAPER_ORDER))


def load_task(name: str, version: str = "paper") -> Task:
    """Return the built-in task `name`, or the task in the file at the path `name`."""
    path = shipped(Path(name)) if name.endswith((".yaml", ".yml")) else DIRECTORY / f"{name}.yaml"
    if not path.is_file():
        raise UserError(
            f"there is no task or task file {name!r}; {nearest(name, known_tasks())}. `emo tasks` describes "
            "them, and docs/how-to/add-a-task.md shows how to add one",
            code="task",
        )
    if path.stem in (Path(MODEL).stem, Path(SAMPLES).stem):  # results have the name of their task
        raise UserError(f"task file {path} has a name that results use. Rename the file.", code="task")
    try:
        spec = load_section(TaskSpec, path, ())
    except UserError as error:
        raise UserError(f"task file {path}: {error}", code="task") from None
    if version not in spec.prompts:
        versions = ", ".join(spec.prompts)
        raise UserError(
            f"task {path.stem} has no prompt version {version!r}. It has {versions}.", code="task"
        )
    return Task(path.stem, spec, version)


def select_tasks(names: str, version: str = "paper") -> list[Task]:
    """Return the tasks in a comma-separated list of names and files. `all` stands for the built-in ones."""
    given = [name.strip() for name in names.split(",") if name.strip()]
    chosen = [each for name in given for each in (known_tasks() if name == "all" else [name])]
    if not chosen:
        raise UserError(f"--tasks is empty. Choose from all, {', '.join(known_tasks())}.", code="task")
    tasks = [load_task(name, version) for name in chosen]
    if len({task.name for task in tasks}) != len(tasks):
        raise UserError(f"--tasks names a task twice: {names}", code="task")
    return tasks
