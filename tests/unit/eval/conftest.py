"""Fixtures of the evaluation's tests: a private cache, and a small model with rows of tasks."""

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
    """Write a random model as a trainer exports it, and rows of three tasks. Tests must not change them."""
    root = tmp_path_factory.mktemp("world")
    write_tasks(root / "data", ["sst2", "trec", "mmlu"], train=20, test=12)
    tiny_model(root / "model")
    facts = {"step": 2, "tokens": 8, "objective": "emo", "run": "/r"}
    (root / "model" / "export.json").write_text(json.dumps(facts))
    return root
