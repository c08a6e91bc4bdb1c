"""Gained and lost: how the NLL of each validation set changed since step 0, of runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from common.errors import UserError, nearest
from common.untrusted import number
from pipeline.report.gather import Run
from pipeline.report.validation import FEWEST, Change, change


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
    """Return every set of every run, set by set; only what was measured after step 0."""
    names = dict.fromkeys(name for run in runs for name in run.sets)
    compared = [_line(runs, i, name) for name in names for i, run in enumerate(runs) if run.held_out(name)]
    return [line for line in compared if line.step > 0]


def _line(runs: Sequence[Run], index: int, name: str) -> Line:
    run, first = runs[index], runs[0]
    records = run.held_out(name)
    start, end = (number(records[i].get("validation_nll")) for i in (0, -1))
    step, current = records[-1]["step"], run.documents(name, -1)
    before = run.documents(name, 0) if records[0]["step"] == 0 else None
    reference = first.documents(name, -1) if index and first.held_out(name) else None
    return Line(
        run,
        index,
        name,
        step,
        start if records[0]["step"] == 0 else None,
        end,
        change(before, current) if before and current else None,
        change(reference, current) if reference and current else None,
    )


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the numbers of `lines` as a list of objects, one for each run and set."""
    return [
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


def _object(result: Change | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {key: number(value) for key, value in result._asdict().items()} | {"documents": result.documents}


def regressions(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[bool, str]]:
    """Return (it was lost for sure, a line that says so) for each run and named set.

    Raises UserError for a set that a run does not have, and where nothing can be said yet.
    """
    measured = {(line.number, line.name): line for line in lines(runs)}
    verdicts = []
    for i, run in enumerate(runs):
        for name in names:
            if name not in run.sets:
                raise UserError(f"{run.path} has no validation set {name}; {nearest(name, run.sets)}")
            line = measured.get((i, name))
            if line is None or line.change is None or number(line.change.low) is None:
                raise UserError(
                    f"no verdict on {name}: {run.path} has not measured {FEWEST} documents or more both at "
                    "step 0 and after it; measure more (train.eval_rows, data.validation) in a new run_dir",
                    code="no-verdict",
                )
            lost, amount = line.change.direction > 0, f"{line.change} nats per token since step 0"
            word = "regression" if lost else "no regression"
            verdicts.append((lost, f"{run.name}: {word} on {name}: {amount}, at step {line.step:,}"))
    return verdicts
