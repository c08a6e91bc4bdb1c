"""validation/: the NLL of every document of the validation sets at each measured step, and how it changed.

    validation/SET/step-000100.npy    one (nll, tokens) per document, in the order of the data's rows

So two measurements of a set are paired document by document, within a run or between runs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from common.files import write_atomically
from common.untrusted import arrays
from pipeline.run_dir import VALIDATION, step_directory, step_of

LEVEL = 0.95
KIND = np.dtype([("nll", "<f4"), ("tokens", "<u4")])


class Documents(NamedTuple):
    """One measurement of a set.

    A document is what one row holds of it: one that was cut to fit into rows counts once for each part.
    """

    nll: np.ndarray  # sum over its supervised tokens, nats, float [documents]
    tokens: np.ndarray  # how many these are, above 0, int [documents]


class Change(NamedTuple):
    """How the NLL of a set changed, nats per token; above zero it is forgotten, below it is learnt."""

    value: float
    low: float  # of the 95 % interval; not finite where there is none
    high: float
    documents: int

    def __str__(self) -> str:
        """As in `+0.0123 [+0.0100, +0.0146]`."""
        return f"{self.value:+.4f} {self.interval}".strip()

    @property
    def interval(self) -> str:
        """Its limits as text; empty without an interval."""
        return f"[{self.low:+.4f}, {self.high:+.4f}]" if math.isfinite(self.low) else ""

    @property
    def direction(self) -> int:
        """+1: lost for sure, -1: gained for sure, 0: cannot be told."""
        return int(self.low > 0) - int(self.high < 0)


def change(before: Documents, after: Documents) -> Change | None:
    """The change of the NLL per token between two measurements; None where they are of other documents.

    R = sum_d D_d / sum_d T_d, where D_d = after_d - before_d of document d, which has T_d tokens. Documents
    are what was sampled; the tokens of one are not independent. The interval is Student's around R, with the
    jackknife's variance (Efron and Stein 1981, The jackknife estimate of variance: on average not too small),

        (n - 1) / n * sum_d (R_d - R)^2,    R_d - R = -(D_d - R T_d) / (sum T - T_d),

    where R_d leaves document d out, and with (sum T)^2 / sum T^2 - 1 degrees of freedom: documents of one
    length, so many that they tell as much (Kish 1965, Survey Sampling, 11.7). One document has no interval.
    """
    n = len(before.tokens)
    if not n or not np.array_equal(before.tokens, after.tokens):
        return None
    with np.errstate(invalid="ignore"):  # what is not finite remains so
        difference = after.nll.astype(np.float64) - before.nll
    tokens = before.tokens.astype(np.float64)
    total = tokens.sum()
    value = float(difference.sum() / total)
    if n < 2:
        return Change(value, float("nan"), float("nan"), n)
    without = (difference - value * tokens) / (total - tokens)
    freedom = max(1.0, total**2 / np.square(tokens).sum() - 1)
    half = float(stdtrit(freedom, (1 + LEVEL) / 2) * np.sqrt((n - 1) / n * np.square(without).sum()))
    return Change(value, value - half, value + half, n)


def write(run_dir: Path, name: str, step: int, found: Documents) -> Documents:
    """Keep a measurement of the set `name` after `step` steps; what was kept, as `read` gives it back."""
    rows = np.empty(len(found.nll), KIND)
    rows["nll"], rows["tokens"] = found
    path = _file(run_dir, name, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda sink: np.save(sink, rows))
    return Documents(rows["nll"], rows["tokens"])


def read(run_dir: Path, name: str, step: int) -> Documents | None:
    """That measurement; None where it is not there or cannot be read."""
    try:
        with arrays():
            rows = np.load(_file(run_dir, name, step), mmap_mode="r")  # no more memory than the file has
    except (OSError, ValueError):
        return None
    if rows.dtype != KIND or rows.ndim != 1 or not rows["tokens"].all():
        return None
    return Documents(np.array(rows["nll"]), np.array(rows["tokens"]))


def drop(run_dir: Path, after: int) -> None:
    """Remove what was measured later than `after` steps: these steps are about to be taken again."""
    for path in (run_dir / VALIDATION).glob("*/step-*.npy"):
        if path.stem[5:].isdigit() and step_of(path.with_suffix("")) > after:
            path.unlink()


def _file(run_dir: Path, name: str, step: int) -> Path:
    return step_directory(run_dir / VALIDATION / name, step).with_suffix(".npy")
