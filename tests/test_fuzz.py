"""Every parser takes damaged files for a moment, and what once crashed it; `make fuzz` takes its time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from emo.common.errors import UserError
from tests.helpers import fuzz_targets, fuzzing
from tests.helpers.fuzzing import TARGETS, fuzz, target


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_end_in_success_or_one_line(name: str) -> None:
    fuzz(name, examples=12)


def _crash() -> None:
    raise KeyError("seconds")


def _silent() -> None:
    raise UserError("")


def _slow() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("fault", "expected"), [(_crash, KeyError), (_silent, AssertionError), (_slow, AssertionError)]
)
def test_a_faulty_parser_is_found(
    fault: Callable[[], None], expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(directory: Path) -> None:
        if b"seconds" not in (directory / "a.json").read_bytes():
            fault()

    monkeypatch.setattr(fuzzing, "SECONDS", 0.05)
    monkeypatch.setattr(fuzzing, "TARGETS", {})
    target("faulty", fuzz_targets.files(a__json='{"seconds": 1, "names": ["x"]}'), "a.json")(read)
    with pytest.raises(expected):
        fuzz("faulty", examples=300)
