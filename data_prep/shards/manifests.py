"""Manifests of the splits: written when all shards of a split are complete, with the n-gram overlap."""

from __future__ import annotations

import json
from collections.abc import Callable

from emo.common.errors import UserError
from emo.common.io.files import write_text
from emo.common.io.objects import shown
from emo.common.text import counted

from ..config import DataConfig
from ..selection.plan import Summary
from ..selection.similarity import contamination
from .format import MANIFEST, ShardInfo, manifest_text, shard_name
from .write import make_manifest, overlap_path, read_note

GRAMS = "grams.npz"
OVERLAP = "contamination.json"


def seal(
    config: DataConfig, summary: Summary, split: str, required: bool, say: Callable[[str], None]
) -> bool:
    """Write the manifest of a split whose shards are complete. Return whether it already existed.

    With `required` missing shards are an error.
    """
    directory = config.dir / split
    infos = read_notes(config, split)
    if len(infos) < config.shards:
        missing = [i for i in range(config.shards) if i not in infos]
        report = f"{split}: {len(missing)} of {config.shards} shards are missing"
        if required:
            raise UserError(
                f"{report}, the first is {shard_name(missing[0], config.shards)}", code="shards-missing"
            )
        say(report)
        return False
    manifest = make_manifest(config, summary, split, list(infos.values()))
    file = directory / MANIFEST
    text = manifest_text(manifest)
    same = file.is_file() and file.read_bytes() == text.encode()
    if same and (config.contamination is None or (directory / OVERLAP).is_file()):
        return True
    if config.contamination is not None:
        _write_overlap(config, split, say)
    write_text(file, text)
    say(
        f"{shown(config.dir)}/{split}: {counted(manifest.rows, 'row')} of {config.sequence_len}, "
        f"{counted(manifest.tokens, 'token')}, {manifest.waste:.2%} padding"
    )
    return False


def read_notes(config: DataConfig, split: str) -> dict[int, ShardInfo]:
    """Return the notes of a split's complete shards, by number."""
    notes = {i: read_note(config.dir / split, i, config.shards) for i in range(config.shards)}
    return {i: info for i, info in notes.items() if info is not None}


def _write_overlap(config: DataConfig, split: str, say: Callable[[str], None]) -> None:
    """Write the report of the test rows that share n-grams with a split."""
    directory = config.dir / split
    n = config.contamination_ngram
    paths = [overlap_path(directory, i, config.shards) for i in range(config.shards)]
    notes = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    hits = {gram for note in notes for gram in note["grams"]}
    documents = sum(note["documents"] for note in notes)
    overlap = contamination.report(contamination.load(config.dir / GRAMS), hits, documents, n)
    write_text(directory / OVERLAP, json.dumps(overlap, indent=1, ensure_ascii=False) + "\n")
    tasks = overlap["tasks"].items()
    counts = ", ".join(f"{name} {task['overlapping']}/{task['rows']}" for name, task in tasks)
    say(f"{split}: test rows that share {n} words with {documents:,} documents: {counts}")
