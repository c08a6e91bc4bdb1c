"""Which code and which libraries made something, and where what comes with the code lies."""

from __future__ import annotations

import contextlib
import importlib.metadata
import subprocess
from pathlib import Path

from emo import __version__

# The checkout; for an installed wheel, whose layout is the same, the directory of its packages.
REPOSITORY = Path(__file__).resolve().parents[1]


def shipped(path: Path) -> Path:
    """Return `path`, or the file of that name that comes with this code where nothing is at a relative one.

    So `launch/recipes/NAME.yaml` and `ds_configs/NAME.json` mean the same in a checkout and anywhere else.
    """
    ours = REPOSITORY / path
    return path if path.exists() or not ours.exists() else ours


def code_version() -> str:
    """Return the commit of this code, marked when it was changed since; the version of an installed wheel.

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
    """Return installed versions by package name."""
    versions = dict.fromkeys(packages, "not installed")
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
