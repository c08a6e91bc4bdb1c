"""The parts that report pages are made of: one HTML file, no scripts, nothing outside it, light and dark.

Text is escaped wherever it is put into a page; only `Markup`, which these functions return, is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from common.text import printable

# What the page says of itself to the browser: no scripts, and nothing from elsewhere, whatever it quotes.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
STYLE = Path(__file__).parent / "page.css"


class Markup(str):
    """HTML that is put into a page as it is."""

    __slots__ = ()


def safe(text: str) -> Markup:
    """The text as HTML; markup stays as it is."""
    return text if isinstance(text, Markup) else Markup(escape(printable(text)))


def join(*parts: str) -> Markup:
    """Parts one after the other, text escaped."""
    return Markup("".join(safe(part) for part in parts))


def tag(name: str, *content: str, **attributes: str | None) -> Markup:
    """An element. An attribute `class_` is `class`; one that is None or empty is left out."""
    given = "".join(f' {key.rstrip("_")}="{safe(value)}"' for key, value in attributes.items() if value)
    return Markup(f"<{name}{given}>{join(*content)}</{name}>")


def page(title: str, lead: str, sections: Iterable[str], notice: str = "") -> Markup:
    """A whole document. lead: the sentence below the title; notice: a remark in a box."""
    head = join(
        Markup(
            '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        ),
        tag("title", title),
        Markup(f"\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n"),
    )
    box = tag("div", tag("strong", "Note"), notice, class_="notice") if notice else ""
    body = [tag("h1", title), tag("p", lead, class_="lead"), box, *sections]
    inner = Markup("\n".join(safe(part) for part in body if part))
    return Markup(
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}</head>\n<body>\n{inner}\n</body>\n</html>\n'
    )


def section(title: str, *content: str) -> Markup:
    """A heading and what belongs to it; empty without content."""
    return tag("section", tag("h2", title), *content) if any(content) else Markup()


def cells(values: Iterable[str], cell: str = "td", text: int = 1) -> Markup:
    """The cells of a table row; the first `text` hold words, the others numbers."""
    return join(*(tag(cell, v, class_="text" if i < text else None) for i, v in enumerate(values)))


def row(values: Iterable[str], kind: str = "", text: int = 1) -> Markup:
    """A table row. kind: `first` (a rule above), `quiet` (muted), `group` (a heading inside the table)."""
    return tag("tr", cells(values, text=text), class_=kind)


def table(head: Sequence[str], rows: Iterable[str], caption: str = "", text: int = 1) -> Markup:
    """A table that scrolls sideways where it does not fit; its caption does not."""
    top = tag("thead", tag("tr", cells(head, "th", text)))
    inner = tag("div", tag("table", top, tag("tbody", *rows)), class_="scroll", tabindex="0")
    return tag("figure", inner, tag("figcaption", caption) if caption else "", class_="table")


def figure(wide: str, narrow: str, caption: str = "", legend: str = "") -> Markup:
    """A figure in two widths, of which the screen shows one."""
    return tag(
        "figure",
        legend,
        tag("div", wide, class_="wide"),
        tag("div", narrow, class_="narrow"),
        tag("figcaption", caption) if caption else "",
    )


def legend(names: Iterable[tuple[str, str]]) -> Markup:
    """(colour, name) of each series; wraps where the line ends."""
    return tag("ul", *(tag("li", chip(colour), name) for colour, name in names), class_="legend")


def chip(colour: str) -> Markup:
    """A dot in a CSS colour."""
    return tag("span", class_="chip", style=f"background:{colour}")


def details(summary: str, *content: str) -> Markup:
    """Content that is folded away."""
    return tag("details", tag("summary", summary), *content)


def definitions(items: Iterable[tuple[str, str]]) -> Markup:
    """A list of terms and what they are."""
    return tag("dl", *(join(tag("dt", term), tag("dd", value)) for term, value in items))
