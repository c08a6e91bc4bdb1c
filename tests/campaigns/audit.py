"""What is known against the packages in requirements.lock: advisories, withdrawn and newer releases.

    python -m tests.campaigns.audit DIRECTORY      where uv and pip-audit lie; `make audit` installs them

Only what this Python and platform would install is looked at. A question that could not be asked is named, so
that silence means an answer. Exit codes: 0 nothing is known against them, 1 something is (a newer
release alone is nothing), 2 nothing could be asked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from common.errors import ExitCode, one_line
from tests.conftest import REPO

LOCK = REPO / "requirements.lock"
YANKED = re.compile(r"`(\S+)==(\S+)` is yanked(?: \(reason: \"(.*)\"\))?")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Part(NamedTuple):
    """What one question brought to light."""

    name: str
    found: list[str]  # a line each
    asked: int  # packages that were asked about
    why: str = ""  # they were not all asked about

    def __str__(self) -> str:
        state = f"{len(self.found)} found among {self.asked} packages" if self.asked else "NOT CHECKED"
        lines = [f"{self.name}: {state}" + (f" ({self.why})" if self.why else "")]
        return "\n  ".join([*lines, *self.found])


def pins(text: str) -> dict[str, Version]:
    """The versions that a lock's lines give this Python and platform, by name."""
    found = {}
    for line in text.splitlines():
        if line[:1].isalnum():
            wanted = Requirement(line.removesuffix("\\").strip())
            if wanted.marker is None or wanted.marker.evaluate():
                found[canonicalize_name(wanted.name)] = Version(next(iter(wanted.specifier)).version)
    return found


def advisories(locked: dict[str, Version], auditor: Path, run: Run = subprocess.run) -> Part:
    """Known vulnerabilities, by pip-audit, which passes over in silence what its service does not know."""
    name = "advisories"
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as file:
        file.write("".join(f"{package}=={version}\n" for package, version in locked.items()))
        file.flush()
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        done = run([auditor, "-r", file.name, *options], capture_output=True, text=True)
    try:
        answers = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        said = done.stderr.strip().splitlines() or ["no answer"]
        return Part(name, [], 0, one_line(said[-1], 150))
    known = [answer for answer in answers if "vulns" in answer]
    found = [
        f"{one['name']} {one['version']}: {fault['id']}, cured in {' '.join(fault['fix_versions']) or 'none'}"
        for one in known
        for fault in one["vulns"]
    ]
    unknown = len(locked) - len(known)
    return Part(name, found, len(known), f"the service does not answer about {unknown}" if unknown else "")


def withdrawn(locked: dict[str, Version], uv: Path, run: Run = subprocess.run) -> Part:
    """Releases that their authors have withdrawn from the registry since they were locked."""
    name = "withdrawn releases"
    given = "".join(f"{package}=={version}\n" for package, version in locked.items())
    options = ["--dry-run", "--no-deps", "--reinstall", "--python", sys.executable, "-r", "-"]
    done = run([uv, "pip", "install", *options], input=given, capture_output=True, text=True, cwd="/")
    if done.returncode:
        return Part(name, [], 0, one_line(done.stderr, 150))
    found = [f"{p} {v}: {reason or 'no reason given'}" for p, v, reason in YANKED.findall(done.stderr)]
    return Part(name, found, len(locked))


def newer(locked: dict[str, Version], uv: Path, run: Run = subprocess.run) -> Part:
    """Newer releases that this project's bounds allow; those that only mend something come first."""
    name = "newer releases"
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--upgrade",
        "pyproject.toml",
        "-",
    ]  # as `make lock`, from nothing
    done = run(command, input="openicl\n", capture_output=True, text=True, cwd=REPO)
    if done.returncode:
        return Part(name, [], 0, one_line(done.stderr, 150))
    newest = pins(done.stdout)
    later = [(p, v, newest[p]) for p, v in locked.items() if p in newest and newest[p] > v]
    patches = [one for one in later if one[1].release[:2] == one[2].release[:2]]
    rest = [one for one in later if one not in patches]
    found = [f"{p} {old} -> {new} (patch)" for p, old, new in patches]
    found += [f"{p} {old} -> {new}" for p, old, new in rest]
    return Part(name, found, len(locked))


def main(tools: Path) -> int:
    """Ask everything, and print what was said."""
    locked = pins(LOCK.read_text())
    parts = [
        advisories(locked, tools / "pip-audit"),
        withdrawn(locked, tools / "uv"),
        newer(locked, tools / "uv"),
    ]
    print(*parts, sep="\n")
    return verdict(*parts)


def verdict(known: Part, gone: Part, later: Part) -> int:
    """The exit code of the three answers."""
    if known.found or gone.found:
        return ExitCode.FAILURE
    return ExitCode.DONE if known.asked or gone.asked or later.asked else ExitCode.MISTAKE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
