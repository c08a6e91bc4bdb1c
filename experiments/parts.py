"""The file of the evidence: its parts, and which part answers which question."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from common.errors import nearest
from common.recipe import Section


class Otherwise(Section):
    """A part's replacement where the files that it needs are not there."""

    note: str  # for the report
    before: list[str] = []  # commands, in order
    file: Path  # instead of the part's


class Part(Section):
    """One study or sweep."""

    title: str
    about: str  # for the report: what it is, what is measured
    kind: Literal["study", "sweep"]
    file: Path
    needs: list[str] = []  # paths; `{name}` stands for one of `names`
    otherwise: Otherwise | None = None  # None: it is left out
    names: dict[str, str] = {}  # of the part's file


class Answer(Section):
    """A question, the part that answers it, and others that the report quotes."""

    text: str
    by: str  # part
    question: str  # of that part's file
    also: list[str] = []  # parts that have the same question


class Evidence(Section):
    """The whole file."""

    out: Path
    names: dict[str, str] = {}
    cut: list[str] = []  # what was made smaller or left out so that it fits its time
    parts: dict[str, Part] = Field(min_length=1)
    answers: dict[str, Answer] = Field(min_length=1)

    @model_validator(mode="after")
    def _parts_exist(self) -> Evidence:
        for answer in self.answers.values():
            for part in (answer.by, *answer.also):
                if part not in self.parts:
                    raise ValueError(f"{part} is not one of the parts; {nearest(part, self.parts)}")
        return self
