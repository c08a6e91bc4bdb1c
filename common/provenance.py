"""Versions of the code and its libraries, and the location of files that ship with it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import subprocess
from pathlib import Path

from emo import __version__

# The checkout, or the directory of an installed wheel's packages, which has the same layout.
REPOSITORY = Path(__file__).resolve().parents[1]


def shipped(path: Path) -> Path:
    """Return `path` if it exists, else the file of that name that ships with this code.

    `launch/recipes/NAME.yaml` and `ds_configs/NAME.json` thus work in every working directory.
    """
    ours = REPOSITORY / path
    return path if path.exists() or not ours.exists() else ours


def code_version() -> str:
    """Return the commit of this code, marked if there are uncommitted changes, or a wheel's version.

    `unknown` in a checkout without git.
    """
    if not (REPOSITORY / ".git").exists():  # a wheel may be installed inside another project's checkout
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
