"""Judged answers in the report: the same numbers in three formats, and what is damaged is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from emo.eval.judging import results
from emo.eval.judging.answers import Question
from emo.eval.judging.pairs import Judged, Pair, row_of
from emo.eval.report.gather import gather
from emo.eval.report.page import document
from tests.helpers.html import Page


def judged(b: str, sides: str, by: str = "judge", human: tuple[Any, ...] = (), text: str = "") -> Judged:
    """One verdict in both orders per letter: a, b, t(ie), c(hanged), u(nreadable)."""
    kinds: dict[str, list[Any]] = {"a": ["a", "a"], "b": ["b", "b"], "t": ["tie"] * 2, "c": ["a", "b"],
                                   "u": ["a", None]}  # fmt: skip
    rows = []
    for i, letter in enumerate(sides):
        pair = Pair(
            f"q{i}", Question(f"q{i}", f"{text}ask {i}"), f"{text}A says {i}", f"{text}B {i}" * 2, human
        )
        said = [{"text": f"{text}reply {i} {order}"} for order in range(2)]
        rows.append(row_of(pair, kinds[letter]) | {"replies": said})
    return Judged("auto-j", by, "mle", b, 2, rows)


def keep(out: Path, one: Judged) -> dict[str, Any]:
    return results.write(one, results.default_title(one), out)


def written(out: Path) -> tuple[str, str, dict[str, Any]]:
    """(HTML, Markdown, JSON) of a report on everything in `out`."""
    report = document(gather([out], {}))
    Page(report.html())
    return report.html(), report.markdown(), json.loads(report.json())


def test_sets_of_questions_stay_apart(tmp_path: Path) -> None:
    """The same models on two sets are two judgements; the same ids are not the same questions."""
    for i, name in enumerate(("vicuna", "koala")):
        for b in ("emo", "dpo"):
            keep(tmp_path, replace(judged(b, "ab" * (i + 2), text=name), questions=name))
    page, markdown, data = written(tmp_path)
    assert len(data["judgements"]) == 4
    pairs = [(pair["questions"], pair["n"]) for pair in data["paired_judgements"]]
    assert pairs == [("koala", 6), ("vicuna", 4)]
    for name in ("vicuna", "koala"):
        assert f"emo against mle on {name}" in page and f"| emo (against mle on {name}) |" in markdown
    for name, text in (("emo", "one "), ("dpo", "other ")):
        keep(tmp_path / "apart", judged(name, "abab", text=text))
    assert written(tmp_path / "apart")[2]["paired_judgements"] == []


def test_three_formats_show_the_same_numbers(tmp_path: Path) -> None:
    keep(tmp_path, judged("emo", "bbbbbbatcu" * 4))
    keep(tmp_path, judged("dpo", "aaaaabtcuu" * 4))
    page, markdown, found = written(tmp_path)
    assert {one["b"]: one["read"] for one in found["judgements"]} == {"emo": 36, "dpo": 32}
    table = {row["B"]: " ".join(row.values()) for row in Page(page).table("B", "Verdict")}
    for one in found["judgements"]:
        shown = [f"{100 * one[name]['value']:.1f}" for name in ("win", "tie", "loss", "win_rate")]
        shown.append(f"{100 * one['consistency']:.1f}")
        line = next(row for row in markdown.split("\n") if row.startswith(f"| {one['b']} (against mle) |"))
        assert all(number in line and number in table[f"{one['b']} against mle"] for number in shown)
        assert f"{one['counts']['changed']} verdicts change with the order" in page
    assert (
        "judge prefers emo to mle" in found["answer"][1] and "judge prefers mle to dpo" in found["answer"][0]
    )
    (pair,) = found["paired_judgements"]
    assert (pair["first"], pair["second"], pair["n"]) == ("dpo", "emo", 32)
    assert pair["difference"] > 0.4 and "Between models" in page and "Between models" in markdown
    assert page.count("reply 8 1") == 2, "each comparison shows five of its pairs"
    assert page.count(">Question<") == 10 and markdown.count("ask 0") == 2
