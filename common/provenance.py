"""Which code and which libraries made something."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def code_version() -> str:
    """Commit of this code, marked when it was changed since; `unknown` outside a checkout or without git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    return described.stdout.strip() or "unknown"


def library_versions(*packages: str) -> dict[str, str]:
    """Installed versions by package name."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
