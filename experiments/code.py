"""The identity of code: a digest of a module's source and of every module of the project that it imports."""

from __future__ import annotations

import ast
import hashlib
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

import emo
from emo.common.files import Signature, signature


@lru_cache
def code_digest(module: str) -> str:
    """Return a digest of the source of `module` and of all that it imports from this project.

    So do their imports, those within functions and for type hints included: rather too much is computed again
    than too little. A process asks for each module once; after `code_digest.cache_clear()` it looks again.
    """
    lines = (f"{name} {_read(path, signature(path))[0]}\n" for name, path in sorted(sources(module).items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def sources(module: str) -> dict[str, Path]:
    """Return the files of `module` and of all that it imports from this project, by module name."""
    files: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = source_file(name)
        if name not in files and path is not None:
            files[name] = path
            # a package's __init__ runs before its modules
            waiting += [name.rpartition(".")[0], *_read(path, signature(path))[1]]
    return files


@cache
def _read(path: Path, current: Signature) -> tuple[str, list[str]]:
    """Return the digest of a source file and the names that it imports, once for each signature."""
    content = path.read_bytes()
    names: list[str] = []
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = [node.module] if node.module else []
            names += [*parent, *(".".join([*parent, alias.name]) for alias in node.names)]
    return hashlib.sha256(content).hexdigest(), names


def source_file(name: str) -> Path | None:
    """Return the file of a module of this project, None for any other name."""
    base = Path(emo.__file__).parents[1].joinpath(*name.split("."))
    files = (base.with_suffix(".py"), base / "__init__.py") if name else ()
    return next((path for path in files if path.is_file()), None)


def plugin_file(objective: str) -> Path | None:
    """Return the file of an objective that is named FILE.py:FUNCTION or MODULE:FUNCTION, None for others."""
    module = objective.rpartition(":")[0]
    if module.endswith(".py") or not module:
        return Path(module) if module else None
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def plugin_sources(objective: str) -> list[Path]:
    """Return the file of an objective that is a program and those that it imports of its folder or package.

    Empty for other objectives, and for a program that is not there.
    """
    program, files = plugin_file(objective), []
    if program is None:
        return []
    module = objective.rpartition(":")[0]
    depth = 0 if module.endswith(".py") else module.count(".") + (program.name == "__init__.py")
    root = [program.parent, *program.absolute().parent.parents][depth]
    waiting = [program]
    while waiting:
        path = waiting.pop()
        if path in files or not path.is_file():
            continue
        files.append(path)
        for name in _read(path, signature(path))[1]:
            for base in (folder.joinpath(*name.split(".")) for folder in {root, path.parent}):
                waiting += [base.with_suffix(".py"), base / "__init__.py"]
    return sorted(files)
