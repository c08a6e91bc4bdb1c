"""`make test-fast` runs the tests of what was changed."""

from __future__ import annotations

import pytest

from tests.conftest import REPO
from tests.helpers.changed import NEEDED, needed


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "pipeline/loss/fused.py",
            ["tests/loss", "tests/pipeline/test_hf.py", "tests/pipeline/test_model.py"],
        ),
        ("tests/eval/test_stats.py", ["tests/eval/test_stats.py"]),
        ("tests/test_audit.py", ["tests/test_audit.py"]),
        ("tests/bench/data.py", []),
    ],
)
def test_a_file_needs_the_tests_of_its_folder(file: str, expected: list[str]) -> None:
    assert needed([file]) == ["tests/test_repository.py", *expected]


def test_a_file_of_no_known_folder_needs_all() -> None:
    assert needed(["tests/bench/data.py", "tests/helpers/launching.py"]) == ["tests"]


def test_every_folder_and_test_that_is_named_exists() -> None:
    for prefix, tests in NEEDED.items():
        assert (REPO / prefix).exists(), prefix
        assert all((REPO / "tests" / name).exists() for name in tests), prefix
