"""The overlap report: the same grams as plain Python finds, and where they come from."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

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


def test_report_names_the_rows_that_stand_in_the_text(tmp_path: Path) -> None:
    """With three jobs; the shards are those without a report."""
    rows = tasks(tmp_path)
    long = rows["sst2"]
    half = " ".join(long[3].split()[:9])  # 2 of its grams of 8 words
    made = texts(60)
    made[5] += " " + long[0].upper().replace(" ", "  -- ") + " tail"
    made[40] += " " + half
    made[41] += f" {rows['mmlu'][2]} {long[0]}"
    write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in made))
    config = data_config(tmp_path, sources=[{"files": "a.jsonl"}], contamination="nlu", shards=3)
    for job in range(3):
        run(config, shard=(job, 3))
    without = data_config(tmp_path, sources=[{"files": "a.jsonl"}], shards=3, dir=str(tmp_path / "without"))
    run(without)
    assert train_set(config).fingerprint == train_set(without).fingerprint
    found = json.loads((config.dir / "train/contamination.json").read_text())
    sst2, mmlu = found["tasks"]["sst2"], found["tasks"]["mmlu"]
    total = len(plain_grams(long[3], 8))
    assert set(found["tasks"]) == {"sst2", "mmlu"} and found["ngram"] == 8 and found["documents"] == 3
    assert (sst2["rows"], sst2["too_short"], sst2["overlapping"], sst2["contained"]) == (21, 1, 2, 1)
    assert sst2["overlapping_rows"] == {"0": 1.0, "6": round(2 / total, 4)}
    assert sst2["examples"] == [long[0], long[3]]
    assert (mmlu["rows"], mmlu["too_short"], mmlu["overlapping"], mmlu["contained"]) == (10, 0, 1, 1)
    assert mmlu["overlapping_rows"] == {"2": 1.0}


def test_known_overlap_of_real_tasks(shared_data: Path, tmp_path: Path) -> None:
    """SST-2's test sentences largely come from Rotten Tomatoes, whose train split is a text here."""
    sources = [{"files": str(shared_data / "nlu/rotten_tomatoes/train.jsonl.zst")}]
    config = data_config(tmp_path, sources=sources, contamination=str(shared_data / "nlu"), sequence_len=128)
    run(config)
    found = json.loads((config.dir / "train/contamination.json").read_text())["tasks"]
    assert found["sst2"]["contained"] > 400
    assert found["trec"]["overlapping"] == found["mmlu"]["overlapping"] == 0
