"""What all rooms stand on."""

import importlib.util
import sys

__version__ = "0.1.0"  # of the whole project; pyproject.toml and CITATION.cff have it from here

_ONE = "tokenizers"  # where it is missing, so are the others: a Python without this project's packages


def _check_packages() -> None:
    """Every command imports this first: a line for those who have not activated the environment."""
    if importlib.util.find_spec(_ONE) is None:
        print(
            f"error: the packages of this project are not here ({_ONE} is missing): run "
            "`source .venv/bin/activate` (`make setup` makes it), or pip install .",
            file=sys.stderr,
        )
        raise SystemExit(2)  # ExitCode.MISTAKE


_check_packages()
