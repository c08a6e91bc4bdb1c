"""A report: its answer, one picture, then tables; as a page for browsers, as Markdown, or as JSON.

The page is one file without scripts and without anything from elsewhere. Text is data and is escaped wherever
it is put; what could act on a terminal or turn the direction of writing is written as an escape.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jinja2
from markupsafe import Markup

from common.errors import UserError
from common.files import finite, write_text
from common.report.figure import HEIGHT, ROW, Figure, style
from common.text import markdown as escaped
from common.text import printable

ARROWS = {"better": "↑", "worse": "↓"}
STDOUT = "-"


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    note: str = ""  # in small letters below: an interval, a second name
    tone: str = ""  # better, worse, unclear, best, quiet
    mark: int | str | None = (
        ""  # the series whose colour and marker stand in front; None: one of the grey ones
    )
    shade: float = 0  # of the background, 0 to 1

    @property
    def arrow(self) -> str:
        """Return the arrow that says in another way than by colour that a number is better or worse."""
        return ARROWS.get(self.tone, "") if any(c.isdigit() for c in self.text) else ""

    def markdown(self) -> str:
        """Return it on one line."""
        text = " ".join(
            part for part in (self.text, self.arrow, f"({self.note})" if self.note else "") if part
        )
        return f"**{escaped(text)}**" if self.tone == "best" else escaped(text)


@dataclass
class Table:
    """Rows whose first cell is their heading. The first `words` columns hold words, the others numbers."""

    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""
    words: int = 1
    label: str = ""  # where a section has several tables

    @property
    def cells(self) -> list[list[Cell]]:
        """Return the rows with every value as a cell."""
        return [[v if isinstance(v, Cell) else Cell(v) for v in row] for row in self.rows]

    def markdown(self) -> list[str]:
        """Return its lines."""
        lines = [[escaped(text) for text in self.head], ["---"] * len(self.head)]
        lines += [[cell.markdown() for cell in row] for row in self.cells]
        label = [f"**{escaped(self.label)}**", ""] if self.label else []
        caption = ["", escaped(self.caption)] if self.caption else []
        return [*label, *(f"| {' | '.join(line)} |" for line in lines), *caption]


class Items(NamedTuple):
    """A list; of texts, or of links with where they lead."""

    items: Sequence[str] | Mapping[str, str]
    title: str = ""
    kind: str = "items"


class Quote(NamedTuple):
    """A text that somebody or something wrote: after `before`, below `title`."""

    text: str
    before: str = ""
    title: str = ""
    kind: str = "quote"


class Fold(NamedTuple):
    """Blocks that are folded away below their title."""

    title: str
    blocks: Sequence[Block]
    mark: int | str | None = ""
    kind: str = "fold"


Block = str | Table | Items | Quote | Fold | Figure


@dataclass
class Section:
    """A heading and what stands below it; left out without blocks."""

    title: str
    blocks: Sequence[Block]
    page_only: bool = False  # not in Markdown


@dataclass
class Document:
    """A report. data: its numbers, for JSON."""

    title: str
    answer: Sequence[str]  # sentences; the first is the heading
    about: str
    sections: Sequence[Section]
    picture: Figure | None = None
    remarks: Sequence[str] = ()  # what to know before trusting the numbers
    notice: str = ""
    data: Any = field(default_factory=dict)

    def html(self) -> str:
        """Return the page."""
        found = [s for s in self.sections if s.blocks]
        return (
            _templates()
            .get_template("page.html.jinja")
            .render(doc=self, sections=found, style=style, ROW=ROW, HEIGHT=HEIGHT)
        )

    def markdown(self) -> str:
        """Return the same numbers for a pull request or a terminal, without figures and long texts."""
        lines = [f"# {escaped(self.answer[0])}", ""]
        lines += [part for text in (*self.answer[1:], self.about) for part in (escaped(text), "")]
        lines += [f"- {escaped(remark)}" for remark in self.remarks] + [""] * bool(self.remarks)
        for section in self.sections:
            blocks = [block for block in section.blocks if not isinstance(block, Figure)]
            if blocks and not section.page_only:
                lines += [f"## {escaped(section.title)}", ""]
                lines += [line for block in blocks for line in (*_lines(block), "")]
        lines += [f"> {escaped(self.notice)}"] if self.notice else []
        return "\n".join(lines).rstrip() + "\n"

    def json(self) -> str:
        """Return its numbers."""
        return json.dumps(finite(self.data), indent=1, allow_nan=False, sort_keys=True) + "\n"

    def write(self, out: str | Path, names: Sequence[str] = ("report.html",)) -> Path | None:
        """Write it where `--out` says; return the page, or what was written instead, or None for stdout.

        A directory (one that exists, ends with a slash or has no suffix) gets the files `names`; a path that
        ends with .html, .md or .json is that file; `-` is Markdown on stdout. Raises UserError where nothing
        can be written.
        """
        if str(out) == STDOUT:
            sys.stdout.write(self.markdown())
            return None
        formats = {".html": self.html, ".htm": self.html, ".md": self.markdown, ".json": self.json}
        folder, target = folder_of(out), Path(out)
        files = [folder / name for name in names] if folder == target else [target]
        if files[0].suffix.lower() not in formats:
            known = "a directory (with / at its end), or a file that ends with .html, .md or .json"
            raise UserError(f"--out {out}: give {known}", code="report-out")
        texts = {file: formats[file.suffix.lower()]() for file in files}
        for file, text in texts.items():
            save(file, text)
        return files[0]


def folder_of(out: str | Path) -> Path:
    """Return the directory that a report with this `--out` is written into."""
    path = Path(out)
    whole = path.is_dir() or str(out).endswith("/") or not (path.suffix or str(out) == STDOUT)
    return path if whole else path.parent


def save(file: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises UserError where that cannot be."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror}); set another --out", code="report-out"
        ) from None


def _lines(block: Block) -> list[str]:
    """Return a block as lines of Markdown."""
    if isinstance(block, Table):
        return block.markdown()
    if isinstance(block, Items):
        return [
            *([escaped(block.title), ""] if block.title else []),
            *(f"- {escaped(i)}" for i in block.items),
        ]
    if isinstance(block, Fold):
        return [
            f"**{escaped(block.title)}**",
            "",
            *(line for inner in block.blocks for line in (*_lines(inner), "")),
        ]
    if isinstance(block, Quote):
        return [f"> {escaped(' '.join(part for part in (block.title, block.before + block.text) if part))}"]
    return [escaped(block)] if isinstance(block, str) else []


@cache
def _templates() -> jinja2.Environment:
    def safe(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        autoescape=True,
        finalize=safe,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["css"] = Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8"))
    found.tests["text"] = lambda value: isinstance(value, str)
    return found
