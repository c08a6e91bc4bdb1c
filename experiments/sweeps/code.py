"""The identity of code: a digest of a module's source and of every module of the project that it imports."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

import emo
from emo.common.io.files import Signature, signature


@lru_cache
def code_digest(module: str) -> str:
    """Return a digest of the source of `module` and of all that it imports from this project.

    So do their imports, those within functions and for type hints included: rather too much is computed again
    than too little. A process asks for each module once; after `code_digest.cache_clear()` it looks again.
    """
    lines = (f"{name} {_read(path, signature(path))[0]}\n" for name, path in sorted(sources(module).items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def sources(module: str) -> dict[str, Path]:
    """Return the files of `module` and of all that it imports from this project, by path below its root."""
    root = Path(emo.__file__).parents[1]
    files = _reached(_candidates(root, module), lambda _: {root})
    return {path.relative_to(root).as_posix(): path for path in files}


def _reached(files: list[Path], roots: Callable[[Path], set[Path]]) -> set[Path]:
    """Return those of the files that exist, and all that they import, directly or not.

    roots: the folders in which the imports of a file are looked for; what is in none is of another project.
    """
    reached: set[Path] = set()
    waiting = [*files]
    while waiting:
        path = waiting.pop()
        if path not in reached and path.is_file():
            reached.add(path)
            names = _read(path, signature(path))[1]
            waiting += [file for name in names for root in roots(path) for file in _candidates(root, name)]
    return reached


def _candidates(root: Path, name: str) -> list[Path]:
    """Return the files that importing a module below a folder may run: its packages' and its own."""
    parts = name.split(".")
    module = root.joinpath(*parts)
    packages = [module, *module.parents][: len(parts)]
    return [module.with_suffix(".py"), *(package / "__init__.py" for package in packages)]


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
    program = plugin_file(objective)
    if program is None:
        return []
    module = objective.rpartition(":")[0]
    depth = 0 if module.endswith(".py") else module.count(".") + (program.name == "__init__.py")
    root = [program.parent, *program.absolute().parent.parents][depth]
    return sorted(_reached([program], lambda path: {root, path.parent}))
