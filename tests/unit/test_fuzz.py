"""Every parser handles some damaged files and all files that once crashed it. `make fuzz` tries more."""

from __future__ import annotations

import pytest

import tests.helpers.fuzz_targets  # noqa: F401 - it registers the targets
from tests.helpers.fuzzing import TARGETS, fuzz


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_end_in_success_or_one_line(name: str) -> None:
    fuzz(name, examples=5)
