"""Retrieval: exact neighbours with a defined order, texts embedded once, OpenICL's components by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from emo.common.errors import UserError
from emo.eval.icl.encoder import Encoder
from emo.eval.icl.openicl_compat import BaseRetriever, DatasetReader, TopkRetriever, quiet
from emo.eval.icl.retrieve import DenseRetriever, GroupRetriever, openicl_retrieve, top_k
from emo.eval.icl.settings import RETRIEVERS
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import load_task
from emo.eval.model import EvaluatedModel
from tests.helpers.evaluating import tiny_model, write_tasks


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAL_CACHE", str(tmp_path_factory.mktemp("cache")))


# --- search -----------------------------------------------------------------------------------------------


def brute_force(queries: np.ndarray, index: np.ndarray, k: int) -> np.ndarray:
    scores = queries.astype(np.float64) @ index.astype(np.float64).T
    scores = np.round(scores, 12)  # equal vectors, equal scores
    return np.stack([np.lexsort((np.arange(len(index)), -row))[:k] for row in scores])


@pytest.mark.parametrize("n", [1, 8, 17, 1000])
@pytest.mark.parametrize("k", [1, 8])
def test_neighbours_are_exact(n: int, k: int) -> None:
    if k > n:
        with pytest.raises(ValueError, match="8 neighbours wanted of 1 rows"):
            top_k(np.zeros((1, 4), np.float32), np.zeros((n, 4), np.float32), k)
        return
    rng = np.random.default_rng(n)
    index = rng.standard_normal((n, 24)).astype(np.float32)
    queries = rng.standard_normal((300, 24)).astype(np.float32)
    np.testing.assert_array_equal(top_k(queries, index, k), brute_force(queries, index, k))


@pytest.mark.parametrize("copies", [2, 30, 500])
def test_equal_scores_are_ordered_by_row(copies: int) -> None:
    """Repeated texts are common; which copy comes first must not depend on the machine."""
    rng = np.random.default_rng(copies)
    distinct = rng.standard_normal((20, 384)).astype(np.float32)
    directory = rng.permutation(np.repeat(np.arange(20), copies))
    index = distinct[directory]
    queries = rng.standard_normal((40, 384)).astype(np.float32)
    actual = top_k(queries, index, 8)
    for query, rows in zip(queries, actual, strict=True):
        order = np.argsort(-(distinct @ query))
        expected = np.concatenate([np.nonzero(directory == d)[0] for d in order])[
            :8
        ]  # rows ascending per text
        np.testing.assert_array_equal(rows, expected)


def test_no_neighbours_wanted() -> None:
    assert top_k(np.zeros((3, 4), np.float32), np.zeros((5, 4), np.float32), 0).shape == (3, 0)


# --- embeddings -------------------------------------------------------------------------------------------


def test_a_text_is_embedded_once_ever(tmp_path: Path) -> None:
    texts = ["a cat", "a dog", "a cat", "the sea"]
    first = Encoder("minilm", tmp_path)
    vectors = first(texts)
    assert first.computed == 3
    np.testing.assert_array_equal(vectors[0], vectors[2])
    second = Encoder("minilm", tmp_path)
    np.testing.assert_array_equal(second([*texts, "a cat"])[:4], vectors)
    assert second.computed == 0
    second(["something new", "a dog"])
    assert second.computed == 1


@pytest.mark.parametrize("damage", ["truncated", "text", "changed"])
def test_a_damaged_segment_is_embedded_again(damage: str, tmp_path: Path) -> None:
    vectors = Encoder("minilm", tmp_path)(["a cat"])
    [path] = (tmp_path / "embeddings").glob("*/*.npz")
    content = path.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
    path.write_bytes({"truncated": content[:middle], "text": b"hello", "changed": changed}[damage])
    messages: list[str] = []
    again = Encoder("minilm", tmp_path, say=messages.append)
    np.testing.assert_allclose(again(["a cat"]), vectors, atol=1e-6)
    assert again.computed == 1 and len(messages) == 1


def test_an_unknown_sentence_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        Encoder("no-such-model", tmp_path)


# --- components -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluatedModel]:
    root = tmp_path_factory.mktemp("world")
    write_tasks(root / "data", ["sst2", "mmlu"], train=30, test=6)
    return root / "data", EvaluatedModel(str(tiny_model(root / "model")))


@pytest.mark.slow
def test_the_dense_retriever_is_openicls_with_the_same_neighbours(shared_data: Path) -> None:
    """On texts that survive OpenICL's round trip through a tokenizer, the lists are the same."""
    task = load_task("trec")
    rows = load_data(task, str(shared_data / "nlu"), limit=20).rows
    tokenizer = copy.deepcopy(EvaluatedModel(str(shared_data / "models" / "stories260K")).tokenizer)

    def survives(text: str) -> bool:
        return tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text

    pool = [r for r in rows["train"].select(range(400)) if survives(r["text"])]
    test = [r for r in rows["test"] if survives(r["text"])]
    assert len(pool) > 100 and len(test) > 5
    pool = list({r["text"]: r for r in pool}.values())  # among equal texts faiss takes any
    data = DatasetDict({"train": Dataset.from_list(pool), "test": Dataset.from_list(test)})
    reader = DatasetReader(data, input_columns=["text"], output_column="label")
    ours = DenseRetriever(reader, ice_num=8)
    assert isinstance(ours, TopkRetriever)
    with quiet():
        openicl = TopkRetriever(
            reader,
            ice_num=8,
            sentence_transformers_model_name=str(ours.encoder.path),
            tokenizer_name=tokenizer,
            batch_size=16,
        )
        assert ours.retrieve() == openicl.retrieve()


@pytest.mark.parametrize("name", RETRIEVERS)
def test_openicls_retrievers_by_name(name: str, world: tuple[Path, EvaluatedModel]) -> None:
    task = load_task("sst2")
    data = load_data(task, str(world[0]))
    actual = openicl_retrieve(name, task, data, 3, "minilm", world[1])
    assert len(actual) == 6
    for row in actual:
        assert len(row) == len(set(row)) == 3 and all(0 <= i < 30 for i in row)
    assert openicl_retrieve(name, task, data, 3, "minilm", world[1]) == actual  # seeded


def test_group_demonstrations_are_the_first_of_the_subject(world: tuple[Path, Any]) -> None:
    data = load_data(load_task("mmlu"), str(world[0]))
    retriever = GroupRetriever(data.reader(load_task("mmlu")), ice_num=5)
    assert isinstance(retriever, BaseRetriever)
    for row, actual in zip(data.rows["test"], retriever.retrieve(), strict=True):
        of_group = [i for i, g in enumerate(data.rows["train"]["group"]) if g == row["group"]]
        assert actual == of_group[:5]
    with pytest.raises(UserError, match=r"has \d+ demonstrations, 99 wanted"):
        GroupRetriever(data.reader(load_task("mmlu")), ice_num=99).retrieve()
