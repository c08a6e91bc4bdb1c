"""validation/: the NLL of every document of the validation sets at each measured step, and how it changed.

    validation/SET/step-000100.npz    `documents`: (nll, tokens) of each, and `fingerprint` of the set

A document is one of the sources: a text that continues over many rows is one, since it was sampled as one.
Two measurements of the same set are paired document by document, within a run or between runs.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from emo.common.io.files import write_atomically
from emo.common.io.untrusted import numpy_value_errors

from ..control.run_dir import VALIDATION, step_directory, step_of

LEVEL = 0.95
KIND = np.dtype([("nll", "<f8"), ("tokens", "<u8")])
FEWEST = 5  # documents; the spread of fewer says too little for an interval


class Documents(NamedTuple):
    """One measurement of a set, document by document in ascending order of their hashes."""

    fingerprint: str  # of the set
    nll: np.ndarray  # sum over its supervised tokens, nats, float64 [documents]
    tokens: np.ndarray  # how many these are, above 0, int64 [documents]


class Change(NamedTuple):
    """The change of a set's NLL, nats per token; above zero it is forgotten, below it is learnt."""

    value: float
    low: float  # of the 95 % interval; not finite where there is none
    high: float
    documents: int

    def __str__(self) -> str:
        """Return it as in `+0.0123 [+0.0100, +0.0146]`."""
        return f"{self.value:+.4f} {self.interval or '(too few documents for an interval)'}"

    @property
    def interval(self) -> str:
        """Return the limits as text; empty without an interval."""
        return f"[{self.low:+.4f}, {self.high:+.4f}]" if math.isfinite(self.low) else ""

    @property
    def direction(self) -> int:
        """Return +1 for lost for sure, -1 for gained for sure, 0 where it cannot be told."""
        return int(self.low > 0) - int(self.high < 0)


def by_document(fingerprint: str, sources: np.ndarray, nll: np.ndarray, tokens: np.ndarray) -> Documents:
    """Return the measurement of a set whose segments are of the documents `sources`, all [segments]."""
    measured = tokens > 0
    documents, index = np.unique(sources[measured], return_inverse=True)
    sums = (np.bincount(index, of_segments[measured], len(documents)) for of_segments in (nll, tokens))
    return Documents(fingerprint, next(sums), next(sums).astype(np.int64))


def change(before: Documents, after: Documents) -> Change | None:
    """Return the change of the NLL per token between two measurements; None where they are of other texts.

    R = sum_d D_d / sum_d T_d, where D_d = after_d - before_d of document d, which has T_d tokens. Documents
    are what was sampled; the tokens of one are not independent. The interval is Student's around R, with the
    jackknife's variance (Efron and Stein 1981, The jackknife estimate of variance: on average not too small),

        (n - 1) / n * sum_d (R_d - R)^2,    R_d - R = -(D_d - R T_d) / (sum T - T_d),

    where R_d leaves document d out, and with (sum T)^2 / sum T^2 - 1 degrees of freedom: documents of one
    length, so many that they tell as much (Kish 1965, Survey Sampling, 11.7). Fewer than FEWEST documents
    have no interval.
    """
    n = len(before.tokens)
    if not n or before.fingerprint != after.fingerprint or not np.array_equal(before.tokens, after.tokens):
        return None
    with np.errstate(invalid="ignore"):  # what is not finite remains so
        difference = after.nll.astype(np.float64) - before.nll
    tokens = before.tokens.astype(np.float64)
    total = tokens.sum()
    value = float(difference.sum() / total)
    if n < FEWEST:
        return Change(value, math.nan, math.nan, n)
    without = (difference - value * tokens) / (total - tokens)
    freedom = max(1.0, total**2 / np.square(tokens).sum() - 1)
    half = float(stdtrit(freedom, (1 + LEVEL) / 2) * np.sqrt((n - 1) / n * np.square(without).sum()))
    return Change(value, value - half, value + half, n)


def write(run_dir: Path, name: str, step: int, measured: Documents) -> None:
    """Keep a measurement of the set `name` after `step` steps."""
    rows = np.empty(len(measured.nll), KIND)
    rows["nll"], rows["tokens"] = measured.nll, measured.tokens
    path = _file(run_dir, name, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda sink: np.savez(sink, documents=rows, fingerprint=measured.fingerprint))


def read(run_dir: Path, name: str, step: int) -> Documents | None:
    """Return that measurement; None where it is not there or cannot be read."""
    with (
        contextlib.suppress(OSError, ValueError),
        numpy_value_errors(),
        np.load(_file(run_dir, name, step)) as stored,
    ):
        rows, fingerprint = stored["documents"], str(stored["fingerprint"])
        return Documents(fingerprint, rows["nll"], rows["tokens"].astype(np.int64))
    return None


def drop(run_dir: Path, after: int) -> None:
    """Remove what was measured later than `after` steps: these steps are about to be taken again."""
    for path in (run_dir / VALIDATION).glob("*/step-*.npz"):
        if path.stem[5:].isdigit() and step_of(path.with_suffix("")) > after:
            path.unlink()


def _file(run_dir: Path, name: str, step: int) -> Path:
    return step_directory(run_dir / VALIDATION / name, step).with_suffix(".npz")
