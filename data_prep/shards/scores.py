"""Scores: a model's log-probability of every token, stored next to the shards.

    <data>/<split>/scores/<name>/shard-00000-of-00004.npy    float32, one number per token of that shard
    <data>/<split>/scores/<name>/shard-00000-of-00004.sha256 its hash, written after the scores
    <data>/<split>/scores/<name>/begun.json                  the model and data of the scores
    <data>/<split>/scores/<name>/scores.json                 the same, with the files. Written last

The first token of a segment is not predicted. Its score is 0 and never read. Training reads the scores of a
row like its tokens. `pipeline/planning/score.py` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emo.common.config.recipe import Section
from emo.common.errors import UserError, nearest, one_line
from emo.common.io.files import Hashes, remove_matching, sha256, write_atomically, write_once, write_text
from emo.common.io.untrusted import numpy_value_errors, read_json

from .format import TokenDataset

SCORES = "scores"
ABOUT = "scores.json"
BEGUN = "begun.json"
HASH = ".sha256"
FORMAT = 1
AGAIN = "run: emo score RECIPE --model MODEL"


class ScoredShard(Section):
    """The scores of one shard."""

    file: str
    tokens: int
    sha256: str


class About(Section):
    """The data and the model of a set of scores."""

    format: int
    data: str  # fingerprint of the data set
    model: dict[str, Any]  # the model of the log-probabilities
    shards: list[ScoredShard]


def directory(data: TokenDataset, name: str) -> Path:
    """Return the directory of the scores called `name`. Raises UserError for a name that is a path."""
    if Path(name).name != name or name.startswith("."):
        raise UserError(f"the name of scores must be a plain name, not {name!r}", code="option-value")
    return data.directory / SCORES / name


def shard_file(data: TokenDataset, name: str, index: int) -> Path:
    """Return the file of the scores of one shard."""
    return directory(data, name) / Path(data.manifest.shards[index].file).with_suffix(".npy").name


def top_dtype(k: int, vocab_size: int, log_p: str = "<f2") -> np.dtype[Any]:
    """Return the type of the k most likely ids, and of their and the remaining log-probability."""
    return np.dtype([("ids", "<u2" if vocab_size <= 2**16 else "<i4", (k,)), ("log_p", log_p, (k + 1,))])


def write_scores(path: Path, scores: np.ndarray) -> None:
    """Write the scores of one shard [tokens], completely or not at all, and their hash."""
    scores = scores.astype(np.float32) if scores.dtype.names is None else scores
    numbers = scores if scores.dtype.names is None else scores["log_p"]
    if not np.isfinite(numbers).all() or (numbers > 0).any():
        raise UserError(
            f"{path} is not written: the model produced NaN, infinite or positive log-probabilities",
            code="not-finite",
        )
    write_atomically(path, lambda sink: np.save(sink, scores))
    write_text(path.with_suffix(HASH), sha256(path))


def written_hash(path: Path) -> str | None:
    """Return the hash of a shard's scores, or None if they are missing or changed."""
    hash_file = path.with_suffix(HASH)
    digest = sha256(path) if path.is_file() and hash_file.is_file() else None
    return digest if digest and hash_file.read_text(encoding="utf-8") == digest else None


def read_shard(path: Path, tokens: int) -> np.ndarray:
    """Return a shard's scores [tokens], memory-mapped. Raises UserError for any other file."""
    try:
        with numpy_value_errors():
            scores = np.load(path, mmap_mode="r")
            if (scores.dtype != np.float32 and scores.dtype.names is None) or scores.shape != (tokens,):
                raise ValueError(f"it does not hold a score for each of {tokens} tokens")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({one_line(error)}); delete it and {AGAIN}", code="damaged-scores"
        ) from None
    return scores


def begin(data: TokenDataset, name: str, model: Mapping[str, object]) -> None:
    """Reserve the directory for the scores of one model. Several jobs may begin the same scores."""
    folder = directory(data, name)
    folder.mkdir(parents=True, exist_ok=True)
    origin = json.dumps({"data": data.fingerprint, "model": model}, indent=1) + "\n"
    write_once(folder / BEGUN, origin)
    if (folder / BEGUN).read_text(encoding="utf-8") != origin:
        raise UserError(
            f"{folder} holds scores of another model or other data. Use another --name, or --force",
            code="other-scores",
        )


def clear(data: TokenDataset, name: str) -> None:
    """Delete the scores with this name."""
    remove_matching(directory(data, name), (ABOUT, BEGUN, "*.npy", f"*{HASH}"))


def finish(data: TokenDataset, name: str, model: Mapping[str, object]) -> bool:
    """Write the description of the scores if every shard has scores. Return False if some are missing."""
    shards = []
    for index, info in enumerate(data.manifest.shards):
        path = shard_file(data, name, index)
        digest = written_hash(path)
        if digest is None:
            return False
        read_shard(path, info.tokens)
        shards.append(ScoredShard(file=path.name, tokens=info.tokens, sha256=digest))
    about = About(format=FORMAT, data=data.fingerprint, model=dict(model), shards=shards)
    write_text(directory(data, name) / ABOUT, about.model_dump_json(indent=1) + "\n")
    return True


class Scores:
    """Reads the scores of a data set's rows for training."""

    def __init__(self, data: TokenDataset, name: str) -> None:
        self.data = data
        folder = directory(data, name)
        if not (folder / ABOUT).is_file():
            names = [path.parent.name for path in folder.parent.glob(f"*/{ABOUT}")]
            problem = "incomplete" if folder.is_dir() else "missing"
            hint = f"; {nearest(name, names)}" if names else ""
            raise UserError(
                f"the scores {folder} are {problem}{hint}; {AGAIN} --name {name}", code="no-scores"
            )
        try:
            self.about = about = About.model_validate(read_json(folder / ABOUT))
        except ValueError as error:
            raise UserError(
                f"{folder / ABOUT} is damaged ({one_line(error, 120)}); {AGAIN} --force",
                code="damaged-scores",
            ) from None
        infos = data.manifest.shards
        if (about.format, about.data, len(about.shards)) != (FORMAT, data.fingerprint, len(infos)):
            raise UserError(
                f"the scores in {folder} are of another version, or not of the data in {data.directory}; "
                f"{AGAIN} --force",
                code="other-scores",
            )
        self.files = [shard_file(data, name, index) for index in range(len(infos))]
        self.shards = [read_shard(path, info.tokens) for path, info in zip(self.files, infos, strict=True)]
        self._starts = [data.token_offsets(index) for index in range(len(infos))]

    def faults(self, hashes: Hashes, part: int = 0, parts: int = 1) -> Iterator[str]:
        """Yield a message for each changed file. Each of several readers checks a part of the files."""
        for path, scored in list(zip(self.files, self.about.shards, strict=True))[part::parts]:
            if hashes.sha256(path) != scored.sha256:
                yield f"{path} was changed after it was written; {AGAIN} --force"

    @property
    def top_k(self) -> int | None:
        """Return how many of the most likely tokens are stored, or None if only the actual token is."""
        return self.about.model.get("top_k")

    def columns(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the scores of the labels of rows. Index i is for the token predicted at position i.

        Either `stored` [b, block] float32: the log-probability of the token. Or `teacher_ids` [b, block, k]
        int64: the most likely tokens, and `teacher_log_p` [b, block, k + 1] float32: their log-probabilities
        and the log-probability of all other tokens at the end. The probabilities sum to 1.
        """
        width = self.data.manifest.block
        out = np.zeros((len(rows), width), self.shards[0].dtype)
        for i, row in enumerate(rows):
            shard, number = self.data.locate(int(row))
            start, stop = self._starts[shard][number : number + 2]
            out[i, : stop - start - 1] = self.shards[shard][start + 1 : stop]
        if out.dtype.names is None:
            return {"stored": out}
        log_p = out["log_p"].astype(np.float32)
        log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
        return {"teacher_ids": out["ids"].astype(np.int64), "teacher_log_p": log_p}
