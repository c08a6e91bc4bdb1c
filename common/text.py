"""Text for users: counts, durations, escapes for terminals and Markdown, and removal of secrets."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MARKDOWN = re.compile(r"[\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_])")
_LINK = re.compile(r"(?<=\w):(?=//)|(?<=\bwww)\.", re.IGNORECASE)  # GitHub turns these into links
# Control characters, line and paragraph separators, direction marks, surrogates.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# All but the last part of an absolute path. URLs do not match.
_FOLDERS = re.compile(r"(?<![\w.~:/-])(?:~\w*)?/(?:[^\s/|`'\",\\]+/)+(?=[^\s/|])")
_SECRETS = (
    re.compile(r"(?P<prefix>\b[a-z][a-z0-9+.-]{0,15}://)[^\s/@:]*:[^\s/@]*(?=@)", re.I),  # user:password@
    re.compile(
        r"(?P<prefix>[?&;](?:[\w-]*(?:token|signature|credential|password|secret)|api_?key|key|sig)=)[^\s&#;'\"]+",
        re.IGNORECASE,
    ),
    re.compile(r"(?P<prefix>\bbearer )\S{16,}", re.IGNORECASE),
    # Prefixes of tokens of the Hugging Face Hub, GitHub, GitLab, Slack and model vendors.
    re.compile(r"(?P<prefix>\b(?:hf_|gh[pousr]_|sk-))[A-Za-z0-9]{20,}"),
    re.compile(r"(?P<prefix>\b(?:github_pat_|glpat-|xox[abprs]-|sk-(?:proj|ant)-))[\w-]{16,}"),
)


def printable(text: str) -> str:
    """Escape control and direction characters. Newlines and tabs are kept."""

    def escape(match: re.Match[str]) -> str:
        return match.group().encode("unicode_escape", "surrogatepass").decode("ascii")

    return _CONTROL.sub(escape, text)


def on_one_line(text: str) -> str:
    """Return printable text without line breaks."""
    return printable(" ".join(text.splitlines()))


def markdown(text: str) -> str:
    """Escape text for a Markdown table cell: one line without tags, links or emphasis."""
    line = printable(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _MARKDOWN.sub(lambda match: "\\" + match.group(), line)
    return _LINK.sub(lambda match: f"&#{ord(match.group())};", line)


def align(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Return rows of cells as lines. With `right`, all columns but the first are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = list(map(str.rjust if right else str.ljust, row, widths))
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return lines


def counted(count: float, noun: str) -> str:
    """Format a count with its noun: `1 epoch`, `2.5 epochs`, `1,000 steps`."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"


def without_secrets(text: str) -> str:
    """Replace passwords in URLs and access tokens by `***`."""
    for pattern in _SECRETS:
        text = pattern.sub(lambda match: match["prefix"] + "***", text)
    return text


def publishable(text: str) -> str:
    """Remove secrets, and shorten absolute paths to their last part."""
    return _FOLDERS.sub("", without_secrets(text))


def duration(seconds: float) -> str:
    """Return a time as `45 s`, `12 min`, `3 h 05 min` or `2 d 3 h`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
    return f"{hours // 24} d {hours % 24} h"
