"""Check for the required packages when imported, and exit with one line if they are missing."""

import importlib.util
import sys

MISSING = [name for name in ("tokenizers", "psutil", "pydantic") if importlib.util.find_spec(name) is None]
if MISSING:
    print(
        f"error: the required packages are not installed ({MISSING[0]} is missing). Run "
        "`source .venv/bin/activate` (created by `make setup`) or `pip install .` [missing-extra]",
        file=sys.stderr,
    )
    raise SystemExit(2)  # ExitCode.MISTAKE
