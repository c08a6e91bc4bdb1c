"""Stages of an experiment's runs, and the notes that say with what each was made.

A measure whose command changed, or what goes before it, is done again. What takes long is not: a stage with a
`directory` of its own is claimed by a note before it begins, and what was begun or done with something else
is refused, as one table would hold two experiments. Without its directory a note is void.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import write_text
from common.recipe import shown
from common.untrusted import read_json


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
        content = json.dumps([stage.identity for stage in self.needs])
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
        before = note.get("made_with")
        if isinstance(before, dict):
            keys = [key for key in {**self.origin, **before} if before.get(key) != self.origin.get(key)]
            values = [
                f"{key}={shown(before[key]) if key in before else 'absent'}, "
                f"now {shown(self.origin[key]) if key in self.origin else 'absent'}"
                for key in keys
            ]
            change = values[0] if values else "what was made before it has changed"
            others = f" (also {', '.join(keys[1:])})" if keys[1:] else ""
        else:
            change, others = f"what its note does not say ({self.note})", ""
        raise UserError(
            f"{run}: {self.name} was made with {change}{others}; put back what changed, remove "
            f"{self.directory} to make it again, or set another out",
            code="stage-changed",
        )

    def write(self, seconds: float | None = None) -> None:
        """Write its note: that it is done, or without `seconds` that its directory is being made."""
        self.note.parent.mkdir(parents=True, exist_ok=True)
        end = {} if seconds is None else {"seconds": round(seconds, 1)}
        write_text(self.note, json.dumps(self.identity | end, indent=1))


def read_note(path: Path) -> dict[str, Any]:
    """Return a stage's note, empty where there is none that can be read."""
    try:
        note = read_json(path)
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}
