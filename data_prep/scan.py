"""The planning pass: every row is looked at once, and what becomes of it is decided for all jobs alike.

Reading and checking text is far cheaper than tokenising it, so one job plans (the others wait, see
prepare.py), and then the jobs encode independently: the plan says which rows each shard takes. It depends on
the sources and the settings alone. Memory grows with the number of rows (about 20 bytes each, 530 with
near-duplicates), not with the size of the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from common.errors import UserError
from common.files import write_atomically
from data_prep import dedup
from data_prep.config import SPLITS, DataConfig
from data_prep.parallel import Workers
from data_prep.rows import (
    REASONS,
    STRUCTURE,
    Payload,
    Rejected,
    RowSpec,
    checksum,
    content_hash,
    parse,
    plain_text,
)
from data_prep.selection import CODE, Choice, Looks, choose
from data_prep.sources import PIECE, Input, Piece, Place, TextInput, open_text


class Looked(NamedTuple):
    """What the planning pass learns about the rows of a piece."""

    place: Place
    hashes: np.ndarray  # uint64 [rows]
    chars: np.ndarray  # uint32 [rows]
    reasons: np.ndarray  # uint8 [rows], index into REASONS; 0: usable
    signatures: np.ndarray  # uint32 [usable rows, permutations], for near-duplicates
    check: int  # checksum of the piece
    fault: tuple[int, str] | None  # the first row that breaks the structure, and how


class Part(NamedTuple):
    """Rows that a shard takes of a payload."""

    name: str  # of the input
    payload: Payload
    spec: RowSpec
    check: int  # checksum that the payload had when it was planned
    copies: np.ndarray  # uint16 [rows of the payload]; 0: not of this shard


@dataclass(frozen=True)
class Plan:
    """Which rows of which pieces each shard takes."""

    pieces: np.ndarray  # int64 [pieces, 5]: input, start, length, rows, checksum
    shard: np.ndarray  # int32 [rows]: shard, counted through both splits; -1: unused
    copies: np.ndarray  # uint16 [rows]: times that a row is used
    summary: dict[str, Any]  # per source: identity, counts; rejected rows by reason; rows per split

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        summary = np.frombuffer(json.dumps(self.summary).encode(), np.uint8)

        def write(sink: IO[bytes]) -> None:
            np.savez(sink, pieces=self.pieces, shard=self.shard, copies=self.copies, summary=summary)

        write_atomically(path, write)

    @staticmethod
    def load(path: Path) -> Plan:
        """The plan that `save` wrote."""
        with np.load(path) as file:
            summary = json.loads(file["summary"].tobytes())
            return Plan(file["pieces"], file["shard"], file["copies"], summary)

    def _pieces_of(self, shard: int) -> np.ndarray:
        """Numbers of the pieces that hold rows of a shard."""
        rows = np.flatnonzero(self.shard == shard)
        return np.unique(np.searchsorted(np.cumsum(self.pieces[:, 3]), rows, side="right"))

    def part_count(self, shard: int) -> int:
        """How many parts `parts` yields."""
        return len(self._pieces_of(shard))

    def parts(self, inputs: list[Input], shard: int) -> Iterator[Part]:
        """What shard `shard` (counted through both splits) encodes, in order."""
        ends = np.cumsum(self.pieces[:, 3])
        mine = self._pieces_of(shard)
        for number in np.unique(self.pieces[mine, 0]).tolist():
            own = mine[self.pieces[mine, 0] == number]
            places = (Place(*self.pieces[piece, 1:3].tolist()) for piece in own)
            for piece, payload in zip(own, inputs[number].read(places), strict=True):
                rows = slice(ends[piece] - self.pieces[piece, 3], ends[piece])
                copies = np.where(self.shard[rows] == shard, self.copies[rows], 0)
                check = int(self.pieces[piece, 4])
                yield Part(inputs[number].name, payload, inputs[number].spec, check, copies)


def look(item: tuple[Piece, RowSpec, bool]) -> Looked:
    """Parse and check the rows of a piece (in a worker)."""
    (place, payload), spec, near = item
    hashes, chars, reasons, signatures, fault = [], [], [], [], None
    rows = [Rejected("too_long")] if payload is None else parse(payload, spec)
    for at, row in enumerate(rows):
        if isinstance(row, Rejected):
            if fault is None and row.reason in STRUCTURE:
                fault = at, row.detail
            hashes.append(0)
            chars.append(0)
            reasons.append(CODE[row.reason])
            continue
        text = plain_text(row)
        hashes.append(content_hash(row))
        chars.append(len(text))
        reasons.append(0)
        if near:
            signatures.append(dedup.signature(text))
    return Looked(
        place,
        np.array(hashes, np.uint64),
        np.array(chars, np.uint32),
        np.array(reasons, np.uint8),
        dedup.stack(signatures),
        0 if payload is None else checksum(payload),
        fault,
    )


def make_plan(config: DataConfig, inputs: list[Input], workers: Workers) -> Plan:
    """Look at all rows of the inputs and decide what becomes of them."""
    table: list[tuple[int, ...]] = []
    looked: list[Looked] = []
    read: list[tuple[Input, int]] = []
    left = {id(one.source): one.source.limit for one in inputs}
    for number, one in enumerate(inputs):
        count = 0
        tasks = ((piece, one.spec, config.dedup == "near") for piece in one.pieces())
        for found in workers.map(look, tasks):
            if config.strict and found.fault is not None:
                raise _located(one, found)
            limit = left[id(one.source)]
            if limit is not None:
                found = _first(found, limit)
                left[id(one.source)] = limit = max(0, limit - len(found.reasons))
            table.append((number, *found.place, len(found.reasons), found.check))
            looked.append(found)
            count += len(found.reasons)
            if limit == 0:
                break
        if not count:
            raise UserError(f"{one.name} has no rows")
        read.append((one, count))
    rows = Looks(
        np.repeat(np.arange(len(read)), [count for _, count in read]),
        np.concatenate([found.hashes for found in looked]),
        np.concatenate([found.chars for found in looked]),
        np.concatenate([found.reasons for found in looked]),
        dedup.join([found.signatures for found in looked]),
    )
    del looked
    used = [one for one, _ in read]
    held_out = np.array([one.held_out for one in used])
    choice = choose(rows, config, np.array([one.source.weight for one in used]), held_out)
    pieces = np.array(table, np.int64).reshape(-1, 5)
    return Plan(pieces, *choice, _summary(config, used, rows, choice))


def _summary(config: DataConfig, inputs: list[Input], rows: Looks, choice: Choice) -> dict[str, Any]:
    """What became of the rows, per input and in all. Raises UserError when nothing is left to train on."""
    sources = []
    split = choice.shard // config.shards
    for number, one in enumerate(inputs):
        own = rows.source == number
        sources.append(
            one.identity()
            | {"format": one.spec.format, "weight": one.source.weight, "rows": int(own.sum())}
            | {name: int(choice.copies[own & (split == i)].sum()) for i, name in enumerate(SPLITS)}
            | {"rejected": _tally(rows.reasons[own])}
        )
    rejected = _tally(rows.reasons)
    if not (split == 0).any():
        reasons = ", ".join(f"{n} {reason}" for reason, n in rejected.items())
        raise UserError(f"no row of the sources can be trained on: {reasons or 'there are none'}")
    chars = [int((rows.chars * choice.copies)[split == i].sum()) for i in range(len(SPLITS))]
    return {"sources": sources, "rejected": rejected, "chars": dict(zip(SPLITS, chars, strict=True))}


def _first(found: Looked, limit: int) -> Looked:
    """The same piece with all rows after the first `limit` marked as beyond the source's limit."""
    usable = found.reasons == 0
    found.reasons[limit:] = CODE["limit"]
    return found._replace(signatures=found.signatures[: usable[:limit].sum()])


def _tally(reasons: np.ndarray) -> dict[str, int]:
    counts = np.bincount(reasons, minlength=len(REASONS)).tolist()
    return {reason: count for reason, count in zip(REASONS, counts, strict=True) if reason and count}


def _located(one: Input, found: Looked) -> UserError:
    """The error of a row that breaks its file's structure, with the line where it stands."""
    assert found.fault is not None
    at, detail = found.fault
    reason = REASONS[found.reasons[at]].replace("_", " ")
    where = f"row {found.place.start + at + 1}"
    if isinstance(one, TextInput):
        with open_text(one.path) as stream:
            before, left = 0, found.place.start
            while left > 0:
                chunk = stream.read(min(PIECE, left))
                before, left = before + chunk.count(b"\n"), left - len(chunk)
            payload = stream.read(found.place.length)
        lines = [i for i, line in enumerate(payload.split(b"\n")) if line.strip()]
        where = f"line {before + lines[at] + 1}"
    return UserError(
        f"{one.name} {where}: {reason} ({detail}); correct it, or set data.strict=false to skip and count"
    )
