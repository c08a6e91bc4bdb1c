"""Scores: one number per token beside the shards, a model's log-probability of it after the tokens before it.

    <data>/<split>/scores/<name>/shard-00000-of-00004.npy    float32, one number per token of that shard
    <data>/<split>/scores/<name>/shard-00000-of-00004.sha256 its hash, written after it
    <data>/<split>/scores/<name>/begun.json                  whose scores are being written
    <data>/<split>/scores/<name>/scores.json                 the same, with the files; written last

The first token of a segment has nothing before it: its number is 0 and never read. Training reads a row's
scores as it reads its tokens; `pipeline/planning/score.py` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from emo.common.errors import UserError, nearest, one_line
from emo.common.files import Hashes, remove_made, sha256, write_atomically, write_once, write_text
from emo.common.recipe import Section
from emo.common.untrusted import arrays, read_json
from emo.data_prep.shards import TokenDataset

SCORES, ABOUT, BEGUN, HASH = "scores", "scores.json", "begun.json", ".sha256"
FORMAT = 1
AGAIN = "run: emo score RECIPE --model MODEL"


class ScoredShard(Section):
    """The scores of one shard."""

    file: str
    tokens: int
    sha256: str


class About(Section):
    """The data and the model that a set of scores belongs to."""

    format: int
    data: str  # fingerprint of the data set
    model: dict[str, Any]  # whose log-probabilities these are
    shards: list[ScoredShard]


def directory(data: TokenDataset, name: str) -> Path:
    """Return the directory of the scores called `name`. Raises UserError for a name that is a path."""
    if Path(name).name != name or name.startswith("."):
        raise UserError(f"scores are called by a plain name, not {name!r}")
    return data.directory / SCORES / name


def shard_file(data: TokenDataset, name: str, index: int) -> Path:
    """The scores of one shard."""
    return directory(data, name) / Path(data.manifest.shards[index].file).with_suffix(".npy").name


def write_shard(path: Path, scores: np.ndarray) -> None:
    """Scores of one shard's tokens [tokens], whole or not at all, and their hash beside them.

    Raises UserError for what is no log-probability.
    """
    if not np.isfinite(scores).all() or (scores > 0).any():
        raise UserError(f"{path} is not written: the model gives what is no log-probability")
    write_atomically(path, lambda sink: np.save(sink, scores.astype(np.float32)))
    write_text(path.with_suffix(HASH), sha256(path))


def written_hash(path: Path) -> str | None:
    """The hash of a shard's scores; None unless they are there as they were written."""
    noted = path.with_suffix(HASH)
    if not (path.is_file() and noted.is_file()):
        return None
    digest = sha256(path)
    return digest if noted.read_text(encoding="utf-8") == digest else None


def read_shard(path: Path, tokens: int) -> np.ndarray:
    """A shard's scores [tokens], memory-mapped. Raises UserError when the file cannot be that."""
    if not path.is_file():
        raise UserError(f"{path} is missing; {AGAIN}")
    try:
        with arrays():
            scores = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); delete it and {AGAIN}") from None
    if scores.dtype != np.float32 or scores.shape != (tokens,):
        raise UserError(
            f"{path} holds {list(scores.shape)} numbers of {scores.dtype} for {tokens} tokens; delete it and "
            f"{AGAIN}"
        )
    return scores


def begin(data: TokenDataset, name: str, model: dict[str, Any]) -> None:
    """Take the directory for the scores of one model; any number of jobs may begin the same.

    Raises UserError when it holds another model's, or those of other data.
    """
    where = directory(data, name)
    where.mkdir(parents=True, exist_ok=True)
    whose = {"data": data.fingerprint, "model": model}
    write_once(where / BEGUN, json.dumps(whose, indent=1) + "\n")
    try:
        claimed = read_json(where / BEGUN)
    except ValueError:
        claimed = None
    if claimed != whose:
        raise UserError(
            f"{where} holds scores of another model or of other data; choose another --name, or give --force"
        )


def clear(data: TokenDataset, name: str) -> None:
    """Delete the scores of that name, and nothing else."""
    remove_made(directory(data, name), (ABOUT, BEGUN, "*.npy", f"*{HASH}"))


def seal(data: TokenDataset, name: str, model: dict[str, Any]) -> bool:
    """Write what the scores belong to, once every shard has its own; False while some have none."""
    shards = []
    for index, info in enumerate(data.manifest.shards):
        path = shard_file(data, name, index)
        digest = written_hash(path)
        if digest is None:
            return False
        read_shard(path, info.tokens)
        shards.append(ScoredShard(file=path.name, tokens=info.tokens, sha256=digest))
    about = About(format=FORMAT, data=data.fingerprint, model=model, shards=shards)
    write_text(directory(data, name) / ABOUT, about.model_dump_json(indent=1) + "\n")
    return True


class Scores:
    """The scores of a data set's rows, as training reads them.

    Raises UserError when there are none of that name or they belong to other data; `faults` reads the files.
    """

    def __init__(self, data: TokenDataset, name: str) -> None:
        self.data = data
        where = directory(data, name)
        self.about = about = _read_about(where, data)
        if about.data != data.fingerprint:
            raise UserError(
                f"the scores in {where} belong to other data than those in {data.directory}; {AGAIN} --force"
            )
        counts = [info.tokens for info in data.manifest.shards]
        self.files = [shard_file(data, name, index) for index in range(len(counts))]
        self.shards = [read_shard(path, tokens) for path, tokens in zip(self.files, counts, strict=True)]
        self._starts = [data.token_offsets(index) for index in range(len(counts))]

    def faults(self, hashes: Hashes, part: int = 0, parts: int = 1) -> Iterator[str]:
        """Files that are not what was written; of several readers each looks at a part."""
        for path, scored in list(zip(self.files, self.about.shards, strict=True))[part::parts]:
            if hashes.sha256(path) != scored.sha256:
                yield f"{path} was changed after it was written; {AGAIN} --force"

    def batch(self, rows: np.ndarray) -> np.ndarray:
        """Scores of the labels of rows, float32 [b, block]: stored[i] is that of the token predicted at i."""
        width = self.data.manifest.block
        out = np.zeros((len(rows), width), np.float32)
        for i, row in enumerate(rows):
            shard, row_in_shard = self.data.place(int(row))
            start, stop = self._starts[shard][row_in_shard], self._starts[shard][row_in_shard + 1]
            out[i, : stop - start - 1] = self.shards[shard][start + 1 : stop]
        return out


def _read_about(where: Path, data: TokenDataset) -> About:
    if not (where / ABOUT).is_file():
        if where.is_dir():
            raise UserError(f"the scores in {where} are not complete; {AGAIN} --name {where.name}")
        names = [path.name for path in where.parent.iterdir()] if where.parent.is_dir() else []
        hint = f"; {nearest(where.name, names)}" if names else ""
        raise UserError(
            f"{data.directory} has no scores called {where.name}{hint}; {AGAIN} --name {where.name}"
        )
    try:
        about = About.model_validate(read_json(where / ABOUT))
    except (ValidationError, ValueError, OSError) as error:
        raise UserError(f"{where / ABOUT} is damaged ({one_line(error, 120)}); {AGAIN} --force") from None
    if about.format != FORMAT or len(about.shards) != len(data.manifest.shards):
        raise UserError(f"{where / ABOUT} is of another version or data set; {AGAIN} --force")
    return about
