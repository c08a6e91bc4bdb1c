"""The report as files."""

from __future__ import annotations

from pathlib import Path

from common.files import write_text
from eval import store
from eval.report.gather import Report, as_json
from eval.report.page import html
from eval.report.summary import markdown


def write(report: Report, target: Path) -> None:
    """results.json, report.md and report.html in `target`, each whole or not at all."""
    target.mkdir(parents=True, exist_ok=True)
    texts = {
        "results.json": store.dump(as_json(report)),
        "report.md": markdown(report),
        "report.html": html(report),
    }
    for name, text in texts.items():
        write_text(target / name, text)
