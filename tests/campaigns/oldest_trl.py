"""Test the loss in the oldest release of TRL that pyproject.toml allows. The suite tests the newest.

    python -m tests.campaigns.oldest_trl [VERSION ...]

Each release is installed into a temporary directory, which precedes the environment's packages, so that all
other packages stay as locked. Exits with pytest's code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

from tests.conftest import REPO

COMMAND = [sys.executable, "-m", "pytest", "-n", "0", "tests/unit/pipeline/test_hf_trl.py"]


def main(versions: list[str]) -> int:
    oldest = re.findall(r'"trl>=([\d.]+)"', (REPO / "pyproject.toml").read_text(encoding="utf-8"))
    for version in versions or oldest:
        with tempfile.TemporaryDirectory() as directory:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", directory]
            subprocess.run([*pip, f"trl=={version}"], check=True)
            print(f"TRL {version}", flush=True)
            code = subprocess.run(COMMAND, cwd=REPO, env=os.environ | {"PYTHONPATH": directory}).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
