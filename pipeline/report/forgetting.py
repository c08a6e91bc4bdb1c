"""Gained and lost: how the NLL of each validation set changed since step 0, of runs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError, nearest
from common.files import write_text
from common.page.parts import Markup, chip, figure, legend, row, section, table, tag
from common.untrusted import number
from pipeline.report.gather import DASH, Run
from pipeline.report.validation import FEWEST, Change, change

WORDS = {1: "lost", -1: "gained", 0: "cannot be told"}
KINDS = {1: "down", -1: "up", 0: ""}  # how the page colours them
CAPTION = (
    "Nats per supervised token since step 0: below zero gained, above zero lost. Intervals, 95 %: Student's "
    "with the jackknife's variance, paired over documents of the sources, from 5 documents on. What "
    "happened is told where the interval is without zero."
)


class Line(NamedTuple):
    """A validation set in a run, at its last measurement."""

    run: Run
    number: int  # of the run, for its colour
    name: str  # of the set
    step: int
    start: float | None  # NLL at step 0, nats per token
    end: float | None
    change: Change | None
    against_first: Change | None  # from the first run's last measurement of the same documents to this one


def lines(runs: Sequence[Run]) -> list[Line]:
    """Every set of every run, set by set; only what was measured after step 0."""
    names = dict.fromkeys(name for run in runs for name in run.sets)
    found = [_line(runs, i, name) for name in names for i, run in enumerate(runs) if run.held_out(name)]
    return [line for line in found if line.step > 0]


def _line(runs: Sequence[Run], index: int, name: str) -> Line:
    run, first = runs[index], runs[0]
    records = run.held_out(name)
    start, end = (number(records[i].get("validation_nll")) for i in (0, -1))
    step, here = records[-1]["step"], run.documents(name, -1)
    before = run.documents(name, 0) if records[0]["step"] == 0 else None
    theirs = first.documents(name, -1) if index and first.held_out(name) else None
    return Line(
        run,
        index,
        name,
        step,
        start if records[0]["step"] == 0 else None,
        end,
        change(before, here) if before and here else None,
        change(theirs, here) if theirs and here else None,
    )


def gained_and_lost(runs: Sequence[Run]) -> Markup:
    """The section of the page; empty where nothing was measured after step 0."""
    from common.page.figures import NARROW, WIDE, Shift, css_colour, shifts_figure

    found = lines(runs)
    if not found:
        return Markup()
    several = len(runs) > 1
    head = [
        "Set",
        *(["Run"] if several else []),
        "Verdict",
        "Documents",
        "NLL at step 0",
        "NLL now",
        "At step",
    ]
    head += ["Change", "95 % interval", *([f"Against {runs[0].name}"] if several else [])]
    words = 3 if several else 2
    rows = []
    for i, line in enumerate(found):
        new = i == 0 or found[i - 1].name != line.name
        named = [tag("span", chip(css_colour(line.number)), line.run.name)] if several else []
        cells = [line.name if new else "", *named, *_cells(line, several)]
        rows.append(row(cells, kind="first" if several and new and i else "", text=words))
    drawn = [
        Shift(line.name, line.number, c.value, c.low, c.high)
        for line in found
        if (c := line.change) is not None and number(c.low) is not None
    ]
    unit = "change of the NLL since step 0, nats per token (left of zero: gained, right: lost)"
    wide, narrow = (shifts_figure(drawn, unit, w, "forgetting", "Gained and lost") for w in (WIDE, NARROW))
    names = [(css_colour(i), run.name) for i, run in enumerate(runs)] if several else []
    drawing = figure(wide, narrow, "", legend(names) if names else "") if drawn else ""
    return section("Gained and lost", drawing, table(head, rows, CAPTION, text=words))


def _cells(line: Line, several: bool) -> list[str]:
    found = line.change
    if found is None:
        cells = ["not measured at step 0" if line.start is None else "not comparable", DASH]
    else:
        cells = [tag("span", WORDS[found.direction], class_=KINDS[found.direction]), f"{found.documents:,}"]
    cells += [_shown(line.start), _shown(line.end), f"{line.step:,}"]
    cells += [f"{found.value:+.4f}", found.interval or DASH] if found else [DASH, DASH]
    if several:
        cells.append(str(line.against_first) if line.against_first else DASH)
    return cells


def _shown(value: float | None) -> str:
    return DASH if value is None else f"{value:.4f}"


def write_json(runs: Sequence[Run], path: Path) -> None:
    """The numbers of `lines` as a list of objects, one for each run and set."""
    told = [
        {
            "run": str(line.run.path),
            "set": line.name,
            "step": line.step,
            "start": line.start,
            "end": line.end,
            "change": _object(line.change),
            "against_first": _object(line.against_first),
        }
        for line in lines(runs)
    ]
    try:
        write_text(path, json.dumps(told, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); set another --json") from None


def _object(found: Change | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {key: number(value) for key, value in found._asdict().items()} | {"documents": found.documents}


def regressions(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[bool, str]]:
    """(whether it was lost for sure, a line that says so) for each run and named set.

    Raises UserError for a set that a run does not have, and where nothing can be said yet.
    """
    found = {(line.number, line.name): line for line in lines(runs)}
    verdicts = []
    for i, run in enumerate(runs):
        for name in names:
            if name not in run.sets:
                raise UserError(f"{run.path} has no validation set {name}; {nearest(name, run.sets)}")
            line = found.get((i, name))
            if line is None or line.change is None or number(line.change.low) is None:
                raise UserError(
                    f"no verdict on {name}: {run.path} has not measured {FEWEST} documents or more both at "
                    "step 0 and after it; measure more (train.eval_rows, data.validation) in a new run_dir",
                    code="no-verdict",
                )
            lost, what = line.change.direction > 0, f"{line.change} nats per token since step 0"
            word = "regression" if lost else "no regression"
            verdicts.append((lost, f"{run.name}: {word} on {name}: {what}, at step {line.step:,}"))
    return verdicts
