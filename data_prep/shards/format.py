"""The format of prepared data, Arrow shards and a manifest, and the reader for training.

A data set is a directory of Arrow IPC stream files, which `datasets.Dataset.from_file` can also memory-map,
and `manifest.json`, which is written last: without it the directory is not a data set. Columns of a row:

    input_ids        list<uint16 or uint32>  tokens, at most `block`
    segment_lengths  list<uint32>            tokens of each document or example in the row
    sources          list<uint64>            document or example of each segment, as a hash of all its tokens
    loss_spans       list<uint32>            instruct only: start and end of each stretch of supervised tokens
    loss_weights     list<float32>           instruct only: weight of each span, empty if all are 1
    weight           double                  instruct only: sum of the weights of the supervised targets
    valid            uint32                  supervised targets after the shift, each counted once
    domain           uint16                  index in the manifest's `domains`, the same for all segments
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from emo.common.causal_lm import IGNORE
from emo.common.config.recipe import LARGEST, Section
from emo.common.errors import UserError, one_line
from emo.common.io.files import Hashes, exists
from emo.common.io.lease import Lease, wait_and_hold
from emo.common.io.mirror import copy_verified, refresh
from emo.common.io.objects import address_of, mirrors, shown
from emo.common.io.untrusted import read_json

from ..config import FORMAT, MANIFEST, MAX_TOKENS, SETTINGS, TRAIN, DataConfig, check_prepared, split_of
from .costs import FILES, FORECAST

HASHES = "hashes.json"  # hashes of files on this machine
# Files besides shards: settings, costs, tokenizer, manifests, scores.
COPIED = (SETTINGS, FORECAST, FILES, "tokenizer/*", f"*/{MANIFEST}", "*/contamination.json", "*/scores/*/*")
AGAIN = "run: emo prepare RECIPE"
RELEASE_EVERY = 256  # rows between releases of mapped pages: each row may have mapped 64 KiB around it
# Largest manifest. The largest number of shards takes 57 MB, each further domain 18 MB, a million files 400
# MB.
MANIFEST_BYTES = 2 << 30
Count = Annotated[int, Field(ge=0, le=LARGEST)]


class DomainCounts(Section):
    """Counts of one domain in a shard or a data set."""

    name: str
    rows: Count
    tokens: Count
    valid_tokens: Count
    segments: Count
    documents: Count


class ShardInfo(Section):
    """One shard file."""

    split: str  # a shard of another data set is rejected
    file: str = Field(pattern=r"^shard-[0-9]{5}-of-[0-9]{5}\.arrow$")  # next to the manifest
    bytes: Count
    sha256: str
    rows: Count
    tokens: Count
    valid_tokens: Count
    segments: Count  # documents or examples. Parts of cut ones are counted separately
    documents: Count  # input documents or examples
    domains: list[DomainCounts]  # domains with documents, in the manifest's order
    counts: dict[str, Count] = {}  # losses by reason: cut, dropped or left over
    answer_ends: list[Count] = []  # instruct: the tokens that end supervised answers
    largest_id: Count | None = None  # of the tokens. None in shards of earlier versions


class Manifest(Section):
    """The description of a prepared data set and its sources."""

    format: int
    tool: str
    kind: str
    split: str
    block: int = Field(gt=1, le=MAX_TOKENS)
    vocab_size: int = Field(ge=0, le=1 << 32)
    tokenizer_fingerprint: str
    bos_id: int | None
    eos_id: int | None
    template: str | None  # name and version
    fingerprint: str  # of the content: shards, block, tokenizer
    config: dict[str, Any]  # the settings that decide the content
    sources: list[dict[str, Any]]  # identity and row counts of each source
    rejected: dict[str, Count]  # rows of the sources, by reason
    counts: dict[str, Count]  # sums of the shards' counts
    rows: Count
    tokens: Count
    valid_tokens: Count
    documents: Count
    segments: Count
    domains: list[DomainCounts] = Field(min_length=1)  # of the sources, in order of first appearance
    answer_ends: list[Count] = []  # instruct: the tokens that end supervised answers, ascending
    waste: float  # share of padding in block * rows
    shards: list[ShardInfo]
    digest: str = ""  # sha256 of all other fields as JSON, set by `manifest_text`

    @property
    def used_ids(self) -> int:
        """One more than the largest token id in the rows. Larger ids of the vocabulary never occur."""
        largest = [shard.largest_id for shard in self.shards]
        known = [number for number in largest if number is not None]
        return self.vocab_size if len(known) < len(largest) else 1 + max(known)


def shard_name(index: int, count: int) -> str:
    """Return the file name of shard `index` of `count`."""
    return f"shard-{index:05d}-of-{count:05d}.arrow"


def token_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 if the vocabulary is small enough, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def schema(kind: str, dtype: np.dtype) -> pa.Schema:
    """Return the Arrow schema of a shard."""
    uint32 = pa.list_(pa.uint32())
    columns = [("input_ids", pa.list_(pa.from_numpy_dtype(dtype))), ("segment_lengths", uint32)]
    columns.append(("sources", pa.list_(pa.uint64())))
    if kind == "instruct":
        columns.append(("loss_spans", uint32))
        columns += [("loss_weights", pa.list_(pa.float32())), ("weight", pa.float64())]
    return pa.schema([*columns, ("valid", pa.uint32()), ("domain", pa.uint16())])


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a data set. Raises UserError if it is missing, unreadable or edited."""
    manifest = parse_manifest(directory)
    if manifest.digest != manifest_digest(manifest):
        raise UserError(
            f"{directory / MANIFEST} was edited after it was written; {AGAIN}", code="damaged-data"
        )
    return manifest


def parse_manifest(directory: Path) -> Manifest:
    """Return the manifest of a data set like `read_manifest`, even if it was edited."""
    file = directory / MANIFEST
    if not file.is_file():
        state = "is not complete" if directory.is_dir() else "does not exist"
        name = shown(directory)
        raise UserError(f"prepared data {name} {state}; {AGAIN}", code="not-prepared")
    try:
        tree = read_json(file, MANIFEST_BYTES)
        if tree["format"] == FORMAT:  # other formats have other fields
            return Manifest.model_validate(tree)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is not a manifest of this version ({one_line(error)}); {AGAIN}", code="damaged-data"
        ) from None
    raise UserError(
        f"{file} has format {tree['format']}, this version reads {FORMAT}; {AGAIN} --force",
        code="other-version",
    )


def manifest_digest(manifest: Manifest) -> str:
    """Return the sha256 of a manifest without its digest."""
    tree = manifest.model_dump(mode="json", exclude={"digest"})
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def manifest_text(manifest: Manifest) -> str:
    """Return the manifest with its digest as the text of its file."""
    tree = manifest.model_dump(mode="json") | {"digest": manifest_digest(manifest)}
    return json.dumps(tree, indent=1, sort_keys=True) + "\n"


def content_fingerprint(kind: str, block: int, tokenizer: str, shards: list[ShardInfo]) -> str:
    """Return a hash of the content of a data set, 64 hex digits."""
    content = [kind, block, tokenizer, *(info.sha256 for info in shards)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class Shard:
    """One memory-mapped shard, with random access to its rows.

    Raises ValueError or Arrow's errors for any other file. Rows are read without further checks, so invalid
    offsets must be found here.
    """

    def __init__(self, path: Path, kind: str) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        stream = pa.ipc.open_stream(pa.py_buffer(self._map))
        if not any(stream.schema.equals(schema(kind, np.dtype(token))) for token in (np.uint16, np.uint32)):
            raise ValueError(f"its columns are not those of a shard of kind {kind}")
        batches = list(stream)
        for batch in batches:
            batch.validate(full=True)
            if batch.nbytes > len(self._map) or any(column.null_count for column in batch.columns):
                raise ValueError("a batch is packed or has gaps")
        instruct = ["loss_spans", "loss_weights"] if kind == "instruct" else []
        self._read = ["input_ids", "segment_lengths", *instruct]
        names = [*self._read, "sources"]
        # Offsets and values of list columns, as views of the mapped file (`to_numpy` would import pandas).
        lists = {name: [batch.column(name) for batch in batches] for name in names}
        self.columns = {
            name: [(np.from_dlpack(column.offsets), np.from_dlpack(column.values)) for column in columns]
            for name, columns in lists.items()
        }
        valid = [np.from_dlpack(batch.column("valid")) for batch in batches]
        self.valid = np.concatenate([np.zeros(0, np.int64), *valid]).astype(np.int64)
        self.weight = self.valid
        self.weight_range = (1.0, 1.0)  # smallest and largest weight of a span
        weights = [values for _, values in self.columns["loss_weights"] if len(values)] if instruct else []
        if weights:
            self.weight = np.concatenate([np.from_dlpack(batch.column("weight")) for batch in batches])
            spans = sum(len(values) for _, values in self.columns["loss_spans"]) // 2
            others = [1.0] if sum(map(len, weights)) < spans else []
            low, high = (f([*others, *map(f, weights)]) for f in (np.min, np.max))
            self.weight_range = float(low), float(high)
        domain = [np.from_dlpack(batch.column("domain")) for batch in batches]
        self.domain = np.concatenate([np.zeros(0, np.uint16), *domain])
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])

    def row(self, row: int) -> list[np.ndarray]:
        """Return the columns of a row: input_ids, segment_lengths, and the spans and weights of instruct."""
        return [self.cell(name, row) for name in self._read]

    def cell(self, column: str, row: int) -> np.ndarray:
        """Return the value of a list column in a row."""
        batch = int(np.searchsorted(self._starts, row, side="right")) - 1
        offsets, values = self.columns[column][batch]
        first = row - self._starts[batch]
        return values[offsets[first] : offsets[first + 1]]

    def token_offsets(self) -> np.ndarray:
        """Return the first token of each row in the shard, and the number of tokens, int64 [rows + 1]."""
        lengths = [np.diff(offsets) for offsets, _ in self.columns["input_ids"]]
        return np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]), dtype=np.int64)

    def release(self) -> None:
        """Release mapped pages. The kernel keeps them in its cache, outside this process's memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class TokenDataset:
    """Reads the rows of a prepared data set for training.

    Raises UserError, with the command to run, if the directory is missing or incomplete, its manifest was
    edited, or a file has another size than in the manifest. `faults` also checks the content.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        self.fingerprint = self.manifest.fingerprint
        self.domains = tuple(counts.name for counts in self.manifest.domains)  # some may have no row
        self._shards: list[Shard] = []
        for info in self.manifest.shards:
            path = directory / info.file
            size = path.stat().st_size if path.is_file() else -1
            if size != info.bytes:
                problem = "is missing" if size < 0 else f"has {size} bytes instead of {info.bytes}"
                raise UserError(f"{path} {problem}; {AGAIN}", code="damaged-data")
            try:
                self._shards.append(Shard(path, self.manifest.kind))
                if len(self._shards[-1].valid) != info.rows:
                    raise ValueError(f"{len(self._shards[-1].valid)} rows where {info.rows} were written")
                if self._shards[-1].domain.max(initial=0) >= len(self.domains):
                    raise ValueError(f"rows of more than its {len(self.domains)} domains")
            except (pa.ArrowException, OSError, KeyError, ValueError) as error:
                raise UserError(
                    f"{path} is damaged ({one_line(error)}); {AGAIN}", code="damaged-data"
                ) from None
        self._starts = np.cumsum([0, *(len(shard.valid) for shard in self._shards)])
        self._read = 0
        self.valid = np.concatenate([shard.valid for shard in self._shards])
        self.domain = np.concatenate([shard.domain for shard in self._shards])  # uint16 [rows], of `domains`
        ranges = [shard.weight_range for shard in self._shards]
        self.weight_range = min(low for low, _ in ranges), max(high for _, high in ranges)
        self.weighted = self.weight_range != (1, 1)
        self.weight = np.concatenate([shard.weight for shard in self._shards])  # sums of weights [rows]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def faults(self, hashes: Hashes, part: int = 0, parts: int = 1) -> Iterator[str]:
        """Yield a message for each changed shard. Each of several readers checks a part of the shards."""
        for info in self.manifest.shards[part::parts]:
            path = self.directory / info.file
            try:
                if hashes.sha256(path) != info.sha256:
                    yield f"{path} was changed after it was prepared; {AGAIN}"
            except OSError as error:
                yield f"{path} cannot be read ({error.strerror}); {AGAIN}"

    def batch(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows as int64 arrays [b, block]: input_ids, labels, position_ids, loss_weights.

        Labels are shifted: labels[i] is the token that position i predicts, or -100 if the next token belongs
        to another segment, is not supervised or is padding. Positions restart at 0 in every segment. Padding
        (ids 0) is a separate last segment. The weights of the labels are float32, and only data with weights
        have them.
        """
        width = self.manifest.block
        ids = np.zeros((len(rows), width), np.int64)
        labels = np.full((len(rows), width), IGNORE, np.int64)
        positions = np.empty((len(rows), width), np.int64)
        weights = np.ones((len(rows), width), np.float32) if self.weighted else None
        for i, row in enumerate(rows):
            tokens, segments, *spans = self._row(int(row))
            n = len(tokens)
            ids[i, :n] = tokens
            if spans:
                of_spans = spans[1].tolist()
                for number, (start, end) in enumerate(spans[0].reshape(-1, 2).tolist()):
                    first = max(start, 1)
                    labels[i, first - 1 : end - 1] = tokens[first:end]
                    if weights is not None and of_spans:
                        weights[i, first - 1 : end - 1] = of_spans[number]
            else:
                labels[i, : n - 1] = tokens[1:]
            ends = np.cumsum(segments, dtype=np.int64)
            labels[i, ends - 1] = IGNORE
            starts = np.concatenate([[0], ends])
            lengths = np.append(segments, width - n)
            positions[i] = np.arange(width) - np.repeat(starts, lengths)
        batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return batch if weights is None else batch | {"loss_weights": weights}

    def describe_weights(self) -> str:
        """Return the range of the loss weights of data with weights, and their sum."""
        low, high = self.weight_range
        return f"{low:g} to {high:g}; {self.valid.sum():,} tokens weigh {self.weight.sum():,.1f}"

    def tokens_of(self, row: int) -> int:
        """Return the number of tokens in a row without padding."""
        return len(self._row(row)[0])

    def documents_of(self, row: int) -> list[np.ndarray]:
        """Return the tokens of each document or example in a row, or of its part in this row."""
        tokens, segments, *_ = self._row(row)
        return np.split(tokens, np.cumsum(segments)[:-1])

    def sources_of(self, row: int) -> np.ndarray:
        """Return the hash of the document or example of each segment of a row, uint64.

        Parts and copies of a document have the same hash in other rows.
        """
        shard, number = self.locate(row)
        return self._shards[shard].cell("sources", number)

    def damage(self, rows: np.ndarray, vocab_size: int) -> str | None:
        """Return a message for the first damaged row of `rows`, or None if all are valid."""
        for row in rows:
            tokens, segments, *spans = self._row(int(row))
            starts, ends = (spans[0][::2], spans[0][1::2]) if spans else (tokens[:0], tokens[:0])
            problem = None
            if len(tokens) > self.manifest.block or segments.sum(dtype=np.int64) != len(tokens):
                problem = f"{len(tokens)} tokens in segments of {segments.sum(dtype=np.int64)}"
            elif len(tokens) and int(tokens.max()) >= vocab_size:
                problem = f"token id {tokens.max()} of a vocabulary of {vocab_size}"
            elif len(starts) != len(ends) or (starts >= ends).any() or (ends > len(tokens)).any():
                problem = "supervised spans beyond its end"
            elif spans and not _are_weights(spans[1], len(starts)):
                problem = "weights that are not one positive number for each supervised span"
            if problem is not None:
                ((file, number),) = self.provenance(np.array([row]))
                return f"{self.directory / file}, row {number}, is damaged: {problem}"
        return None

    def segment_lengths(self) -> np.ndarray:
        """Return the lengths of all segments of all rows, int64."""
        parts = [values for shard in self._shards for _, values in shard.columns["segment_lengths"]]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

    def mean_context(self, max_rows: int = 4096) -> float:
        """Return the mean number of tokens that a token attends to: half of its segment, weighted by tokens.

        Padding attends to itself and counts. max_rows: number of evenly spaced rows that are read.
        """
        rows = np.linspace(0, len(self) - 1, min(max_rows, len(self)), dtype=np.int64)
        squares = 0.0
        width = self.manifest.block
        for row in rows.tolist():
            shard, number = self.locate(row)
            lengths = self._shards[shard].cell("segment_lengths", number).astype(np.float64)
            squares += lengths @ lengths + (width - lengths.sum()) ** 2
        return float(squares) / (2 * width * max(1, len(rows)))

    def provenance(self, rows: np.ndarray) -> list[tuple[str, int]]:
        """Return the shard file of each row, and the row in that file."""
        positions = (self.locate(int(row)) for row in rows)
        return [(self.manifest.shards[shard].file, number) for shard, number in positions]

    def token_offsets(self, shard: int) -> np.ndarray:
        """Return `Shard.token_offsets` of a shard."""
        return self._shards[shard].token_offsets()

    def rows_of(self, shard: int) -> np.ndarray:
        """Return the numbers of the rows in a shard, in order."""
        return np.arange(self._starts[shard], self._starts[shard + 1])

    def locate(self, row: int) -> tuple[int, int]:
        """Return the shard of a row, and the row in that shard."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        return shard, int(row - self._starts[shard])

    def _row(self, row: int) -> list[np.ndarray]:
        shard, number = self.locate(row)
        self._read += 1
        if self._read % RELEASE_EVERY == 0:  # keeps resident memory constant over an epoch
            for opened in self._shards:
                opened.release()
        return self._shards[shard].row(number)


def _are_weights(weights: np.ndarray, spans: int) -> bool:
    """Return whether the weights of a row are those of its spans."""
    return not len(weights) or (len(weights) == spans and bool((np.isfinite(weights) & (weights > 0)).all()))


def is_prepared(config: DataConfig) -> bool:
    """Return whether the training data of a recipe's data section exist. They may be damaged."""
    return exists(config.dir / TRAIN / MANIFEST)


def copy_prepared(directory: Path, again: bool = False) -> None:
    """Copy prepared data from the store that they belong to, if any. One process of a host copies.

    Files that this host has are compared by version or hash, and not copied again, except with `again` the
    shards. Raises UserError for a shard that is missing or has another hash than in its manifest.
    """
    address = address_of(directory)
    if address is None:
        return
    locks = mirrors().with_name(f"{mirrors().name}-locks")
    with wait_and_hold(Lease(locks, hashlib.sha256(address.encode()).hexdigest()), None):
        refresh(directory, COPIED)
        splits = [file.parent for file in directory.glob(f"*/{MANIFEST}")]
        shards = {split / info.file: info.sha256 for split in splits for info in read_manifest(split).shards}
        copy_verified(shards, Hashes(directory / HASHES), again)


def open_prepared(config: DataConfig) -> tuple[TokenDataset, dict[str, TokenDataset]]:
    """Return the training data of a recipe's data section, and its validation sets by name, in order.

    Raises UserError if they are missing, incomplete, or were prepared with other settings.
    """
    copy_prepared(config.dir)
    opened = {}
    for split in config.splits:
        manifest = read_manifest(config.dir / split)
        check_prepared(config.dir, manifest.config, config)
        opened[split] = TokenDataset(config.dir / split)
    return opened[TRAIN], {name: opened[split_of(name)] for name in config.validation_sets}
