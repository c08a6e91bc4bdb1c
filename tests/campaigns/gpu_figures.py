"""Figures of the GPU campaign, each beside its target, kept as soon as they are there."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from emo.common.errors import one_line
from emo.common.files import write_text

OWN = ("emo", "tests")  # packages that are never just "not installed"
CLOSING = 3.0  # seconds that a part needs to keep what it knows once a run of it was cut off
RESULTS = "results.json"
MARKS = {True: "met", False: "MISSED", None: ""}


class MissingError(Exception):
    """What a figure needs is not here: said in a line, and no target is missed."""


@dataclass
class Figures:
    """The records of one part; one process writes at a time."""

    directory: Path  # for figures, logs and traces, which are small
    part: str
    quick: bool = False  # sizes that say whether it runs, not how well: no target holds
    deadline: float = float("inf")  # of the part, by time.monotonic(), which processes share
    work: Path = Path()  # for weights, data and runs, which are not

    def __call__(
        self,
        case: str,
        value: float | None,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        always: bool = False,
        note: str = "",
    ) -> None:
        """Keep a figure with its target; both bounds: within them. None, or NaN, misses a target.

        `always`: it is a matter of right and wrong, and holds in small as well.
        """
        bounds = [(">=", at_least), ("<=", at_most)] if always or not self.quick else []
        target = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
        met = None
        if target:
            low = -float("inf") if at_least is None else at_least
            high = float("inf") if at_most is None else at_most
            met = value is not None and low <= value <= high
        self._keep(case, value, unit, target, met, note)

    def skip(self, case: str, why: object) -> None:
        """Keep that something could not be measured here."""
        self._keep(case, None, "", "", None, f"left out: {why}")

    def failed(self, case: str, why: object) -> None:
        """Keep that something which should work did not."""
        self._keep(case, None, "", "works", False, str(why))

    @contextlib.contextmanager
    def attempt(self, case: str) -> Iterator[None]:
        """What goes wrong in the block is kept as a failure of `what`, and what is missing as left out."""
        try:
            yield
        except MissingError as error:
            self.skip(case, error)
        except ModuleNotFoundError as error:
            self._not_found(case, error)
        except Exception as error:
            traceback.print_exc()
            self.failed(case, f"{type(error).__name__}: {one_line(error)}")

    def need_seconds(self, seconds: float) -> None:
        """Raises MissingError when the part has not so much time left: better than to be killed halfway."""
        if time.monotonic() + seconds > self.deadline:
            raise MissingError(f"the part has less than {seconds:g} s left for it")

    def limit(self, seconds: float) -> float:
        """As many seconds, or those that the part has left less CLOSING; at least one."""
        return max(1.0, min(seconds, self.deadline - time.monotonic() - CLOSING))

    def _not_found(self, case: str, error: ModuleNotFoundError) -> None:
        """A package that is not installed is left out; a module of the project that is gone is a fault."""
        if error.name is None or error.name.partition(".")[0] in OWN:
            traceback.print_exc()
            self.failed(case, one_line(error))
        else:
            self.skip(case, f"{error.name} is not installed")

    def _keep(self, case: str, value: Any, unit: str, target: str, met: bool | None, note: str) -> None:
        known = read(self.directory)
        if value is not None and value != value:
            value, note = None, f"not a number; {note}"
        record = {"part": self.part, "what": case, "value": value, "unit": unit, "target": target}
        known["records"].append(record | {"met": met, "note": note})
        write_text(self.directory / RESULTS, json.dumps(known, indent=1) + "\n")


def read(directory: Path) -> dict[str, Any]:
    """What is kept so far: `records`, and `about` the sessions that the parts ran in."""
    path = directory / RESULTS
    return json.loads(path.read_text()) if path.is_file() else {"records": []}


def begin(directory: Path, parts: list[str], **about: Any) -> None:
    """Forget the records of parts that are about to run again; those of others stay; `about` this session."""
    known = read(directory)
    known["about"] = known.get("about", {}) | dict.fromkeys(parts, about)
    known["records"] = [record for record in known["records"] if record["part"] not in parts]
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / RESULTS, json.dumps(known, indent=1) + "\n")


def line(record: dict[str, Any]) -> str:
    """A record for people."""
    value = "-" if record["value"] is None else f"{record['value']:,.4g} {record['unit']}".rstrip()
    target = f" (target {record['target']})" if record["target"] else ""
    note = f"; {record['note']}" if record["note"] else ""
    return f"{record['part']}: {record['what']}: {value}{target} {MARKS[record['met']]}".rstrip() + note


def table(directory: Path) -> int:
    """Print everything that is kept; 1 when a target is missed or something failed, else 0."""
    records = read(directory)["records"]
    shown = Table("part", "figure", "value", "target", "", "note")
    for record in records:
        value = "" if record["value"] is None else f"{record['value']:,.4g} {record['unit']}".rstrip()
        cells = (record["part"], record["what"], value, record["target"], MARKS[record["met"]])
        shown.add_row(*cells, record["note"][:200])
    Console(width=190).print(shown)
    missed = [record for record in records if record["met"] is False]
    print(f"{len(records)} figures, {len(missed)} missed; {directory / RESULTS}", flush=True)
    return int(bool(missed))
