"""Every parser takes damaged files for a moment, and what once crashed it; `make fuzz` takes its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import fuzz_targets, fuzzing
from tests.helpers.fuzzing import TARGETS, fuzz, target


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_end_in_success_or_one_line(name: str) -> None:
    fuzz(name, examples=12)


@pytest.mark.parametrize("expected", [KeyError, AssertionError], ids=["crash", "endless"])
def test_a_faulty_parser_is_found(expected: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(directory: Path) -> None:
        while b"seconds" not in (directory / "a.json").read_bytes():
            if expected is KeyError:
                raise KeyError("seconds")

    monkeypatch.setattr(fuzzing, "SECONDS", 0.05)
    monkeypatch.setattr(fuzzing, "TARGETS", {})
    target("faulty", fuzz_targets.files(a__json='{"seconds": 1, "names": ["x"]}'), "a.json")(read)
    with pytest.raises(expected):
        fuzz("faulty", examples=300)
