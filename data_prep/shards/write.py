"""The names in a prepared directory, writing a shard and its manifest, and what is reported of both.

A shard is packed rows in an Arrow stream, and a note beside it that says it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from emo.common.errors import UserError
from emo.common.io.files import part_file, write_text
from emo.common.text import counted

from ..config import FORMAT, TRAIN, VALIDATION, DataConfig, settings
from ..encoding.pack import BlockPacker, PackedRows, packed_rows
from ..encoding.tokenizer import TokenizerFacts
from ..selection.arrow import array_of, lists_of
from .encode import Encoded
from .format import (
    DomainCounts,
    Manifest,
    ShardInfo,
    content_fingerprint,
    schema,
    shard_name,
)
from .reencode import ShardCheck

SETTINGS, PLAN, TOKENIZER = "settings.json", "plan.parquet", "tokenizer"
TOOL = f"data_prep {FORMAT}"
BATCH_ROWS = 1024  # rows of an Arrow record batch
COUNTED = ("rows", "tokens", "valid_tokens", "segments")  # of each domain, while rows are written


class ShardWriter:
    """PackedRows of some domains into one shard file."""

    def __init__(self, file: IO[bytes], kind: str, dtype: np.dtype, domains: tuple[str, ...]) -> None:
        self._file, self._kind, self._dtype, self._domains = file, kind, dtype, domains
        self._schema = schema(kind, dtype)
        self._stream = pa.ipc.new_stream(file, self._schema)
        self._waiting: list[pa.RecordBatch] = []
        self._counts = np.zeros((len(domains), len(COUNTED)), np.int64)

    def add(self, rows: PackedRows, most: int | None = None) -> int:
        """Append the first `most` rows, or all; return how many. They are written BATCH_ROWS at a time."""
        columns = [
            lists_of(_ends(rows.lengths), rows.ids.astype(self._dtype, copy=False)),
            lists_of(_ends(rows.segment_counts), rows.segments.astype(np.uint32)),
            lists_of(_ends(rows.segment_counts), rows.sources),
        ]
        if self._kind == "instruct":
            columns.append(lists_of(_ends(rows.span_counts), rows.spans.astype(np.uint32)))
        domain = np.full(len(rows.lengths), rows.domain, np.uint16)
        columns += [array_of(rows.valid.astype(np.uint32)), array_of(domain)]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._waiting.append(batch if most is None else batch.slice(0, most))
        count = self._waiting[-1].num_rows
        sums = [int(amount[:count].sum()) for amount in (rows.lengths, rows.valid, rows.segment_counts)]
        self._counts[rows.domain] += (count, *sums)
        if sum(batch.num_rows for batch in self._waiting) >= BATCH_ROWS:
            self._write(BATCH_ROWS)
        return count

    def _write(self, multiple: int) -> None:
        """Write as many of the rows that wait as are a multiple of some number."""
        table = pa.Table.from_batches(self._waiting, self._schema)
        count = table.num_rows // multiple * multiple
        for start in range(0, count, BATCH_ROWS):
            columns = table.slice(start, min(BATCH_ROWS, count - start)).columns
            # Copied, since Arrow pads the buffers of what is a slice.
            arrays = [pa.concat_arrays(column.chunks) for column in columns]
            self._stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._waiting = table.slice(count).to_batches()

    def finish(
        self, path: Path, documents: Counter[str], counts: Counter[str], ends: Iterable[int] = ()
    ) -> ShardInfo:
        """Write what waits and the end of the stream; return the note of a shard that gets the name `path`.

        documents: of each domain. ends: the tokens that end supervised answers.
        """
        self._write(1)
        self._stream.close()
        self._file.flush()
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        domains = [
            DomainCounts(name=name, documents=documents[name], **dict(zip(COUNTED, amounts, strict=True)))
            for name, amounts in zip(self._domains, self._counts.tolist(), strict=True)
            if documents[name]
        ]
        return ShardInfo(
            split=path.parent.name,
            file=path.name,
            bytes=size,
            sha256=hashlib.file_digest(self._file, "sha256").hexdigest(),  # type: ignore[arg-type]
            **totals(domains),
            domains=domains,
            counts=dict(sorted((+counts).items())),
            answer_ends=sorted(ends),
        )


def _ends(lengths: np.ndarray) -> np.ndarray:
    """Return where lists of some lengths begin, and where the last ends."""
    return np.append(0, np.cumsum(lengths))


def totals(parts: Iterable[DomainCounts | ShardInfo]) -> dict[str, int]:
    """Return what domains or shards hold in all."""
    parts = list(parts)
    return {key: sum(getattr(part, key) for part in parts) for key in (*COUNTED, "documents")}


def write_shard(
    directory: Path,
    index: int,
    config: DataConfig,
    dtype: np.dtype,
    encoded: Iterable[Encoded],
    check: ShardCheck,
    quota: int | None = None,
) -> ShardInfo:
    """Pack encoded sequences, of one domain each, into shard `index` of a split; return its note.

    It is put in place, and then its note, only if `check` finds the rows in it that come with the sequences.
    quota: for text, tokens at most, in whole blocks.
    """
    name, domains = shard_name(index, config.shards), config.domains_of(directory.name)
    counts: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    overlap: set[int] = set()
    ends: set[int] = set()
    overlapping = 0

    def counted_parts() -> Iterator[tuple[int, Encoded]]:
        nonlocal overlapping
        for part in encoded:
            number = domains.index(part.domain)
            check.add(number, part.ids, part.lengths, part.sampled)
            documents[part.domain] += part.documents
            counts.update(part.counts)
            overlap.update(part.overlap.tolist())
            ends.update(part.ends)
            overlapping += part.overlapping
            yield number, part

    with part_file(directory / name) as file:
        writer = ShardWriter(file, config.kind, dtype, domains)
        if config.kind == "text":
            _blocks(writer, counted_parts(), config.sequence_len, quota, counts)
        else:
            _bins(writer, counted_parts(), config.sequence_len, dtype, directory)
        info = writer.finish(directory / name, documents, counts, ends)
        check.compare(Path(file.name), config.kind, directory / name)
    if config.contamination is not None:
        note = {"documents": overlapping, "grams": sorted(overlap)}
        write_text(overlap_path(directory, index, config.shards), json.dumps(note) + "\n")
    write_text((directory / name).with_suffix(".json"), info.model_dump_json(indent=1) + "\n")
    return info


def _blocks(
    writer: ShardWriter,
    encoded: Iterable[tuple[int, Encoded]],
    block: int,
    quota: int | None,
    counts: Counter[str],
) -> None:
    packers: dict[int, BlockPacker] = {}
    left = None if quota is None else quota // block
    for domain, part in encoded:
        packer = packers.setdefault(domain, BlockPacker(block, domain))
        rows = packer.add(part.ids, part.lengths, part.sources)
        written = writer.add(rows, left)
        if left is not None:
            counts["tokens_beyond_limit"] += (len(rows.lengths) - written) * block
            left -= written
    counts["remainder_tokens_dropped"] += sum(packer.remainder for packer in packers.values())


def _bins(
    writer: ShardWriter,
    encoded: Iterable[tuple[int, Encoded]],
    block: int,
    dtype: np.dtype,
    directory: Path,
) -> None:
    """Pack bins, which need all lengths of the shard first: the ids wait in a file that has no name."""
    import tempfile

    parts: dict[int, list[tuple[int, Encoded]]] = {}  # of each domain: where the ids begin
    tokens = 0
    with tempfile.TemporaryFile(dir=directory) as spool:
        for domain, part in encoded:
            spool.write(part.ids.tobytes())
            parts.setdefault(domain, []).append((tokens, part._replace(ids=part.ids[:0].copy())))
            tokens += len(part.ids)
        spool.flush()
        if not tokens:
            return
        ids = np.memmap(spool, dtype, mode="r", shape=(tokens,))
        for domain, members in sorted(parts.items()):
            starts = [begin + np.cumsum(part.lengths) - part.lengths for begin, part in members]
            lengths = np.concatenate([part.lengths for _, part in members])
            sources = np.concatenate([part.sources for _, part in members])
            spans = [span for _, part in members for span in part.spans]
            for rows in packed_rows(ids, np.concatenate(starts), lengths, spans, sources, block, domain):
                writer.add(rows)
        del ids


def overlap_path(directory: Path, index: int, count: int) -> Path:
    """Return the path of the grams of test rows that a shard's documents hold."""
    return (directory / shard_name(index, count)).with_suffix(".overlap.json")


def read_note(directory: Path, index: int, count: int) -> ShardInfo | None:
    """Return the note of a whole shard; None when the shard has to be made."""
    shard = directory / shard_name(index, count)
    try:
        info = ShardInfo.model_validate_json(shard.with_suffix(".json").read_bytes())
        whole = shard.stat().st_size == info.bytes and (info.split, info.file) == (directory.name, shard.name)
    except (OSError, ValidationError):
        return None
    return info if whole else None


def manifest_of(config: DataConfig, summary: dict[str, Any], split: str, infos: list[ShardInfo]) -> Manifest:
    """Return the manifest of a split whose shards are all there. Raises UserError when they hold no row.

    summary: of the plan.
    """
    decisive, facts = settings(config), TokenizerFacts(**summary["tokenizer"])
    total = totals(infos)
    if not total["rows"]:
        rows = "training" if split == TRAIN else split.replace(f"{VALIDATION}-", f"{VALIDATION} ")
        if config.kind == "instruct":
            reason = f"no {rows} example has a response within data.sequence_len={config.sequence_len} tokens"
            advice = "set a larger one"
        else:
            reason = f"the {rows} data are less than one block of {config.sequence_len} tokens in every shard"
            fewer = " or fewer data.shards" if config.shards > 1 else ""
            advice = f"set a smaller data.sequence_len{fewer}, or add {rows} data,"
        raise UserError(f"{reason}; {advice} and prepare with --force", code="no-rows")
    domains = [
        DomainCounts(
            name=name, **totals(part for info in infos for part in info.domains if part.name == name)
        )
        for name in config.domains_of(split)
    ]
    return Manifest(
        format=FORMAT,
        tool=TOOL,
        kind=config.kind,
        split=split,
        block=config.sequence_len,
        vocab_size=facts.vocab_size,
        tokenizer_fingerprint=facts.fingerprint,
        bos_id=facts.bos_id,
        eos_id=facts.eos_id,
        template=decisive["template_version"],
        fingerprint=content_fingerprint(config.kind, config.sequence_len, facts.fingerprint, infos),
        config=decisive,
        sources=summary["sources"],
        rejected=summary["rejected"],
        counts=dict(sorted(sum((Counter(info.counts) for info in infos), Counter()).items())),
        **total,
        domains=domains,
        answer_ends=sorted({token for info in infos for token in info.answer_ends}),
        waste=round(1 - total["tokens"] / max(1, total["rows"] * config.sequence_len), 6),
        shards=infos,
    )


def columns_read(summary: dict[str, Any]) -> list[str]:
    """Return lines for the user: which columns of the sources are read, and which are not."""
    alike: dict[tuple[str, str], list[str]] = {}
    for source in summary["sources"]:
        if source["columns_not_read"]:
            key = ", ".join(source["columns"]), ", ".join(source["columns_not_read"][:12])
            alike.setdefault(key, []).append(source["name"])
    lines = []
    for (read, unread), names in alike.items():
        others = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        lines.append(f"{names[0]}{others}: columns read: {read}; not read: {unread}")
    return lines


def left_out(summary: dict[str, Any]) -> list[str]:
    """Return phrases for the user: what of the sources no shard takes."""
    lost, rejected = [], summary["rejected"]
    if rejected:
        reasons = ", ".join(f"{n:,} {reason.replace('_', ' ')}" for reason, n in rejected.items())
        lost.append(f"{counted(sum(rejected.values()), 'row')} ({reasons})")
    if messages := sum(source["messages_left_out"] for source in summary["sources"]):
        lost.append(f"{counted(messages, 'message')} before the first prompt or after the last response")
    fields: Counter[str] = Counter()
    for source in summary["sources"]:
        fields.update(source["fields_left_out"])
    if fields:
        listed = ", ".join(f"{field} in {counted(count, 'row')}" for field, count in sorted(fields.items()))
        lost.append(f"left out by the template: {listed}")
    return lost


def losses(config: DataConfig, split: str, infos: list[ShardInfo]) -> list[str]:
    """Return lines for the user: what of a split's rows was cut or dropped as they were encoded and packed.

    infos: of the shards that are there so far.
    """
    lines, domains = [], config.domains_of(split)
    counts = sum((Counter(info.counts) for info in infos), Counter())
    if overlong := counts["overlong"]:
        kinds = ("truncated", "split", "dropped", "without_response")
        parts = [(counts[f"overlong_{kind}"], kind.replace("_", " ")) for kind in kinds]
        fates = ", ".join(f"{count:,} {kind}" for count, kind in parts if count)
        lines.append(
            f"{counted(overlong, 'example')} of {counted(totals(infos)['documents'], 'row')} are longer than "
            f"{config.sequence_len} tokens "
            f"({fates}); {counted(counts['overlong_tokens_lost'], 'token')} lost"
        )
    if remainder := counts["remainder_tokens_dropped"]:
        ends = "shards, and of domains in them" if len(domains) > 1 else "shards"
        lines.append(f"{counted(remainder, 'token')} at the ends of {ends}, less than a row each, dropped")
    if beyond := counts["tokens_beyond_limit"]:
        lines.append(f"{counted(beyond, 'token')} beyond data.limit_tokens dropped")
    written = {part.name for info in infos for part in info.domains if part.rows}
    if len(infos) == config.shards and (none := [name for name in domains if name not in written]):
        lines.append(f"nothing is left of the domain{'s' if none[1:] else ''} {', '.join(none)}")
    return lines
