"""What the result of a run depends on: its resolved recipe, and what is in the files that this names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import sha256
from common.provenance import shipped
from common.recipe import marked
from common.untrusted import read_json
from data_prep.config import DataConfig, settings
from eval import store
from pipeline.config import FREE, RunConfig

# A run may go on with others, as they change nothing that is learned; but they change what is reported of it.
REPORTED = {"train.eval_rows", "train.mixture_from"}
OF_MODELS = (".safetensors", ".bin", ".json", ".model")  # files of a model's directory that decide
_EXTENDS = re.compile(rb"^extends:[ \t]*['\"]?([^'\"\s#]+)", re.MULTILINE)
OF_COMMANDS = (".yaml", ".yml", ".py", ".sh")  # files that tell a command what to do


def data_origin(config: DataConfig) -> dict[str, Any]:
    """What decides prepared data, by dotted key."""
    return flattened({"data": settings(config)}) | {"data.root": str(config.root)}


def run_origin(config: RunConfig, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run, by dotted key.

    recorded: what was noted when it was begun; it stands for files that are not there any more, which a run
    that is done does not need.
    """
    free = marked(RunConfig, FREE) - REPORTED
    origin = {
        key: value
        for key, value in flattened(config.model_dump(mode="json", exclude={"data"})).items()
        if not any(key == one or key.startswith(f"{one}.") for one in free)
    }
    origin |= data_origin(config.data)
    named = {"model.path": config.model.path, "objective.cost": config.objective.cost}
    names = [config.objective.name, *(part.name for part in config.objective.sum or ())]
    named |= {f"objective {name}": name.rpartition(":")[0] for name in names if ":" in name}
    for key, path in named.items():
        key = f"content of {key}"
        content = None if path is None else _content(Path(path)) or recorded.get(key)
        if content is not None:
            origin[key] = content
    return origin | _deepspeed(config, recorded)


def _deepspeed(config: RunConfig, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What the DeepSpeed file says; a file of another name may say the same."""
    try:
        return flattened({"deepspeed": read_json(shipped(config.deepspeed))})
    except (OSError, ValueError):
        return {key: value for key, value in recorded.items() if key.split(".")[0] == "deepspeed"}


def _content(path: Path) -> str | None:
    """Digest of a file, or of a model in a directory; None where nothing is there."""
    path = path.expanduser()
    try:
        if path.is_dir():
            files = [one for one in path.iterdir() if one.suffix in OF_MODELS and one.is_file()]
            return store.digest_files(path, files)
        return store.digest_files(path.parent, [path]) if path.is_file() else None
    except OSError:
        return None


def command_origin(command: list[str], out: Path) -> dict[str, Any]:
    """What decides what a command makes: its words, and the recipes and programs among them.

    Files in `out` are left out: other stages make them, perhaps this one.
    """
    origin: dict[str, Any] = {"command": command}
    for word in command:
        file = shipped(Path(word.rpartition("=")[2]))
        if file.suffix in OF_COMMANDS and not file.resolve().is_relative_to(out.resolve()):
            origin |= {f"content of {one}": sha256(one) for one in _with_bases(file)}
    return origin


def _with_bases(file: Path) -> list[Path]:
    """A file, and the recipes that it extends, as far as they are there."""
    found: list[Path] = []
    while file.is_file() and file not in found:
        found.append(file)
        base = _EXTENDS.search(file.read_bytes()) if file.suffix in (".yaml", ".yml") else None
        if base is None:
            break
        file = file.parent / os.fsdecode(base[1])
    return found


def flattened(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values; lists stay whole."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flattened(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
