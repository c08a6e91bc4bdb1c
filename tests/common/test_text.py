"""Text of others does not act on a terminal or in Markdown, and passes on no secrets; progress in words."""

from __future__ import annotations

import pytest

from emo.common import progress as module
from emo.common.errors import UserError, one_line
from emo.common.progress import amount, duration, progress, progress_line
from emo.common.text import counted, markdown, on_one_line, printable, publishable, without_secrets

TITLE = "\x1b]0;owned\a"  # an OSC sequence, which sets a terminal's title
ACTING = ["\x1b[2J", TITLE, "a\rb", "\x9b31m", "\u202egpj.exe", "\u2066x\u2069", "\u2028", "\ud800", "\x7f"]


@pytest.mark.parametrize("text", ACTING)
def test_what_acts_on_a_terminal_is_written_out(text: str) -> None:
    for shown in (printable(text), on_one_line(text), markdown(text), str(UserError(text)), one_line(text)):
        shown.encode()
        assert not set(shown) & set("\x1b\a\b\r\x7f\x9b\u202e\u2066\u2069\u2028\ud800")


def test_plain_text_stays_as_it_is() -> None:
    text = "na\u00efve \u65e5\u672c \U0001f642, 50 % of a/b_c.txt: tab\tand line\n"
    assert printable(text) == text
    assert on_one_line("two  spaces\nstay") == "two  spaces stay"


def test_a_long_line_keeps_its_ends() -> None:
    line = str(UserError(f"ds.json: unknown key {'x' * 10_000}; did you mean stage?"))
    assert len(line) < 2000
    assert line.startswith("ds.json: unknown key x") and line.endswith("x; did you mean stage?")


def test_markdown_makes_no_links_tags_or_cells() -> None:
    assert markdown("see https://x.org and www.x.org") == "see https&#58;//x.org and www&#46;x.org"
    assert markdown("<b>|[a](b)`c`") == "&lt;b&gt;\\|\\[a\\](b)\\`c\\`"


SECRETS = {
    "https://me:hunter2@host/x": "https://***@host/x",
    "s3://KEY:SECRET@bucket/x": "s3://***@bucket/x",
    "https://h/x?a=1&X-Amz-Signature=abc123&b=2": "https://h/x?a=1&X-Amz-Signature=***&b=2",
    "https://h/x?access_token=abc": "https://h/x?access_token=***",
    "Authorization: Bearer abcdefghijklmnopqrstuvwxyz": "Authorization: Bearer ***",
    "401 for hf_" + "aB3" * 11: "401 for hf_***",
    "ghp_" + "a1" * 18: "ghp_***",
    "glpat-abcdefghijklmnopqrst": "glpat-***",
}


INNOCENT = [
    "s3://bucket/x",
    "https://h:8080/x",
    "hf_checkpoints_of_a_llama",
    "the bearer of it",
    "git@host:a/b",
]


def test_secrets_are_left_out() -> None:
    for text, expected in SECRETS.items():
        assert without_secrets(text) == expected
        assert expected in str(UserError(f"cannot read {text}"))
        assert expected in one_line(ValueError(text))
    assert [without_secrets(text) for text in INNOCENT] == INNOCENT


PUBLISHABLE = {
    "/home/me/runs/emo": "emo",
    "['/data/a/*.jsonl', '/data/b.txt']": "['*.jsonl', 'b.txt']",
    "from ~me/models/base, /mnt/x/cost.pt:f": "from base, cost.pt:f",
    "https://me:hunter2@host/a/b": "https://***@host/a/b",
}


def test_what_is_published_names_no_folder() -> None:
    for text, expected in PUBLISHABLE.items():
        assert publishable(text) == expected
    for text in ("runs/emo", "and/or", "https://h/a/b c/d", "s3://bucket/a/b", "/ 1/2"):
        assert publishable(text) == text


def test_long_texts_take_no_time() -> None:
    for text in ("a-" * 100_000, "://" + ":" * 100_000, "?" + "a" * 100_000, "://a" * 50_000):
        assert without_secrets(text) == text
    for text in ("~" * 100_000, "/" * 100_000, "a/" * 50_000, "/" + "!" * 100_000):
        assert publishable(text) == text


def test_a_number_has_its_noun() -> None:
    assert [counted(n, "step") for n in (1, 2.5, 1000)] == ["1 step", "2.5 steps", "1,000 steps"]


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
