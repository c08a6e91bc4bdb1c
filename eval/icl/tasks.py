"""Tasks: what a task file may contain, and the prompts that follow from it.

A new task is a new file in `eval/icl/tasks/` (or any file given by path to `--tasks`); README.md there has an
example. Labels are compared by name, never by number: copies of one data set number them differently.
"""

from __future__ import annotations

import re
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

from ..results.directory import MODEL, SAMPLES

DIRECTORY = Path(__file__).parent / "tasks"
PAPER_ORDER = ("tweet_emotion", "sst2", "trec", "subj", "cr", "rotten_tomatoes", "ag_news", "mmlu")
LABEL, GROUP, ROW = "label", "group", "row"  # columns of the canonical rows, beside the inputs
LABEL_SLOT = f"{{{LABEL}}}"
SLOT = re.compile(r"\{(\w+)\}")

Row = dict[str, Any]


class Hub(Section):
    """A data set on the hub, for `--data hub`."""

    path: str
    name: str | None = None
    revision: str | None = None


class Splits(Section):
    """The split that is tested, and the one that demonstrations come from."""

    test: str = "test"
    demonstrations: str = "train"


class Column(Section):
    """A column of the data, with literal replacements made in its text."""

    column: str
    replace: dict[str, str] = {}


class Label(Section):
    """The label column and, for each label, the values of the data that mean it."""

    columns: list[str] = Field(min_length=1)  # the first one that the data has
    names: dict[str, list[bool | str | int]] = Field(
        min_length=2
    )  # also the order: ties go to the first label


class Shots(Section):
    """Demonstrations per prompt."""

    count: int = Field(8, ge=0)
    by: Literal["retrieval", "group"] = "retrieval"  # group: the first rows of the same group


class Prompt(Section):
    """One prompt version. {name} stands for an input, {label} for the label's words."""

    text: str  # the query with a label; demonstrations look the same unless `demonstration` is given
    before: str = ""  # once, before the demonstrations
    demonstration: str | None = None
    words: dict[str, str] = {}  # label -> words; a label without an entry stands for itself
    order: list[str] | None = None  # another order of the labels
    channel: str | None = None  # label first, for the channel score
    pool_first: int | None = Field(None, gt=0)  # demonstrations from this many first rows only


class TaskSpec(Section):
    """A task file."""

    title: str
    hub: Hub | None = None
    splits: Splits = Splits()
    # Name in the prompts -> column ("choices.0": an element).
    input: dict[str, str | Column] = Field(min_length=1)
    group: str | None = None  # column: the score is the unweighted mean over its values
    label: Label
    shots: Shots = Shots()
    metric: Literal["accuracy"] = "accuracy"
    prompts: dict[str, Prompt] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> TaskSpec:
        for name in self.input:
            if name in (LABEL, GROUP, ROW) or not re.fullmatch(r"\w+", name):
                raise ValueError(
                    f"input: {name!r} cannot be a name: it must be of letters, digits and _, and not "
                    f"{LABEL}, {GROUP} or {ROW}"
                )
        values = [(type(v), v) for accepted in self.label.names.values() for v in accepted]
        if len(set(values)) != len(values):
            raise ValueError("label.names: one value stands for two labels")
        if self.shots.by == "group" and self.group is None:
            raise ValueError("shots.by: group needs the key `group`")
        labels = list(self.label.names)
        for version, prompt in self.prompts.items():
            where = f"prompts.{version}"
            for part in ("text", "before", "demonstration", "channel"):
                template = getattr(prompt, part)
                if template is None:
                    continue
                if unknown := set(SLOT.findall(template)) - {LABEL, *self.input}:
                    raise ValueError(
                        f"{where}.{part} names {{{min(unknown)}}}, which `input` does not define"
                    )
                if re.search(r"\{[^{}]*\}", SLOT.sub("", template)):
                    raise ValueError(f"{where}.{part}: braces would stay; a slot is written {{name}}")
                if (LABEL_SLOT in template) != (part != "before"):
                    raise ValueError(f"{where}.{part} must {'not ' * (part == 'before')}name {LABEL_SLOT}")
            if prompt.channel is not None and not SLOT.search(prompt.channel.rsplit(LABEL_SLOT, 1)[-1]):
                raise ValueError(f"{where}.channel must name an input after the last {LABEL_SLOT}")
            words = Counter(prompt.words.get(label, label) for label in labels)
            if alike := [text for text, count in words.items() if count > 1]:
                raise ValueError(f"{where}.words: several labels read {alike[0]!r}; only one could ever win")
            if unknown := prompt.words.keys() - labels:
                raise ValueError(f"{where}: {min(unknown)!r} is not one of the labels {', '.join(labels)}")
            if prompt.order is not None and sorted(prompt.order) != sorted(labels):
                raise ValueError(f"{where}.order must list every label once: {', '.join(labels)}")
        return self


def fill(text: str, values: Mapping[str, Any]) -> str:
    """Return `text` with every {name} replaced by its value."""
    return SLOT.sub(lambda match: str(values[match.group(1)]), text)


@dataclass(frozen=True)
class Task:
    """A task file together with the prompt version in use."""

    name: str
    spec: TaskSpec
    version: str

    @property
    def prompt(self) -> Prompt:
        return self.spec.prompts[self.version]

    @property
    def labels(self) -> list[str]:
        """Return the labels' names in the order that decides ties."""
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
        """Return how a label is spelt in the prompt."""
        return self.prompt.words.get(label, label)

    def text(self, row: Row) -> str:
        """Return the inputs of a row; equal texts mean that a test row is also in the pool."""
        return "\n".join(row[name] for name in self.inputs)

    def channel(self) -> Task:
        """Return the task with the label before the text, for the channel score; UserError if it has none."""
        text = self.prompt.channel
        if text is None:
            raise UserError(f"task {self.name}: prompts.{self.version} has no `channel` text")
        prompt = self.prompt.model_copy(update={"text": text, "demonstration": None})
        return replace(self, spec=self.spec.model_copy(update={"prompts": {self.version: prompt}}))

    def require_text(self, rows: list[Row]) -> None:
        """Raise UserError where a row of a `channel` task has nothing after its label to be scored."""
        after = self.prompt.text.rsplit(LABEL_SLOT, 1)[1]
        for row in rows:
            if not fill(after, row).strip():
                where = f"task {self.name}, test row {row[ROW]}"
                raise UserError(f"{where}: the text after the label is empty in `channel`", code="channel")

    def identity(self) -> dict[str, Any]:
        """Return what of the task decides a score, data and retriever aside, in lists where order counts."""
        return {
            "prompt": self.prompt.model_dump(),
            "labels": [[label, self.words(label)] for label in self.labels],
            "inputs": [[name, c.column, list(c.replace.items())] for name, c in self.columns.items()],
            "group": self.spec.group,
        }


def known_tasks() -> list[str]:
    """Return the names of the built-in tasks, the paper's eight first and in its order."""
    names = {path.stem for path in DIRECTORY.glob("*.yaml")}
    return [n for n in PAPER_ORDER if n in names] + sorted(names - set(PAPER_ORDER))


def load_task(name: str, version: str = "paper") -> Task:
    """Return the built-in task `name`, or the task in the file at the path `name`.

    Raises UserError for an unknown name or version, or a malformed file.
    """
    path = shipped(Path(name)) if name.endswith((".yaml", ".yml")) else DIRECTORY / f"{name}.yaml"
    if not path.is_file():
        raise UserError(
            f"there is no task or task file {name!r}; {nearest(name, known_tasks())}", code="task"
        )
    if path.stem in (Path(MODEL).stem, Path(SAMPLES).stem):  # results are called like their task
        raise UserError(f"task file {path}: results use this name themselves; rename the file", code="task")
    try:
        spec = load_section(TaskSpec, path, ())
    except UserError as error:
        raise UserError(f"task file {path}: {error}", code="task") from None
    if version not in spec.prompts:
        versions = ", ".join(spec.prompts)
        raise UserError(f"task {path.stem} has no prompt version {version!r}; it has {versions}", code="task")
    return Task(path.stem, spec, version)


def select_tasks(names: str, version: str = "paper") -> list[Task]:
    """Return the tasks of a comma-separated list of names and files, or of `all`."""
    chosen = known_tasks() if names == "all" else [n.strip() for n in names.split(",") if n.strip()]
    if not chosen:
        raise UserError(f"--tasks is empty; known: all, {', '.join(known_tasks())}", code="task")
    tasks = [load_task(name, version) for name in chosen]
    if len({task.name for task in tasks}) != len(tasks):
        raise UserError(f"--tasks names a task twice: {names}", code="task")
    return tasks
