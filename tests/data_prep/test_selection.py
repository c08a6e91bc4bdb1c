"""Which rows are taken: weights, limits, copies, near duplicates and contamination in any script."""

from __future__ import annotations

import json
import random
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emo.data_prep.contamination import Finder, collect
from emo.data_prep.near import band_shape, signatures
from emo.data_prep.plan import _trimmed, in_turn
from emo.data_prep.scan import uniform
from emo.data_prep.shards import Manifest
from emo.data_prep.world import TASKS, corpus, read_rows, task_rows
from tests.data_prep.test_prepare import rejected as plan_rejected
from tests.data_prep.test_prepare import rows_of
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    prepared,
    run,
    sentence,
    texts,
    train_set,
    write_jsonl,
)
from tests.helpers.scripts import TEXTS


def test_a_weight_drops_no_row_of_another_source(tmp_path: Path) -> None:
    """Rows in A (weight 0.1) and in B (weight 1) are all used."""
    first, second = texts(300, seed=1), texts(300, seed=2)
    write_jsonl(tmp_path / "a.jsonl", first + second[:150])
    write_jsonl(tmp_path / "b.jsonl", second)
    sources = [{"files": "a.jsonl", "weight": 0.1}, {"files": "b.jsonl"}]
    for name, dedup in (("exact", "exact"), ("near", "near")):
        config = prepared(tmp_path, dir=str(tmp_path / name), sources=sources, dedup=dedup)
        times = Counter(rows_of(config))
        few = [times[text] for text in first]
        assert [times[text] for text in second] == [1] * 300 and 10 < sum(few) < 60
        taken = [source["train"] for source in train_set(config).manifest.sources]
        assert sum(taken) == 300 + sum(few)
        assert plan_rejected(config)["weight"] >= few.count(0)
    sources[0]["weight"] = 2
    times = Counter(rows_of(prepared(tmp_path, dir=str(tmp_path / "two"), sources=sources[::-1])))
    assert [times[text] for text in second] == [2] * 150 + [1] * 150  # the most that a source asks for


@pytest.mark.parametrize("weight", [1, 2.5, 0.6])
def test_limit_of_rows_counts_copies(tmp_path: Path, weight: float) -> None:
    """Limit_rows 300 with weight 2.5 gave 713."""
    write_jsonl(tmp_path / "a.jsonl", texts(700))
    write_jsonl(tmp_path / "b.jsonl", texts(200, seed=1))
    sources = [{"files": "a.jsonl", "weight": weight}, {"files": "b.jsonl"}]
    config = prepared(tmp_path, sources=sources, limit_rows=300)
    assert len(rows_of(config)) == 300 == train_set(config).manifest.documents


def test_copies_are_spread(tmp_path: Path) -> None:
    """Far from each other, and rows without copies keep their order."""
    first, second = texts(300, seed=1), texts(40, seed=2)
    write_jsonl(tmp_path / "a.jsonl", first)
    write_jsonl(tmp_path / "b.jsonl", second)
    sources = [{"files": "a.jsonl"}, {"files": "b.jsonl", "weight": 4}]
    found = rows_of(prepared(tmp_path, sources=sources, shards=1))
    places = {text: [i for i, other in enumerate(found) if other == text] for text in second}
    assert all(len(at) == 4 and min(np.diff(at)) >= 40 for at in places.values())
    assert [text for text in found if text in set(first)] == first


def test_limit_of_tokens_takes_all_sources_in_proportion(tmp_path: Path) -> None:
    """... copies counted; and what is less than the limit is used whole."""
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(600, seed=1))
    write_jsonl(tmp_path / "b.jsonl", alpaca_rows(200, seed=2))
    common = {"kind": "instruct", "sequence_len": 256}
    common |= {"sources": [{"files": "a.jsonl"}, {"files": "b.jsonl", "weight": 2.0}]}

    def manifest(limit: int) -> Manifest:
        out = str(tmp_path / str(limit))
        return train_set(prepared(tmp_path, dir=out, limit_tokens=limit, **common)).manifest

    whole = manifest(10**9)
    half = manifest(whole.tokens // 2)
    assert whole.documents == 600 + 2 * 200 and "limit" not in whole.rejected
    assert 0 <= whole.tokens // 2 - half.tokens < 256
    taken = [source["train"] for source in half.sources]
    assert abs(taken[0] - 300) < 20 and abs(taken[1] - 200) < 20 and sum(taken) == half.documents
    assert half.rejected["limit"] == 800 - taken[0] - -(-taken[1] // 2)


def test_a_limit_of_tokens_may_end_among_the_copies_of_the_first_row(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(1))
    more = {"kind": "instruct", "sequence_len": 512, "shards": 1}
    more |= {"sources": [{"files": "a.jsonl", "weight": 3}]}
    whole = train_set(prepared(tmp_path, limit_tokens=10**9, **more)).manifest
    two = prepared(tmp_path, dir=str(tmp_path / "two"), limit_tokens=whole.tokens // 3 * 2, **more)
    assert (whole.documents, train_set(two).manifest.documents) == (3, 2)


def test_draws_of_a_seed_stay_what_they_were() -> None:
    """Other ones would split the same sources into other training and validation rows."""
    assert uniform(np.arange(2, dtype=np.uint64), 3, 1).round(9).tolist() == [0.523950592, 0.454937907]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_blocks_are_trimmed_exactly(blocks: list[int], data: st.DataObject) -> None:
    surplus = data.draw(st.integers(0, sum(blocks)))
    left = _trimmed(np.array(blocks), surplus)
    assert left.sum() == sum(blocks) - surplus and (left >= 0).all() and (left <= blocks).all()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_any_beginning_has_the_sources_in_proportion(have: list[int]) -> None:
    source = np.repeat(np.arange(len(have)), have)
    order = in_turn(source)
    assert sorted(order.tolist()) == list(range(len(source)))
    for count in range(1, len(source) + 1):
        taken = np.bincount(source[order[:count]], minlength=len(have))
        assert (np.abs(taken - np.array(have) * count / len(source)) <= len(have)).all()


def test_bands_are_those_that_datasketch_takes() -> None:
    assert [band_shape(threshold) for threshold in (0.3, 0.7, 0.95)] == [(37, 3), (14, 9), (3, 42)]


@pytest.mark.parametrize("task", TASKS)
def test_no_test_row_stands_in_a_document_or_a_demonstration(task: str) -> None:
    key = "question" if task == "mmlu" else "text"
    corpora = map(corpus, ("world", "world-home", "world-abroad"))
    texts = [row["text"] for path in corpora for row in read_rows(path)]
    demonstrations = [row[key] for row in task_rows(task, "dev" if task == "mmlu" else "train")]
    everything = "\n".join([*texts, *demonstrations])
    assert all(row[key] not in everything for row in task_rows(task, "test"))
    assert all(text in everything for text in demonstrations)  # the search itself works


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


def rejected(tmp_path: Path, rows: list[dict[str, Any]]) -> dict[str, int]:
    write_jsonl(tmp_path / "a.jsonl", rows)
    return plan_rejected(prepared(tmp_path, kind="instruct", sequence_len=1024, shards=1, dedup="near"))


def passage(rng: random.Random, words: int = 150) -> str:
    return " ".join(f"{sentence(rng)} {rng.randrange(10**6)}" for _ in range(words // 10))


def asked(form: str, system: str, context: str, question: str, answer: str) -> dict[str, Any]:
    """Return a row in one of the forms in which such rows come."""
    if form == "input":
        return {"instruction": question, "input": context, "output": answer, "system": system}
    roles = {"system": system, "user": f"{context}\n\n{question}", "assistant": answer}
    return {"messages": [{"role": role, "content": content} for role, content in roles.items() if content]}


@pytest.mark.parametrize("form", ["input", "before"])
def test_questions_on_one_passage_are_all_kept(tmp_path: Path, form: str) -> None:
    """... whether their answers are long or but a word."""
    rng, rows = random.Random(5), []
    for context in (passage(rng) for _ in range(12)):
        for answer in (passage(rng, 40), passage(rng, 40), "Yes", "Yes", "No"):
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
