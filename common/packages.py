"""Importing this first ends a command with a line where the project's packages are missing."""

import importlib.util
import sys

# Where one of these is missing, so are others.
MISSING = [name for name in ("tokenizers", "psutil", "pydantic") if importlib.util.find_spec(name) is None]
if MISSING:
    print(
        f"error: the packages of this project are not installed ({MISSING[0]} is missing): run "
        "`source .venv/bin/activate` (`make setup` makes it), or pip install .",
        file=sys.stderr,
    )
    raise SystemExit(2)  # ExitCode.MISTAKE
