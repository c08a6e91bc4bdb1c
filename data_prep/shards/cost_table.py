"""The stored forecast of a preparation, and the table that compares it with what the jobs measured."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import UserError
from emo.common.io.files import sha256
from emo.common.io.objects import local_directory
from emo.common.io.untrusted import read_json
from emo.common.report.document import Table

from ..config import MANIFEST, SETTINGS
from .costs import FILES, FORECAST, Costs, read_costs
from .format import parse_manifest

CAPTION = (
    "Forecast: by `emo plan --data` from a sample of the sources. It assumes that all rows are used. Times, "
    "CPU and memory are those of the job that took the most."
)


class Record(NamedTuple):
    """The predicted or measured costs of a preparation."""

    costs: Costs
    jobs: int
    rows: int  # of the sources
    tokens: int  # of all splits

    def shown(self) -> dict[str, str]:
        """Return the numbers as text by name."""
        jobs = {"jobs": f"{self.jobs:,}", "processes per job": f"{self.costs.workers:,}"}
        return jobs | self.costs.shown() | {"rows read": f"{self.rows:,}", "tokens": f"{self.tokens:,}"}

    def as_json(self, settings: str) -> str:
        """Return the text of a stored forecast. settings: digest of the settings that it is for."""
        tree = self._asdict() | {"costs": self.costs._asdict(), "settings": settings}
        return json.dumps(tree, indent=1) + "\n"


def cost_tables(configs: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Return a table for each data directory of resolved recipes that has measured or predicted costs.

    Of data in a store, only files that training has copied to this host are read.
    """
    names: list[str] = []
    for config in configs:
        with contextlib.suppress(LookupError, TypeError):
            names.append(str(config["data"]["dir"]))
    tables = []
    for name in dict.fromkeys(names):
        columns: list[dict[str, str]] = []
        for read in (_read_forecast, _read_measured):
            columns.append({})
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError, UserError):
                columns[-1] = read(local_directory(name)).shown()
        rows = [
            [key[0].upper() + key[1:], *(column.get(key) for column in columns)]
            for key in columns[0] | columns[1]
        ]
        tables.append(Table([name, "Forecast", "Measured"], rows, CAPTION))
    return tables


def _read_forecast(directory: Path) -> Record:
    """Return the forecast for the settings of the prepared data. Raises an error if there is none."""
    tree = read_json(directory / FORECAST)
    if tree.pop("settings") != sha256(directory / SETTINGS):
        raise ValueError("the forecast is for other settings")
    return Record(**tree | {"costs": Costs(**tree["costs"])})


def _read_measured(directory: Path) -> Record:
    """Return what the jobs measured. Raises an error if they recorded nothing."""
    if (costs := read_costs(directory)) is None:
        raise FileNotFoundError(directory)
    manifests = [parse_manifest(file.parent) for file in sorted(directory.glob(f"*/{MANIFEST}"))]
    rows = sum(source["rows"] for source in manifests[0].sources)  # all splits list the same sources
    return Record(costs, len([*directory.glob(FILES)]), rows, sum(manifest.tokens for manifest in manifests))
