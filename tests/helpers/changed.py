"""Select the tests that changed files need. `make test-fast` runs them.

python -m tests.helpers.changed      prints them
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.conftest import REPO

PACKAGES = ("common", "data_prep", "loss", "pipeline", "eval", "experiments")
# Prefix of a path -> its tests in tests/unit and tests/launch. The first matching prefix counts. Writers of a
# file format also need the tests of its readers.
NEEDED = {
    "pipeline/loss/": ["loss", "pipeline/test_model.py", "pipeline/test_hf.py"],
    "pipeline/control/run_dir.py": ["pipeline", "eval/test_watch.py"],
    "pipeline/": ["pipeline"],
    "data_prep/": ["data_prep", "pipeline/test_order.py", "pipeline/test_identity.py"],
    "eval/": ["eval"],
    "experiments/": ["experiments"],
    "launch/": ["pipeline", "common"],
    "ds_configs/": ["pipeline"],
    "examples/": ["pipeline/test_hf_trl.py", "loss/test_objectives.py"],
    **{key: ["test_docs.py"] for key in ("docs/", "README.md")},
    **{key: ["test_bench.py"] for key in ("Makefile", "tests/bench/")},
    **{key: [] for key in ("CONTRIBUTING.md", ".github/", ".pre-commit-config.yaml", "tests/campaigns/")},
    **{key: ["test_packaging.py"] for key in ("CHANGELOG.md", "CITATION.cff", "LICENSE")},
    **{key: ["test_packaging.py", "test_private_apis.py"] for key in ("pyproject.toml", "requirements.lock")},
    **{f"{kind}/{package}/": [package] for package in PACKAGES for kind in ("tests/unit", "tests/launch")},
}


def changed() -> list[str]:
    """Return the files that differ from the last commit, or the files of the last commit if none differs."""
    for command in (["git", "status", "--porcelain", "-uall"], ["git", "show", "--name-only", "--format="]):
        lines = subprocess.run(command, cwd=REPO, capture_output=True, text=True).stdout.splitlines()
        files = [line.split()[-1] for line in lines if line.strip()]
        if files:
            return files
    return []


def needed(files: list[str]) -> list[str]:
    """Return the tests that changed `files` need. A file with an unknown prefix needs all tests."""
    folders: set[str] = set()
    for file in files:
        if file.startswith("tests/") and Path(file).match("test_*.py"):  # a test file needs itself
            folders.add(file.split("/", 2)[-1])
            continue
        fitting = next((tests for prefix, tests in NEEDED.items() if file.startswith(prefix)), None)
        if fitting is None:
            return ["tests"]
        folders |= set(fitting)
    paths = (REPO / "tests" / kind / name for name in sorted(folders) for kind in ("unit", "launch"))
    return ["tests/unit/test_repository.py", *(str(p.relative_to(REPO)) for p in paths if p.exists())]


if __name__ == "__main__":
    print(*needed(changed()))
