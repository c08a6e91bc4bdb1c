"""Text from data where it must not act: on a terminal and in Markdown; and text without the secrets in it."""

from __future__ import annotations

import re

_MARKDOWN = re.compile(r"[\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_])")
_LINK = re.compile(r"(?<=\w):(?=//)|(?<=\bwww)\.", re.IGNORECASE)  # what GitHub makes a link of by itself
# Control characters, line and paragraph separators, what changes the direction of writing, half characters.
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Of an absolute path, all but its last part; not of an address.
_FOLDERS = re.compile(r"(?<![\w.~:/-])(?:~\w*)?/(?:[^\s/|`'\",\\]+/)+(?=[^\s/|])")
_SECRETS = (
    re.compile(
        r"(?P<kept>\b[a-z][a-z0-9+.-]{0,15}://)[^\s/@:]*:[^\s/@]*(?=@)", re.IGNORECASE
    ),  # user:password@
    re.compile(
        r"(?P<kept>[?&;](?:[\w-]*(?:token|signature|credential|password|secret)|api_?key|key|sig)=)[^\s&#;'\"]+",
        re.IGNORECASE,
    ),
    re.compile(r"(?P<kept>\bbearer )\S{16,}", re.IGNORECASE),
    # As the tokens of the hub, GitHub, GitLab, Slack and vendors of models begin.
    re.compile(r"(?P<kept>\b(?:hf_|gh[pousr]_|sk-))[A-Za-z0-9]{20,}"),
    re.compile(r"(?P<kept>\b(?:github_pat_|glpat-|xox[abprs]-|sk-(?:proj|ant)-))[\w-]{16,}"),
)


def printable(text: str) -> str:
    """Return the text with all that could move a cursor, colour or reorder a line written as escapes.

    Newlines and tabs stay.
    """
    return _ACTING.sub(
        lambda match: match.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text
    )


def on_one_line(text: str) -> str:
    """Return printable text without line breaks: a name, or a message that must stay one line."""
    return printable(" ".join(text.splitlines()))


def markdown(text: str) -> str:
    """Return the text as it is in a Markdown table cell: on one line, without tags, links or emphasis."""
    line = printable(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _MARKDOWN.sub(lambda match: "\\" + match.group(), line)
    return _LINK.sub(lambda match: f"&#{ord(match.group())};", line)


def counted(count: float, noun: str) -> str:
    """Return a number with its noun, whose plural ends in s: `1 epoch`, `2.5 epochs`, `1,000 steps`."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"


def without_secrets(text: str) -> str:
    """Return the text with passwords in addresses, and what looks like an access token, replaced by `***`."""
    for pattern in _SECRETS:
        text = pattern.sub(lambda match: match["kept"] + "***", text)
    return text


def publishable(text: str) -> str:
    """Return the text without secrets or folders: absolute paths become their last part."""
    return _FOLDERS.sub("", without_secrets(text))
