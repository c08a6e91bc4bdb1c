"""Importing this first ends a command with a line where the project's packages are missing."""

import importlib.util
import sys

if importlib.util.find_spec("tokenizers") is None:  # where it is missing, so are the others
    print(
        "error: the packages of this project are not here (tokenizers is missing): run "
        "`source .venv/bin/activate` (`make setup` makes it), or pip install .",
        file=sys.stderr,
    )
    raise SystemExit(2)  # ExitCode.MISTAKE
