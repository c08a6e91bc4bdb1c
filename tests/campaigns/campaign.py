"""What a long campaign found: said at once, shown as a table at the end, and kept as JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.conftest import REPO


class Campaign:
    """Findings in order; call it with each."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []

    def __call__(self, part: str, case: str, results: str, good: bool) -> None:
        self.rows.append({"part": part, "what": case, "found": results, "good": good})
        print(f"{part}: {case}: {results}", flush=True)

    def finish(self, settings: dict[str, Any]) -> int:
        """Print the table, write runs/NAME.json; 1 when a finding is not good."""
        table = Table("part", "what", "found", "")
        for row in self.rows:
            table.add_row(row["part"], row["what"], row["found"], "ok" if row["good"] else "FAILED")
        Console().print(table)
        target = REPO / "runs" / f"{self.name}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps({"settings": settings, "rows": self.rows}, indent=1) + "\n")
        return int(not all(row["good"] for row in self.rows))
