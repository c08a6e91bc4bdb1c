"""Pairs of answers to the same questions, and verdicts on them, in one format for all sources.

Pairs come from two models' answer files, or from a test set with human labels. Verdicts come from a judge's
replies, or from published files: AlpacaEval's annotations, and the verdicts of PandaLM and Auto-J.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from emo.common.errors import UserError

from ..results import store
from ..results.directory import Record, Say
from ..results.rows import FileRow, read_json_rows
from .answers import (
    Answers,
    ModelAnswer,
    Question,
    answer_of,
    id_of,
    question_of,
    read_answers,
    require_unique,
    shorten,
)

Side = Literal["a", "b", "tie"]  # the better answer
Outcome = Literal["a", "b", "tie", "changed", "unreadable"]
SCORES = {"a": 0.0, "b": 1.0, "tie": 0.5, "changed": 0.5, "unreadable": None}  # of B


class Pair(NamedTuple):
    """Two answers to a question. key: unique among the pairs. human: human labels, if there are any.

    cut_off: the sides ("a", "b") whose answer was cut off at the token limit.
    """

    key: str
    question: Question
    a: str
    b: str
    human: tuple[Side, ...] = ()
    cut_off: tuple[str, ...] = ()


class Pairs(NamedTuple):
    """a, b: the models that wrote the answers. questions: the set that all questions belong to, or ""."""

    a: str
    b: str
    rows: list[Pair]
    questions: str = ""

    @property
    def digest(self) -> str:
        """The identity of everything that a judge sees, and of the keys of the pairs."""
        rows = [[p.key, p.question.instruction, p.question.input, p.a, p.b] for p in self.rows]
        return store.digest_json(rows)


@dataclass(frozen=True)
class Judged:
    """All pairs with a judge's verdicts.

    by: the model that gave them. orders: 2 if both orders of the answers were judged. facts: how it was done.
    questions: as in Pairs.
    """

    judge: str
    by: str
    a: str
    b: str
    orders: int
    rows: list[Record]
    facts: Mapping[str, Any] = field(default_factory=dict)
    questions: str = ""


def combine_verdicts(sides: Sequence[Side | None]) -> Outcome:
    """Return the outcome of the verdicts in one or both orders.

    `changed`: they differ, which counts as a tie. `unreadable`: one of them cannot be read.
    """
    if not sides or None in sides:
        return "unreadable"
    return "changed" if len(set(sides)) > 1 else sides[0]  # type: ignore[return-value]


def judged_row(pair: Pair, sides: Sequence[Side | None]) -> Record:
    """Return the record of a judged pair."""
    result = combine_verdicts(sides)
    row: Record = {"id": pair.key, "question": pair.question.text, "a": pair.a, "b": pair.b}
    row |= {"verdicts": list(sides), "outcome": result, "score": SCORES[result], "human": list(pair.human)}
    row["cut_off"] = list(pair.cut_off)
    return row | {"replies": [], "unasked": None, "cut": None}


def pair_answers(a: Path, b: Path, say: Say = lambda text: None) -> Pairs:
    """Return the answers of two files to the same questions, in A's order. say: receives remarks.

    They are matched by id if both files have ids, else by the texts of the questions. Raises UserError when a
    question is in only one file, or when an id stands for different questions.
    """
    files = first, second = read_answers(a), read_answers(b)
    by_id = all(answer.question.id for answers in files for answer in answers.rows)
    of_a, of_b = (_keyed(answers.rows, by_id) for answers in files)
    _require_same("ids" if by_id else "questions", of_a, first.path, of_b, second.path)
    rows = []
    for key, of_first in of_a.items():
        cut_off = tuple(s for s, answer in zip("ab", (of_first, of_b[key]), strict=True) if not answer.ended)
        rows.append(Pair(key, of_first.question, of_first.text, of_b[key].text, (), cut_off))
    if other := [pair.key for pair in rows if pair.question.text != of_b[pair.key].question.text]:
        raise UserError(
            f"ids stand for different questions in {first.path} and {second.path}: {shorten(other)}. Answer "
            "the same questions with both models.",
            code="question",
        )
    _remark(files, rows, say)
    sets = {pair.question.dataset for pair in rows}
    return Pairs(*_model_names(first, second), rows, sets.pop() if len(sets) == 1 else "")


def _remark(files: Iterable[Answers], rows: Sequence[Pair], say: Say) -> None:
    for path, _, texts in files:
        if empty := sum(not answer.text.strip() for answer in texts):
            say(f"{path}: {empty} of {len(texts)} answers are empty. They are judged like the others.")
    if repeated := sum(count > 1 for count in Counter(pair.question.text for pair in rows).values()):
        say(f"{repeated} questions occur more than once. Intervals treat each of them as one unit.")


def _model_names(first: Answers, second: Answers) -> tuple[str, str]:
    """Return the names of both models, with parts of the paths if they are the same model."""
    if first.generator != second.generator:
        return first.generator, second.generator
    parts = [(answers.path.parent.name, answers.path.name.split(".")[0]) for answers in (first, second)]
    a, b = next(((a, b) for a, b in zip(*parts, strict=True) if a != b), ("a", "b"))
    return f"{first.generator} {a}", f"{second.generator} {b}"


def _keyed(rows: Sequence[ModelAnswer], by_id: bool) -> dict[str, ModelAnswer]:
    """Return answers by id, or by the text of the question. A repeated text gets a numbered key."""
    counts = Counter[str]()
    table = {}
    for answer in rows:
        key = answer.question.id if by_id else answer.question.text
        counts[key] += 1
        table[key if counts[key] == 1 else f"{key} #{counts[key]}"] = answer
    return table


def _require_same(kind: str, first: Iterable[str], a: Path, second: Iterable[str], b: Path | str) -> None:
    """Raise UserError if one of two files has ids that the other lacks."""
    x = dict.fromkeys(first)
    y = dict.fromkeys(second)
    if only := [key for key in {**x, **y} if key not in x or key not in y]:
        raise UserError(
            f"{a} and {b} have different questions: {len(only)} {kind} are in only one of them: "
            f"{shorten(only)}",
            code="unmatched",
        )


PANDALM_LABELS: dict[Any, Side] = {0: "tie", 1: "a", 2: "b"}
AUTO_J_LABELS: dict[Any, Side] = {0: "a", 1: "b", 2: "tie"}
PANDALM_VERDICTS = ("pandalm_result", "gpt_result", "pandalm_7b", "gpt_3_5_turbo")
AUTO_J_VERDICT = "output"
EXCHANGED: dict[Side | None, Side | None] = {"a": "b", "b": "a", "tie": "tie", None: None}


def read_labelled(path: Path) -> Pairs:
    """Return the pairs of a test set with human labels: PandaLM's (annotator1 to 3) or Auto-J's (label)."""
    rows = read_json_rows(path)
    pairs = []
    of_pandalm = "annotator1" in rows[0]
    names = ["annotator1", "annotator2", "annotator3"] if of_pandalm else ["label"]
    labels = PANDALM_LABELS if of_pandalm else AUTO_J_LABELS
    instruction, response = ("instruction", "response") if of_pandalm else ("prompt", "response ")
    for i, row in enumerate(rows, start=1):
        values = [row.get(name) for name in names]
        if not all(type(value) is int and value in labels for value in values):
            raise UserError(
                f"{row.source}: {', '.join(names)} is {values}, but a human label is 0, 1 or 2", code="label"
            )
        question = question_of(row, instruction)
        human = tuple(labels[value] for value in values)
        texts = answer_of(row, f"{response}1"), answer_of(row, f"{response}2")
        pairs.append(Pair(question.id or str(i), question, *texts, human))
    require_unique([pair.key for pair in pairs], f"{path}: ids occur")
    return Pairs("response 1", "response 2", pairs)


def read_verdicts(files: Sequence[Path], labels: Path | None, judge: str) -> list[Judged]:
    """Return the verdicts in files of AlpacaEval, PandaLM or Auto-J, which their fields identify.

    files: several only for AlpacaEval and PandaLM, or for Auto-J verdicts on original and exchanged answers.
    labels: the test set of PandaLM's verdicts (matched by idx) or Auto-J's (line by line). judge: name of the
    judge.
    """
    require_unique([str(file.resolve()) for file in files], "--from lists files")
    tables = {file: read_json_rows(file) for file in files}
    fields = tables[files[0]][0]
    if "preference" in fields:
        return _alpaca_eval(tables, judge)
    if any(name in fields for name in PANDALM_VERDICTS):
        return [
            _pandalm(file, name, rows, read_labelled(labels or file), judge)
            for file, rows in tables.items()
            for name in PANDALM_VERDICTS
            if name in rows[0]
        ]
    if AUTO_J_VERDICT in fields and labels is not None:
        return [_auto_j(tables, read_labelled(labels), judge)]
    names = f"preference, {', '.join(PANDALM_VERDICTS)}, or (with --labelled) {AUTO_J_VERDICT}"
    raise UserError(
        f"{files[0]} has no verdicts. It needs {names}, but has {', '.join(fields)}.", code="no-verdict"
    )


def _alpaca_eval(tables: Mapping[Path, list[FileRow]], judge: str) -> list[Judged]:
    """Return a judgement for each combination of two generators and an annotator over all files.

    A preference of 1 is A and 2 is B. A value between them minus 1 is B's score. 0 is a tie. Others are
    unreadable.
    """
    unnamed = next(iter(tables)).name.split(".")[0]  # if no annotator is named
    judgements: dict[tuple[str, str, str], Judged] = {}
    for file, rows in tables.items():
        for row in rows:
            by = str(row.get("annotator") or unnamed)
            a = row.text("generator_1")
            b = row.text("generator_2")
            question = question_of(row, "instruction")
            preference: Any = row.get("preference")
            texts = answer_of(row, "output_1"), answer_of(row, "output_2")
            row_record = judged_row(Pair(question.id or question.text, question, *texts), [None])
            if type(preference) in (int, float) and (preference == 0 or 1 <= preference <= 2):
                score = 0.5 if preference == 0 else float(preference) - 1
                side = "tie" if score == 0.5 else "b" if score > 0.5 else "a"
                row_record |= {"verdicts": [side], "outcome": side, "score": score}
            judged = judgements.setdefault((a, b, by), Judged(judge, by, a, b, 1, [], {"from": []}))
            judged.rows.append(row_record)
            if file.name not in judged.facts["from"]:
                judged.facts["from"].append(file.name)
    for judged in judgements.values():
        require_unique([row["id"] for row in judged.rows], f"{judged.b} against {judged.a} was judged")
    return list(judgements.values())


def _pandalm(file: Path, name: str, rows: list[FileRow], pairs: Pairs, judge: str) -> Judged:
    """Return verdicts 0, 1, 2 or Tie, matched with the test set by idx. Others are unreadable."""
    ids = [id_of(row) for row in rows]
    require_unique(ids, f"{file}: ids occur")
    _require_same("ids", ids, file, [pair.key for pair in pairs.rows], "the labels")
    by_id = dict(zip(ids, rows, strict=True))
    sides: dict[str, Side] = {str(number): label for number, label in PANDALM_LABELS.items()} | {"tie": "tie"}
    verdicts = [str(by_id[pair.key].get(name)).strip().lower() for pair in pairs.rows]
    judged = [
        judged_row(pair, [sides.get(verdict)]) for pair, verdict in zip(pairs.rows, verdicts, strict=True)
    ]
    return Judged(judge, name, pairs.a, pairs.b, 1, judged, {"from": [file.name]})


def _auto_j(tables: Mapping[Path, list[FileRow]], pairs: Pairs, judge: str) -> Judged:
    """Return verdicts 0, 1, 2 line by line. The second file is for exchanged answers."""
    counts = [len(rows) for rows in tables.values()]
    if len(tables) > 2 or set(counts) != {len(pairs.rows)}:
        raise UserError(
            "--from takes one or two files of Auto-J (verdicts on original and on exchanged answers) with "
            f"{len(pairs.rows)} lines each, but they have {counts}",
            code="no-verdict",
        )
    judged = []
    for pair, *rows_of_pair in zip(pairs.rows, *tables.values(), strict=True):
        values = [row.get(AUTO_J_VERDICT) for row in rows_of_pair]
        first, *second = [AUTO_J_LABELS.get(value) if type(value) is int else None for value in values]
        judged.append(judged_row(pair, [first, *map(EXCHANGED.get, second)]))
    names = [file.name for file in tables]
    return Judged(judge, names[0].split(".")[0], pairs.a, pairs.b, len(names), judged, {"from": names})
