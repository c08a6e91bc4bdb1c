"""Embeddings and digests are remembered for as long as one file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
