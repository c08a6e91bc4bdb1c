"""What is fuzzed of judging: replies of judges, and the files that answers, replies and verdicts come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zstandard

from eval import store
from eval.judging import judging, pairs, results
from eval.judging.answers import read_answers, read_questions
from eval.judging.judges import JUDGES
from eval.judging.results import lines
from tests.helpers.fuzz_targets import files, rows
from tests.helpers.fuzzing import target

ASKED = [{"id": i, "instruction": f"Say {i}.", "input": "It." * i, "dataset": "d"} for i in range(3)]
WRITTEN = {
    name: [one | {"output": f"{name} {one['id']}", "generator": name} for one in ASKED] for name in "ab"
}
SAID = {
    "auto-j": "Both fit. So, the final decision is Response 2.",
    "pandalm": "1\n\n### Reason: it is better.\n\n### Reference: it\n",
    "alpaca_eval": repr([{"model": "model_1", "rank": 1}, {"model": "model_2", "rank": 2}]),
}
DECISIONS = ("first", "second", "tie", None)


def _numbers(found: pairs.Judged) -> None:
    """All that is said and kept of a judgement."""
    numbers = results.summary(found, results.default_title(found))
    assert 0 <= numbers["read"] <= numbers["pairs"] == len(found.rows)
    _ = store.dump(numbers), list(lines(numbers)), store.digest(found.rows)


@target(
    "judges' replies", files(**{f"{name}__txt": text for name, text in SAID.items()}),
    *(f"{name}.txt" for name in SAID),
)  # fmt: skip
def judges_replies(here: Path) -> None:
    """Any text, to every judge's parser: a verdict, or none."""
    for name in SAID:
        text = (here / f"{name}.txt").read_bytes().decode("utf-8", "surrogateescape")
        for judge in JUDGES.values():
            assert judge.verdict(text) in DECISIONS


@target(
    "questions",
    files(a__jsonl=rows(ASKED), b__json=json.dumps([{"prompt": "a"}, {"Instruction": "b"}]),
          c__jsonl__zst=zstandard.compress(rows([{"text": "a", "question_id": 1}]).encode())),
    "a.jsonl", "b.json", "c.jsonl.zst",
)  # fmt: skip
def questions(here: Path) -> None:
    for name in ("a.jsonl", "b.json", "c.jsonl.zst"):
        _, found = read_questions(str(here / name), "hub", 2)
        assert all(one.text.encode() for one in found)


BOTH = files(a__json=json.dumps(WRITTEN["a"]), b__jsonl=rows(WRITTEN["b"]))


@target("answers", BOTH, "a.json", "b.jsonl")
def answers(here: Path) -> None:
    """Two files of answers, and the prompts that come of them."""
    read_answers(here / "b.jsonl").by_text()
    found = pairs.of_answers(here / "a.json", here / "b.jsonl")
    try:
        for judge in JUDGES.values():
            judging.write_prompts(judge, found, here / "prompts", "jsonl", None, None)
            assert len((here / "prompts").read_text().splitlines()) <= 2 * len(found.rows)
    finally:
        (here / "prompts").unlink(missing_ok=True)


def make_replies(here: Path) -> None:
    BOTH(here)
    found = pairs.of_answers(here / "a.json", here / "b.jsonl")
    for form in judging.FORMATS:
        path = here / f"{form}.jsonl"
        judging.write_prompts(JUDGES["alpaca_eval"], found, path, form, None, None)
        asked = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(rows([_reply(one) for one in asked]))


def _reply(asked: dict[str, Any]) -> dict[str, Any]:
    """As a program of one's own answers, or a service."""
    text = SAID["alpaca_eval"]
    if "id" in asked:
        return {"id": asked["id"], "reply": text}
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    response = {"status_code": 200, "body": {"choices": [choice]}}
    return {"custom_id": asked["custom_id"], "response": response, "error": None}


@target("replies", make_replies, "jsonl.jsonl", "openai.jsonl")
def replies(here: Path) -> None:
    found, judge = pairs.of_answers(here / "a.json", here / "b.jsonl"), JUDGES["alpaca_eval"]
    for form in judging.FORMATS:
        given = judging.read_replies(judge, found, here / f"{form}.jsonl")
        _numbers(pairs.of_replies(judge, "x", found, given, {}))


ANNOTATED = [
    {"instruction": f"Say {i}.", "output_1": "a" * i, "output_2": "b", "generator_1": "a", "generator_2": "b",
     "annotator": "x", "preference": value}
    for i, value in enumerate((1, 2, 0, 1.5, None, 2.0))
]  # fmt: skip


@target("AlpacaEval's annotations", files(a__json=json.dumps(ANNOTATED)), "a.json")
def annotations(here: Path) -> None:
    for found in pairs.read_existing([here / "a.json"], None, "alpaca_eval"):
        _numbers(found)


PEOPLE = {"annotator1": 1, "annotator2": 2, "annotator3": 0}
LABELLED = [
    {"idx": i, "instruction": "Say it.", "input": "", "response1": "a", "response2": "b", **PEOPLE}
    for i in range(3)
]
VERDICTS = [{"idx": i, "pandalm_result": value} for i, value in enumerate((1, "2", "Tie"))]


@target("PandaLM's files", files(labels__json=json.dumps(LABELLED), v__json=json.dumps(VERDICTS)),
        "labels.json", "v.json")  # fmt: skip
def pandalm(here: Path) -> None:
    for found in pairs.read_existing([here / "v.json"], here / "labels.json", "pandalm"):
        _numbers(found)


SCENES = [
    {"scenario": "s", "label": i, "prompt": f"Say {i}.", "response 1": "a", "response 2": "b"}
    for i in range(3)
]


@target("Auto-J's files", files(labels__jsonl=rows(SCENES), v__jsonl=rows([{"output": i} for i in range(3)]),
                                x__jsonl=rows([{"output": i} for i in (1, 0, 0)])),
        "labels.jsonl", "v.jsonl", "x.jsonl")  # fmt: skip
def auto_j(here: Path) -> None:
    both = [here / "v.jsonl", here / "x.jsonl"]
    for found in pairs.read_existing(both, here / "labels.jsonl", "auto-j"):
        _numbers(found)


def make_judgements(here: Path) -> None:
    (here / "a.json").write_text(json.dumps(ANNOTATED))
    for b in ("b", "c"):
        (found,) = pairs.read_existing([here / "a.json"], None, "alpaca_eval")
        results.write(pairs.Judged("alpaca_eval", "x", "a", b, 1, found.rows), b, here)


@target("judgements", make_judgements, "judgements/b.json", "judgements/b.jsonl")
def judgements(here: Path) -> None:
    from common.report.document import Document
    from eval.report import judged as shown

    found = results.read_judgements([here], lambda line: None)
    beside = shown.pairings(found, [])
    page = Document("", [*shown.answers(found), ""], "", shown.sections(found, beside), shown.picture(found))
    text = page.html() + page.markdown()
    assert "<script" not in text and "\x1b" not in text
