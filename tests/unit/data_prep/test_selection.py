"""Splits, weights, limits, domains and near duplicates select rows. Contamination is found in any script."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emo.common.config.recipe import parse_section
from emo.data_prep.config import DataConfig
from emo.data_prep.encoding.templates import Chat, Conversation, Exchange
from emo.data_prep.selection import buckets, row_units, scan, select
from emo.data_prep.selection.select import Selection
from emo.data_prep.selection.similarity import near
from emo.data_prep.selection.similarity.contamination import SHARED, Finder, collect, row_digest
from emo.data_prep.selection.similarity.near import band_shape, signatures
from emo.data_prep.shards.format import Manifest, open_prepared
from emo.data_prep.shards.verify import verify
from emo.data_prep.sources.spec import Row
from emo.data_prep.sources.world import TASKS, corpus, read_json_lines, task_rows
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    prepared,
    rejected,
    rows_of,
    run,
    sentence,
    texts,
    train_set,
    word_tokenizer,
    write_jsonl,
)
from tests.helpers.refusals import refused
from tests.helpers.scanned import parts_of, select_in_memory
from tests.helpers.scripts import TEXTS

ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2)),
    min_size=1,
    max_size=60,
)


def test_the_error_for_no_training_rows_names_the_first_problem(tmp_path: Path) -> None:
    row = {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}
    write_jsonl(tmp_path / "a.jsonl", [row] * 3)
    with refused("no-training-rows") as error:
        run(data_config(tmp_path, kind="instruct", sources=[{"files": "a.jsonl"}]))
    assert "3 bad roles" in str(error.value) and "a.jsonl line 1: bad roles" in str(error.value)


def test_near_duplicates_may_leave_no_validation_rows(tmp_path: Path) -> None:
    same = [f"the river runs under the old road near the house number {i % 2} and on" for i in range(400)]
    write_jsonl(tmp_path / "a.jsonl", [f"{i} {text}" for i, text in enumerate(same)])
    options = {"dedup": "near", "near_threshold": 0.5, "validation_fraction": 0.3, "sequence_len": 8}
    with refused("no-validation-rows"):
        run(data_config(tmp_path, shards=1, **options))


@example(
    [(0, i, 5, 0, 0) for i in range(11)] + [(1, i, 1, 0, 0) for i in range(5)],
    [1] * 4,
    [0] * 4,
    "near",
    1,
    6,
    1 << 24,
)
@settings(deadline=None, max_examples=30)
@given(
    drawn=ROWS,
    weights=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    splits=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    dedup=st.sampled_from(["none", "exact", "near"]),
    signed=st.integers(1, 2),
    unit=st.sampled_from([1 << 19, 16, 6]),
    batch=st.sampled_from([1 << 24, 2 << 10, 64]),
)
def test_selection_equals_a_sort_in_memory(
    drawn: list[tuple[int, ...]], weights: list[int], splits: list[int], dedup: str, signed: int,
    unit: int, batch: int,
) -> None:  # fmt: skip
    """Every row is selected as defined, for all sizes of parts, units and batches."""
    source, hashes, chars, kind, change = np.array(sorted(drawn, key=lambda row: row[0])).T
    reasons = np.where(chars == 5, 7, 0)
    similar = np.repeat(kind[:, None] * 1000, near.PERMUTATIONS, 1) + np.arange(near.PERMUTATIONS)
    similar[:, 100:] += change[:, None] * 17  # equal in most bands and in 0.78 of all, or in all
    other = np.repeat(hashes[:, None] // 3 + 5000, near.PERMUTATIONS, 1)
    tree = {"dir": "x", "tokenizer": "t", "sources": [{"files": "a"}], "shards": 3, "dedup": dedup}
    tree |= {"validation": {"a": [{"files": "v"}], "b": [{"files": "w"}]}, "near_threshold": 0.7}
    config = parse_section(DataConfig, tree, "data")
    columns = (source, hashes, chars, reasons, np.stack([similar, other][:signed], axis=1))
    taken, expected = select_in_memory(config, weights, splits, *columns)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "GROUP_ROWS", 5)
        patch.setattr(row_units, "UNIT_ROWS", unit)
        patch.setattr(row_units, "BLOCK_ROWS", 3)
        patch.setattr(buckets, "BATCH_BYTES", batch)
        parts = parts_of(Path(name), config, *columns, weights, splits, size=11)
        selection = Selection(config, [], parts, Path(name))
        assert selection.run(0, lambda: False, print)
        dealt = [
            row for batch in selection.used_rows() for row in zip(*map(np.ndarray.tolist, batch), strict=True)
        ]
    counts: Counter[int] = Counter()
    for reason, count in zip(selection.totals.reason.tolist(), selection.totals.rows.tolist(), strict=True):
        counts[reason] += count
    assert [(shard, row, copies) for row, shard, copies in dealt] == taken
    assert counts == Counter(expected)


def test_more_rows_than_a_node_can_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "MOST_ROWS", 20)
    write_jsonl(tmp_path / "a.jsonl", texts(21))
    with refused("too-many-rows"):
        run(data_config(tmp_path))


def test_one_row_of_a_large_group_of_near_duplicates_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group is read in several batches, each of which names the row that is kept."""
    monkeypatch.setattr(buckets, "BATCH_BYTES", 64)
    text = texts(1, sentences=60)[0]
    write_jsonl(tmp_path / "a.jsonl", [f"{text} {number}" for number in range(40)])
    config = prepared(tmp_path, dedup="near")
    assert len(rows_of(config)) == 1


# --- splits and weights -----------------------------------------------------------------------------------


def test_the_validation_split_depends_on_content(tmp_path: Path) -> None:
    """The position of a row and the other rows do not move it between the splits."""
    rows = texts(1000, sentences=1)
    sides = []
    for name, subset, seed in (("a", rows, 0), ("b", rows[::-1][:700], 0), ("c", rows, 1)):
        write_jsonl(tmp_path / "a.jsonl", subset)
        config = prepared(tmp_path, dir=str(tmp_path / name), validation_fraction=0.1, seed=seed)
        sides.append({text: side for side in (0, 1) for text in rows_of(config, side)})
    assert all(sides[0][text] == side for text, side in sides[1].items())
    assert 70 < sum(sides[0].values()) < 130
    assert sides[0] != sides[2]


def test_a_weight_does_not_drop_rows_of_another_source(tmp_path: Path) -> None:
    """Rows that are both in a source of weight 0.1 and in a source of weight 1 are all used."""
    first, second = texts(300, seed=1), texts(300, seed=2)
    write_jsonl(tmp_path / "a.jsonl", first + second[:150])
    write_jsonl(tmp_path / "b.jsonl", second)
    config = prepared(tmp_path, sources=[{"files": "a.jsonl", "weight": 0.1}, {"files": "b.jsonl"}])
    times = Counter(rows_of(config))
    few = [times[text] for text in first]
    assert [times[text] for text in second] == [1] * 300 and 10 < sum(few) < 60
    sources = train_set(config).manifest.sources
    assert [source["rows"] for source in sources] == [450, 300]  # duplicates count, too
    assert sum(source["train"] for source in sources) == 300 + sum(few)
    assert rejected(config)["weight"] >= few.count(0)


def test_copies_are_spread_over_the_shard(tmp_path: Path) -> None:
    """The copies of a row are far from each other, and rows without copies keep their order."""
    first, second = texts(300, seed=1), texts(40, seed=2)
    write_jsonl(tmp_path / "a.jsonl", first)
    write_jsonl(tmp_path / "b.jsonl", second)
    sources = [{"files": "a.jsonl"}, {"files": "b.jsonl", "weight": 4}]
    rows = rows_of(prepared(tmp_path, sources=sources, shards=1))
    positions = {text: [i for i, other in enumerate(rows) if other == text] for text in second}
    assert all(len(indices) == 4 and min(np.diff(indices)) >= 40 for indices in positions.values())
    assert [text for text in rows if text in set(first)] == first


# --- limits and domains -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [2.5, 0.6])
def test_limit_of_rows_counts_copies(tmp_path: Path, weight: float) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(700))
    write_jsonl(tmp_path / "b.jsonl", texts(200, seed=1))
    sources = [{"files": "a.jsonl", "weight": weight}, {"files": "b.jsonl"}]
    config = prepared(tmp_path, sources=sources, limit_rows=300)
    assert len(rows_of(config)) == 300 == train_set(config).manifest.documents


def test_limit_of_tokens_takes_all_sources_in_proportion(tmp_path: Path) -> None:
    """Copies count, smaller data are used completely, and the limit may fall between copies of a row."""
    for seed, (name, count) in enumerate((("a.jsonl", 600), ("b.jsonl", 200), ("c.jsonl", 1)), 1):
        write_jsonl(tmp_path / name, alpaca_rows(count, seed))

    def manifest(limit: int, *sources: tuple[str, int]) -> Manifest:
        listed = [{"files": name, "weight": weight} for name, weight in sources]
        options = {"kind": "instruct", "sequence_len": 512, "sources": listed, "limit_tokens": limit}
        with tempfile.TemporaryDirectory(dir=tmp_path) as out:
            return train_set(prepared(tmp_path, dir=out, **options)).manifest

    both = (("a.jsonl", 1), ("b.jsonl", 2))
    whole = manifest(10**9, *both)
    half = manifest(whole.tokens // 2, *both)
    assert whole.documents == 600 + 2 * 200 and "limit" not in whole.rejected
    assert 0 <= whole.tokens // 2 - half.tokens < 256
    taken = [source["train"] for source in half.sources]
    assert abs(taken[0] - 300) < 20 and abs(taken[1] - 200) < 20 and sum(taken) == half.documents
    assert half.rejected["limit"] == 800 - taken[0] - -(-taken[1] // 2)
    thrice = manifest(10**9, ("c.jsonl", 3))
    assert (thrice.documents, manifest(thrice.tokens // 3 * 2, ("c.jsonl", 3)).documents) == (3, 2)


@pytest.mark.parametrize(("limit", "shards"), [(None, 3), (4_000, 3), (3_000, 1), (100, 5), (10**6, 2)])
def test_no_row_holds_two_domains_and_limits_stay_exact(
    tmp_path: Path, limit: int | None, shards: int
) -> None:
    """The hundreds digit of a token id is its domain, and the two files of a domain are not adjacent."""
    rng, sources, count = np.random.default_rng(0), [], 0
    for number, domain in enumerate((*range(4), *range(4))):
        low = 100 * domain
        rows = [rng.integers(low, low + 100, rng.integers(1, 60)).tolist() for _ in range(40)]
        write_jsonl(tmp_path / f"{number}.jsonl", ({"ids": row} for row in rows))
        sources.append({"files": f"{number}.jsonl", "format": "tokens", "domain": f"d{domain}"})
        count += sum(map(len, rows))
    config = prepared(tmp_path, sources=sources, shards=shards, limit_tokens=limit, dedup="none")
    data = train_set(config)
    assert data.domains == ("d0", "d1", "d2", "d3")
    ids = data.batch(np.arange(len(data)))["input_ids"]
    assert (ids // 100 == data.domain[:, None]).all()
    assert [domain.rows for domain in data.manifest.domains] == np.bincount(data.domain, minlength=4).tolist()
    lost = data.manifest.counts.get("remainder_tokens_dropped", 0)
    if limit is None or limit > count:
        assert data.manifest.tokens == count - lost and lost < 32 * (shards + 8)
    else:
        assert data.manifest.tokens == limit // 32 * 32


def test_validation_sets_keep_the_order_of_the_recipe(tmp_path: Path) -> None:
    for seed, name in enumerate("abcd"):
        write_jsonl(tmp_path / f"{name}.jsonl", texts(50 + 10 * seed, seed))
    law, sources = {"files": "c.jsonl", "domain": "law"}, [{"files": "a.jsonl"}, {"files": "b.jsonl"}]
    sets = {"some": [law | {"limit": 20}], "all": [{"files": "d.jsonl"}, law]}
    config = prepared(tmp_path, sources=sources, validation=sets)
    data, opened = open_prepared(config)
    assert list(opened) == ["some", "all"] and data.manifest.documents == 50 + 60
    assert [each.domains for each in opened.values()] == [("law",), ("default", "law")]
    assert [each.manifest.documents for each in opened.values()] == [20, 70 + 80]
    assert len(verify(config.dir)[0]) == 3 and verify(config.dir)[1] == []
    reordered = data_config(tmp_path, sources=sources, validation=dict(reversed(sets.items())))
    for use in (run, open_prepared):
        with refused("settings-differ"):
            use(reordered)


# sha256 of the columns that training reads, as format 2 wrote them, which had no domains
FORMAT_2 = {
    ("text", 6000): "37143d5aa21fc5c818d5dc84dec0f82d689539cc0bfd3d8573fd60c715c126bc",
    ("instruct", None): "84456b9368cca2e0569fec90eacb5baa63b8ed5d5c4bf5d4408cdf73e986d755",
}


@pytest.mark.parametrize(("kind", "limit"), FORMAT_2)
def test_data_without_domains_have_the_rows_of_format_2(tmp_path: Path, kind: str, limit: int | None) -> None:
    """The tokenizer lists the words of the texts, so its ids do not depend on a library's training."""
    words = sorted({word.strip(".") for text in texts(300) for word in text.split()})
    tokenizer = word_tokenizer(tmp_path / "words", ["?", ".", *words])
    for seed, name in enumerate(("a.jsonl", "b.jsonl")):
        write_jsonl(tmp_path / name, texts(150, seed) if kind == "text" else alpaca_rows(90, seed))
    sources = [{"files": "a.jsonl", "weight": 2.5}, {"files": "b.jsonl"}]
    options = {
        "kind": kind,
        "sequence_len": 32 if kind == "text" else 128,
        "limit_tokens": limit,
        "shards": 3,
    }
    config = prepared(tmp_path, sources=sources, validation_fraction=0.2, tokenizer=tokenizer, **options)
    digest = hashlib.sha256()
    for split in config.splits:
        for file in sorted((config.dir / split).glob("*.arrow")):
            table = pa.ipc.open_stream(file.read_bytes()).read_all()
            for name in ("input_ids", "segment_lengths", "valid", "loss_spans")[: 3 + (kind == "instruct")]:
                digest.update(repr(table.column(name).to_pylist()).encode())
    assert digest.hexdigest() == FORMAT_2[kind, limit]


# --- near duplicates and contamination --------------------------------------------------------------------


def test_bands_equal_those_of_datasketch() -> None:
    assert [band_shape(threshold) for threshold in (0.3, 0.7, 0.95)] == [(37, 3), (14, 9), (3, 42)]


SAME = {
    "none": str,
    "upper": str.upper,
    "NFD": lambda text: unicodedata.normalize("NFD", text),
    "NFKC": lambda text: unicodedata.normalize("NFKC", text),
    "full width": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text),
    "soft hyphens and joiners": lambda text: "".join(c + "\u00ad\u2060" if c.isalpha() else c for c in text),
    "spaced": lambda text: text.replace(" ", " \n\u3000 "),
}


def alike(script: str) -> dict[str, str]:
    """Return a text in equivalent forms. Thai is not respaced, because its spaces end sentences."""
    ways = (name for name in SAME if (script, name) != ("thai", "spaced"))
    return {name: SAME[name](TEXTS[script]) for name in ways}


def similarity(a: str, b: str) -> float:
    first, second = signatures([a, b], "text")
    return float((first == second).mean())


@pytest.mark.parametrize("script", TEXTS)
def test_grams_ignore_case_and_spaces_in_any_script(script: str) -> None:
    text = TEXTS[script]
    assert {similarity(text, other) for other in alike(script).values()} == {1}
    changed = text[: len(text) // 2] + text[len(text) // 2 + 1 :]  # a letter is missing
    assert 0.6 < similarity(text, changed) < 1
    assert similarity(text, text[: len(text) // 2]) < 0.75
    assert all(similarity(text, other) < 0.1 for name, other in TEXTS.items() if name != script)


@pytest.mark.parametrize("script", TEXTS)
def test_contamination_is_found_in_any_script(tmp_path: Path, script: str) -> None:
    write_jsonl(tmp_path / "nlu/own/test.jsonl", TEXTS.values())
    grams = collect(tmp_path / "nlu", 8)
    finder, number = Finder(grams), list(TEXTS).index(script)
    for name, text in alike(script).items():
        hits, documents = finder.overlap([sentence(random.Random(1)), f"xyz {text} xyz"])
        assert documents == 1
        owners = set(grams.pairs[np.isin(grams.pairs[:, 0], hits), 1].tolist())
        assert owners == {number} and len(hits) == (grams.pairs[:, 1] == number).sum(), name
    few = TEXTS[script][: len(TEXTS[script]) // 12]  # about four words cannot share eight words
    assert finder.overlap([few])[1] == 0


def passage(rng: random.Random, words: int = 150) -> str:
    return " ".join(f"{sentence(rng)} {rng.randrange(10**6)}" for _ in range(words // 10))


@pytest.mark.parametrize("form", ["input", "before"])
def test_near_duplicate_instructions_are_dropped_and_questions_on_a_passage_are_kept(
    tmp_path: Path, form: str
) -> None:
    """This holds for all system messages, and for long answers as well as single words."""
    rng = random.Random(7)

    def asked(context: str, question: str, answer: str, system: str = "") -> dict[str, Any]:
        """Return a row whose context is an input or precedes its question."""
        if form == "input":
            return {"instruction": question, "input": context, "output": answer, "system": system}
        roles = {"system": system, "user": f"{context}\n\n{question}", "assistant": answer}
        return {"messages": [{"role": role, "content": text} for role, text in roles.items() if text]}

    context, question, answer = passage(rng), sentence(rng, 8, 14), passage(rng, 120)
    changed = answer.replace(answer.split()[60], "other", 1)
    rows = [
        asked(context, question, answer),
        asked(context, question, changed, "Be brief."),
        asked(passage(rng), sentence(rng, 8, 14), answer),  # the same answer to another question
        asked(context, question.upper() + "!", "Yes"),
        asked(context, question.upper() + "!", " yes", "Be brief."),
    ]
    for context in (passage(rng) for _ in range(12)):
        for answer in (passage(rng, 40), passage(rng, 40), "Yes", "Yes", "No"):
            rows.append(asked(context, sentence(rng, 6, 12), answer))
    write_jsonl(tmp_path / "a.jsonl", rows)
    config = prepared(tmp_path, kind="instruct", sequence_len=1024, shards=1, dedup="near")
    assert rejected(config) == {"near_duplicate": 2}


@pytest.mark.parametrize("form", ["conversation", "system", "tool"])
def test_passages_before_short_answers_distinguish_rows(form: str) -> None:
    """Passages may be in the system message or in the result of a tool. Short instructions do not count."""

    def asked(context: str) -> Row:
        if form == "conversation":
            return Conversation((Exchange("Is it true?", "Yes"),), context)
        roles = {form: context, "user": "Is it true?", "assistant": "Yes"}
        return Chat(json.dumps([{"role": role, "content": text} for role, text in roles.items()]))

    rng = random.Random(3)
    first, other, brief, none = signatures(
        [asked(text) for text in (passage(rng), passage(rng), "Be brief.", "")], "instruct"
    )
    assert (first == other).mean(axis=-1).min() < 0.2
    assert (brief == none).all()


def test_the_report_names_the_test_rows_in_the_text(tmp_path: Path) -> None:
    """Three jobs write one report, and their shards equal the shards of data without a report."""
    rng = random.Random(8)
    long = [*(sentence(rng, 12, 16) for _ in range(20)), "Too short."]
    short = [sentence(rng, 5, 7) for _ in range(10)]
    write_jsonl(tmp_path / "nlu/sst2/test.jsonl", ({"text": t, "row": 2 * i} for i, t in enumerate(long)))
    write_jsonl(tmp_path / "nlu/mmlu/test.jsonl", ({"question": t} for t in short))
    write_jsonl(tmp_path / "nlu/notes/train.jsonl", ["not a test set"])
    rows = texts(60)
    rows[5] += " " + long[0].upper().replace(" ", "  -- ") + " tail"
    rows[40] += " " + " ".join(long[3].split()[:9])  # 2 of its grams of 8 words
    rows[41] += f" {short[2]} {long[0]}"
    write_jsonl(tmp_path / "a.jsonl", rows)
    config = data_config(tmp_path, contamination="nlu", shards=3)
    for job in range(3):
        run(config, shard=(job, 3))
    without = prepared(tmp_path, shards=3, dir=str(tmp_path / "without"))
    assert train_set(config).fingerprint == train_set(without).fingerprint
    report = json.loads((config.dir / "train/contamination.json").read_text())
    assert report["ngram"] == 8 and report["documents"] == 3
    keys = ("rows", "too_short", "overlapping", "contained", SHARED)
    counts = {name: [task[key] for key in keys] for name, task in report["tasks"].items()}
    found = [row_digest(text.upper() + " ") for text in (long[0], long[3], short[2])]
    share = round(2 / (len(long[3].split()) - 7), 4)
    assert counts == {
        "sst2": [21, 1, 2, 1, {found[0]: 1.0, found[1]: share}],
        "mmlu": [10, 0, 1, 1, {found[2]: 1.0}],
    }
    assert report["tasks"]["sst2"]["examples"] == [long[0], long[3]]
    write_jsonl(tmp_path / "nlu/mmlu/test.jsonl", [{"question": rows[3]}])
    with refused("source-changed"):
        run(config)


def test_the_embedded_world_has_no_contamination() -> None:
    corpora = map(corpus, ("world", "world-home", "world-abroad"))
    documents = "\n".join(row["text"] for path in corpora for row in read_json_lines(path))
    for task in TASKS:
        key, split = ("question", "dev") if task == "mmlu" else ("text", "train")
        demonstrations = "\n".join(row[key] for row in task_rows(task, split))
        tests = {row[key] for row in task_rows(task, "test")}
        assert tests and not [text for text in tests if text in documents or text in demonstrations]


@pytest.mark.parametrize("bit", [3, 40, 62])
def test_a_damaged_offset_is_found_at_once(tmp_path: Path, bit: int) -> None:
    """A flipped bit of the end of a bucket points far behind the end of the file."""
    path = tmp_path / "file"
    records = np.arange(30, dtype=np.uint64).reshape(10, 3)
    buckets.write_buckets(path, 2, [(records, np.arange(10) % 2)])
    data = np.frombuffer(path.read_bytes(), np.uint64).copy()
    offsets = data[30:36]  # the offset and checksum of both buckets, and of the end
    assert offsets[[0, 2, 4]].tolist() == [0, 5, 10]
    offsets[4] ^= np.uint64(1 << bit)
    path.write_bytes(data.tobytes())
    with pytest.raises(buckets.DamagedError):
        list(buckets.read_buckets([path], 1))
