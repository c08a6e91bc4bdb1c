"""Stages of a run, the origins of their results, and the notes that record finished stages.

A stage is done if its note matches its origin and those of the stages before it. A measure with another
origin is repeated. Stages with a `directory` (preparation and training) take long, so a changed origin is an
error instead: the user decides whether to remove the directory. Their note is written before they begin.
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
from typing import TypedDict

from emo.__main__ import modules
from emo.common.config.recipe import FREE, format_value, marked
from emo.common.errors import UserError
from emo.common.io.files import sha256, write_text
from emo.common.io.untrusted import read_json
from emo.common.provenance import shipped
from emo.data_prep.config import DataConfig, settings
from emo.eval.results import store
from emo.pipeline.config import RunConfig, flatten
from emo.pipeline.model.objective.config import TeacherConfig

from .code import code_digest, current_digest, find_plugin_sources

Origin = dict[str, object]  # JSON values that decide a result, by dotted key
# Free keys that change the reported numbers.
REPORTED = {
    *("train.eval_rows", "train.mixture_from", "train.kl_from_base", "train.early_stopping"),
    "train.load_best_at_end",
}
CHOOSING = {"train.keep_best", "train.eval_steps"}  # these also do if validations choose the model
MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".model")
COMMAND_SUFFIXES = (".yaml", ".yml", ".py", ".sh")  # files that instruct a command
EXTENDS = re.compile(rb"^extends:[ \t]*['\"]?([^'\"\s#]+)", re.MULTILINE)
CONTENT = "content of "  # prefix of the keys of files
CODE = "code of "  # prefix of the keys of modules


class StageNote(TypedDict, total=False):
    """The content of a note. `seconds` is missing while the stage runs."""

    made_with: Origin
    after: str  # digest of the notes of the stages before it
    seconds: float
    numbers: dict[str, float]  # of a measure, by metric


@dataclass(frozen=True)
class Stage:
    """A command, and the note that records it."""

    name: str
    command: list[str]
    note: Path
    origin: Origin = field(default_factory=dict)
    needs: tuple[Stage, ...] = ()  # stages that must be done before
    directory: Path | None = None  # what it makes, if it is not repeated

    @cached_property
    def identity(self) -> StageNote:
        """Return what the note must contain, besides the time."""
        content = json.dumps([stage.identity for stage in self.needs], sort_keys=True)
        after = hashlib.sha256(content.encode()).hexdigest()[:16] if self.needs else ""
        return {"made_with": self.origin, "after": after}

    def follows(self, other: Stage) -> bool:
        """Return whether another stage must be done before, directly or indirectly."""
        return any(need.note == other.note or need.follows(other) for need in self.needs)

    def read(self) -> StageNote:
        """Read the note. Returns an empty one if the note or the stage's directory is missing."""
        if self.directory is not None and not self.directory.exists():
            return {}
        return read_stage_note(self.note)

    @property
    def seconds(self) -> float | None:
        """Return the duration of the stage, or None if it is not done."""
        note = self.read()
        return note.get("seconds") if note.items() >= self.identity.items() else None

    @property
    def done(self) -> bool:
        """Return whether the stage is done."""
        return self.seconds is not None

    @property
    def code_changed(self) -> bool:
        """Return whether the files of the stage's code have changed since its origin was determined."""
        codes = {key.removeprefix(CODE): value for key, value in self.origin.items() if key.startswith(CODE)}
        return any(current_digest(module) != digest for module, digest in codes.items())

    def reject_changes(self, run: str) -> None:
        """Raise UserError if the stage's directory was begun for `run` with another origin."""
        note: StageNote = self.read() if self.directory is not None else {}
        if not note or note.items() >= self.identity.items():
            return
        before = note["made_with"]
        now = self.origin
        changes = [key for key in {**now, **before} if before.get(key) != now.get(key)]
        change = "another stage before it"
        if changes:
            key = changes[0]
            old, new = (format_value(tree[key]) if key in tree else "absent" for tree in (before, now))
            change = "; also ".join([f"{key}={old}, now {new}", *changes[1:]])
        fix = f"revert the change, remove {self.directory} to repeat it, or set another out"
        raise UserError(f"{run}: {self.name} was made with {change}; {fix}", code="stage-changed")

    def write(self, seconds: float | None = None, numbers: Mapping[str, float] | None = None) -> None:
        """Write the note: the stage is done, or without `seconds` its directory is begun.

        numbers: What a measure has measured, by metric.
        """
        self.note.parent.mkdir(parents=True, exist_ok=True)
        note = self.identity.copy()
        if seconds is not None:
            note["seconds"] = round(seconds, 1)
        if numbers is not None:
            note["numbers"] = dict(numbers)
        write_text(self.note, json.dumps(note, indent=1))


def read_stage_note(path: Path) -> StageNote:
    """Read a stage's note. Returns an empty one if it is missing."""
    note: StageNote = read_json(path) if path.exists() else {}
    return note


def data_origin(config: DataConfig) -> Origin:
    """Return the origin of prepared data."""
    code = {f"{CODE}emo.data_prep.prepare": code_digest("emo.data_prep.prepare")}
    return dict(flatten({"data": settings(config) | {"root": str(config.root)}}, ".")) | code


def run_origin(config: RunConfig, recorded: Mapping[str, object]) -> Origin:
    """Return the origin of a run. `recorded`: its earlier origin, used for files that no longer exist."""
    chosen = config.train.load_best_at_end or config.train.early_stopping is not None
    decisive = REPORTED | CHOOSING if chosen else REPORTED
    free = tuple(f"{key}." for key in marked(RunConfig, FREE) - decisive)
    recipe = flatten(config.model_dump(mode="json", exclude={"data"}), ".")
    origin: Origin = {key: value for key, value in recipe if not f"{key}.".startswith(free)}
    origin |= {key: value for key, value in recorded.items() if key.startswith(CONTENT)}
    origin |= data_origin(config.data) | {f"{CODE}emo.pipeline.trainer": code_digest("emo.pipeline.trainer")}
    for objective in (config.objective.name, *(part.name for part in config.objective.sum or ())):
        origin |= {f"{CONTENT}{file}": sha256(file) for file in find_plugin_sources(objective)}
    models = {"model.path": config.model.path, "objective.cost": config.objective.cost}
    if isinstance(teacher := config.objective.resolved_teacher, TeacherConfig):
        models["objective.teacher.model"] = teacher.model
    for key, name in models.items():
        path = Path(name or "").expanduser()
        if path.is_dir() and name:
            files = [file for file in path.iterdir() if file.suffix in MODEL_SUFFIXES and file.is_file()]
            origin[CONTENT + key] = store.digest_files(path, files)
        elif path.is_file():
            origin[CONTENT + key] = store.digest_files(path.parent, [path])
    deepspeed = shipped(config.deepspeed)
    if deepspeed.is_file():  # its content counts, not its name
        origin[f"{CONTENT}deepspeed"] = read_json(deepspeed)
    return origin


def command_origin(command: list[str], out: Path) -> Origin:
    """Return the origin of a command's result: its words, its code, and the recipes and scripts it names.

    A word may name several files, separated by commas. Files in `out` are left out, because stages make them.
    """
    origin: Origin = {"command": command}
    program, *words = command[2:] if command[1:2] == ["-m"] else command
    names = modules(words[0]) if program == "emo" and words else [program]
    origin |= {f"{CODE}{name}": code_digest(name) for name in names if name.startswith("emo.")}
    files = [shipped(Path(part.rpartition("=")[2])) for word in command for part in word.split(",")]
    for file in files:  # the list grows by the recipes in `extends`
        key = f"{CONTENT}{file}"
        if key in origin or file.suffix not in COMMAND_SUFFIXES or not file.is_file():
            continue
        if not file.resolve().is_relative_to(out.resolve()):
            origin[key] = sha256(file)
            files += [file.parent / os.fsdecode(base) for base in EXTENDS.findall(file.read_bytes())]
    return origin
