"""Extract the examples of CONTRIBUTING.md, so that tests can run them."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from pathlib import Path
from types import ModuleType

from tests.conftest import REPO


def write_example(name: str, directory: Path) -> Path:
    """Write an example to the file named in its first line, and return the path."""
    text = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(rf"```\w+\n(# {re.escape(name)}[:\n].*?)```", text, re.DOTALL)
    (directory / name).write_text(code, encoding="utf-8")
    return directory / name


def load_example(name: str) -> ModuleType:
    """Import an example that is a Python file."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_example(name, Path(directory))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
