"""Does the training text contain test rows of the evaluation tasks? An n-gram overlap report.

A gram is n consecutive words, letters and digits only, as grams.py counts them in any script; a test row of
fewer words (but at least SHORTEST) has grams of as many whole words as it has. Grams are compared by 64-bit
hashes that numpy computes for many texts at once, so that the check costs little beside tokenising.

The report names a test row by the digest of its text: copies of one data set number their rows differently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from emo.common.errors import UserError
from emo.common.io.files import write_atomically

from ..sources.inputs import read_text
from .grams import WORD, folded, split

SHORTEST = 4  # words; shorter rows say nothing
COLUMNS = ("text", "question")  # of a task's rows
EXAMPLES = 5  # shown per task
SHARED = "overlapping_texts"  # in the report: digest of a row's text -> share of its grams that were found
SIEVE_BITS = 22


class Grams(NamedTuple):
    """All grams of the tasks' test rows."""

    hashes: np.ndarray  # uint64 [grams], sorted, distinct
    lengths: np.ndarray  # int64: which lengths there are, in words
    pairs: np.ndarray  # int64 [pairs, 2]: gram, row
    task: np.ndarray  # str [rows]
    text: np.ndarray  # str [rows]


def row_text(row: Mapping[str, Any]) -> str | None:
    """Return the text by which a row of a task is looked for and recognised."""
    return next((row[column] for column in COLUMNS if isinstance(row.get(column), str)), None)


def digest(text: str) -> str:
    """Return a digest of a row's text, the same whatever its case and spaces."""
    return hashlib.sha256(folded(text).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def collect(directory: Path, n: int) -> Grams:
    """Return the grams of every <directory>/<task>/test.jsonl. Raises UserError when there are none."""
    files = sorted(p for p in directory.glob("*/test.jsonl*") if p.suffix in (".jsonl", ".zst", ".gz"))
    if not files:
        raise UserError(f"data.contamination={directory} has no <task>/test.jsonl (.zst, .gz)")
    rows: list[tuple[str, str]] = []  # task and text
    for file in files:
        for i, line in enumerate(read_text(file).split("\n")):
            if not line.strip():
                continue
            try:
                text = row_text(json.loads(line))
            except (ValueError, AttributeError, RecursionError):
                text = None
            if text is None:
                names = " or ".join(COLUMNS)
                raise UserError(f"{file} line {i + 1} is not a JSON row with text in {names}")
            rows.append((file.parent.name, text))
    words = split([text for _, text in rows])
    size = np.minimum(words.totals(len(rows)) // WORD, n)  # words in each row's grams
    lengths = np.unique(size[size >= SHORTEST])
    if not len(lengths):
        raise UserError(f"no test row in {directory} has {SHORTEST} words")
    grams = []
    for length in lengths.tolist():
        hashes, owners = words.grams(length)
        grams.append((hashes[size[owners] == length], owners[size[owners] == length]))
    hashes, owners = (np.concatenate(column) for column in zip(*grams, strict=True))
    distinct, gram = np.unique(hashes, return_inverse=True)
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return Grams(distinct, lengths, np.stack([gram, owners], axis=1), *columns)


def save(grams: Grams, path: Path) -> None:
    """Write grams for the workers."""
    write_atomically(path, lambda sink: np.savez(sink, **grams._asdict()))


def load(path: Path) -> Grams:
    """Return what `save` wrote."""
    with np.load(path) as file:
        return Grams(*(file[name] for name in Grams._fields))


class Finder:
    """Looks for grams in texts."""

    def __init__(self, grams: Grams) -> None:
        self.grams = grams
        self.sieve = np.zeros(1 << SIEVE_BITS, bool)  # most hashes are ruled out by one look here
        self.sieve[grams.hashes >> np.uint64(64 - SIEVE_BITS)] = True

    def overlap(self, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        """Return which grams the texts contain, int64, distinct; and how many texts contain one."""
        words = split(texts)
        grams = [words.grams(n) for n in self.grams.lengths.tolist()]
        hashes, text = (np.concatenate(column) for column in zip(*grams, strict=True))
        likely = self.sieve[hashes >> np.uint64(64 - SIEVE_BITS)]
        hashes, text = hashes[likely], text[likely]
        index = np.searchsorted(self.grams.hashes, hashes)
        index[index == len(self.grams.hashes)] = 0
        same = self.grams.hashes[index] == hashes
        return np.unique(index[same]), len(np.unique(text[same]))


def report(grams: Grams, hits: Iterable[int], documents: int, n: int) -> dict[str, Any]:
    """Return, for each task which test rows share grams with the training text, and how much of them.

    hits: grams found in any training row; documents: training rows in which one was found.
    """
    hit_grams = np.isin(np.arange(len(grams.hashes)), list(hits))
    total = np.bincount(grams.pairs[:, 1], minlength=len(grams.text))
    counts = np.bincount(grams.pairs[:, 1], weights=hit_grams[grams.pairs[:, 0]], minlength=len(grams.text))
    share = counts / np.maximum(total, 1)
    tasks = {}
    for task in np.unique(grams.task).tolist():
        members = np.flatnonzero(grams.task == task)
        hit = members[counts[members] > 0]
        worst = hit[np.argsort(-share[hit], kind="stable")]
        tasks[task] = {
            "rows": len(members),
            "too_short": int((total[members] == 0).sum()),
            "overlapping": len(hit),
            "contained": int((share[members] == 1).sum()),  # every gram of the row was found
            SHARED: {digest(str(grams.text[r])): round(float(share[r]), 4) for r in hit},
            "examples": [str(grams.text[r])[:300] for r in worst[:EXAMPLES]],
        }
    return {"ngram": n, "documents": documents, "tasks": tasks}
