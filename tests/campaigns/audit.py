"""Check the packages in requirements.lock for advisories, withdrawn releases and newer releases.

    python -m tests.campaigns.audit DIRECTORY

DIRECTORY contains uv and pip-audit, which `make audit` installs.
Only packages that this Python and platform would install are checked. A check that could not run is reported.
Exit codes: 0 for no finding, 1 for an advisory or a withdrawn release (a newer release does not count), 2 if
no check could run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from emo.common.errors import ExitCode, one_line
from tests.conftest import REPO

LOCK = REPO / "requirements.lock"
YANKED = re.compile(r"`(\S+)==(\S+)` is yanked(?: \(reason: \"(.*)\"\))?")


def pins(text: str) -> dict[str, Version]:
    versions = {}
    for line in text.splitlines():
        if line[:1].isalnum():
            requirement = Requirement(line.removesuffix("\\").strip())
            if requirement.marker is None or requirement.marker.evaluate():
                version = next(iter(requirement.specifier)).version
                versions[canonicalize_name(requirement.name)] = Version(version)
    return versions


def _ask(*command: str | Path, text: str = "", cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
    """Run a command and return the completed process. Raises ValueError if it fails without output."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=cwd)
    if done.returncode and not done.stdout.strip():
        raise ValueError(one_line(done.stderr))
    return done


def advisories(locked: dict[str, Version], file: Path, tools: Path) -> list[str]:
    """Return known vulnerabilities. Raises ValueError if the service does not answer about any package."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    answers = json.loads(_ask(tools / "pip-audit", "-r", file, *options).stdout)["dependencies"]
    packages = [answer for answer in answers if "vulns" in answer]
    if not packages:
        raise ValueError("the service does not answer")
    print(f"advisories: the service does not answer about {len(locked) - len(packages)} packages")
    return [f"{p['name']} {p['version']}: {fault['id']}" for p in packages for fault in p["vulns"]]


def withdrawn(locked: dict[str, Version], file: Path, tools: Path) -> list[str]:
    """Return locked releases that were withdrawn. Raises ValueError if the registry is unavailable."""
    options = ["--dry-run", "--no-deps", "--reinstall", "--python", sys.executable, "-r", file]
    done = _ask(tools / "uv", "pip", "install", *options, cwd=file.parent)
    return [f"{package} {version}: {reason}" for package, version, reason in YANKED.findall(done.stderr)]


def newer(locked: dict[str, Version], file: Path, tools: Path) -> list[str]:
    """Return newer releases that this project allows. Raises ValueError if the registry is unavailable."""
    options = ["--quiet", "--upgrade", "pyproject.toml", "-"]
    newest = pins(_ask(tools / "uv", "pip", "compile", *options, text="openicl\n").stdout)
    return [f"{p} {v} -> {newest[p]}" for p, v in locked.items() if p in newest and newest[p] > v]


def main(tools: Path) -> int:
    locked, answered, faults = pins(LOCK.read_text()), 0, 0
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "requirements.txt"
        file.write_text("".join(f"{package}=={version}\n" for package, version in locked.items()))
        for ask in (advisories, withdrawn, newer):
            try:
                lines = ask(locked, file, tools)
            except (ValueError, OSError) as error:
                print(f"{ask.__name__}: NOT CHECKED ({error})")
                continue
            answered += 1
            faults += len(lines) if ask is not newer else 0
            print(f"{ask.__name__}: {len(lines)} among {len(locked)} packages", *lines, sep="\n  ")
    if faults:
        return ExitCode.FAILURE
    return ExitCode.DONE if answered else ExitCode.MISTAKE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
