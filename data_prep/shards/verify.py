"""`verify`: check that a prepared directory is unchanged and consistent.

Hashes, counts and sums are computed again, every row is read as in training, and the text of a sample is
encoded again. The sources are not read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from emo.common.errors import UserError, one_line
from emo.common.io.files import sha256
from emo.common.text import counted

from ..config import FORMAT, SETTINGS, TRAIN, VALIDATION, splits_made
from ..encoding.tokenizer import read_tokenizer
from ..selection.plan import Plan
from .format import (
    IGNORE,
    MANIFEST,
    DomainCounts,
    Manifest,
    Shard,
    ShardInfo,
    TokenDataset,
    content_fingerprint,
    manifest_digest,
    parse_manifest,
    shard_name,
)
from .reencode import PlainEncoder, reencode_documents
from .write import COUNTED, PLAN, TOKENIZER, read_note, totals

ROWS = 256  # rows of a batch


def data_sets(directory: Path) -> list[Path]:
    """Return the data sets that a prepared directory should have, or the directory if it is a data set."""
    if (directory / MANIFEST).is_file():
        return [directory]
    sets = sorted(path.name for path in directory.glob(f"{VALIDATION}-*"))
    present = [path for name in (TRAIN, VALIDATION, *sets) if (path := directory / name).is_dir()]
    for path in present:
        try:
            splits = splits_made(parse_manifest(path).config)
        except UserError:
            continue
        also = (split for split in (TRAIN, VALIDATION) if directory / split in present)
        return [directory / split for split in dict.fromkeys((*splits, *also))]
    return present or [directory]


def verify(directory: Path) -> tuple[list[str], list[str]]:
    """Return a line for each correct data set, and a line for each fault."""
    correct = []
    faults = []
    for split in data_sets(directory):
        found: list[str] = []
        reencoded = 0
        try:
            manifest = parse_manifest(split)
            found += [*_shard_faults(split, manifest), *_manifest_faults(split, manifest)]
            tokenizer, facts = read_tokenizer(split.parent / TOKENIZER)
            expected = (manifest.vocab_size, manifest.bos_id, manifest.eos_id, manifest.tokenizer_fingerprint)
            if facts[:4] != expected:
                found.append(f"{split.parent / TOKENIZER} is not the tokenizer that made {split}")
            if not found:
                found += _row_faults(split)
                plain = PlainEncoder(tokenizer, facts)
                for info in manifest.shards:
                    path = split / info.file
                    same = list(reencode_documents(Shard(path, manifest.kind), manifest, plain))
                    reencoded += len(same)
                    if not all(same):
                        found.append(f"{path} has ids that the tokenizer does not give for their text")
        except UserError as error:
            found.append(str(error))
        faults += found
        if not found:
            noun = "document" if manifest.kind == "text" else "example"
            correct.append(
                f"{split}: {manifest.rows:,} rows in {len(manifest.shards)} shards, unchanged; encoded again "
                f"with the same ids: {counted(reencoded, noun) if reencoded else 'none'}"
            )
    return correct, faults


def _shard_faults(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Yield missing, incomplete, changed, miscounted and additional files."""
    names = [shard_name(i, len(manifest.shards)) for i in range(len(manifest.shards))]
    if [info.file for info in manifest.shards] != names:
        yield f"{directory / MANIFEST} does not list its shards in order"
    for extra in sorted(directory.glob("*.arrow")):
        if extra.name not in names:
            yield f"{extra} is not in the manifest"
    for number, info in enumerate(manifest.shards):
        path = directory / names[number]
        if not path.is_file():
            yield f"{path} is missing"
            continue
        size = path.stat().st_size
        if size != info.bytes or sha256(path) != info.sha256:
            yield f"{path} was changed: it has {size:,} bytes instead of {info.bytes:,}, or another hash"
            continue
        note = read_note(directory, number, len(names))
        if note is not None and note != info:
            yield f"{path}: its note differs from {directory / MANIFEST}"
        try:
            yield from _content_faults(path, Shard(path, manifest.kind), info, manifest)
        except (pa.ArrowException, KeyError, ValueError) as error:
            yield f"{path} is not a shard: {one_line(error)}"


def _content_faults(path: Path, shard: Shard, info: ShardInfo, manifest: Manifest) -> Iterator[str]:
    """Yield differences between columns, block, vocabulary and recorded counts."""
    segments = [np.zeros(0, np.int64)]  # of each row
    for (id_offsets, ids), (offsets, lengths), (source_offsets, _) in zip(
        *(shard.columns[name] for name in ("input_ids", "segment_lengths", "sources")), strict=True
    ):
        tokens = np.diff(id_offsets)
        segments.append(np.diff(offsets))
        if len(ids) and int(ids.max()) >= manifest.vocab_size:
            yield f"{path} has id {ids.max()}, but the vocabulary has {manifest.vocab_size} tokens"
        complete = manifest.kind == "text" and manifest.config.get("packing", "blocks") == "blocks"
        if (tokens > manifest.block).any() or (complete and (tokens != manifest.block).any()):
            yield f"{path} has rows that are not {manifest.block} tokens"
        sums = np.add.reduceat(lengths, offsets[:-1]) if len(lengths) else tokens[:0]
        if not np.array_equal(sums, tokens) or (lengths == 0).any():
            yield f"{path} has segments that do not add up to their rows"
        if not np.array_equal(source_offsets, offsets):
            yield f"{path} has segments without a source"
    names = [domain.name for domain in manifest.domains]
    amounts = (None, np.diff(shard.token_offsets()), shard.valid, np.concatenate(segments))
    counts = [np.bincount(shard.domain, amount, len(names)).astype(int).tolist() for amount in amounts]
    documents = {domain.name: domain.documents for domain in info.domains}
    if len(counts[0]) > len(names):
        yield f"{path} has rows of more than its {len(names)} domains"
        return
    domains = [
        DomainCounts(name=name, documents=documents.get(name, 0), **dict(zip(COUNTED, amounts, strict=True)))
        for name, *amounts in zip(names, *counts, strict=True)
        if name in documents or amounts[0]
    ]
    yield from _unequal(path, info, {"domains": domains, **totals(domains)})


def _manifest_faults(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Yield differences of a manifest from its shards, its settings, its plan and its digest."""
    file = directory / MANIFEST
    settings = manifest.config
    for domain in manifest.domains:
        parts = totals(o for info in manifest.shards for o in info.domains if o.name == domain.name)
        yield from _unequal(file, domain, parts)
    identity = (manifest.kind, manifest.block, manifest.tokenizer_fingerprint, manifest.shards)
    expected: dict[str, object] = totals(manifest.shards) | {
        "counts": dict(sum((Counter(info.counts) for info in manifest.shards), Counter())),
        "waste": round(1 - manifest.tokens / max(1, manifest.rows * manifest.block), 6),
        "fingerprint": content_fingerprint(*identity),
        "digest": manifest_digest(manifest),
        "split": directory.name if directory.name in splits_made(settings) else manifest.split,
        "kind": settings.get("kind"),
        "block": settings.get("sequence_len"),
        "template": settings.get("template_version"),
    }
    if len(manifest.shards) != settings.get("shards"):
        yield f"{file} lists {len(manifest.shards)} shards of {settings.get('shards')}"
    home = directory.parent
    try:
        tree = json.loads((home / SETTINGS).read_text(encoding="utf-8"))
        summary = Plan.load(home / PLAN).summary
        expected |= {"sources": summary["sources"], "rejected": summary["rejected"]}
        if tree != settings | {"format": FORMAT}:
            yield f"{file} was not made with the settings in {home / SETTINGS}"
    except FileNotFoundError:  # a data set may be copied without these files
        pass
    except Exception as error:  # pyarrow and zlib raise many classes for a damaged file
        yield f"{home}: {SETTINGS} or {PLAN} is damaged ({one_line(error)})"
    yield from _unequal(file, manifest, expected)


def _unequal(file: Path, record: object, expected: Mapping[str, object]) -> Iterator[str]:
    """Yield a fault for every field of a record with an unexpected value."""
    for name, value in expected.items():
        if (recorded := getattr(record, name)) != value:
            recorded = one_line(str(recorded), 80)
            actual = one_line(str(value), 80)
            yield f"{file} has {name} {recorded} instead of {actual}: it was edited, or is of other data"


def _row_faults(directory: Path) -> Iterator[str]:
    """Yield the first row whose number of supervised targets in training differs from the recorded count."""
    data = TokenDataset(directory)
    for start in range(0, len(data), ROWS):
        rows = np.arange(start, min(start + ROWS, len(data)))
        batch = data.batch(rows)
        supervised = batch["labels"] != IGNORE
        targets = supervised.sum(axis=1)
        weight = np.where(supervised, batch.get("loss_weights", 1.0), 0.0).sum(axis=1)
        same = (targets == data.valid[rows]) & np.isclose(weight, data.weight[rows], rtol=1e-9)
        wrong = np.flatnonzero(~same)
        if len(wrong):
            row = int(rows[wrong[0]])
            file, number = data.provenance(np.array([row]))[0]
            counts = (
                f"supervises {targets[wrong[0]]} tokens of weight {weight[wrong[0]]:g}, but its columns have "
                f"{data.valid[row]} of weight {data.weight[row]:g}"
            )
            yield f"{directory / file} row {number} {counts}"
            return
