"""Which code and which libraries made something, and where what comes with the code lies."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

from common import __version__

# The checkout; for an installed wheel, whose layout is the same, the directory of its packages.
REPOSITORY = Path(__file__).resolve().parents[1]


def shipped(path: Path) -> Path:
    """`path`; where it is relative and nothing is there, the file of that name that comes with this code.

    So `launch/recipes/NAME.yaml` and `ds_configs/NAME.json` mean the same in a checkout and anywhere else.
    """
    ours = REPOSITORY / path
    return path if path.exists() or not ours.exists() else ours


def code_version() -> str:
    """Commit of this code, marked when it was changed since; the version of an installed wheel.

    `unknown` in a checkout without git.
    """
    if not (REPOSITORY / ".git").exists():  # a wheel may lie inside a checkout of something else
        return __version__
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=REPOSITORY,
            capture_output=True,
            encoding="utf-8",
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
