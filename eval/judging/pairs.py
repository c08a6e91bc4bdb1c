"""Pairs of answers to the same questions, and verdicts on them, in one form for all sources.

Pairs are two models' answer files, or a test set with human labels. Verdicts are a judge's replies, or those
that others gave: AlpacaEval's annotations, the published verdicts of PandaLM and Auto-J.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from emo.common.errors import UserError
from emo.eval import store
from emo.eval.judging.answers import (
    Question,
    Row,
    answer_of,
    evenly,
    id_of,
    input_of,
    named,
    read_answers,
    read_rows,
    repeated,
    text_of,
)  # fmt: skip
from emo.eval.judging.judges import Judge, Side, outcome, score, side

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
    keys = {answer.key: None for answer in first.rows}
    differences = [
        f"{len(only)} only in {answers.path}: {named(only)}"
        for only, answers in (
            ([key for key in keys if key not in others], first),
            ([key for key in others if key not in keys], second),
        )
        if only
    ]
    if differences:
        kind = "ids" if first.by_id else "questions"
        differing = "; ".join(differences)
        raise UserError(f"the files answer different questions; {kind} {differing}", code="unmatched")
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
    names = (first.generator, second.generator)
    if names[0] == names[1]:  # files of one model are told apart by their paths
        parts = [(answers.path.parent.name, answers.path.name.split(".")[0]) for answers in (first, second)]
        ends = next(((a, b) for a, b in zip(*parts, strict=True) if a != b), ("a", "b"))
        names = (f"{names[0]} {ends[0]}", f"{names[1]} {ends[1]}")
    return Pairs(*names, rows, notes, sets.pop() if len(sets) == 1 else "")


def labelled(path: Path) -> Pairs:
    """Return the pairs of a test set with human labels: PandaLM's (annotator1 to 3) or Auto-J's (label)."""
    rows, pairs = read_rows(path), []
    of_pandalm = PANDALM_ANNOTATORS[0] in rows[0]
    for i, row in enumerate(rows, start=1):
        where = f"{path} row {i}"
        if of_pandalm:
            labels = tuple(_label(row, name, PANDALM_LABELS, where) for name in PANDALM_ANNOTATORS)
            question = Question(id_of(row), text_of(row, ("instruction",), where), input_of(row), "pandalm")
            fields = ("response1", "response2")
        else:
            labels = (_label(row, "label", AUTO_J_LABELS, where),)
            question = Question("", text_of(row, ("prompt",), where), "", "auto-j")
            fields = ("response 1", "response 2")
        first, second = (answer_of(row, name, where) for name in fields)
        pairs.append(Pair(question.id or str(i), question, first, second, labels))
    if twice := repeated([pair.key for pair in pairs]):
        raise UserError(f"{path}: ids that come more than once: {named(twice)}")
    return Pairs("response 1", "response 2", pairs)


def _label(row: Row, name: str, labels: dict[Any, Side], where: str) -> Side:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value not in labels:
        raise UserError(f"{where}: {name} is {value!r}; a human label is one of {sorted(labels)}")
    return labels[value]


IDENTICAL, NO_ROOM = "identical", "no_room"  # why a pair was not asked


@dataclass(frozen=True)
class Judged:
    """All pairs with a judge's verdicts. by: who gave them; orders: 2 where pairs were asked both ways round.

    facts: how it was done, for the record; questions: the set that they are of, "" where nothing says so.
    """

    judge: str
    by: str
    a: str
    b: str
    orders: int
    rows: list[Row]
    facts: dict[str, Any] = field(default_factory=dict)
    questions: str = ""


def of_replies(judge: Judge, by: str, pairs: Pairs, replies: Sequence[Row], facts: dict[str, Any]) -> Judged:
    """Pairs with the replies to their prompts.

    replies: one per pair, {"replies": [{"text", ...}, {"text", ...}]}, A's answer first and B's first; with
    "unasked" instead where there was nothing to ask, and "cut" where both answers were cut.
    """
    rows = []
    for pair, reply in zip(pairs.rows, replies, strict=True):
        sides = [side(judge.verdict(r["text"]), bool(i)) for i, r in enumerate(reply["replies"])]
        if reply.get("unasked") == IDENTICAL:
            sides = ["tie"] * 2  # as AlpacaEval's annotator has it
        rows.append(row_of(pair, sides) | {key: reply[key] for key in ("replies", "unasked", "cut")})
    return Judged(judge.name, by, pairs.a, pairs.b, 2, rows, facts, pairs.questions)


def row_of(pair: Pair, sides: Sequence[Side | None], value: float | None = None) -> Row:
    """A judged pair. value: its score where the verdict is a number between the two."""
    result = outcome(sides)
    return {
        "id": pair.key,
        "question": pair.question.text,
        "a": pair.a,
        "b": pair.b,
        "verdicts": list(sides),
        "outcome": result,
        "score": score(result) if value is None else value,
        "human": list(pair.human),
        "replies": [],
        "unasked": None,
        "cut": None,
    }


PANDALM_VERDICTS = ("pandalm_result", "gpt_result", "pandalm_7b", "gpt_3_5_turbo")
AUTO_J_VERDICT = "output"


def read_existing(files: Sequence[Path], labels: Path | None, judge: str) -> list[Judged]:
    """The verdicts in files of AlpacaEval, of PandaLM or of Auto-J; which of them, their fields say.

    labels: the test set that verdicts of PandaLM (by idx) and Auto-J (line by line) belong to. Auto-J's come
    as one file, or as two: the answers as they are, and exchanged.
    """
    if twice := repeated([str(file.resolve()) for file in files]):
        raise UserError(f"--from names a file twice: {named(twice)}")
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
    """Return a comparison for each two generators and annotator, in whichever files their annotations are."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    origins: dict[tuple[str, str, str], dict[str, None]] = {}
    for file, rows in zip(files, tables, strict=True):
        for i, row in enumerate(rows, start=1):
            where = f"{file} row {i}"
            of_a, of_b = (text_of(row, (f"generator_{side}",), where) for side in (1, 2))
            parties = (of_a, of_b, str(row.get("annotator") or judge))
            question = Question(id_of(row), text_of(row, ("instruction",), where), input_of(row))
            a, b = (answer_of(row, f"output_{side}", where) for side in (1, 2))
            value = _preference(row.get("preference"))
            verdict: Side | None = None
            if value is not None:
                verdict = "tie" if value == 0.5 else "b" if value > 0.5 else "a"
            pair = Pair(question.id or question.text, question, a, b)
            groups.setdefault(parties, []).append(row_of(pair, [verdict], value))
            origins.setdefault(parties, {})[file.name] = None
    judgements = []
    for (a, b, by), judged in groups.items():
        if twice := repeated([row["id"] for row in judged]):
            names = ", ".join(map(str, files))
            raise UserError(
                f"{names}: {b} against {a} was judged more than once on {named(twice)}", code="twice"
            )
        judgements.append(Judged(judge, by, a, b, 1, judged, {"from": list(origins[a, b, by])}))
    return judgements


def _preference(value: Any) -> float | None:
    """B's score from AlpacaEval's number: 1 is A, 2 is B, 0 and 1.5 are ties; None for any other."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if value == 0:
        return 0.5
    return float(value) - 1 if 1 <= value <= 2 else None  # which no NaN is


def _pandalm(file: Path, rows: list[Row], name: str, pairs: Pairs, judge: str) -> Judged:
    """Verdicts 0, 1, 2 or Tie, joined to the test set by idx; what is neither is unreadable."""
    ids = [id_of(row) for row in rows]
    if absent := [i for i, row_id in enumerate(ids, start=1) if not row_id]:
        raise UserError(f"{file} row {absent[0]}: no idx, by which verdicts belong to answers")
    if twice := repeated(ids):
        raise UserError(f"{file}: ids that come more than once: {named(twice)}")
    by_id = dict(zip(ids, rows, strict=True))
    keys = {pair.key for pair in pairs.rows}
    if lacking := [pair.key for pair in pairs.rows if pair.key not in by_id]:
        raise UserError(f"{file} has no verdict on {len(lacking)} of {len(keys)} pairs: {named(lacking)}")
    if extra := [key for key in ids if key not in keys]:
        raise UserError(f"{file} has verdicts on {len(extra)} pairs that the labels lack: {named(extra)}")
    sides: dict[str, Side] = {str(number): label for number, label in PANDALM_LABELS.items()} | {"tie": "tie"}
    verdicts = [str(by_id[pair.key].get(name)).strip().lower() for pair in pairs.rows]
    judged = [row_of(pair, [sides.get(verdict)]) for pair, verdict in zip(pairs.rows, verdicts, strict=True)]
    return Judged(judge, name, pairs.a, pairs.b, 1, judged, {"from": [file.name]})


def _auto_j(files: Sequence[Path], tables: list[list[Row]], pairs: Pairs, judge: str) -> Judged:
    """Verdicts 0, 1, 2 line by line; those of the second file are on the answers exchanged."""
    if len(files) > 2:
        raise UserError(
            "--from takes at most two files of Auto-J: its verdicts, and those on exchanged answers"
        )
    for file, rows in zip(files, tables, strict=True):
        if len(rows) != len(pairs.rows):
            raise UserError(
                f"{file} has {len(rows)} verdicts on {len(pairs.rows)} pairs; is it half-written?"
            )
    exchange: dict[Side | None, Side | None] = {"a": "b", "b": "a", "tie": "tie", None: None}
    judged = []
    for pair, *rows_of_pair in zip(pairs.rows, *tables, strict=True):
        values = [row.get(AUTO_J_VERDICT) for row in rows_of_pair]
        sides = [AUTO_J_LABELS.get(value) if type(value) is int else None for value in values]
        judged.append(row_of(pair, [sides[0], *(exchange[verdict] for verdict in sides[1:])]))
    facts = {"from": [file.name for file in files]}
    return Judged(judge, files[0].name.split(".")[0], pairs.a, pairs.b, len(files), judged, facts)
