"""Reports escape text, agree in all formats, draw curves, and are written to the chosen path."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from emo.common.report import figure
from emo.common.report.document import (
    HEADLINE,
    Cell,
    Document,
    Fold,
    Items,
    Quote,
    ReportSection,
    Table,
    drawn,
)
from emo.common.report.figure import Curve, Curves, Figure, choose_series, mean_points
from emo.common.report.numbers import COMPARED, DASH, Effect, describe_effects
from emo.common.text import printable
from tests.helpers.html import Page
from tests.helpers.refusals import refused

HOSTILE = '</td><script>alert("1")</script>|`*_[x](http://x)_*` $a$ \x1b[31m\u202e &amp;\n# x #000003'
NAMES = ["$x^$", "日本語", "x" * 150, "%d {0}", "{{ 7 * 7 }}", HOSTILE]


def document(name: str = "a name", answer: str = "An answer.") -> Document:
    cells = [Cell(name, "a note", mark=1), Cell("12.5", "11.0 to 14.0", "better"), 1234, None]
    dots = [Effect(name, 1, 0, 12.5, 11.0, 14.0), Effect("alone", 2, 0, 12.0, math.nan, math.nan)]
    curves = Curves(name, [Curve(0, [(1.0, 2.0)], [(1.0, 3.0)])])
    panels = Figure(name, [curves], name, [(0, name)], [name])
    rows = [[e.label, *drawn(e, "{:.1f}"), 1, 2] for e in dots]
    forest = Table(["Series", "Plot", "Value", "n", "m"], rows)
    fold = Fold(name, [Quote(name, name, name)], 1)
    sections = [
        ReportSection(
            name, Table(["Model", name, "n", "m"], [cells], name), panels, Items([name], name), fold
        ),
        ReportSection("Never", Table(["x"], []), "text alone"),
    ]
    answers = [answer, "Another.", f"{name} {'word ' * HEADLINE}"]
    return Document(name, answers, name, sections, forest, [name], {"x": math.inf})


@pytest.mark.parametrize("name", NAMES)
def test_all_text_is_escaped(name: str) -> None:
    page, markdown = document(name).html(), document(name).markdown()
    assert Page(page).sections == [printable(name)]
    assert "<script" not in page and "\x1b" not in page + markdown and "\u202e" not in page + markdown
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, "a cell broke its row"
    assert "<" not in markdown and len([x for x in markdown.splitlines() if x.startswith("#")]) == 2


def test_html_and_markdown_have_the_same_numbers_and_begin_with_the_answer() -> None:
    page, markdown = Page(document().html()), document().markdown()
    (row,) = page.table("Model")
    first, _ = page.table("Series")
    assert [first[key] for key in ("Series", "Value", "n")] == ["a name", "12.5 11.0 to 14.0", "1"]
    assert list(row.values()) == ["a name a note", "12.5 ↑ 11.0 to 14.0", "1,234", DASH]
    assert f"| a name (a note) | 12.5 ↑ (11.0 to 14.0) | 1,234 | {DASH} |" in markdown
    assert "default-src 'none'" in document().html()
    assert page.answer == "An answer. Another." and markdown.startswith("# An answer. Another.\n")


def test_curves_keep_spikes_and_series_differ_by_more_than_colour() -> None:
    """Many points are reduced to a few hundred, with a band that reaches the maximum."""
    points = [(float(i), 6.0 if i % 9000 == 7 else 1.0) for i in range(100_000)]
    image = figure.svg(Curves("loss", [Curve(0, points)]), "f", True)
    assert len(image) < 60_000 and "fill-opacity" in image and ">6</text>" in image
    looks = [figure.style(i) for i in range(40)]
    assert len(set(looks)) == 40 and len({marker for _, marker, _ in looks[1:7]}) == 6
    chosen = [choose_series(names) for names in (["", "mle", "emo", "emo", "other"], ["emo", "mle", "other"])]
    assert chosen[0][:3] == [0, 1, 2] and chosen[1] == [2, 1, chosen[0][4]], "the same on all pages"
    assert len(set(chosen[0])) == 5


def test_a_short_last_record_does_not_end_a_curve_in_a_jump() -> None:
    records = [{"step": step, "nll": nll} for step, nll in ((10, 4.0), (20, 3.0), (22, 1.0))]
    assert mean_points(records, "step", "nll") == [(10, 4.0), (22, pytest.approx((10 * 3 + 2 * 1) / 12))]
    assert mean_points(records[:2], "step", "nll") == [(10, 4.0), (20, 3.0)]


def test_where_a_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.d").mkdir()
    report, names = document(), ("report.md", "results.json")
    for out in (".", "there.d", "new.d/", "plain"):
        assert report.write(out, names) == Path(out) / "report.md"
        assert all(Path(out, name).is_file() for name in names)
    assert report.write("a/x.json", names) == Path("a/x.json")
    assert json.loads(Path("a/x.json").read_text(encoding="utf-8")) == {"x": None}
    assert report.write("-", names) is None and capsys.readouterr().out == report.markdown()
    with refused("report-out"):
        report.write("x.pdf", names)


def test_many_effects_without_intervals_are_counted() -> None:
    effects = [
        Effect(name, None, 0, value, math.nan, math.nan)
        for name, value in zip("abcdef", range(6), strict=True)
    ]
    known = Effect("g", None, 1, 9.0, 8.0, 10.0)
    text = describe_effects([*effects, known], COMPARED, "points")
    assert text.startswith("1 ") and "6 without an interval" in text and "Best: g" in text
    assert describe_effects(effects, COMPARED, "points").startswith("6 without an interval")
    assert describe_effects(effects[:2], COMPARED, "points") == (
        "a shows no clear difference, and b is better by 1.0 points (no interval)"
    )
