"""Explanations of error codes, from `errors.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml


@cache
def error_index() -> dict[str, dict[str, str]]:
    """Return the cause and the fix of each error code."""
    return yaml.safe_load(Path(__file__).with_name("errors.yaml").read_text(encoding="utf-8"))


def explain_code(code: str) -> str | None:
    """Return the explanation of an error code, or None if there is no such code."""
    entry = error_index().get(code.strip("[]"))
    return None if entry is None else f"{entry['cause']}\n\n{entry['fix']}"
