"""What the evaluation's tests share: a private cache of embeddings and digests, and a small world."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.evaluating import tiny_model, write_tasks


@pytest.fixture(scope="package", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that a trainer exported, and rows of three tasks: only to be read."""
    root = tmp_path_factory.mktemp("world")
    write_tasks(root / "data", ["sst2", "trec", "mmlu"], train=20, test=12)
    tiny_model(root / "model")
    facts = {"step": 2, "tokens": 8, "objective": "emo", "run": "/r"}
    (root / "model" / "export.json").write_text(json.dumps(facts))
    return root
