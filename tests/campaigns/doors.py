"""The loss inside the oldest release of TRL that pyproject.toml allows; the suite has the newest.

    python -m tests.campaigns.doors [VERSION ...]

Each release is downloaded into a directory of its own, which stands before the environment's packages, so
that all else stays as locked. Exits with pytest's code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib

from tests.conftest import REPO

TESTS = "tests/pipeline/test_hf_trl.py"


def oldest() -> str:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bound,) = (line for line in project["optional-dependencies"]["test"] if line.startswith("trl>="))
    return bound.removeprefix("trl>=")


def main(versions: list[str]) -> int:
    for version in versions or [oldest()]:
        with tempfile.TemporaryDirectory() as directory:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", directory]
            subprocess.run([*pip, f"trl=={version}"], check=True)
            print(f"TRL {version}", flush=True)
            environment = os.environ | {"PYTHONPATH": directory}
            command = [sys.executable, "-m", "pytest", "-n", "0", TESTS]
            done = subprocess.run(command, cwd=REPO, env=environment)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
