"""What the suite says in the end: what was not tried, and why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NO_DATA, REPO, RealData


def last_lines(*arguments: str, **environment: str) -> str:
    """What a run of a few tests prints."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=REPO, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_checkout_elsewhere_says_how_many_tests_lacked_real_data(tmp_path: Path) -> None:
    said = last_lines(
        "-n", "1", "tests/data_prep/test_words.py", "-k", "real_tokenizers", SHARED_DATA=str(tmp_path)
    )
    assert "3 skipped: no real data" in said and "no time" not in said


def test_what_had_no_time_is_told() -> None:
    said = last_lines("-n", "0", "tests/test_changed.py", "--within", "0")
    assert re.search(r"\d skipped: no time", said)


def test_a_step_to_real_data_that_is_not_there_skips(tmp_path: Path) -> None:
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "a.txt").touch()
    place = RealData(tmp_path)
    assert (place / "lm" / "a.txt").is_file()
    for name in ("nlu", "lm/b.txt"):
        with pytest.raises(pytest.skip.Exception, match=f"{NO_DATA}.*{name}"):
            place / name
