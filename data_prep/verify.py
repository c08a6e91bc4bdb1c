"""`verify`: does a prepared data set still hold what its manifest says? Everything is computed again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from common.errors import UserError
from data_prep.scan import SPLITS
from data_prep.shards import (
    IGNORE,
    MANIFEST,
    Manifest,
    Shard,
    ShardInfo,
    TokenDataset,
    content_fingerprint,
    read_manifest,
)
from data_prep.tokenizer import load_tokenizer, tokenizer_fingerprint

ROWS = 256  # rows looked at together


def data_sets(directory: Path) -> list[Path]:
    """The data sets of a prepared directory, or the data set that the directory is."""
    if (directory / MANIFEST).is_file():
        return [directory]
    found = [directory / split for split in SPLITS if (directory / split).is_dir()]
    return found or [directory]


def verify(directory: Path) -> tuple[list[str], list[str]]:
    """What was found right, and every fault, a line each."""
    right, faults = [], []
    for place in data_sets(directory):
        try:
            manifest = read_manifest(place)
        except UserError as error:
            faults.append(str(error))
            continue
        own = [*_shard_faults(place, manifest), *_total_faults(place, manifest)]
        own += _tokenizer_faults(place, manifest)
        if not own:
            own += _row_faults(place)
        faults += own
        if not own:
            right.append(f"{place}: {manifest.rows:,} rows in {len(manifest.shards)} shards, all as written")
    return right, faults


def _shard_faults(place: Path, manifest: Manifest) -> Iterator[str]:
    """Files: there, whole, unchanged, readable; and no others."""
    named = {info.file for info in manifest.shards}
    for extra in sorted(p.name for p in place.glob("*.arrow") if p.name not in named):
        yield f"{place / extra} is not in the manifest"
    for info in manifest.shards:
        path = place / info.file
        if not path.is_file():
            yield f"{path} is missing"
            continue
        size = path.stat().st_size
        if size != info.bytes:
            yield f"{path} has {size:,} bytes instead of {info.bytes:,}"
            continue
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != info.sha256:
            yield f"{path} was changed: sha256 {found[:12]}... instead of {info.sha256[:12]}..."
            continue
        try:
            yield from _content_faults(path, Shard(path, manifest.kind), info, manifest)
        except (pa.ArrowInvalid, KeyError) as error:
            yield f"{path} is no shard: {' '.join(str(error).split())}"


def _content_faults(path: Path, shard: Shard, info: ShardInfo, manifest: Manifest) -> Iterator[str]:
    """Columns agree with each other, with the block and with the vocabulary."""
    counted = dict.fromkeys(("rows", "tokens", "segments"), 0)
    for (id_offsets, ids), (segment_offsets, segments) in zip(
        shard.columns["input_ids"], shard.columns["segment_lengths"], strict=True
    ):
        lengths = np.diff(id_offsets)
        if len(ids) and int(ids.max()) >= manifest.vocab_size:
            yield f"{path} has id {ids.max()}, the vocabulary only {manifest.vocab_size}"
        if (lengths > manifest.block).any() or (
            manifest.kind == "text" and (lengths != manifest.block).any()
        ):
            yield f"{path} has rows that are not {manifest.block} tokens"
        sums = np.add.reduceat(segments, segment_offsets[:-1]) if len(segments) else lengths[:0]
        if not np.array_equal(sums, lengths) or (segments == 0).any():
            yield f"{path} has segments that do not add up to their rows"
        counted["rows"] += len(lengths)
        counted["tokens"] += len(ids)
        counted["segments"] += len(segments)
    counted["valid_tokens"] = int(shard.valid.sum())
    for name, count in counted.items():
        if count != getattr(info, name):
            yield f"{path} has {count:,} {name}, its manifest {getattr(info, name):,}"


def _total_faults(place: Path, manifest: Manifest) -> Iterator[str]:
    """Sums and the fingerprint."""
    for name in ("rows", "tokens", "valid_tokens", "segments", "documents"):
        total = sum(getattr(info, name) for info in manifest.shards)
        if total != getattr(manifest, name):
            yield f"{place / MANIFEST} says {getattr(manifest, name):,} {name}, its shards {total:,}"
    if manifest.fingerprint != content_fingerprint(
        manifest.kind, manifest.block, manifest.tokenizer_fingerprint, manifest.shards
    ):
        yield f"{place / MANIFEST} was edited: its fingerprint is not that of its shards"


def _tokenizer_faults(place: Path, manifest: Manifest) -> Iterator[str]:
    """The tokenizer beside the data set is the one that made it."""
    saved = place.parent / "tokenizer"
    try:
        tokenizer = load_tokenizer(saved) if saved.is_dir() else None
    except UserError as error:
        yield str(error)
        return
    if tokenizer is None:
        yield f"{saved} is missing"
    elif tokenizer_fingerprint(tokenizer) != manifest.tokenizer_fingerprint:
        yield f"{saved} is not the tokenizer that made {place}"


def _row_faults(place: Path) -> Iterator[str]:
    """What training would read: supervised targets as counted, positions as segments say."""
    data = TokenDataset(place)
    for start in range(0, len(data), ROWS):
        rows = np.arange(start, min(start + ROWS, len(data)))
        batch: dict[str, Any] = data.batch(rows)
        found = (batch["labels"] != IGNORE).sum(axis=1)
        wrong = np.flatnonzero(found != data.valid[rows])
        if len(wrong):
            row = int(rows[wrong[0]])
            file, at = data.provenance(np.array([row]))[0]
            counts = f"supervises {found[wrong[0]]} tokens, its count says {data.valid[row]}"
            yield f"{place / file} row {at} {counts}"
            return
