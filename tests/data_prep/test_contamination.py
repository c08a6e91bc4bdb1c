"""The overlap report: the same grams as plain Python finds, and where they come from."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from emo.data_prep.contamination import Finder, Grams, collect, load, report, save
from tests.helpers.corpus import data_config, run, sentence, texts, train_set, write_jsonl


def plain_grams(text: str, n: int) -> list[tuple[str, ...]]:
    """Consecutive words, as the regular expression sees them."""
    found = re.findall(r"[^\W_]+", text.lower())
    return [tuple(found[i : i + n]) for i in range(len(found) - n + 1)]


def tasks(root: Path) -> dict[str, list[str]]:
    """Test rows of two tasks: long ones, and one that is too short to say anything."""
    rng = random.Random(8)
    rows = {
        "sst2": [sentence(rng, 12, 16) for _ in range(20)] + ["Too short."],
        "mmlu": [sentence(rng, 5, 7) for _ in range(10)],
    }
    write_jsonl(
        root / "nlu/sst2/test.jsonl",
        ({"text": t, "label": 0, "row": 2 * i} for i, t in enumerate(rows["sst2"])),
    )
    write_jsonl(root / "nlu/mmlu/test.jsonl", ({"question": t} for t in rows["mmlu"]))
    write_jsonl(root / "nlu/notes/train.jsonl", [{"text": "not a test set"}])
    return rows


@pytest.mark.parametrize("jobs", [1, 3])
def test_report_names_the_rows_that_stand_in_the_text(tmp_path: Path, jobs: int) -> None:
    rows = tasks(tmp_path)
    long = rows["sst2"]
    half = " ".join(long[3].split()[:9])  # 2 of its grams of 8 words
    made = texts(60)
    made[5] += " " + long[0].upper().replace(" ", "  -- ") + " tail"
    made[40] += " " + half
    made[41] += f" {rows['mmlu'][2]} {long[0]}"
    write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in made))
    config = data_config(tmp_path, sources=[{"files": "a.jsonl"}], contamination="nlu", shards=3)
    for job in range(jobs):
        run(config, shard=(job, jobs))
    found = json.loads((config.dir / "train/contamination.json").read_text())
    sst2, mmlu = found["tasks"]["sst2"], found["tasks"]["mmlu"]
    total = len(plain_grams(long[3], 8))
    assert set(found["tasks"]) == {"sst2", "mmlu"} and found["ngram"] == 8 and found["documents"] == 3
    assert (sst2["rows"], sst2["too_short"], sst2["overlapping"], sst2["contained"]) == (21, 1, 2, 1)
    assert sst2["overlapping_rows"] == {"0": 1.0, "6": round(2 / total, 4)}
    assert sst2["examples"] == [long[0], long[3]]
    assert (mmlu["rows"], mmlu["too_short"], mmlu["overlapping"], mmlu["contained"]) == (10, 0, 1, 1)
    assert mmlu["overlapping_rows"] == {"2": 1.0}


def test_looking_does_not_change_the_shards(tmp_path: Path) -> None:
    tasks(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in texts(60)))
    prints = []
    for name, extra in (("with", {"contamination": "nlu"}), ("without", {})):
        config = data_config(tmp_path, dir=str(tmp_path / name), sources=[{"files": "a.jsonl"}], **extra)
        run(config)
        prints.append(train_set(config).fingerprint)
    assert prints[0] == prints[1]


@pytest.mark.parametrize("texts_", [[], [""], ["a b"], ["", "  ", "one two three four five"]])
def test_texts_without_grams(tmp_path: Path, texts_: list[str]) -> None:
    tasks(tmp_path)
    hits, holding = Finder(collect(tmp_path / "nlu", 8)).overlap(texts_)
    assert len(hits) == 0 and holding == 0


def test_grams_are_saved_whole(tmp_path: Path) -> None:
    tasks(tmp_path)
    grams = collect(tmp_path / "nlu", 8)
    save(grams, tmp_path / "grams.npz")
    again = load(tmp_path / "grams.npz")
    assert all(np.array_equal(getattr(grams, name), getattr(again, name)) for name in Grams._fields)
    assert report(again, [], 0, 8)["tasks"]["sst2"]["overlapping"] == 0


def test_known_overlap_of_real_tasks(shared_data: Path, tmp_path: Path) -> None:
    """SST-2's test sentences largely come from Rotten Tomatoes, whose train split is a text here."""
    sources = [{"files": str(shared_data / "nlu/rotten_tomatoes/train.jsonl.zst")}]
    config = data_config(tmp_path, sources=sources, contamination=str(shared_data / "nlu"), sequence_len=128)
    run(config)
    found = json.loads((config.dir / "train/contamination.json").read_text())["tasks"]
    assert found["sst2"]["contained"] > 400
    assert found["trec"]["overlapping"] == found["mmlu"]["overlapping"] == 0
