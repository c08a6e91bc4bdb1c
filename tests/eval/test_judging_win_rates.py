"""Win rates, intervals, lengths and agreement: against plain arithmetic, on annotations, in the report."""

from __future__ import annotations

import io
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from emo.eval.judging import results
from emo.eval.judging.answers import Question
from emo.eval.judging.pairs import Judged, Pair, labelled, read_existing, row_of
from emo.eval.judging.results import length_controlled, summary
from emo.eval.report.gather import Report
from emo.eval.report.page import document
from tests.helpers.evaluating import write_lines
from tests.helpers.html import Page
from tests.helpers.refusals import refused

# Files of annotations -> alpaca_eval 0.6.6's own length-controlled win rate of them (its functions
# make_dmatrix_for_model and fit_LogisticRegressionCV with length_controlled_minimal's formula), in per cent.
CONTROLLED = {"alpaca-7b": 26.297722, "falcon-7b-instruct": 39.521650, "recycled-wizardlm-7b-v2.0": 50.0}


@pytest.fixture(scope="module")
def instruct(shared_data: Path) -> Path:
    return shared_data / "instruct"


def plain_rows(path: Path) -> list[dict[str, Any]]:
    """Rows read without any of the project's code."""
    with path.open("rb") as file:
        text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "utf-8").read()
    return [json.loads(line) for line in text.split("\n") if line]


def alpaca_file(instruct: Path, name: str) -> Path:
    return instruct / "alpaca_eval" / "annotations_gpt4_vs_davinci003" / f"{name}.jsonl.zst"


@pytest.mark.parametrize("name", CONTROLLED)
def test_alpaca_eval_win_rates(instruct: Path, name: str) -> None:
    """(n_2 + n_0 / 2) / n of the file, counted here; lengths and the length-controlled rate with it."""
    rows = plain_rows(alpaca_file(instruct, name))
    (judged,) = read_existing([alpaca_file(instruct, name)], None, "alpaca_eval")
    actual, n = summary(judged, name), Counter(int(row["preference"]) for row in rows)
    rate = actual["win_rate"]
    assert rate["value"] == pytest.approx((n[2] + n[0] / 2) / len(rows))
    assert rate["low"] < rate["value"] < rate["high"]
    assert [actual["counts"][outcome] for outcome in ("tie", "a", "b")] == [n[0], n[1], n[2]]
    assert judged.b == rows[0]["generator_2"]  # falcon-7b-instruct's file is of falcon-40b-instruct
    assert abs(100 * actual["length_controlled"] - CONTROLLED[name]) < 0.01
    assert actual["lengths"]["b"] == pytest.approx(sum(len(r["output_2"]) for r in rows) / len(rows))


def test_pandalm_labels_and_verdicts(instruct: Path, tmp_path: Path) -> None:
    path = instruct / "pandalm" / "test.jsonl.zst"
    rows, names = plain_rows(path), {"tie": 0, "a": 1, "b": 2, "unreadable": None}
    votes = [[row[f"annotator{i}"] for i in (1, 2, 3)] for row in rows]
    gold = [max(sorted(set(v), key=v.index), key=v.count) for v in votes]
    assert [names[results.majority(pair.human)] for pair in labelled(path).rows] == gold
    by = {judged.by: judged for judged in read_existing([path], path, "pandalm")}
    assert set(by) == {"pandalm_7b", "gpt_3_5_turbo"}
    for column, judged in by.items():
        verdicts = [{"0": 0, "1": 1, "2": 2, "tie": 0}.get(str(row[column]).lower()) for row in rows]
        assert [names[row["outcome"]] for row in judged.rows] == verdicts
        actual, ties = summary(judged, column)["human"], [verdict or 0 for verdict in verdicts]
        assert actual["agreement"]["value"] == pytest.approx(np.mean(np.equal(gold, verdicts)))
        assert actual["unreadable_as_ties"] == pytest.approx(np.mean(np.equal(gold, ties)))
    assert summary(by["gpt_3_5_turbo"], "g")["counts"]["unreadable"] == 9
    with refused("unmatched"):
        read_existing(
            [write_lines(tmp_path / "v.jsonl", [{"idx": -1, "pandalm_result": 1}])], path, "pandalm"
        )


def test_auto_js_agreement_and_consistency(instruct: Path, tmp_path: Path) -> None:
    """Its labels with verdicts made up here, as its own script counts: both orders right; both alike."""
    path = instruct / "auto_j" / "pairwise.jsonl.zst"
    rows, draw = plain_rows(path), random.Random(0)
    straight = [draw.choice([row["label"], 0, 1, 2]) for row in rows]
    second = [v if draw.random() < 0.8 else draw.choice([0, 1, 2]) for v in straight]
    files = [tmp_path / "o.jsonl", tmp_path / "e.jsonl"]
    for file, values in zip(files, (straight, [(1, 0, 2)[v] for v in second]), strict=True):
        write_lines(file, [{"output": v} for v in values])
    (judged,) = read_existing(files, path, "auto-j")
    actual = summary(judged, "x")
    alike = np.equal(straight, second)
    right = alike & np.equal(straight, [row["label"] for row in rows])
    assert actual["consistency"] == pytest.approx(alike.mean())
    assert actual["human"]["agreement"]["value"] == pytest.approx(right.mean())
    assert actual["counts"]["changed"] == sum(~alike)


def test_length_control_takes_out_what_length_gives(capfd: pytest.CaptureFixture[str]) -> None:
    """A judge that only counts characters: the plain rate follows lengths, the controlled one is a half."""
    rng, a = np.random.default_rng(0), np.full(600, 1000)
    b = (1000 + rng.normal(60, 100, 600)).round().astype(int)  # B is longer
    p = 1 / (1 + np.exp(-3 * np.tanh((b - a) / (b - a).std())))
    scores = (rng.random(600) < p).astype(float)
    assert scores.mean() > 0.62
    assert length_controlled(scores.tolist(), a.tolist(), b.tolist()) == pytest.approx(0.5, abs=0.06)
    assert length_controlled([1.0] * 20, [5] * 20, [5] * 20) is None  # nothing to learn from
    for score in (0.0, 1.0):  # one side always wins: what liblinear writes does not reach the terminal
        actual = length_controlled([score] * 40, range(1, 41), range(40, 0, -1))
        assert actual == pytest.approx(score, abs=1e-3)
    assert capfd.readouterr() == ("", "")


def test_kappas_of_textbooks() -> None:
    """Cohen's example of 25 + 25 of 50 applications; Fleiss' table of 10 subjects and 14 raters."""
    first = ["y"] * 25 + ["n"] * 25
    second = ["y"] * 20 + ["n"] * 5 + ["y"] * 10 + ["n"] * 15
    assert results.cohen(first, second) == pytest.approx(0.4)
    table = [[0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1],
             [7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7]]  # fmt: skip
    ratings = [[str(i) for i, count in enumerate(row) for _ in range(count)] for row in table]
    assert results.fleiss(ratings) == pytest.approx(0.2099, abs=1e-4)
    assert results.cohen(["a"] * 3, ["a"] * 3) is None and results.fleiss([["a", "a"]] * 3) is None


def annotations(path: Path, preferences: dict[int, Any]) -> Path:
    row = {"output_1": "x", "output_2": "y", "generator_1": "a", "generator_2": "b"}
    return write_lines(path, [row | {"instruction": f"{i}", "preference": p} for i, p in preferences.items()])


def test_preferences_of_one_and_of_several_files(tmp_path: Path) -> None:
    """AlpacaEval 2's between 1 and 2: the win rate is their mean; NaN and 7 are unreadable."""
    values: list[Any] = [1.2, 1.9, 1.5, 0, 2, 1, math.nan, 7, None, "2", True, 10**400]
    file = annotations(tmp_path / "w.jsonl", dict(enumerate(values)))
    actual = summary(read_existing([file], None, "alpaca_eval")[0], "w")
    assert actual["read"] == 6 and actual["counts"]["unreadable"] == 6
    assert actual["win_rate"]["value"] == pytest.approx((0.2 + 0.9 + 0.5 + 0.5 + 1 + 0) / 6)
    assert actual["win"]["value"] == pytest.approx(2 / 6) and actual["tie"]["value"] == pytest.approx(2 / 6)
    files = [annotations(tmp_path / "1.jsonl", dict.fromkeys(range(6), 2)), tmp_path / "2.jsonl"]
    annotations(files[1], {6: 1, 7: 1})
    (judged,) = read_existing(files, None, "alpaca_eval")
    assert judged.facts == {"from": ["1.jsonl", "2.jsonl"]}
    assert summary(judged, "n")["win_rate"]["value"] == 6 / 8
    annotations(files[1], {5: 2, 6: 2})
    for same in (files, [files[0], files[0]]):
        with refused("twice"):
            read_existing(same, None, "alpaca_eval")


def keep(out: Path, b: str, sides: str, text: str = "", questions: str = "") -> None:
    """Write a judgement with one verdict in both orders per letter: a or b."""
    pairs = [Pair(f"q{i}", Question("", f"{text}ask {i}"), f"A {i}", f"B {i}") for i in range(len(sides))]
    rows = [row_of(pair, [letter, letter]) for pair, letter in zip(pairs, sides, strict=True)]  # type: ignore[list-item]
    judged = Judged("auto-j", "judge", "mle", b, 2, rows, questions=questions)
    results.write(judged, results.default_title(judged), out)


def test_sets_of_questions_stay_apart(tmp_path: Path) -> None:
    """The same models on two sets are two judgements; the same ids are not the same questions."""
    for i, name in enumerate(("vicuna", "koala")):
        for b in ("emo", "dpo"):
            keep(tmp_path, b, "ab" * (i + 2), name, name)
    report = document(Report([tmp_path]))
    data = json.loads(report.json())
    pairs = [(pair["questions"], pair["n"]) for pair in data["paired_judgements"]]
    assert pairs == [("koala", 6), ("vicuna", 4)] and len(data["judgements"]) == 4
    rows = {row["B"]: " ".join(row.values()) for row in Page(report.html()).table("B", "Verdict")}
    for judgement in data["judgements"]:
        name = f"{judgement['b']} against mle on {judgement['questions']}"
        assert f"{100 * judgement['win_rate']['value']:.1f}" in rows[name]
    for b, text in (("emo", "one "), ("dpo", "other ")):
        keep(tmp_path / "apart", b, "abab", text)
    apart = document(Report([tmp_path / "apart"]))
    assert json.loads(apart.json())["paired_judgements"] == []
