"""Versions of the code and its libraries, and the location of files that ship with it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
from pathlib import Path

from emo import __version__

# The checkout, or the directory of an installed wheel's packages, which has the same layout.
REPOSITORY = Path(__file__).resolve().parents[1]
UNKNOWN = "unknown"  # also the default of REVISION in the Dockerfile


def shipped(path: Path) -> Path:
    """Return `path` if it exists, else the file of that name that ships with this code.

    `launch/recipes/NAME.yaml` and `ds_configs/NAME.json` thus work in every working directory.
    """
    ours = REPOSITORY / path
    return path if path.exists() or not ours.exists() else ours


def code_version() -> str:
    """Return the commit of this code, marked if there are uncommitted changes, or a wheel's version.

    Docker images have no .git. They know their commit from EMO_REVISION if it was set when they were built.
    Returns `unknown` in a checkout without git.
    """
    if not (REPOSITORY / ".git").exists():  # a wheel may be installed inside another project's checkout
        revision = os.environ.get("EMO_REVISION", UNKNOWN)
        return __version__ if revision in ("", UNKNOWN) else revision
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=REPOSITORY,
            capture_output=True,
            encoding="utf-8",
        )
    except OSError:
        return UNKNOWN
    return described.stdout.strip() or UNKNOWN


def library_versions(*packages: str) -> dict[str, str]:
    """Return installed versions by package name."""
    versions = dict.fromkeys(packages, "not installed")
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
