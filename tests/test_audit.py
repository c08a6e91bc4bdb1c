"""`make audit`: a fault ends with 1, and a question that could not be asked is not called well."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from tests.campaigns import audit

IDNA = '{"dependencies": [{"name": "idna", "version": "3.20", "vulns": [%s]}]}'


def test_pins_are_those_of_this_platform() -> None:
    text = (
        "# made by\nalpha==1.2 \\\n    --hash=sha256:00\n    # via beta\n"
        "beta==2 ; python_version < '3' \\\n    --hash=sha256:00\n"
        "Gamma_Ray==3.1 ; python_version >= '3' \\\n    --hash=sha256:00\n"
    )
    assert audit.pins(text) == {"alpha": Version("1.2"), "gamma-ray": Version("3.1")}


@pytest.mark.parametrize(
    ("advisories", "uv", "code"),
    [
        (IDNA % "", "", 0),
        (IDNA % '{"id": "X-1"}', "", 1),
        (IDNA % "", 'warning: `idna==3.20` is yanked (reason: "broken")', 1),
        ('{"dependencies": [{"name": "idna", "skip_reason": "not found"}]}', "", 0),  # uv has answered
        ("", "exit 2", 2),
    ],
)
def test_the_exit_code_tells_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advisories: str, uv: str, code: int
) -> None:
    (tmp_path / "lock").write_text("idna==3.20\n")
    monkeypatch.setattr(audit, "LOCK", tmp_path / "lock")
    scripts = {
        "pip-audit": f"cat <<'E'\n{advisories}\nE",
        "uv": uv if uv.startswith("exit") else f"cat >&2 <<'E'\n{uv}\nE",
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    assert audit.main(tmp_path) == code
