"""Stages of an experiment's runs, and the notes that say with what each was made.

A measure whose command changed, or what goes before it, is done again. What takes long is not: a stage with a
`place`, a directory of its own, is claimed by a note before it begins, and what was begun or done with
something else is refused, as one table would hold two experiments. Without its place a note is void.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.files import write_text
from common.recipe import shown
from common.untrusted import read_json

SECONDS = "seconds"  # in the note of a stage that is done: how long it took
AFTER = "after"  # the key of a difference in what was made before a stage


class Stage(NamedTuple):
    """A command, and the note that says it was done."""

    name: str
    command: list[str]
    note: Path
    made_with: Mapping[str, Any] = {}  # JSON values that decide what it makes, by key
    after: str = ""  # digest of the stages that it depends on
    place: Path | None = None  # the directory that it makes, where it is not done twice

    @property
    def content(self) -> dict[str, Any]:
        """Return what its note says besides the time it took."""
        return {"made_with": dict(self.made_with), "after": self.after}

    @property
    def written(self) -> dict[str, Any] | None:
        """Return its note, if what that speaks of is there."""
        return None if self.place is not None and not self.place.exists() else read_note(self.note)

    @property
    def done(self) -> bool:
        """Return whether this has been done with the very same, after those that now go before it."""
        note = self.written
        return note is not None and SECONDS in note and self._agrees(note)

    def _agrees(self, note: Mapping[str, Any]) -> bool:
        return all(note.get(key) == value for key, value in self.content.items())

    def differences(self) -> list[str]:
        """Return what is not as it was when its place was begun, as in `train.lr=0.1, now 0.2`."""
        note = self.written if self.place is not None else None
        if note is None or self._agrees(note):
            return []
        was = note.get("made_with")
        if not isinstance(was, dict):
            return [f"what its note does not say ({self.note})"]
        keys = [key for key in {**self.made_with, **was} if was.get(key) != self.made_with.get(key)]
        return [f"{key}={_value(was, key)}, now {_value(self.made_with, key)}" for key in keys] or [AFTER]

    def claim(self) -> None:
        """Say what its place is made with, before it is."""
        if self.place is not None and self.written is None:
            self._note({})

    def finish(self, seconds: float) -> None:
        """Say that it is done."""
        self._note({SECONDS: round(seconds, 1)})

    def _note(self, more: dict[str, Any]) -> None:
        self.note.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.note, json.dumps(self.content | more, indent=1))


def _value(tree: Mapping[str, Any], key: str) -> str:
    return shown(tree[key]) if key in tree else "absent"


def said(command: list[str]) -> list[str]:
    """Return a command as its note has it: the same whichever Python runs it."""
    return ["python" if word == sys.executable else word for word in command]


def read_note(path: Path) -> dict[str, Any] | None:
    """Return a stage's note, or None where there is none that can be read."""
    try:
        note = read_json(path)
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def in_order(stages: Iterable[Stage], *before: Stage) -> list[Stage]:
    """Return stages of which each depends on the one before it, the first on all of `before`."""
    chain: list[Stage] = []
    for stage in stages:
        below = [one.content for one in (chain[-1:] or before)]
        after = hashlib.sha256(json.dumps(below).encode()).hexdigest()[:16] if below else ""
        chain.append(stage._replace(after=after))
    return chain


def refuse_others(stages: Iterable[tuple[str, Stage]]) -> None:
    """Raises UserError where a stage, given with its run's name, was begun or done with something else."""
    found: dict[Path | None, tuple[str, Stage, list[str]]] = {}  # by place, which runs may share
    for name, one in stages:
        if one.place not in found and (differences := one.differences()):
            found[one.place] = name, one, differences
    if not found:
        return
    (owner, stage, (first, *others)), *more = found.values()
    besides = f" (also {', '.join(one.partition('=')[0] for one in others)})" if others else ""
    if first == AFTER:
        first = "what was made before it has changed"
    where = f", and so with {len(more)} more" if more else ""
    raise UserError(
        f"{owner}: {stage.name} was made with {first}{besides}{where}; put back what changed, remove "
        f"{stage.place} to make it again, or set another out"
    )
