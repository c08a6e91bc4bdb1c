"""Names and texts of others do not act in a terminal or a report."""

from __future__ import annotations

from pathlib import Path

from emo.common.report.document import Document
from emo.eval.compare import table
from tests.helpers.results import fabricated


def test_names_stay_on_their_line(tmp_path: Path) -> None:
    forged = "emo\nall is well: no regression \x1b[32m"
    a = fabricated(tmp_path, "base", {"sst2": [True, False]})
    b = fabricated(tmp_path, forged, {"sst2": [True, False]})
    text = table(a, b)
    assert "\x1b" not in text and not any(line.startswith("all is well") for line in text.splitlines())


def test_a_page_tells_the_browser_to_run_nothing() -> None:
    text = Document("<script>x</script>", ["a"], "", []).html()
    assert "Content-Security-Policy" in text and "default-src 'none'" in text and "<script" not in text
