"""Pairs of answers to the same questions: two models' answer files, or a test set with human labels."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from eval import store
from eval.judging.answers import Answers, read_answers
from eval.judging.questions import Question, id_of, input_of
from eval.judging.rows import Row, answer_of, evenly, named, read_rows, repeated, text_of
from eval.judging.verdicts import Side

PANDALM_LABELS: dict[Any, Side] = {0: "tie", 1: "a", 2: "b"}
AUTO_J_LABELS: dict[Any, Side] = {0: "a", 1: "b", 2: "tie"}
PANDALM_ANNOTATORS = ("annotator1", "annotator2", "annotator3")


@dataclass(frozen=True)
class Pair:
    """Two answers to a question. key: its own among the pairs; human: labels, where there are any."""

    key: str
    question: Question
    a: str
    b: str
    human: tuple[Side, ...] = ()

    @property
    def content(self) -> list[Any]:
        """All that a judge is shown, and what tells the pair from others."""
        return [self.key, self.question.instruction, self.question.input, self.a, self.b]


@dataclass(frozen=True)
class Pairs:
    """a, b: who wrote the answers; notes: what a user should know about them.

    questions: the set that they are of, "" where it is not one, or nothing says which.
    """

    a: str
    b: str
    rows: list[Pair]
    notes: list[str] = field(default_factory=list)
    questions: str = ""

    @property
    def digest(self) -> str:
        """Identity by content."""
        return store.digest([pair.content for pair in self.rows])

    def limited(self, limit: int | None) -> Pairs:
        """At most `limit` of the pairs, evenly spaced."""
        rows = [self.rows[i] for i in evenly(len(self.rows), limit)]
        return replace(self, rows=rows)


def of_answers(a: Path, b: Path) -> Pairs:
    """The answers of two files to the same questions, in A's order.

    They are matched by id where both files have ids, else by the questions' texts. UserError when a question
    is in one file only, or when an id stands for different questions.
    """
    first, second = read_answers(a), read_answers(b)
    if not (first.by_id and second.by_id):
        first, second = first.by_text(), second.by_text()
    others = {answer.key: answer for answer in second.rows}
    keys = [answer.key for answer in first.rows]
    _require_same(keys, list(others), first, second)
    rows = []
    for answer in first.rows:
        other = others[answer.key]
        if answer.question.text != other.question.text:
            raise UserError(
                f"id {answer.key!r} is another question in {first.path} than in {second.path}; "
                "answer the same questions with both models"
            )
        rows.append(Pair(answer.key, answer.question, answer.text, other.text))
    notes = [
        f"{answers.path}: {count} of {len(answers.rows)} answers are empty; they are judged like others"
        for answers in (first, second)
        if (count := sum(not answer.text.strip() for answer in answers.rows))
    ]
    again = sum(count > 1 for count in Counter(pair.question.text for pair in rows).values())
    if again:
        notes.append(f"{again} questions come more than once; intervals treat each of them as one")
    sets = {pair.question.dataset for pair in rows}
    return Pairs(*_names(first, second), rows, notes, sets.pop() if len(sets) == 1 else "")


def _require_same(keys_of_first: list[str], others: list[str], first: Answers, second: Answers) -> None:
    absent, extra = set(keys_of_first) - set(others), set(others) - set(keys_of_first)
    parts = [
        f"{len(only)} only in {answers.path}: {named(key for key in keys if key in only)}"
        for only, keys, answers in ((absent, keys_of_first, first), (extra, others, second))
        if only
    ]
    if parts:
        kind = "ids" if first.by_id else "questions"
        raise UserError(f"the files answer different questions; {kind} {'; '.join(parts)}")


def _names(first: Answers, second: Answers) -> tuple[str, str]:
    """Return the names of the models; files of one model are told apart by their paths."""
    if first.generator != second.generator:
        return first.generator, second.generator
    parts = [(answers.path.parent.name, answers.path.name.split(".")[0]) for answers in (first, second)]
    ends = [p[0] for p in parts] if parts[0][0] != parts[1][0] else [p[1] for p in parts]
    if ends[0] == ends[1]:
        ends = ["a", "b"]
    return f"{first.generator} {ends[0]}", f"{second.generator} {ends[1]}"


def labelled(path: Path) -> Pairs:
    """The pairs of a test set with human labels: PandaLM's (annotator1 to 3) or Auto-J's (label)."""
    rows = read_rows(path)
    read = _of_pandalm if PANDALM_ANNOTATORS[0] in rows[0] else _of_auto_j
    pairs = [read(row, i, f"{path} row {i}") for i, row in enumerate(rows, start=1)]
    if twice := repeated([pair.key for pair in pairs]):
        raise UserError(f"{path}: ids that come more than once: {named(twice)}")
    return Pairs("response 1", "response 2", pairs)


def _of_pandalm(row: Row, number: int, where: str) -> Pair:
    labels = tuple(_label(row, name, PANDALM_LABELS, where) for name in PANDALM_ANNOTATORS)
    question = Question(id_of(row), text_of(row, ("instruction",), where), input_of(row), "pandalm")
    first, second = (answer_of(row, name, where) for name in ("response1", "response2"))
    return Pair(question.id or str(number), question, first, second, labels)


def _of_auto_j(row: Row, number: int, where: str) -> Pair:
    label = _label(row, "label", AUTO_J_LABELS, where)
    question = Question("", text_of(row, ("prompt",), where), "", "auto-j")
    first, second = (answer_of(row, name, where) for name in ("response 1", "response 2"))
    return Pair(str(number), question, first, second, (label,))


def _label(row: Row, name: str, labels: dict[Any, Side], where: str) -> Side:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value not in labels:
        raise UserError(f"{where}: {name} is {value!r}; a human label is one of {sorted(labels)}")
    return labels[value]
