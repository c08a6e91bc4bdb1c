"""Progress of long work: bytes and the time left, in lines where there is no terminal."""

from __future__ import annotations

import pytest

from emo.common import progress as module
from emo.common.progress import amount, duration, progress, progress_line


def test_a_line_tells_bytes_and_the_time_left() -> None:
    line = progress_line("reading", 3_400_000, 6_800_000, 34)
    assert line == "reading: 3.4 MB of 6.8 MB (50%), 100 kB/s, 34 s left"
    assert progress_line("reading", 500, 0, 5) == "reading: 500 bytes, 100 bytes/s"
    assert "left" not in progress_line("reading", 0, 1000, 0)
    assert [amount(n) for n in (0, 999, 1000, 999_499, 1_500_000, 2 * 10**9)] == [
        *("0 bytes", "999 bytes", "1 kB", "999 kB", "1.5 MB", "2.0 GB")
    ]
    assert [duration(n) for n in (0.4, 61, 3600, 86399)] == ["0 s", "1 min 1 s", "1 h 0 min", "23 h 59 min"]


def test_without_a_terminal_lines_come_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: False, raising=False)
    lines: list[str] = []
    with progress("reading", 100, lines.append) as at:
        for done in range(100):
            now[0] += 1
            at(done)
    assert [line.partition("(")[2].partition(")")[0] for line in lines] == ["29%", "59%", "89%"]
