"""Stages of an experiment's runs, the origin of what each makes, and the notes that record it.

A measure whose command changed, or what goes before it, is done again. What takes long is not: a stage with a
`directory` of its own is claimed by a note before it begins, and what was begun or done with something else
is refused, as one table would hold two experiments. Without its directory a note is void.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from emo.__main__ import modules
from emo.common.config.recipe import FREE, marked, shown
from emo.common.errors import UserError
from emo.common.io.files import sha256, write_text
from emo.common.io.untrusted import read_json
from emo.common.provenance import shipped
from emo.data_prep.config import DataConfig, settings
from emo.eval.results import store
from emo.pipeline.config import RunConfig
from emo.pipeline.model.objective_config import TeacherConfig

from .code import code_digest, plugin_sources

# A run may go on with others, as they change nothing that is learned; but they change what is reported of it.
REPORTED = {"train.eval_rows", "train.mixture_from"}
OF_MODELS = (".safetensors", ".bin", ".json", ".model")  # files of a model's directory that decide
OF_COMMANDS = (".yaml", ".yml", ".py", ".sh")  # files that tell a command what to do
EXTENDS = re.compile(rb"^extends:[ \t]*['\"]?([^'\"\s#]+)", re.MULTILINE)
CONTENT = "content of "  # begins the keys of an origin that stand for files


@dataclass(frozen=True)
class Stage:
    """A command, and the note that says it was done."""

    name: str
    command: list[str]
    note: Path
    origin: Mapping[str, Any] = field(default_factory=dict)  # JSON values that decide what it makes, by key
    needs: tuple[Stage, ...] = ()  # stages that it depends on
    directory: Path | None = None  # that it makes, where it is not done twice

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return what its note says besides the time it took."""
        content = json.dumps([stage.identity for stage in self.needs], sort_keys=True)
        after = hashlib.sha256(content.encode()).hexdigest()[:16] if self.needs else ""
        return {"made_with": dict(self.origin), "after": after}

    def read(self) -> dict[str, Any]:
        """Return its note; empty where there is none, or what it speaks of is gone."""
        return {} if self.directory is not None and not self.directory.exists() else read_note(self.note)

    @property
    def seconds(self) -> float | None:
        """Return how long it took if it has been done with the very same, after what it now depends on."""
        note = self.read()
        return note.get("seconds") if note.items() >= self.identity.items() else None

    @property
    def done(self) -> bool:
        """Return whether it has been done."""
        return self.seconds is not None

    def refuse_changes(self, run: str) -> None:
        """Raise UserError where its directory was begun for `run` with something else than now."""
        note = self.read() if self.directory is not None else {}
        if not note or note.items() >= self.identity.items():
            return
        before, now = note["made_with"], self.origin
        changes = ["another stage before it"]
        if keys := [key for key in {**now, **before} if before.get(key) != now.get(key)]:
            was, is_now = (shown(tree[keys[0]]) if keys[0] in tree else "absent" for tree in (before, now))
            changes = [f"{keys[0]}={was}, now {is_now}", *keys[1:]]
        raise UserError(
            f"{run}: {self.name} was made with {'; also '.join(changes)}; put back what changed, remove "
            f"{self.directory} to make it again, or set another out",
            code="stage-changed",
        )

    def write(self, seconds: float | None = None) -> None:
        """Write its note: that it is done, or without `seconds` that its directory is being made."""
        self.note.parent.mkdir(parents=True, exist_ok=True)
        end = {} if seconds is None else {"seconds": round(seconds, 1)}
        write_text(self.note, json.dumps(self.identity | end, indent=1))


def read_note(path: Path) -> dict[str, Any]:
    """Return a stage's note, empty where there is none."""
    return dict(read_json(path)) if path.exists() else {}


def data_origin(config: DataConfig) -> dict[str, Any]:
    """Return what decides prepared data, by dotted key."""
    code = {"code of emo.data_prep.prepare": code_digest("emo.data_prep.prepare")}
    return _flattened({"data": settings(config) | {"root": str(config.root)}}) | code


def run_origin(config: RunConfig, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides a run, by dotted key.

    recorded: what was noted when it was begun; it stands for files that are not there any more, which a run
    that is done does not need.
    """
    free = tuple(f"{key}." for key in marked(RunConfig, FREE) - REPORTED)
    recipe = _flattened(config.model_dump(mode="json", exclude={"data"}))
    origin = {key: value for key, value in recipe.items() if not f"{key}.".startswith(free)}
    origin |= {key: value for key, value in recorded.items() if key.startswith(CONTENT)}
    origin |= data_origin(config.data) | {"code of emo.pipeline.trainer": code_digest("emo.pipeline.trainer")}
    for objective in (config.objective.name, *(part.name for part in config.objective.sum or ())):
        origin |= {f"{CONTENT}{file}": sha256(file) for file in plugin_sources(objective)}
    models = {"model.path": config.model.path, "objective.cost": config.objective.cost}
    if isinstance(teacher := config.objective.resolved_teacher, TeacherConfig):
        models["objective.teacher.model"] = teacher.model
    for key, name in models.items():
        path = Path(name or "").expanduser()
        if path.is_dir() and name:
            files = [file for file in path.iterdir() if file.suffix in OF_MODELS and file.is_file()]
            origin[CONTENT + key] = store.digest_files(path, files)
        elif path.is_file():
            origin[CONTENT + key] = store.digest_files(path.parent, [path])
    if (
        deepspeed := shipped(config.deepspeed)
    ).is_file():  # what it says: one of another name may say the same
        origin[f"{CONTENT}deepspeed"] = read_json(deepspeed)
    return origin


def command_origin(command: list[str], out: Path) -> dict[str, Any]:
    """Return what decides what a command makes: its words, and the recipes, programs and modules among them.

    Files in `out` are left out: other stages make them, perhaps this one.
    """
    origin: dict[str, Any] = {"command": command}
    program, *words = command[2:] if command[1:2] == ["-m"] else command
    names = modules(words[0]) if program == "emo" and words else [program]
    origin |= {f"code of {name}": code_digest(name) for name in names if name.startswith("emo.")}
    files = [shipped(Path(word.rpartition("=")[2])) for word in command]
    for file in files:  # the list grows by the recipes that they extend
        key = f"{CONTENT}{file}"
        if key in origin or file.suffix not in OF_COMMANDS or not file.is_file():
            continue
        if not file.resolve().is_relative_to(out.resolve()):
            origin[key] = sha256(file)
            files += [file.parent / os.fsdecode(base) for base in EXTENDS.findall(file.read_bytes())]
    return origin


def _flattened(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted keys and their values; lists stay whole."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flattened(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
