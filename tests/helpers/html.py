"""Parse an HTML page, and check that it is well-formed, accessible and self-contained."""

from __future__ import annotations

from html.parser import HTMLParser
from itertools import pairwise


class Page(HTMLParser):
    """Tags, tables, headings, labels and addresses of a page. Asserts that the page is valid."""

    VOID = {"meta", "path", "use", "rect", "circle"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str | None] = []
        self.images = 0  # without decorative ones
        self.labels: list[str] = []
        self.tables: list[list[list[str]]] = []  # rows of texts. A space precedes a note
        self.headings: list[tuple[str, str]] = []
        self.feed(text)
        assert not self.open, f"unclosed: {self.open}"
        assert not {"script", "link", "iframe", "img"} & set(self.tags)
        assert self.tags.count("main") == self.tags.count("h1") == 1
        assert self.headings[0][0] == "h1", "the answer comes first"
        levels = [int(name[1]) for name, _ in self.headings]
        assert all(b - a < 2 for a, b in pairwise(levels)), "a heading level is left out"
        assert len(set(self.ids)) == len(self.ids) and len(set(self.labels)) == len(self.labels)
        assert self.images == sum(label.startswith("img ") for label in self.labels)
        inside = {f"#{name}" for name in self.ids}
        assert all(a in inside for a in self.addresses if a.startswith("#")), "a link leads nowhere"
        assert not [a for a in self.addresses if "://" in a], "an address outside the file"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        attributes = dict(attrs)
        self.addresses += [v or "" for n, v in attrs if n in ("src", "href", "xlink:href", "data")]
        self.images += tag == "svg" and "aria-hidden" not in attributes
        self.ids += [attributes["id"]] if "id" in attributes else []
        if attributes.get("role") in ("img", "region"):
            self.labels.append(f"{attributes['role']} {attributes['aria-label']}")
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            is_heading = "thead" in self.open or not self.tables[-1][-1]
            assert (tag == "th") == is_heading == ("scope" in attributes), "a row or column has no heading"
            self.tables[-1][-1].append("")
        if tag == "small":
            self.tables[-1][-1][-1] += " "
        if tag in ("h1", "h2", "h3"):
            self.headings.append((tag, ""))
        self.open += [tag] if tag not in self.VOID else []

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data.removeprefix("\n")
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings[-1] = self.headings[-1][0], (self.headings[-1][1] + data).strip()

    @property
    def answer(self) -> str:
        return self.headings[0][1]

    @property
    def sections(self) -> list[str]:
        return [text for name, text in self.headings if name == "h2"]

    def table(self, first: str, *others: str) -> list[dict[str, str]]:
        """Return the rows of the first table whose header begins with these names, without series markers."""
        head = [first, *others]
        names, *rows = next(t for t in self.tables if t[0][: len(head)] == head)
        return [{n: text.lstrip("●■◆▲▼✚") for n, text in zip(names, row, strict=True)} for row in rows]
