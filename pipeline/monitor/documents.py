"""Store the NLL of every document of the validation sets at each measured step, and compare two measurements.

    validation/SET/step-000100.npz    `documents`: (nll, tokens) of each, and `fingerprint` of the set

Documents are those of the source: a text that continues over many rows is one document, since it was sampled
as one. Two measurements of the same set, in one run or in two, are paired document by document.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from emo.common.io.files import write_atomically
from emo.common.io.untrusted import numpy_value_errors

from ..control.run_dir import VALIDATION, step_directory, step_of

LEVEL = 0.95
FEWEST = 5  # documents; the spread of fewer is too uncertain for an interval


class Documents(NamedTuple):
    """One measurement of a set, by document in ascending order of their hashes."""

    fingerprint: str  # of the set
    nll: np.ndarray  # sum over the document's supervised tokens, nats, float64 [documents]
    tokens: np.ndarray  # supervised tokens, above 0, int64 [documents], or the sum of their weights, float64


class Change(NamedTuple):
    """The change of a set's NLL in nats per token. An increase is forgetting."""

    value: float
    low: float  # limits of the 95 % interval, or NaN
    high: float
    documents: int

    def __str__(self) -> str:
        """Return a text such as `+0.0123 [+0.0100, +0.0146]`."""
        if self.diverged:
            return "not finite"
        return f"{self.value:+.4f} {self.interval or '(too few documents for an interval)'}"

    @property
    def diverged(self) -> bool:
        """Return whether one of the two measurements has an NLL that is not finite."""
        return not math.isfinite(self.value)

    @property
    def interval(self) -> str:
        """Return the limits as text, or an empty text."""
        return f"[{self.low:+.4f}, {self.high:+.4f}]" if math.isfinite(self.low) else ""

    @property
    def direction(self) -> int:
        """Return +1 for a significant increase, -1 for a significant decrease, else 0."""
        return int(self.low > 0) - int(self.high < 0)


def group_by_document(
    fingerprint: str, sources: np.ndarray, nll: np.ndarray, tokens: np.ndarray
) -> Documents:
    """Sum the measurements of segments by document.

    Args:
        fingerprint: Fingerprint of the set.
        sources: Document of each segment [segments].
        nll: NLL of each segment in nats [segments].
        tokens: Supervised tokens of each segment, or the sum of their weights [segments].
    """
    measured = tokens > 0
    documents, index = np.unique(sources[measured], return_inverse=True)
    sums = (np.bincount(index, of_segments[measured], len(documents)) for of_segments in (nll, tokens))
    return Documents(fingerprint, next(sums), next(sums).astype(tokens.dtype))


def compute_change(before: Documents, after: Documents) -> Change | None:
    """Return the change of the NLL per token between two measurements; None if their documents differ.

    R = sum_d D_d / sum_d T_d, where D_d = after_d - before_d of document d, which has T_d tokens. Documents
    are the sampled units, because the tokens of one are not independent. The interval is Student's around R
    with the jackknife's variance (Efron and Stein 1981, The jackknife estimate of variance: on average not
    too small),

        (n - 1) / n * sum_d (R_d - R)^2,    R_d - R = -(D_d - R T_d) / (sum T - T_d),

    where R_d leaves document d out. It has (sum T)^2 / sum T^2 - 1 degrees of freedom, one less than the
    number of equally long documents with the same information (Kish 1965, Survey Sampling, 11.7). Fewer than
    FEWEST documents have no interval.
    """
    n = len(before.tokens)
    if not n or before.fingerprint != after.fingerprint or not np.array_equal(before.tokens, after.tokens):
        return None
    with np.errstate(invalid="ignore"):  # infinities stay
        difference = after.nll.astype(np.float64) - before.nll
    if not np.isfinite(difference).all():
        return Change(math.nan, math.nan, math.nan, n)
    tokens = before.tokens.astype(np.float64)
    total = tokens.sum()
    value = float(difference.sum() / total)
    if n < FEWEST:
        return Change(value, math.nan, math.nan, n)
    from scipy.special import stdtrit  # a machine without SciPy can train without intervals

    left_out = (difference - value * tokens) / (total - tokens)
    freedom = max(1.0, total**2 / np.square(tokens).sum() - 1)
    half = float(stdtrit(freedom, (1 + LEVEL) / 2) * np.sqrt((n - 1) / n * np.square(left_out).sum()))
    return Change(value, value - half, value + half, n)


def write_documents(run_dir: Path, name: str, step: int, measured: Documents) -> None:
    """Store the measurement of the set `name` after `step` steps."""
    count = "<u8" if measured.tokens.dtype.kind == "i" else "<f8"
    rows = np.empty(len(measured.nll), np.dtype([("nll", "<f8"), ("tokens", count)]))
    rows["nll"] = measured.nll
    rows["tokens"] = measured.tokens
    path = _file(run_dir, name, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda sink: np.savez(sink, documents=rows, fingerprint=measured.fingerprint))


def read_documents(run_dir: Path, name: str, step: int) -> Documents | None:
    """Return a stored measurement, or None if it is missing or damaged."""
    with (
        contextlib.suppress(OSError, ValueError),
        numpy_value_errors(),
        np.load(_file(run_dir, name, step)) as stored,
    ):
        rows = stored["documents"]
        fingerprint = str(stored["fingerprint"])
        tokens = rows["tokens"]
        if tokens.dtype.kind == "u":
            tokens = tokens.astype(np.int64)
        return Documents(fingerprint, rows["nll"], tokens)
    return None


def drop_documents(run_dir: Path, after: int) -> None:
    """Remove measurements after step `after`, which is where a run resumes."""
    for path in (run_dir / VALIDATION).glob("*/step-*.npz"):
        if path.stem[5:].isdigit() and step_of(path.with_suffix("")) > after:
            path.unlink()


def _file(run_dir: Path, name: str, step: int) -> Path:
    return step_directory(run_dir / VALIDATION / name, step).with_suffix(".npz")
