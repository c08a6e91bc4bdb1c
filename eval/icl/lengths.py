"""Measures of how well a model uses long contexts, on a file of texts: JSON lines with `text`, maybe .zst.

positions:FILE   nats per token in bins of powers of two of the position, on the texts that reach the last bin
passkey:FILE     share of passkeys that greedy decoding finds. A number is hidden in the texts at several
                 depths of prompts of several lengths, and asked for at the end (Mohtashami and Jaggi 2023,
                 arXiv 2305.16300). One forward decides it: each token of the number must be the most likely.

The longest input is the context of the model, or --max_tokens, which may exceed the context of a model with
RoPE. Records are stored in chunks, like those of other tasks.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from emo.common.cli.progress import show_activity
from emo.common.errors import UserError
from emo.common.io.weights import load_model_config
from emo.data_prep.encoding.tokenizer import PLAIN, text_ids

from ..models.base import NotFiniteError
from ..models.model import EvaluatedModel, quiet_libraries
from ..results import stats, store
from ..results.directory import Record, TaskResult
from ..results.rows import evenly_spaced, read_texts
from .tasks import ForeignTask

VERSION = 1  # of records and prompts
CHUNK = 8  # rows, the most work that a killed job loses
FIRST_BIN = 64  # smaller bins would have few tokens
SHORTEST = 256  # tokens of the shortest prompts with a passkey
DEPTHS = (0, 25, 50, 75, 100)  # per cent of the text before the passkey
PROMPTS = 10  # of each length and depth, unless --limit is set
INTRODUCTION = "A pass key is hidden in the text below. Remember it.\n\n"
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"


class LengthTask(ForeignTask):
    """A measure over lengths. kind: the prefix of its name."""

    kind = title = score = ""
    higher_is_better = False
    bounded = False  # whether values are from 0 to 1

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"--tasks {self.kind}{path}: the file does not exist", code="no-text")
        self.path = path
        self.name = f"{self.kind}{path.name.split('.')[0]}"

    def fingerprint(self) -> Any:
        """Return the version of the prompts and the digest of the file."""
        return [VERSION, store.digest_files(self.path.parent, [self.path])]

    def load(self) -> list[str]:
        """Return the texts that are not empty."""
        if texts := list(filter(None, read_texts(self.path))):
            return texts
        raise UserError(f"{self.path} has no texts", code="no-text")

    @abstractmethod
    def prepare(self, tokenizer: Any, longest: int, limit: int | None) -> list[Record]:
        """Return the known part of the record of each row, and the token ids of its input as `ids`."""

    @abstractmethod
    def score_row(self, model: EvaluatedModel, row: Record) -> Record:
        """Return the rest of the record, with `value` and `weight`."""

    @abstractmethod
    def summarise(self, records: list[Record]) -> list[Record]:
        """Return the values by length, followed by the value of all rows."""

    def evaluate(self, job: Any) -> TaskResult:
        """Return the result of the model of a `Job`, as ForeignTask.evaluate does."""
        model = job.model
        if not isinstance(model, EvaluatedModel):
            raise UserError(f"{model.name} is not a Hugging Face model: {self.name}", code="model")
        context, text = model.context, load_model_config(model.path).get_text_config()
        longest = job.settings.max_tokens or context
        if not longest or (context and longest > context and not getattr(text, "rope_parameters", None)):
            problem = f"{model.source} has a context of {context or 'unknown length'}"
            raise UserError(f"{problem}. Set --max_tokens to its context or less", code="context")
        rows = self.prepare(model.tokenizer, longest, job.settings.limit)
        inputs = hashlib.sha256(b"".join(row["ids"].tobytes() for row in rows)).hexdigest()
        compared = {"test_rows": inputs[:16], "max_tokens": longest, "dtype": model.dtype, "scorer": VERSION}
        facts = {"weights": model.digest, "tokenizer": model.tokenizer_digest, "task": self.name}
        entry = store.Entry(job.out / store.STORE, compared | facts, job.say)
        records = self._records(job, entry, rows)
        result: TaskResult | None = entry.result()
        if result is None:
            compared |= {"dtype": model.computed_dtype}  # also if it was `auto`
            result = self._result(records, compared)
            entry.finish(result)
        job.write_view(self.name, entry.key, result, {"from_hub": False, "hub": None, "split": "test"})
        return result

    def _records(self, job: Any, entry: store.Entry, rows: list[Record]) -> list[Record]:
        model: EvaluatedModel = job.model
        if not entry.is_complete(len(rows), CHUNK):
            quiet_libraries()
            _ = model.scorer  # it logs lines, so load it before the bar appears

        def compute(numbers: range) -> list[Record]:
            records = []
            for number in numbers:
                known = {key: value for key, value in rows[number].items() if key != "ids"}
                records.append({"row": number} | known | self.score_row(model, rows[number]))
                advance(1)
            job.computed += 1
            return records

        try:
            with show_activity(f"{model.name} {self.name}", len(rows), "row") as advance:
                return store.complete(entry, len(rows), CHUNK, compute, advance)
        except NotFiniteError as error:
            raise UserError(f"{model.source}: {error}. Try --dtype float32.", code="not-finite") from None

    def _result(self, records: list[Record], compared: dict[str, Any]) -> TaskResult:
        lengths = self.summarise(records)
        facts = {"scale": "mean", "higher_is_better": self.higher_is_better, "bounded": self.bounded}
        result: Any = {
            **{"task": self.name, "title": f"{self.title}, {self.path.name}", "score": self.score},
            **{"version": str(VERSION), "retriever": "none", "shots": 0, "rows_shortened": 0, "rows_cut": 0},
            **{"n": len(records), "lengths": lengths, "metrics": {p["label"]: p["value"] for p in lengths}},
            "conditions": {"compared": compared, "noted": {"prompt_version": str(VERSION)}},
            "measure": facts | {key: lengths[-1][key] for key in ("value", "interval")},
        }
        return result


class PositionTask(LengthTask):
    """The loss by position."""

    kind = "positions:"
    title = "Loss by position"
    score = "nats per token"

    def prepare(self, tokenizer: Any, longest: int, limit: int | None) -> list[Record]:
        """Return the texts that reach the last bin, so that all bins are of the same texts."""
        encoded = [text_ids(tokenizer, text, verbose=False)[:longest] for text in self.load()]
        *_, last = [1, *_powers(FIRST_BIN, longest - 1)]
        if not (long := [ids for ids in encoded if len(ids) > last]):
            shorter = max(map(len, encoded))
            cure = (
                f"Set --max_tokens={shorter} or less, or use longer texts"
                if shorter > 1
                else "Use longer texts"
            )
            raise UserError(f"{self.path} has no text of more than {last} tokens. {cure}", code="no-text")
        chosen = enumerate(evenly_spaced(long, limit))
        return [{"id": number, "gold": "", "group": "", "ids": np.array(ids)} for number, ids in chosen]

    def score_row(self, model: EvaluatedModel, row: Record) -> Record:
        """Return the sum of -log p by bin, of the tokens with 1, 2, ... tokens before them."""
        nll, _ = model.scorer.read_text(row["ids"])
        sums = [float(nll[low - 1 : high - 1].sum()) for low, high in _bins(len(nll))]
        return {"value": sum(sums), "weight": len(nll), "nll": sums}

    def summarise(self, records: list[Record]) -> list[Record]:
        """Return the means, with Student's intervals over texts."""

        sizes = [r["weight"] for r in records]
        parts = {}
        for i, (low, high) in enumerate(_bins(max(sizes))):
            tokens = [min(high, size + 1) - low for size in sizes]
            parts[f"{low:,} to {high - 1:,}"] = [r["nll"][i] for r in records], tokens
        parts["all"] = [r["value"] for r in records], sizes
        means = {label: stats.ratio(*part, range(len(records))) for label, part in parts.items()}
        return [_cell(label, mean.value, mean.interval()) for label, mean in means.items()]


class PasskeyTask(LengthTask):
    """The passkeys found by length."""

    kind = "passkey:"
    title = "Passkeys found"
    score = "exact match"
    higher_is_better = True
    bounded = True

    def prepare(self, tokenizer: Any, longest: int, limit: int | None) -> list[Record]:
        """Return prompts of exactly the lengths of powers of two, which include the passkey at the end."""
        if not (lengths := _powers(SHORTEST, longest)):
            problem = f"{self.name} needs a context of {SHORTEST} tokens"
            raise UserError(f"{problem}. Raise --max_tokens ({longest})", code="context")
        texts = [_encode(tokenizer, f"{text}\n\n") for text in self.load()]
        haystack = np.concatenate(texts).astype(np.int64)
        begins = np.cumsum([0, *map(len, texts)])[:-1].tolist()
        rows = []
        for length in lengths:
            for number, begin in enumerate(evenly_spaced(begins, limit or PROMPTS)):
                text = np.resize(np.roll(haystack, -begin), length)
                for depth in DEPTHS:
                    key = str(np.random.default_rng([length, number, depth]).integers(10**4, 10**5))
                    known = {"id": number, "cluster": number, "gold": key, "group": str(length)}
                    rows.append(known | {"depth": depth} | _hide(tokenizer, key, text, depth))
        return rows

    def score_row(self, model: EvaluatedModel, row: Record) -> Record:
        """Return 1 if greedy decoding writes the passkey, and no further digit after it."""
        _, best = model.scorer.read_text(row["ids"])
        answer = row["ids"][-row["answer"] :].tolist()
        text, longer = (model.tokenizer.decode(ids) for ids in (answer, [*answer, best[-1]]))
        digit = longer[len(text) :][:1].isdigit()  # the token alone may be a byte, or have a mark before it
        found = best[-1 - len(answer) : -1] == answer
        return {"value": float(found and not digit), "weight": 1.0}

    def summarise(self, records: list[Record]) -> list[Record]:
        """Return the shares, with intervals over the beginnings of the prompts, and the shares by depth."""

        def cell(label: str, part: list[Record]) -> Record:
            value, interval = stats.bounded_mean([r["value"] for r in part], [str(r["id"]) for r in part])
            by_depth = ([r["value"] for r in part if r["depth"] == depth] for depth in DEPTHS)
            shares = " ".join(f"{100 * np.mean(values):.0f}" for values in by_depth)
            return _cell(label, value, interval, f"by depth {shares}")

        groups = dict.fromkeys(r["group"] for r in records)
        parts = {f"{int(name):,} tokens": [r for r in records if r["group"] == name] for name in groups}
        return [cell(label, part) for label, part in {**parts, "all": records}.items()]


def length_task(name: str) -> LengthTask:
    """Return the task that `positions:FILE` or `passkey:FILE` names."""
    task = PositionTask if name.startswith(PositionTask.kind) else PasskeyTask
    return task(Path(name.removeprefix(task.kind)))


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a part of a text, without special tokens."""
    ids: list[int] = tokenizer(text, verbose=False, **PLAIN).input_ids
    return ids


def _hide(tokenizer: Any, key: str, text: np.ndarray, depth: int) -> Record:
    """Return a prompt that ends with its answer, as long as `text`, and the number of the answer's tokens."""
    begin = text_ids(tokenizer, INTRODUCTION)
    needle = _encode(tokenizer, NEEDLE.format(key=key))
    asked, end = (_encode(tokenizer, QUESTION + answer) for answer in ("", f" {key}"))
    same = [a == b for a, b in zip(asked, end, strict=False)]
    size = len(text) - len(begin) - len(needle) - len(end)
    cut = size * depth // 100
    ids = np.concatenate([begin, text[:cut], needle, text[cut:size], end])
    return {"answer": len(end) - [*same, False].index(False), "ids": ids}


def _cell(label: str, value: float, interval: stats.Interval | None, note: str = "") -> Record:
    ends = None if interval is None else asdict(interval)
    return {"label": label, "value": value, "interval": ends, "note": note}


def _powers(first: int, last: int) -> list[int]:
    """Return first, 2 first, 4 first and so on, up to `last`."""
    return [first << i for i in range(64) if first << i <= last]


def _bins(last: int) -> list[tuple[int, int]]:
    """Return the first position of each bin and of the bin after it, for positions from 1 to `last`."""
    return list(pairwise([1, *_powers(FIRST_BIN, last), last + 1]))
