"""Tasks: one YAML file each, and the rows and OpenICL templates that follow from it.

A new task is a new file in `eval/tasks/` (or any file given by path to `--tasks`); README.md there has an
example. Labels are compared by name, never by number: copies of one data set number them differently.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from datasets import Dataset, DatasetDict
from pydantic import Field, model_validator

from common.errors import UserError, nearest, one_line
from common.recipe import Section, parse_section
from eval.icl.openicl_compat import DatasetReader, PromptTemplate, Template
from eval.names import TASK_ORDER

DIRECTORY = Path(__file__).parent / "tasks"
ICE = "</E>"  # where OpenICL puts the demonstrations
LABEL, GROUP, ROW = "label", "group", "row"  # columns of the canonical rows, beside the inputs
_SLOT = re.compile(r"\{(\w+)\}")


class Hub(Section):
    """A data set on the hub, for `--data hub`."""

    path: str
    name: str | None = None
    revision: str | None = None


class Splits(Section):
    """Which split is tested, and which one demonstrations come from."""

    test: str = "test"
    demonstrations: str = "train"


class Column(Section):
    """A column of the data, with literal replacements made in its text."""

    column: str
    replace: dict[str, str] = {}


class Label(Section):
    """The label column and, for each label, the values of the data that mean it."""

    columns: list[str] = Field(min_length=1)  # the first one that the data has
    names: dict[str, list[str | int]] = Field(min_length=2)  # also the order: ties go to the first label


class Shots(Section):
    """Demonstrations per prompt."""

    count: int = Field(8, ge=0)
    by: Literal["retrieval", "group"] = "retrieval"  # group: the first rows of the same group


class Prompt(Section):
    """One prompt version. {name} stands for an input, {label} for the label's words."""

    text: str  # the query with a label; demonstrations look the same unless `demonstration` is given
    before: str = ""  # stands once, before the demonstrations
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
    input: dict[str, str | Column] = Field(
        min_length=1
    )  # name in the prompts -> column ("choices.0": an element)
    group: str | None = None  # column: the score is the unweighted mean over its values
    label: Label
    shots: Shots = Shots()
    metric: Literal["accuracy"] = "accuracy"
    prompts: dict[str, Prompt] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> TaskSpec:
        labels = list(self.label.names)
        taken = {LABEL, GROUP, ROW} & set(self.input)
        if taken:
            raise ValueError(f"input: {taken.pop()} is a name that every row has; choose another")
        values = [(type(v), v) for accepted in self.label.names.values() for v in accepted]
        if len(set(values)) != len(values):
            raise ValueError("label.names: one value stands for two labels")
        if self.shots.by == "group" and self.group is None:
            raise ValueError("shots.by: group needs the key `group`")
        for version, prompt in self.prompts.items():
            where = f"prompts.{version}"
            for part in ("text", "before", "demonstration", "channel"):
                template = getattr(prompt, part)
                if template is None:
                    continue
                for slot in _SLOT.findall(template):
                    if slot != "label" and slot not in self.input:
                        raise ValueError(f"{where}.{part} names {{{slot}}}, which `input` does not define")
                if ("{label}" in template) == (part == "before"):
                    problem = "must not name" if part == "before" else "must name"
                    raise ValueError(f"{where}.{part} {problem} {{label}}")
            for label in [*prompt.words, *(prompt.order or [])]:
                if label not in labels:
                    raise ValueError(f"{where}: {label!r} is not one of the labels {', '.join(labels)}")
            if prompt.order is not None and sorted(prompt.order) != sorted(labels):
                raise ValueError(f"{where}.order must list every label once")
        return self


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
        """Label names in the order that decides ties."""
        return self.prompt.order or list(self.spec.label.names)

    @property
    def inputs(self) -> list[str]:
        return list(self.spec.input)

    def words(self, label: str) -> str:
        """How a label is spelt in the prompt."""
        return self.prompt.words.get(label, label)

    @cached_property
    def template(self) -> PromptTemplate:
        """The prompt: demonstrations, then the query with a label."""
        return self._template(self.prompt.before, self.prompt.text, ice=True)

    @cached_property
    def demonstration_template(self) -> PromptTemplate:
        return self._template("", self.prompt.demonstration or self.prompt.text, ice=False)

    @cached_property
    def channel_templates(self) -> tuple[PromptTemplate, PromptTemplate]:
        """(prompt, demonstration) with the label before the text, for the channel score."""
        if self.prompt.channel is None:
            raise UserError(f"task {self.name}: prompts.{self.version} has no `channel` text")
        text = self.prompt.channel
        return self._template(self.prompt.before, text, ice=True), self._template("", text, ice=False)

    def fill(self, text: str, row: dict[str, Any]) -> str:
        """`text` with {name} replaced by the inputs of a canonical row."""
        return _SLOT.sub(lambda match: str(row[match.group(1)]), text)

    def _template(self, before: str, text: str, ice: bool) -> PromptTemplate:
        tokens = {name: f"</{name}>" for name in self.inputs}

        def fill(part: str, label: str) -> str:
            slots = tokens | {"label": self.words(label)}
            return _SLOT.sub(lambda match: slots[match.group(1)], part)

        middle = ICE if ice else ""
        by_label = {label: fill(before, label) + middle + fill(text, label) for label in self.labels}
        return Template(by_label, tokens, ice_token=ICE if ice else None)

    def identity(self) -> dict[str, Any]:
        """What of the task decides a score, data and retriever aside."""
        return {
            "prompt": self.prompt.model_dump(),
            "labels": {label: self.words(label) for label in self.labels},
            "inputs": {k: v if isinstance(v, str) else v.model_dump() for k, v in self.spec.input.items()},
            "group": self.spec.group,
        }


def known_tasks() -> list[str]:
    """Names of the tasks that come along, the paper's eight first and in its order."""
    names = {path.stem for path in DIRECTORY.glob("*.yaml")}
    return [n for n in TASK_ORDER if n in names] + sorted(names - set(TASK_ORDER))


def load_task(name: str, version: str = "paper") -> Task:
    """The task `name` of eval/tasks, or the task file at the path `name`.

    Raises UserError for an unknown name or version, or a malformed file.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else DIRECTORY / f"{name}.yaml"
    if not path.is_file():
        if path.parent != DIRECTORY:
            raise UserError(f"task file {path} does not exist")
        raise UserError(f"unknown task {name!r}; {nearest(name, known_tasks())}")
    try:
        tree = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"task file {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"task file {path} must be a mapping (title, input, label, prompts, ...)")
    try:
        spec = parse_section(TaskSpec, tree, "")
    except UserError as error:
        raise UserError(f"task file {path}: {error}") from None
    if version not in spec.prompts:
        raise UserError(
            f"task {path.stem} has no prompt version {version!r}; it has {', '.join(spec.prompts)}"
        )
    return Task(path.stem, spec, version)


def select_tasks(names: str, version: str = "paper") -> list[Task]:
    """Tasks of a comma-separated list of names and files, or of `all`."""
    chosen = known_tasks() if names == "all" else [n.strip() for n in names.split(",") if n.strip()]
    if not chosen:
        raise UserError(f"--tasks is empty; known: all, {', '.join(known_tasks())}")
    if len(set(chosen)) != len(chosen):
        raise UserError(f"--tasks names a task twice: {names}")
    return [load_task(name, version) for name in chosen]


# --- rows -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskData:
    """Canonical rows: the inputs as text, `label` as its name, `group`, `row`."""

    rows: DatasetDict  # "train": where demonstrations come from; "test"
    digest: str  # of both splits' content

    def reader(self, task: Task) -> DatasetReader:
        """OpenICL's reader over the rows."""
        return DatasetReader(self.rows, input_columns=task.inputs, output_column=LABEL)


def load_data(task: Task, source: str, limit: int | None = None) -> TaskData:
    """Rows of a task from a directory (<source>/<task>/<split>.jsonl[.zst]) or, for `hub`, from the hub.

    limit: evenly spaced test rows, so that every group and label keeps its share.
    """
    splits = {"train": task.spec.splits.demonstrations, "test": task.spec.splits.test}
    canonical: dict[str, list[dict[str, Any]]] = {}
    for role, split in splits.items():
        raw, where = _hub_rows(task, split) if source == "hub" else _file_rows(task, Path(source), split)
        canonical[role] = [_canonical(task, row, i, f"{where} row {i}") for i, row in enumerate(raw)]
        if not canonical[role]:
            raise UserError(f"{where} has no rows")
    canonical["train"] = canonical["train"][: task.prompt.pool_first]
    if limit is not None and limit < len(canonical["test"]):
        n = len(canonical["test"])
        canonical["test"] = [canonical["test"][i * n // limit] for i in range(limit)]
    count, pool = task.spec.shots.count, len(canonical["train"])
    if task.spec.shots.by == "retrieval" and pool < count:
        raise UserError(f"task {task.name}: {count} demonstrations wanted of {pool} rows")
    digest = hashlib.sha256(json.dumps(canonical, ensure_ascii=False, sort_keys=True).encode()).hexdigest()
    return TaskData(DatasetDict({k: Dataset.from_list(v) for k, v in canonical.items()}), digest)


def _file_rows(task: Task, root: Path, split: str) -> tuple[Iterator[dict[str, Any]], str]:
    directory = root / task.name
    for name in (f"{split}.jsonl", f"{split}.jsonl.zst"):
        if (directory / name).is_file():
            return _read_lines(directory / name), str(directory / name)
    raise UserError(
        f"no {split}.jsonl or {split}.jsonl.zst in {directory}; "
        "--data names a directory of <task>/<split>.jsonl, or hub"
    )


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".zst":
        import zstandard

        data = zstandard.ZstdDecompressor().stream_reader(path.open("rb"))
        content = data.read()
    else:
        content = path.read_bytes()
    for number, line in enumerate(content.decode().split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} is not an object")
        yield row


def _hub_rows(task: Task, split: str) -> tuple[Iterable[dict[str, Any]], str]:
    from datasets import ClassLabel, load_dataset

    hub = task.spec.hub
    if hub is None:
        raise UserError(f"task {task.name} has no hub id; give --data DIRECTORY")
    where = f"{hub.path} {split}"
    try:
        data = load_dataset(hub.path, hub.name, split=split, revision=hub.revision)
    except Exception as error:  # datasets raises a dozen kinds: no network, no such id, no such split
        cause = one_line(error, 200)
        raise UserError(
            f"cannot load {where} from the hub ({type(error).__name__}: {cause}); give --data DIRECTORY"
        ) from None
    for column, feature in data.features.items():
        if isinstance(feature, ClassLabel):  # numbers become the names that the data set itself gives them
            names = [None if v is None or v < 0 else feature.int2str(v) for v in data[column]]
            data = data.remove_columns(column).add_column(column, names)
    return data, where


def _canonical(task: Task, row: dict[str, Any], place: int, where: str) -> dict[str, Any]:
    """One row: inputs as text, the label by name, the group, and its number in the full split."""
    canonical: dict[str, Any] = {ROW: row.get(ROW, place)}
    for name, column in task.spec.input.items():
        spec = Column(column=column) if isinstance(column, str) else column
        text = str(_value(row, spec.column, where))
        for old, new in spec.replace.items():
            text = text.replace(old, new)
        canonical[name] = text
    label = next((c for c in task.spec.label.columns if c in row), None)
    if label is None:
        raise UserError(f"{where}: none of the label columns {', '.join(task.spec.label.columns)}")
    canonical[LABEL] = _label_name(task, row[label], f"{where}: column {label}")
    canonical[GROUP] = str(_value(row, task.spec.group, where)) if task.spec.group else ""
    return canonical


def _value(row: dict[str, Any], column: str, where: str) -> Any:
    name, dot, element = column.partition(".")
    if name not in row:
        raise UserError(f"{where}: no column {name}; {nearest(name, row)}")
    if not dot:
        return row[name]
    try:
        return row[name][int(element)]
    except (IndexError, ValueError, TypeError):
        raise UserError(f"{where}: column {name} has no element {element}") from None


def _label_name(task: Task, value: Any, where: str) -> str:
    for label, accepted in task.spec.label.names.items():
        if any(type(a) is type(value) and a == value for a in accepted):
            return label
    if isinstance(value, int):
        raise UserError(
            f"{where}: label {value} is a number without a name; the task file checks names, not numbers"
        )
    known = ", ".join(str(a) for accepted in task.spec.label.names.values() for a in accepted)
    raise UserError(f"{where}: unknown label {value!r}; known: {known}")
