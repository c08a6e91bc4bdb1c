"""`make audit`: what is found is told, and what could not be asked is not called well."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from common.errors import ExitCode
from tests.campaigns.audit import LOCK, Part, advisories, newer, pins, verdict, withdrawn

LOCKED = {"jinja2": Version("3.1.6"), "idna": Version("3.20")}


def tool(place: Path, output: str, error: str = "", code: int = 0) -> Path:
    """A program that answers as the real one does; what it is given stands in `given` beside it."""
    (place / "output").write_text(output)
    (place / "error").write_text(error)
    path = place / "tool"
    path.write_text(f'#!/bin/sh\ncd {place}\necho "$@" > given\ncat output; cat error >&2; exit {code}\n')
    path.chmod(0o755)
    return path


def test_pins_are_those_of_this_platform() -> None:
    text = (
        "# made by\nalpha==1.2 \\\n    --hash=sha256:00\n    # via beta\n"
        "beta==2 ; python_version < '3' \\\n    --hash=sha256:00\n"
        "Gamma_Ray==3.1 ; python_version >= '3' \\\n    --hash=sha256:00\n"
    )
    assert pins(text) == {"alpha": Version("1.2"), "gamma-ray": Version("3.1")}


def test_the_lock_gives_every_package_one_version() -> None:
    locked = pins(LOCK.read_text())
    assert {"torch", "transformers", "deepspeed", "openicl"} <= set(locked)


def test_a_vulnerability_is_found(tmp_path: Path) -> None:
    answer = """{"dependencies": [
        {"name": "idna", "version": "3.20", "vulns": [{"id": "X-1", "fix_versions": ["3.21"]}]},
        {"name": "jinja2", "version": "3.1.6", "vulns": []}]}"""
    part = advisories(LOCKED, tool(tmp_path, answer, code=1))
    assert (part.found, part.asked, part.why) == (["idna 3.20: X-1, cured in 3.21"], 2, "")
    assert verdict(part, Part("", [], 2), Part("", [], 2)) == ExitCode.FAILURE


def test_packages_that_the_service_does_not_know_were_not_checked(tmp_path: Path) -> None:
    """pip-audit ends with 0 and "No known vulnerabilities found"."""
    answer = '{"dependencies": [{"name": "idna", "skip_reason": "not found"}], "fixes": []}'
    part = advisories(LOCKED, tool(tmp_path, answer, "No known vulnerabilities found"))
    assert part.asked == 0 and "NOT CHECKED" in str(part) and "about 2" in str(part)


def test_a_service_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    part = advisories(LOCKED, tool(tmp_path, "", "Traceback\nConnectionError: no route to advisories", 1))
    assert "NOT CHECKED (ConnectionError: no route to advisories)" in str(part)
    assert verdict(part, Part("", [], 0), Part("", [], 0)) == ExitCode.MISTAKE


def test_a_withdrawn_release_is_found(tmp_path: Path) -> None:
    said = 'Would install\nwarning: `idna==3.20` is yanked (reason: "broken")\n'
    part = withdrawn(LOCKED, tool(tmp_path, "", said))
    assert part.found == ["idna 3.20: broken"]
    assert verdict(Part("", [], 2), part, Part("", [], 2)) == ExitCode.FAILURE
    assert "NOT CHECKED" in str(withdrawn(LOCKED, tool(tmp_path, "", "no network", 2)))


@pytest.mark.parametrize("newest", ["3.1.7", "3.2"])
def test_newer_releases_are_told_and_are_no_fault(newest: str, tmp_path: Path) -> None:
    part = newer(LOCKED, tool(tmp_path, f"idna==3.20 \\\n    --hash=x\njinja2=={newest} \\\n    --hash=x\n"))
    patch = " (patch)" if newest == "3.1.7" else ""
    assert part.found == [f"jinja2 3.1.6 -> {newest}{patch}"]
    assert "--upgrade" in (tmp_path / "given").read_text()
    assert verdict(Part("", [], 2), Part("", [], 2), part) == ExitCode.DONE
