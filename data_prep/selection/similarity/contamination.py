"""The n-gram overlap of the training text with the test rows of the evaluation tasks.

A gram is n consecutive words of letters and digits, as grams.py counts them in any script. A test row with
fewer words (but at least MIN_WORDS) has one gram with all its words. Grams are compared by 64-bit hashes that
numpy computes for many texts at once, so that the check costs little compared with tokenizing.

The report names a test row by the digest of its text, because copies of a data set number rows differently.
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

from ...sources.files import read_text
from .grams import WORD, folded, split

MIN_WORDS = 4  # shorter rows are not compared
COLUMNS = ("text", "question")  # of a task's rows
EXAMPLES = 5  # of each task
BEGINNING = 300  # characters of an example
SHARED = "overlapping_texts"  # in the report: digest of a row's text -> share of its grams that were found
SIEVE_BITS = 22


class Grams(NamedTuple):
    """All grams of the tasks' test rows."""

    hashes: np.ndarray  # uint64 [grams], sorted, distinct
    lengths: np.ndarray  # int64: the distinct lengths, in words
    pairs: np.ndarray  # int64 [pairs, 2]: gram, row
    task: np.ndarray  # str [rows]
    digest: np.ndarray  # str [rows], of the text
    beginning: np.ndarray  # str [rows], of the text


def row_text(row: Mapping[str, object]) -> str | None:
    """Return the text of a task's row that is searched for and identifies the row."""
    return next((text for column in COLUMNS if isinstance(text := row.get(column), str)), None)


def row_digest(text: str) -> str:
    """Return a digest of a row's text that ignores case and spaces."""
    return hashlib.sha256(folded(text).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def task_files(directory: Path) -> list[Path]:
    """Return every <directory>/<task>/test.jsonl (.zst, .gz)."""
    return sorted(p for p in directory.glob("*/test.jsonl*") if p.suffix in (".jsonl", ".zst", ".gz"))


def collect(directory: Path, n: int) -> Grams:
    """Return the grams of all rows of `task_files`. Raises UserError if there are none."""
    files = task_files(directory)
    if not files:
        raise UserError(
            f"data.contamination={directory} has no <task>/test.jsonl (.zst, .gz)", code="contamination"
        )
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
                raise UserError(
                    f"{file} line {i + 1} is not a JSON row with text in {names}", code="not-json"
                )
            rows.append((file.parent.name, text))
    words = split([text for _, text in rows])
    size = np.minimum(words.totals(len(rows)) // WORD, n)  # words in each row's grams
    lengths = np.unique(size[size >= MIN_WORDS])
    if not len(lengths):
        raise UserError(f"no test row in {directory} has {MIN_WORDS} words", code="contamination")
    grams = []
    for length in lengths.tolist():
        hashes, owners = words.grams(length)
        grams.append((hashes[size[owners] == length], owners[size[owners] == length]))
    hashes, owners = (np.concatenate(column) for column in zip(*grams, strict=True))
    distinct, gram = np.unique(hashes, return_inverse=True)
    facts = ((task, row_digest(text), text[:BEGINNING]) for task, text in rows)
    columns = [np.array(column) for column in zip(*facts, strict=True)]
    return Grams(distinct, lengths, np.stack([gram, owners], axis=1), *columns)


def save(grams: Grams, path: Path) -> None:
    """Write grams to a file for the workers."""
    write_atomically(path, lambda sink: np.savez(sink, **grams._asdict()))


def load(path: Path) -> Grams:
    """Return the grams that `save` wrote. Raises UserError if another version wrote them."""
    with np.load(path) as file:
        if set(file.files) != set(Grams._fields):
            raise UserError(
                f"{path} was written by another version. Run prepare --force", code="other-version"
            )
        return Grams(*(file[name] for name in Grams._fields))


class Finder:
    """Finds grams in texts."""

    def __init__(self, grams: Grams) -> None:
        self.grams = grams
        self.sieve = np.zeros(1 << SIEVE_BITS, bool)  # rules out most hashes fast
        self.sieve[grams.hashes >> np.uint64(64 - SIEVE_BITS)] = True

    def overlap(self, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        """Return the distinct grams in the texts, int64, and how many texts contain a gram."""
        words = split(texts)
        grams = [words.grams(n) for n in self.grams.lengths.tolist()]
        hashes, text = (np.concatenate(column) for column in zip(*grams, strict=True))
        possible = self.sieve[hashes >> np.uint64(64 - SIEVE_BITS)]
        hashes = hashes[possible]
        text = text[possible]
        index = np.searchsorted(self.grams.hashes, hashes)
        index[index == len(self.grams.hashes)] = 0
        same = self.grams.hashes[index] == hashes
        return np.unique(index[same]), len(np.unique(text[same]))


def report(grams: Grams, hits: Iterable[int], documents: int, n: int) -> dict[str, Any]:
    """Return the test rows of each task that share grams with the training text, and the shared part.

    Args:
        grams: The grams of all tasks.
        hits: Grams found in any training row.
        documents: Training rows with at least one gram.
        n: Words in a gram.
    """
    hit_grams = np.isin(np.arange(len(grams.hashes)), list(hits))
    total = np.bincount(grams.pairs[:, 1], minlength=len(grams.digest))
    counts = np.bincount(grams.pairs[:, 1], weights=hit_grams[grams.pairs[:, 0]], minlength=len(grams.digest))
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
            SHARED: {str(grams.digest[r]): round(float(share[r]), 4) for r in hit},
            "examples": [str(grams.beginning[r]) for r in worst[:EXAMPLES]],
        }
    return {"ngram": n, "documents": documents, "tasks": tasks}
