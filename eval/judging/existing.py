"""Verdicts that others gave: AlpacaEval's annotations, the published verdicts of PandaLM and Auto-J."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from eval.judging.judged import Judged, row_of
from eval.judging.pairs import AUTO_J_LABELS, PANDALM_LABELS, Pair, Pairs, labelled
from eval.judging.questions import Question, id_of, input_of
from eval.judging.rows import Row, answer_of, named, read_rows, repeated, text_of
from eval.judging.verdicts import Side

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
    """AlpacaEval's annotations: a comparison for each two generators and annotator, in whichever files."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    origins: dict[tuple[str, str, str], list[str]] = {}
    for file, i, row in (
        (file, i, row)
        for file, rows in zip(files, tables, strict=True)
        for i, row in enumerate(rows, start=1)
    ):
        where = f"{file} row {i}"
        parties = (
            text_of(row, ("generator_1",), where),
            text_of(row, ("generator_2",), where),
            str(row.get("annotator") or judge),
        )
        question = Question(id_of(row), text_of(row, ("instruction",), where), input_of(row))
        a, b = (answer_of(row, name, where) for name in ("output_1", "output_2"))
        value = _preference(row.get("preference"))
        sides: list[Side | None] = [None if value is None else _side(value)]
        pair = Pair(question.id or question.text, question, a, b)
        groups.setdefault(parties, []).append(row_of(pair, sides, value))
        origins.setdefault(parties, []).append(file.name)
    for (a, b, _), rows_of_parties in groups.items():
        if twice := repeated([row["id"] for row in rows_of_parties]):
            names = ", ".join(map(str, files))
            raise UserError(f"{names}: {b} against {a} was judged more than once on {named(twice)}")
    return [
        Judged(judge, by, a, b, 1, rows_of_parties, {"from": list(dict.fromkeys(origins[a, b, by]))})
        for (a, b, by), rows_of_parties in groups.items()
    ]


def _preference(value: Any) -> float | None:
    """B's score from AlpacaEval's number: 1 is A, 2 is B, 0 and 1.5 are ties; None for any other."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if value == 0:
        return 0.5
    return float(value) - 1 if 1 <= value <= 2 else None  # which no NaN is


def _side(value: float) -> Side:
    return "tie" if value == 0.5 else "b" if value > 0.5 else "a"


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
    judged = [row_of(pair, [_verdict(by_id[pair.key].get(name))]) for pair in pairs.rows]
    return Judged(judge, name, pairs.a, pairs.b, 1, judged, {"from": [file.name]})


def _verdict(value: Any) -> Side | None:
    text = str(value).strip().lower()
    labels = {str(number): label for number, label in PANDALM_LABELS.items()} | {"tie": "tie"}
    return labels.get(text)


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
    for i, pair in enumerate(pairs.rows):
        sides = [AUTO_J_LABELS.get(_number(rows[i])) for rows in tables]
        judged.append(row_of(pair, [sides[0], *(exchange[name] for name in sides[1:])]))
    return Judged(judge, files[0].name.split(".")[0], pairs.a, pairs.b, len(files), judged, {
        "from": [file.name for file in files]
    })  # fmt: skip


def _number(row: Row) -> Any:
    value = row.get(AUTO_J_VERDICT)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
