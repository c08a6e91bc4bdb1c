"""Near duplicates and contamination in any script, and what of an instruction row is compared."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emo.data_prep.contamination import Finder, collect
from emo.data_prep.near import signatures
from emo.data_prep.plan import Plan
from tests.helpers.corpus import data_config, prepared, run, sentence, texts, train_set, write_jsonl
from tests.helpers.scripts import TEXTS


def nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def wide(text: str) -> str:
    """Letters and digits in full width."""
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


def hyphenated(text: str) -> str:
    """With soft hyphens and joiners, which are not seen."""
    return "".join(c + "\u00ad\u2060" if c.isalpha() else c for c in text)


SAME = {"upper": str.upper, "NFD": nfd, "NFKC": lambda t: unicodedata.normalize("NFKC", t), "wide": wide}
SAME |= {"hyphenated": hyphenated, "spaced": lambda t: t.replace(" ", " \n\u3000 ")}


def similarity(a: str, b: str) -> float:
    first, second = signatures([a, b], "text")
    return float((first == second).mean())


@pytest.mark.parametrize("script", TEXTS)
def test_texts_that_read_alike_are_alike_in_any_script(script: str) -> None:
    text = TEXTS[script]
    for name, change in SAME.items():
        if script == "thai" and name == "spaced":  # spaces there end sentences
            continue
        assert similarity(text, change(text)) == 1, name
    changed = text[: len(text) // 2] + text[len(text) // 2 + 1 :]  # a letter is missing
    assert 0.6 < similarity(text, changed) < 1
    assert similarity(text, text[: len(text) // 2]) < 0.75
    assert all(similarity(text, other) < 0.1 for name, other in TEXTS.items() if name != script)


@pytest.mark.parametrize("script", TEXTS)
def test_contamination_is_found_in_any_script(tmp_path: Path, script: str) -> None:
    rows = [{"text": text} for text in TEXTS.values()]
    write_jsonl(tmp_path / "nlu/own/test.jsonl", rows)
    grams = collect(tmp_path / "nlu", 8)
    finder, number = Finder(grams), list(TEXTS).index(script)
    text = TEXTS[script]
    for name, change in (SAME | {"none": str}).items():
        if script == "thai" and name == "spaced":
            continue
        hits, documents = finder.overlap([sentence(random.Random(1)), f"xyz {change(text)} xyz"])
        assert documents == 1
        owners = set(grams.pairs[np.isin(grams.pairs[:, 0], hits), 1].tolist())
        assert owners == {number}, name
        assert len(hits) == (grams.pairs[:, 1] == number).sum(), name
    few = text[: len(text) // 12]  # about four words are no overlap of eight
    assert finder.overlap([few])[1] == 0


# --- instructions -----------------------------------------------------------------------------------------


def rejected(tmp_path: Path, rows: list[dict[str, Any]]) -> dict[str, int]:
    write_jsonl(tmp_path / "a.jsonl", rows)
    config = prepared(tmp_path, kind="instruct", sequence_len=1024, shards=1, dedup="near")
    found: dict[str, int] = Plan.load(config.dir / "plan.parquet").summary["rejected"]
    return found


def passage(rng: random.Random, words: int = 150) -> str:
    text = ""
    while len(text.split()) < words:
        text += f" {sentence(rng)} {rng.randrange(10**6)}"
    return text


def asked(form: str, system: str, context: str, question: str, answer: str) -> dict[str, Any]:
    """A row in one of the forms in which such rows come."""
    if form == "input":
        return {"instruction": question, "input": context, "output": answer, "system": system}
    content = f"{context}\n\n{question}"
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": [{"role": "system", "content": system}, *talk] if system else talk}


@pytest.mark.parametrize("form", ["input", "before"])
@pytest.mark.parametrize("answers", ["long", "yes or no"])
def test_questions_on_one_passage_are_all_kept(tmp_path: Path, form: str, answers: str) -> None:
    rng = random.Random(5)
    rows = []
    for _ in range(12):
        context = passage(rng)
        for _ in range(5):
            answer = passage(rng, 40) if answers == "long" else rng.choice(["Yes", "No"])
            rows.append(asked(form, "", context, sentence(rng, 6, 12), answer))
    assert rejected(tmp_path, rows) == {}


def test_near_duplicates_among_instructions_go(tmp_path: Path) -> None:
    """... whatever their system messages; the same answer to another question stays."""
    rng = random.Random(7)
    rows = []
    for form in ("input", "before"):
        context, question, answer = passage(rng), sentence(rng, 8, 14), passage(rng, 120)
        changed = answer.replace(answer.split()[60], "other", 1)
        rows.append(asked(form, "", context, question, answer))
        rows.append(asked(form, "Be brief.", context, question, changed))
        rows.append(asked(form, "", passage(rng), sentence(rng, 8, 14), answer))
        rows.append(asked(form, "", context, question.upper() + "!", "Yes"))
        rows.append(asked(form, "Be brief.", context, question.upper() + "!", " yes"))
    assert rejected(tmp_path, rows) == {"near_duplicate": 4}


def test_report_names_the_rows_that_stand_in_the_text(tmp_path: Path) -> None:
    """With three jobs; the shards are those without a report."""
    rng = random.Random(8)
    long = [*(sentence(rng, 12, 16) for _ in range(20)), "Too short."]
    short = [sentence(rng, 5, 7) for _ in range(10)]
    write_jsonl(tmp_path / "nlu/sst2/test.jsonl", ({"text": t, "row": 2 * i} for i, t in enumerate(long)))
    write_jsonl(tmp_path / "nlu/mmlu/test.jsonl", ({"question": t} for t in short))
    write_jsonl(tmp_path / "nlu/notes/train.jsonl", ["not a test set"])
    made = texts(60)
    made[5] += " " + long[0].upper().replace(" ", "  -- ") + " tail"
    made[40] += " " + " ".join(long[3].split()[:9])  # 2 of its grams of 8 words
    made[41] += f" {short[2]} {long[0]}"
    write_jsonl(tmp_path / "a.jsonl", made)
    config = data_config(tmp_path, contamination="nlu", shards=3)
    for job in range(3):
        run(config, shard=(job, 3))
    without = prepared(tmp_path, shards=3, dir=str(tmp_path / "without"))
    assert train_set(config).fingerprint == train_set(without).fingerprint
    found = json.loads((config.dir / "train/contamination.json").read_text())
    assert set(found["tasks"]) == {"sst2", "mmlu"} and found["ngram"] == 8 and found["documents"] == 3
    keys = ("rows", "too_short", "overlapping", "contained", "overlapping_rows")
    counts = {name: [task[key] for key in keys] for name, task in found["tasks"].items()}
    share = round(2 / (len(long[3].split()) - 7), 4)
    assert counts == {"sst2": [21, 1, 2, 1, {"0": 1.0, "6": share}], "mmlu": [10, 0, 1, 1, {"2": 1.0}]}
    assert found["tasks"]["sst2"]["examples"] == [long[0], long[3]]
