"""Writing of shards, notes and manifests, and the reports about them.

A shard is an Arrow stream of packed rows. The note next to it marks it as complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from emo.common.errors import UserError
from emo.common.io.files import part_file, write_text
from emo.common.io.mirror import size_of
from emo.common.text import counted

from ..config import FORMAT, TRAIN, VALIDATION, DataConfig, settings
from ..encoding.pack import ROWS, SPAN, BlockPacker, PackedRows, cut_documents, packed_rows, rows_at_once
from ..encoding.tokenizer import TokenizerFacts
from ..selection.arrow import array_of, lists_of
from ..selection.plan import Summary
from .encode import SHORT, Encoded, split_by_length
from .format import (
    DomainCounts,
    Manifest,
    ShardInfo,
    content_fingerprint,
    schema,
    shard_name,
)
from .reencode import ShardCheck

PLAN = "plan.parquet"
TOKENIZER = "tokenizer"
TOOL = f"data_prep {FORMAT}"
COUNTED = ("rows", "tokens", "valid_tokens", "segments")  # counted for each domain


class ShardWriter:
    """Writes packed rows to one shard file."""

    def __init__(
        self, file: IO[bytes], kind: str, dtype: np.dtype, domains: tuple[str, ...], batch_rows: int = ROWS
    ) -> None:
        """Args:
        file: the file to write.
        kind: the kind of the data set.
        dtype: type of the tokens.
        domains: the domains of the data set.
        batch_rows: rows of an Arrow record batch.
        """
        self._batch_rows = batch_rows
        self._file = file
        self._kind = kind
        self._dtype = dtype
        self._domains = domains
        self._schema = schema(kind, dtype)
        self._stream = pa.ipc.new_stream(file, self._schema)
        self._waiting: list[pa.RecordBatch] = []
        self._counts = np.zeros((len(domains), len(COUNTED)), np.int64)
        self._largest_id = 0

    def add(self, rows: PackedRows, limit: int | None = None) -> int:
        """Append the first `limit` rows, or all, and return how many.

        They are written `batch_rows` at a time.
        """
        columns = [
            lists_of(_ends(rows.lengths), rows.ids.astype(self._dtype, copy=False)),
            lists_of(_ends(rows.segment_counts), rows.segments.astype(np.uint32)),
            lists_of(_ends(rows.segment_counts), rows.sources),
        ]
        if self._kind == "instruct":
            columns.append(lists_of(_ends(rows.span_counts), rows.spans.astype(np.uint32)))
            columns.append(lists_of(_ends(rows.weight_counts), rows.weights))
            columns.append(array_of(rows.weight))
        domain = np.full(len(rows.lengths), rows.domain, np.uint16)
        columns += [array_of(rows.valid.astype(np.uint32)), array_of(domain)]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._waiting.append(batch if limit is None else batch.slice(0, limit))
        count = self._waiting[-1].num_rows
        sums = [int(amount[:count].sum()) for amount in (rows.lengths, rows.valid, rows.segment_counts)]
        self._counts[rows.domain] += (count, *sums)
        self._largest_id = max(self._largest_id, int(rows.ids.max(initial=0)))
        if sum(batch.num_rows for batch in self._waiting) >= self._batch_rows:
            self._write(self._batch_rows)
        return count

    def _write(self, multiple: int) -> None:
        """Write waiting rows, in a number that is a multiple of `multiple`."""
        table = pa.Table.from_batches(self._waiting, self._schema)
        count = table.num_rows // multiple * multiple
        for start in range(0, count, self._batch_rows):
            columns = table.slice(start, min(self._batch_rows, count - start)).columns
            # Copied, because Arrow pads the buffers of slices.
            arrays = [pa.concat_arrays(column.chunks) for column in columns]
            self._stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._waiting = table.slice(count).to_batches()

    def finish(
        self, path: Path, documents: Counter[str], counts: Counter[str], ends: Iterable[int] = ()
    ) -> ShardInfo:
        """Write the waiting rows and the end of the stream. Return the note of the shard.

        Args:
            path: The later name of the shard.
            documents: The number of documents of each domain.
            counts: Losses by reason.
            ends: The tokens that end supervised answers.
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
            largest_id=self._largest_id,
        )


def _ends(lengths: np.ndarray) -> np.ndarray:
    """Return the beginnings of lists with these lengths, and the end of the last."""
    return np.append(0, np.cumsum(lengths))


def totals(parts: Iterable[DomainCounts | ShardInfo]) -> dict[str, int]:
    """Return the total counts of domains or shards."""
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
    """Pack encoded sequences into a shard and return its note.

    The shard and its note get their final names only if `check` finds the sampled rows in the shard.

    Args:
        directory: The directory of the split.
        index: The number of the shard.
        config: The data section of the recipe.
        dtype: Type of the tokens.
        encoded: The sequences, each of one domain.
        check: Compares sampled rows.
        quota: Most tokens of a text shard, in complete blocks.
    """
    name = shard_name(index, config.shards)
    domains = config.domains_of(directory.name)
    counts: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    overlap: set[int] = set()
    ends: set[int] = set()
    overlapping = 0

    def counted_parts() -> Iterator[tuple[int, Encoded]]:
        nonlocal overlapping
        for part in (piece for whole in encoded for piece in split_by_length(whole, config.long_doc_tokens)):
            number = domains.index(part.domain)
            check.add(number, part.ids, part.lengths, part.sampled)
            documents[part.domain] += part.documents - part.counts[SHORT]
            counts.update(part.counts)
            overlap.update(part.overlap.tolist())
            ends.update(part.ends)
            overlapping += part.overlapping
            yield number, part

    with part_file(directory / name) as file:
        block = config.sequence_len
        text = config.kind == "text"
        complete = text and config.packing != "blocks"
        writer = ShardWriter(file, config.kind, dtype, domains, rows_at_once(block) if complete else ROWS)
        if text and not complete:
            _pack_blocks(writer, counted_parts(), block, quota, counts)
        else:
            parts = _cut_parts(counted_parts(), block, counts) if complete else counted_parts()
            alone = config.packing == "none"
            counts["weighted_spans"] = _pack_bins(writer, parts, block, dtype, directory, alone)
        info = writer.finish(directory / name, documents, counts, ends)
        check.compare(Path(file.name), config.kind, directory / name)
    if config.contamination is not None:
        note = {"documents": overlapping, "grams": sorted(overlap)}
        write_text(overlap_path(directory, index, config.shards), json.dumps(note) + "\n")
    write_text((directory / name).with_suffix(".json"), info.model_dump_json(indent=1) + "\n")
    return info


def _pack_blocks(
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


def _cut_parts(
    encoded: Iterable[tuple[int, Encoded]], block: int, counts: Counter[str]
) -> Iterator[tuple[int, Encoded]]:
    """Yield documents as sequences of at most `block` tokens, all of them supervised, and count cut ones."""
    for domain, part in encoded:
        lengths, pieces = cut_documents(part.lengths, block)
        counts["cut_documents"] += int((pieces > 1).sum())
        spans = np.ones((len(lengths), 1), SPAN)
        spans["start"] = 0
        spans["stop"] = lengths[:, None]
        sources = np.repeat(part.sources, pieces)
        yield domain, part._replace(lengths=lengths, sources=sources, spans=list(spans))


def _pack_bins(
    writer: ShardWriter,
    encoded: Iterable[tuple[int, Encoded]],
    block: int,
    dtype: np.dtype,
    directory: Path,
    alone: bool,
) -> int:
    """Pack bins, and return the number of spans with a weight. alone: give each example its own row.

    Bins need all lengths of the shard first, so the ids wait in an unnamed file.
    """
    import tempfile

    parts: dict[int, list[tuple[int, Encoded]]] = {}  # of each domain: the beginning of the ids
    tokens = 0
    weighted = 0
    with tempfile.TemporaryFile(dir=directory) as spool:
        for domain, part in encoded:
            spool.write(part.ids.tobytes())
            parts.setdefault(domain, []).append((tokens, part._replace(ids=part.ids[:0].copy())))
            tokens += len(part.ids)
        spool.flush()
        if not tokens:
            return 0
        ids = np.memmap(spool, dtype, mode="r", shape=(tokens,))
        for domain, members in sorted(parts.items()):
            starts = [begin + np.cumsum(part.lengths) - part.lengths for begin, part in members]
            lengths = np.concatenate([part.lengths for _, part in members])
            sources = np.concatenate([part.sources for _, part in members])
            spans = [span for _, part in members for span in part.spans]
            examples = ids, np.concatenate(starts), lengths, spans, sources
            for rows in packed_rows(*examples, block, domain, alone):
                writer.add(rows)
                weighted += int((rows.weights != 1).sum())
        del ids
    return weighted


def overlap_path(directory: Path, index: int, count: int) -> Path:
    """Return the file with the n-grams of test rows in a shard's documents."""
    return (directory / shard_name(index, count)).with_suffix(".overlap.json")


def read_note(directory: Path, index: int, count: int) -> ShardInfo | None:
    """Return the note of a complete shard, or None if the shard must be made."""
    shard = directory / shard_name(index, count)
    try:
        info = ShardInfo.model_validate_json(shard.with_suffix(".json").read_bytes())
        complete = size_of(shard) == info.bytes and (info.split, info.file) == (
            directory.name,
            shard.name,
        )
    except (OSError, ValidationError):
        return None
    return info if complete else None


def make_manifest(config: DataConfig, summary: Summary, split: str, infos: list[ShardInfo]) -> Manifest:
    """Return the manifest of a split whose shards are complete. Raises UserError if they have no rows.

    Args:
        config: The data section of the recipe.
        summary: The summary of the plan.
        split: The name of the split.
        infos: The notes of all shards.
    """
    made_with = settings(config)
    facts = TokenizerFacts(**summary["tokenizer"])
    total = totals(infos)
    if not total["rows"]:
        raise _no_rows_error(config, split, sum(info.counts.get(SHORT, 0) for info in infos))
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
        template=made_with["template_version"],
        fingerprint=content_fingerprint(config.kind, config.sequence_len, facts.fingerprint, infos),
        config=made_with,
        sources=summary["sources"],
        rejected=summary["rejected"],
        counts=dict(sorted(sum((Counter(info.counts) for info in infos), Counter()).items())),
        **total,
        domains=domains,
        answer_ends=sorted({token for info in infos for token in info.answer_ends}),
        waste=round(1 - total["tokens"] / max(1, total["rows"] * config.sequence_len), 6),
        shards=infos,
    )


def _no_rows_error(config: DataConfig, split: str, short: int) -> UserError:
    """Return the reason why a split has no rows. short: documents below data.min_doc_tokens."""
    rows = "training" if split == TRAIN else split.replace(f"{VALIDATION}-", f"{VALIDATION} ")
    if config.kind == "instruct":
        problem = f"no {rows} example has a response within data.sequence_len={config.sequence_len} tokens"
        advice = "Set a larger value"
    elif short:
        problem = f"data.min_doc_tokens={config.min_doc_tokens} leaves no {rows} row of {short:,} documents"
        advice = "Set a smaller value"
    else:
        problem = f"the {rows} data are less than one block of {config.sequence_len} tokens in every shard"
        fewer = " or fewer data.shards" if config.shards > 1 else ""
        advice = f"Set a smaller data.sequence_len{fewer}, or add {rows} data,"
    return UserError(f"{problem}. {advice} and prepare with --force", code="no-rows")


def describe_columns(summary: Summary) -> list[str]:
    """Return lines for the user with the columns of the sources that are read and that are not."""
    same_columns: dict[tuple[str, str], list[str]] = {}
    for source in summary["sources"]:
        if source["columns_not_read"]:
            key = ", ".join(source["columns"]), ", ".join(source["columns_not_read"][:12])
            same_columns.setdefault(key, []).append(source["name"])
    lines = []
    for (read, unread), names in same_columns.items():
        others = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        lines.append(f"{names[0]}{others}: columns read: {read}; not read: {unread}")
    return lines


def describe_left_out(summary: Summary) -> list[str]:
    """Return phrases for the user about rows and messages of the sources that are not used."""
    lost = []
    rejected = summary["rejected"]
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


def describe_losses(config: DataConfig, split: str, infos: list[ShardInfo]) -> list[str]:
    """Return lines for the user about rows of a split that were cut or dropped by encoding and packing.

    infos: the notes of the existing shards.
    """
    lines = []
    domains = config.domains_of(split)
    counts = sum((Counter(info.counts) for info in infos), Counter())
    if overlong := counts["overlong"]:
        kinds = ("truncated", "split", "dropped", "without_response")
        parts = [(counts[f"overlong_{kind}"], kind.replace("_", " ")) for kind in kinds]
        outcomes = ", ".join(f"{count:,} {kind}" for count, kind in parts if count)
        lines.append(
            f"{counted(overlong, 'example')} of {counted(totals(infos)['documents'], 'row')} are longer than "
            f"{config.sequence_len} tokens "
            f"({outcomes}); {counted(counts['overlong_tokens_lost'], 'token')} lost"
        )
    if short := counts[SHORT]:
        tokens = counted(counts[f"{SHORT}_tokens"], "token")
        lines.append(f"{counted(short, 'document')} of fewer than {config.min_doc_tokens} tokens: {tokens}")
    if cut := counts["cut_documents"]:
        lines.append(f"{counted(cut, 'document')} longer than {config.sequence_len} tokens cut into rows")
    if remainder := counts["remainder_tokens_dropped"]:
        ends = "shards, and of domains in them" if len(domains) > 1 else "shards"
        lines.append(f"{counted(remainder, 'token')} at the ends of {ends}, less than a row each, dropped")
    if beyond := counts["tokens_beyond_limit"]:
        lines.append(f"{counted(beyond, 'token')} beyond data.limit_tokens dropped")
    written = {part.name for info in infos for part in info.domains if part.rows}
    if len(infos) == config.shards and (none := [name for name in domains if name not in written]):
        lines.append(f"no rows are left of the domain{'s' if none[1:] else ''} {', '.join(none)}")
    return lines
