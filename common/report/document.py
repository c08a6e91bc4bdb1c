"""Reports with an answer, a picture and tables, written as HTML, Markdown or JSON.

The HTML page is one file without scripts and external resources. All text is escaped, including control and
direction characters.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ..errors import UserError
from ..io.files import replace_nonfinite, write_text
from ..text import markdown as escaped
from ..text import printable
from .figure import DASHES, MARKERS, Figure, style, svg
from .numbers import Axis, Effect, axis_of, format_interval, formatted

ARROWS = {"better": "↑", "worse": "↓"}
TONES = {1: "better", -1: "worse", 0: ""}  # by the direction of an effect
STDOUT = "-"
HEADLINE = 25  # words


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    note: str = ""  # small print below, for example an interval
    tone: str = ""  # better, worse, unclear, best, quiet, again (repeats the cell above)
    mark: int | str | None = ""  # series whose marker precedes the text; None: a grey one
    shade: float = 0  # of the background, 0 to 1
    plot: Effect | None = None  # drawn on the table's axis, instead of the text

    @property
    def shown(self) -> str:
        """Return the text. A number gets an arrow with the same meaning as its colour."""
        arrow = ARROWS.get(self.tone, "") if any(c.isdigit() for c in self.text) else ""
        return f"{self.text} {arrow}".rstrip()

    @property
    def markdown(self) -> str:
        """Return the cell for a Markdown table."""
        text = escaped(f"{self.shown} ({self.note})" if self.note else self.shown)
        return f"**{text}**" if self.tone == "best" else text


def estimated(value: Any, low: Any, high: Any, form: str, scale: float = 1, tone: str = "") -> Cell:
    """Return a cell with a number and its interval."""
    return Cell(formatted(value, form, scale), format_interval(low, high, form, scale), tone)


def drawn(effect: Effect, form: str) -> list[Cell]:
    """Return two cells: the effect on the table's axis, and its number with the interval."""
    return [Cell("", plot=effect), estimated(*effect[3:], form, tone=TONES[effect.direction])]


Row = Sequence[Cell | str | float | None]  # numbers are shown as integers, None as a dash


@dataclass
class Table:
    """Rows with a heading in the first cell. The first `words` columns are text, the others numbers."""

    head: Sequence[str | Cell]
    rows: Sequence[Row]
    caption: str = ""
    words: int = 1
    label: str = ""  # for sections with several tables
    line: float | None = 0.0  # reference value of the cells with a plot
    axis: Axis | None = None  # of these cells. By default it fits them.

    def __post_init__(self) -> None:
        effects = [cell.plot for row in self.rows for cell in row if isinstance(cell, Cell) and cell.plot]
        self.axis = self.axis or (axis_of(effects, self.line) if effects else None)

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def plotted(self) -> set[int]:
        """Return the numbers of the columns that are drawn."""
        return {i for row in self.cells for i, cell in enumerate(row) if cell.plot}

    @property
    def cells(self) -> list[list[Cell]]:
        """Return the head and the rows with all values converted to cells."""
        return [
            [v if isinstance(v, Cell) else Cell(v if isinstance(v, str) else formatted(v)) for v in row]
            for row in (self.head, *self.rows)
        ]


@dataclass
class Items:
    """A list of texts, or of links by their targets."""

    items: Sequence[str] | Mapping[str, str]
    title: str = ""

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclass
class Quote:
    """A quoted text below `title`, with its context `before`."""

    text: str
    before: str = ""
    title: str = ""


@dataclass
class Fold:
    """Blocks that are collapsed below a title."""

    title: str
    blocks: Sequence[Block]
    mark: int | str | None = ""

    def __bool__(self) -> bool:
        return any(self.blocks)


Block = str | Table | Items | Quote | Fold | Figure


class ReportSection:
    """A heading and its non-empty blocks. A section of plain text only is left out."""

    def __init__(self, title: str, *blocks: Block, page_only: bool = False) -> None:
        """page_only: leave the section out of Markdown."""
        self.title = title
        self.page_only = page_only
        self.blocks = [block for block in blocks if block]

    def __bool__(self) -> bool:
        return any(not isinstance(block, str) for block in self.blocks)


@dataclass
class Document:
    """A report. data: the numbers for JSON."""

    title: str
    answer: Sequence[str]  # sentences; the first is the heading, which takes as many as it has space for
    about: str
    sections: Sequence[ReportSection]
    picture: Figure | Table | None = None
    remarks: Sequence[str] = ()  # caveats
    data: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        head, *others = self.answer
        while others and len(f"{head} {others[0]}".split()) <= HEADLINE:
            head = f"{head} {others.pop(0)}"
        self.answer = [head, *others]

    def html(self) -> str:
        """Return the HTML page."""
        labels: Counter[str] = Counter()

        def unique(label: str) -> str:
            labels[label] += 1
            return label if labels[label] == 1 else f"{label} ({labels[label]})"

        return _page().render(doc=self, sections=[s for s in self.sections if s], unique=unique)

    def markdown(self) -> str:
        """Return the report as Markdown, without figures and page-only sections."""
        head, *texts = self.answer
        picture = [self.picture] if isinstance(self.picture, Table) else []
        parts = [f"# {escaped(head)}", *_markdown([Items(self.remarks), *texts, self.about, *picture])]
        for section in self.sections:
            blocks = _markdown(section.blocks) if section and not section.page_only else []
            parts += [f"## {escaped(section.title)}", *blocks] if blocks else []
        return "\n\n".join(parts) + "\n"

    def json(self) -> str:
        """Return the numbers as JSON."""
        return json.dumps(replace_nonfinite(self.data), indent=1, allow_nan=False) + "\n"

    def write(self, out: str | Path, names: Sequence[str] = ("report.html",)) -> Path | None:
        """Write the report to --output_path. Returns the first file, or None for stdout.

        A directory (an existing one, or a path with a trailing slash or without a suffix) gets the files
        `names`. A path with the suffix .html, .md or .json is written as that format. `-` prints Markdown to
        stdout. Raises UserError for other suffixes.
        """
        if str(out) == STDOUT:
            sys.stdout.write(self.markdown())
            return None
        formats = {".html": self.html, ".htm": self.html, ".md": self.markdown, ".json": self.json}
        folder = folder_of(out)
        files = [folder / name for name in names] if folder == Path(out) else [Path(out)]
        if files[0].suffix.lower() not in formats:
            accepted = "a directory with a trailing / or a file that ends in .html, .md or .json"
            raise UserError(f"--output_path {out} must be {accepted}", code="report-out")
        texts = [formats[file.suffix.lower()]() for file in files]
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in zip(files, texts, strict=True):
            write_text(file, text)
        return files[0]


def folder_of(out: str | Path) -> Path:
    """Return the directory of a report with this `--output_path`."""
    path = Path(out)
    is_folder = path.is_dir() or str(out).endswith("/") or not (path.suffix or str(out) == STDOUT)
    return path if is_folder else path.parent


@functools.cache
def _page() -> jinja2.Template:
    """Return the page template, which escapes all text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda v: printable(v) if isinstance(v, str) and not isinstance(v, Markup) else v,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"style": style, "svg": svg, "MARKERS": MARKERS, "DASHES": DASHES}
    environment.globals |= {"formatted": formatted}
    return environment.get_template("page.html.jinja")


def _markdown(blocks: Sequence[Block]) -> list[str]:
    """Convert blocks to paragraphs of Markdown, without figures."""
    parts: list[str] = []
    for block in filter(None, blocks):
        match block:
            case str():
                parts.append(escaped(block))
            case Table():
                kept = [i for i in range(len(block.head)) if i not in block.plotted]
                head, *others = [[cells[i].markdown for i in kept] for cells in block.cells]
                rows = [head, ["---"] * len(kept), *others]
                parts.append(f"**{escaped(block.label)}**" if block.label else "")
                parts += ["\n".join(f"| {' | '.join(row)} |" for row in rows), escaped(block.caption)]
            case Items():
                parts += [escaped(block.title), "\n".join(f"- {escaped(item)}" for item in block.items)]
            case Quote():
                parts.append(f"> {escaped(f'{block.title} {block.before}{block.text}')}")
            case Fold():
                parts += [f"**{escaped(block.title)}**", *_markdown(block.blocks)]
    return list(filter(None, parts))
