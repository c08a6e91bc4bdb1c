"""Pairs of answers to the same questions, and verdicts on them, in one form for all sources.

Pairs are two models' answer files, or a test set with human labels. Verdicts are a judge's replies, or those
that others gave: AlpacaEval's annotations, the published verdicts of PandaLM and Auto-J.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from emo.common.errors import UserError
from emo.eval import store
from emo.eval.generation.engines import Row
from emo.eval.generation.prefixes import read_rows, text_of
from emo.eval.judging.answers import (
    Question,
    answer_of,
    named,
    question_id,
    question_of,
    read_answers,
    require_once,
)

Side = Literal["a", "b", "tie"]  # whose answer is better
Outcome = Literal["a", "b", "tie", "changed", "unreadable"]
WORTH = {"a": 0.0, "b": 1.0, "tie": 0.5, "changed": 0.5, "unreadable": None}  # of an outcome, for B


class Pair(NamedTuple):
    """Two answers to a question. key: its own among the pairs; human: labels, where there are any."""

    key: str
    question: Question
    a: str
    b: str
    human: tuple[Side, ...] = ()


class Pairs(NamedTuple):
    """a, b: who wrote the answers; notes: what a user should know; questions: the one set of all, or ""."""

    a: str
    b: str
    rows: list[Pair]
    notes: Sequence[str] = ()
    questions: str = ""

    @property
    def digest(self) -> str:
        """Return the identity of all that a judge is shown, and of what tells pairs from others."""
        return store.digest([[p.key, p.question.instruction, p.question.input, p.a, p.b] for p in self.rows])


@dataclass(frozen=True)
class Judged:
    """All pairs with a judge's verdicts. by: who gave them; orders: 2 where pairs were asked both ways round.

    facts: how it was done, for the record; questions: as in Pairs.
    """

    judge: str
    by: str
    a: str
    b: str
    orders: int
    rows: list[Row]
    facts: dict[str, Any] = field(default_factory=dict)
    questions: str = ""


def outcome(sides: Sequence[Side | None]) -> Outcome:
    """Return what the verdicts in both orders, or in the only one, come to.

    `changed`: they differ, which counts as a tie; `unreadable`: one of them cannot be read.
    """
    if not sides or None in sides:
        return "unreadable"
    return "changed" if len(set(sides)) > 1 else sides[0]  # type: ignore[return-value]


def row_of(pair: Pair, sides: Sequence[Side | None], value: float | None = None) -> Row:
    """Return a judged pair. value: its score where the verdict is a number between the two."""
    result = outcome(sides)
    score = WORTH[result] if value is None else value
    row: Row = {"id": pair.key, "question": pair.question.text, "a": pair.a, "b": pair.b}
    row |= {"verdicts": list(sides), "outcome": result, "score": score, "human": list(pair.human)}
    return row | {"replies": [], "unasked": None, "cut": None}


def of_answers(a: Path, b: Path) -> Pairs:
    """Return the answers of two files to the same questions, in A's order.

    They are matched by id where both files have ids, else by the questions' texts. UserError when a question
    is in one file only, or when an id stands for different questions.
    """
    files = first, second = read_answers(a), read_answers(b)
    by_id = all(question.id for answers in files for question, _ in answers.rows)
    tables: list[dict[str, tuple[Question, str]]] = []
    for answers in files:
        table, counts = {}, Counter[str]()
        for question, text in answers.rows:
            key = question.id if by_id else question.text
            counts[key] += 1  # a text that comes again is another question
            table[key if counts[key] == 1 else f"{key} #{counts[key]}"] = (question, text)
        tables.append(table)
    _require_same("ids" if by_id else "questions", tables[0], first.path, tables[1], second.path)
    rows = [Pair(key, question, text, tables[1][key][1]) for key, (question, text) in tables[0].items()]
    if other := [pair.key for pair in rows if pair.question.text != tables[1][pair.key][0].text]:
        raise UserError(
            f"ids are of other questions in {first.path} than in {second.path}: {named(other)}; "
            "answer the same questions with both models"
        )
    notes = [
        f"{answers.path}: {count} of {len(answers.rows)} answers are empty; they are judged like others"
        for answers in files
        if (count := sum(not text.strip() for _, text in answers.rows))
    ]
    if again := sum(count > 1 for count in Counter(pair.question.text for pair in rows).values()):
        notes.append(f"{again} questions come more than once; intervals treat each of them as one")
    names = (first.generator, second.generator)
    if names[0] == names[1]:  # files of one model are told apart by their paths
        parts = [(answers.path.parent.name, answers.path.name.split(".")[0]) for answers in files]
        ends = next(((a, b) for a, b in zip(*parts, strict=True) if a != b), ("a", "b"))
        names = (f"{names[0]} {ends[0]}", f"{names[1]} {ends[1]}")
    sets = {pair.question.dataset for pair in rows}
    return Pairs(*names, rows, notes, sets.pop() if len(sets) == 1 else "")


def _require_same(kind: str, first: Iterable[str], a: Path, second: Iterable[str], b: Path | str) -> None:
    """Raise UserError where one of two files has ids that the other lacks."""
    x, y = dict.fromkeys(first), dict.fromkeys(second)
    for path, only in ((a, [key for key in x if key not in y]), (b, [key for key in y if key not in x])):
        if only:
            raise UserError(
                f"{a} and {b} are on different questions: {len(only)} {kind} only in {path}: {named(only)}",
                code="unmatched",
            )


PANDALM_LABELS: dict[Any, Side] = {0: "tie", 1: "a", 2: "b"}
AUTO_J_LABELS: dict[Any, Side] = {0: "a", 1: "b", 2: "tie"}
PANDALM_VERDICTS = ("pandalm_result", "gpt_result", "pandalm_7b", "gpt_3_5_turbo")
AUTO_J_VERDICT = "output"
EXCHANGED: dict[Side | None, Side | None] = {"a": "b", "b": "a", "tie": "tie", None: None}


def labelled(path: Path) -> Pairs:
    """Return the pairs of a test set with human labels: PandaLM's (annotator1 to 3) or Auto-J's (label)."""
    rows, pairs = read_rows(path), []
    if "annotator1" in rows[0]:
        names, labels, fields = (
            [f"annotator{i}" for i in (1, 2, 3)],
            PANDALM_LABELS,
            ("instruction", "response"),
        )
    else:
        names, labels, fields = ["label"], AUTO_J_LABELS, ("prompt", "response ")
    for i, row in enumerate(rows, start=1):
        where, values = f"{path} row {i}", [row.get(name) for name in names]
        if not all(type(value) is int and value in labels for value in values):
            raise UserError(
                f"{where}: {', '.join(names)} is {values}; a human label is one of {list(labels)}"
            )
        question = question_of(row, where, fields[:1])
        first, second = (answer_of(row, f"{fields[1]}{number}", where) for number in (1, 2))
        human = tuple(labels[value] for value in values)
        pairs.append(Pair(question.id or str(i), question, first, second, human))
    require_once([pair.key for pair in pairs], f"{path}: ids come")
    return Pairs("response 1", "response 2", pairs)


def read_existing(files: Sequence[Path], labels: Path | None, judge: str) -> list[Judged]:
    """Return the verdicts in files of AlpacaEval, PandaLM or Auto-J; which of them, their fields say.

    labels: the test set that verdicts of PandaLM (by idx) and Auto-J (line by line) belong to. Auto-J's come
    as one file, or as two: the answers as they are, and exchanged.
    """
    require_once([str(file.resolve()) for file in files], "--from names files")
    tables = [read_rows(file) for file in files]
    first = tables[0][0]
    if "preference" in first:
        return _alpaca_eval(files, tables, judge)
    if any(name in first for name in PANDALM_VERDICTS):
        return [
            _pandalm(file, rows, name, labelled(labels or file), judge)
            for file, rows in zip(files, tables, strict=True)
            for name in PANDALM_VERDICTS
            if name in rows[0]
        ]
    if AUTO_J_VERDICT in first and labels is not None:
        return [_auto_j(files, tables, labelled(labels), judge)]
    fields = f"preference, {', '.join(PANDALM_VERDICTS)}, or (with --labelled) {AUTO_J_VERDICT}"
    raise UserError(f"{files[0]} holds no verdicts: none of the fields {fields}; it has {', '.join(first)}")


def _alpaca_eval(files: Sequence[Path], tables: list[list[Row]], judge: str) -> list[Judged]:
    """Return a comparison for each two generators and annotator, in whichever files their annotations are.

    A preference of 1 is A, 2 is B, between them it is less one B's score; 0 is a tie; others are unreadable.
    """
    judgements: dict[tuple[str, str, str], Judged] = {}
    for file, rows in zip(files, tables, strict=True):
        for i, row in enumerate(rows, start=1):
            where, by = f"{file} row {i}", str(row.get("annotator") or judge)
            a, b = (text_of(row, (f"generator_{number}",), where) for number in (1, 2))
            question = question_of(row, where)
            first, second = (answer_of(row, f"output_{number}", where) for number in (1, 2))
            preference: Any = row.get("preference")
            value: float | None = None
            verdict: Side | None = None
            if type(preference) in (int, float) and (preference == 0 or 1 <= preference <= 2):
                value = 0.5 if preference == 0 else float(preference) - 1
                verdict = "tie" if value == 0.5 else "b" if value > 0.5 else "a"
            pair = Pair(question.id or question.text, question, first, second)
            judged = judgements.setdefault((a, b, by), Judged(judge, by, a, b, 1, [], {"from": []}))
            judged.rows.append(row_of(pair, [verdict], value))
            if file.name not in judged.facts["from"]:
                judged.facts["from"].append(file.name)
    for judged in judgements.values():
        require_once([row["id"] for row in judged.rows], f"{judged.b} against {judged.a} was judged")
    return list(judgements.values())


def _pandalm(file: Path, rows: list[Row], name: str, pairs: Pairs, judge: str) -> Judged:
    """Return verdicts 0, 1, 2 or Tie, joined to the test set by idx; what is neither is unreadable."""
    ids = [question_id(row) for row in rows]
    require_once(ids, f"{file}: ids come")
    _require_same("ids", ids, file, [pair.key for pair in pairs.rows], "the labels")
    by_id = dict(zip(ids, rows, strict=True))
    sides: dict[str, Side] = {str(number): label for number, label in PANDALM_LABELS.items()} | {"tie": "tie"}
    verdicts = [str(by_id[pair.key].get(name)).strip().lower() for pair in pairs.rows]
    judged = [row_of(pair, [sides.get(verdict)]) for pair, verdict in zip(pairs.rows, verdicts, strict=True)]
    return Judged(judge, name, pairs.a, pairs.b, 1, judged, {"from": [file.name]})


def _auto_j(files: Sequence[Path], tables: list[list[Row]], pairs: Pairs, judge: str) -> Judged:
    """Return verdicts 0, 1, 2 line by line; those of the second file are on the answers exchanged."""
    counts = [len(rows) for rows in tables]
    if len(files) > 2 or set(counts) != {len(pairs.rows)}:
        raise UserError(
            "--from takes one or two files of Auto-J, verdicts and those on exchanged answers, with a line "
            f"for each of {len(pairs.rows)} pairs; these have {counts}"
        )
    judged = []
    for pair, *rows_of_pair in zip(pairs.rows, *tables, strict=True):
        values = [row.get(AUTO_J_VERDICT) for row in rows_of_pair]
        first, *second = [AUTO_J_LABELS.get(value) if type(value) is int else None for value in values]
        judged.append(row_of(pair, [first, *map(EXCHANGED.get, second)]))
    facts = {"from": [file.name for file in files]}
    return Judged(judge, files[0].name.split(".")[0], pairs.a, pairs.b, len(files), judged, facts)
