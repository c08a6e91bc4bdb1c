"""Digests of source code, which identify the code that made a result."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import emo
from emo.common.io.files import sha256


@lru_cache
def code_digest(module: str) -> str:
    """Return the digest of `module` at the first call, or after `code_digest.cache_clear()`."""
    return current_digest(module)


def current_digest(module: str) -> str:
    """Return a digest of the present content of the files in `find_sources`."""
    files = sorted(find_sources(module).items())
    lines = (f"{name} {sha256(path) if path.exists() else 'missing'}\n" for name, path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


@lru_cache
def find_sources(module: str) -> dict[str, Path]:
    """Return the files of `module` and its imports from this project, by path below the project's root.

    Imports within functions and for type hints count too. So do the YAML files next to each module and in a
    folder of its name. The list is cached: a new import changes the content of a file in it.
    """
    root = Path(emo.__file__).parents[1]
    finder = _Finder(path=[str(root)])
    with suppress(ImportError):  # an unknown module has no files
        finder.import_hook(module)
    modules = _files(finder)
    folders = {folder for path in modules for folder in (path.parent, path.with_suffix(""))}
    files = [*modules, *(path for folder in folders for path in folder.glob("*.yaml"))]
    return {path.relative_to(root).as_posix(): path for path in files}


def find_plugin_sources(objective: str) -> list[Path]:
    """Return the files of a custom objective, FILE.py:FUNCTION or MODULE:FUNCTION, and of its imports.

    Only imports from the same folder or package count. The list is empty for other objectives and for missing
    files.
    """
    module = objective.rpartition(":")[0]
    if module.endswith(".py"):
        if not Path(module).is_file():
            return []
        finder = _Finder(path=[str(Path(module).parent)])
        finder.run_script(module)
        return _files(finder)
    try:
        spec = find_spec(module) if module else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return []
    depth = module.count(".") + (spec.submodule_search_locations is not None)
    finder = _Finder(path=[str(Path(spec.origin).parents[depth])])
    finder.import_hook(module)
    return _files(finder)


def _files(finder: ModuleFinder) -> list[Path]:
    files = (getattr(module, "__file__", None) for module in finder.modules.values())
    return sorted({Path(file) for file in files if file})


class _Finder(ModuleFinder):
    """Finds imported modules. A folder without Python files, such as wandb/, is not one."""

    def find_module(self, name: str, *args: Any) -> Any:
        try:
            return super().find_module(name, *args)
        except AttributeError:  # modulefinder asks for the loader of a folder, which has none
            raise ImportError(name) from None
