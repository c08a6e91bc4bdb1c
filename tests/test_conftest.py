"""A step to real data that is not there skips its test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import NO_DATA, RealData


def test_a_step_to_real_data_that_is_not_there_skips(tmp_path: Path) -> None:
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "a.txt").touch()
    directory = RealData(tmp_path)
    assert (directory / "lm" / "a.txt").is_file()
    for name in ("nlu", "lm/b.txt"):
        with pytest.raises(pytest.skip.Exception, match=f"{NO_DATA}.*{name}"):
            directory / name
