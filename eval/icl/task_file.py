"""What a task file may contain, and what is checked before any row is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from emo.common.recipe import Section

ICE = "</E>"  # where OpenICL puts the demonstrations
LABEL, GROUP, ROW = "label", "group", "row"  # columns of the canonical rows, beside the inputs
SLOT = re.compile(r"\{(\w+)\}")
_BRACES = re.compile(r"\{[^{}]*\}")
_TEXTS = ("text", "before", "demonstration", "channel")  # the templates of a prompt version


def token_of(name: str) -> str:
    """Return what stands for an input in an OpenICL template until it is filled."""
    return f"</{name}>"


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
    names: dict[str, list[str | int]] = Field(min_length=2)  # also the order: ties go to the first label


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

    def templates(self) -> Iterator[tuple[str, str]]:
        """(key, template) of those that are given."""
        for part in _TEXTS:
            template = getattr(self, part)
            if template is not None:
                yield part, template


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
    def _inputs_have_usable_names(self) -> TaskSpec:
        for name in self.input:
            if name in (LABEL, GROUP, ROW):
                raise ValueError(f"input: {name} is a name that every row has; choose another")
            if not re.fullmatch(r"\w+", name):
                raise ValueError(f"input: {name!r} cannot be written as {{name}}; use letters, digits and _")
            if token_of(name) == ICE:
                raise ValueError(f"input: {name} is OpenICL's name for demonstrations; choose another")
        return self

    @model_validator(mode="after")
    def _labels_are_told_apart(self) -> TaskSpec:
        values = [(type(v), v) for accepted in self.label.names.values() for v in accepted]
        if len(set(values)) != len(values):
            raise ValueError("label.names: one value stands for two labels")
        if self.shots.by == "group" and self.group is None:
            raise ValueError("shots.by: group needs the key `group`")
        return self

    @model_validator(mode="after")
    def _prompts_fit_inputs_and_labels(self) -> TaskSpec:
        labels = list(self.label.names)
        for version, prompt in self.prompts.items():
            where = f"prompts.{version}"
            for part, template in prompt.templates():
                _check_template(f"{where}.{part}", template, set(self.input), part != "before")
            for label in [*prompt.words, *(prompt.order or [])]:
                if label not in labels:
                    raise ValueError(f"{where}: {label!r} is not one of the labels {', '.join(labels)}")
            if prompt.order is not None and sorted(prompt.order) != sorted(labels):
                raise ValueError(f"{where}.order must list every label once")
        return self


def _check_template(where: str, template: str, inputs: set[str], labelled: bool) -> None:
    """ValueError unless every pair of braces is the slot of an input or, where `labelled`, of the label."""
    for slot in SLOT.findall(template):
        if slot != LABEL and slot not in inputs:
            raise ValueError(f"{where} names {{{slot}}}, which `input` does not define")
    for braces in _BRACES.findall(template):
        if not SLOT.fullmatch(braces):
            raise ValueError(f"{where}: {braces} would stay as it is; a slot is written {{name}}")
    if _BRACES.search(SLOT.sub("", template)):
        raise ValueError(f"{where}: braces around a slot would stay as they are; a slot is written {{name}}")
    for token in (ICE, *map(token_of, inputs)):
        if token in template:
            raise ValueError(f"{where} contains {token}, which is reserved")
    if (f"{{{LABEL}}}" in template) != labelled:
        raise ValueError(f"{where} {'must name' if labelled else 'must not name'} {{label}}")
