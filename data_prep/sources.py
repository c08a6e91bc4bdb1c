"""Sources -> pieces: stretches of a file, small enough for a worker, that can be read again on their own.

A text file is cut between rows into payloads of about PIECE bytes, a table into blocks of rows. The planning
pass goes over all pieces once and keeps their places; a shard's job later reads just the pieces it needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow

from common.errors import UserError, one_line
from data_prep.config import DataConfig, Source
from data_prep.rows import Payload, RowSpec, cuts, raw_rows

PIECE = 256 << 10  # bytes of text in a piece
PIECE_ROWS = 256  # rows of a table in a piece
JSON_LIMIT = 1 << 30  # bytes of a .json array, which is held in memory
SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
WORLD_ROWS = 20_000  # rows of an embedded corpus without a limit


class Place(NamedTuple):
    """Where a piece lies in its file: bytes of the unpacked text, or rows of the table."""

    start: int
    length: int


class Piece(NamedTuple):
    """A place and what stands there; payload None: a row longer than data.max_chars allows."""

    place: Place
    payload: Payload | None


class Input:
    """One file, hub data set or embedded corpus of a source."""

    held_out = False  # of a validation source

    def __init__(self, source: Source, name: str, spec: RowSpec) -> None:
        self.source, self.name, self.spec = source, name, spec

    def pieces(self) -> Iterator[Piece]:
        """All pieces, in order."""
        raise NotImplementedError

    def read(self, places: Iterable[Place]) -> Iterator[Payload]:
        """The payloads at some places, which come in order."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What pins the content: name, and hash or revision."""
        raise NotImplementedError


class TextInput(Input):
    """A .txt or .jsonl file, plain or packed."""

    def __init__(self, source: Source, name: str, spec: RowSpec, path: Path) -> None:
        super().__init__(source, name, spec)
        self.path = path

    def pieces(self) -> Iterator[Piece]:
        with open_text(self.path) as stream:
            yield from _cut(_chunks(stream, self.name), self.spec, 4 * self.spec.max_chars)

    def read(self, places: Iterable[Place]) -> Iterator[Payload]:
        with open_text(self.path) as stream:
            at = 0
            for place in places:
                skip(stream, place.start - at)
                payload = stream.read(place.length)
                if len(payload) != place.length:
                    raise UserError(f"{self.name} is shorter than when it was planned; {AGAIN}")
                at = place.start + place.length
                yield payload

    def identity(self) -> dict[str, Any]:
        return file_identity(self.path, self.name)


class TableInput(Input):
    """Rows that can be had by number: parquet, .json, a hub data set, an embedded corpus."""

    def __init__(
        self,
        source: Source,
        name: str,
        spec: RowSpec,
        rows: Callable[[int], Iterator[Any]],  # rows from a number on
        pinned: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(source, name, spec)
        self._rows, self._pinned = rows, pinned

    def pieces(self) -> Iterator[Piece]:
        start = 0
        for block in self._blocks():
            yield Piece(Place(start, len(block)), self._payload(block))
            start += len(block)

    def read(self, places: Iterable[Place]) -> Iterator[Payload]:
        rows: Iterator[Any] = iter(())
        at = -1
        for place in places:
            if place.start != at:
                rows = self._rows(place.start)
            block = list(islice(rows, place.length))
            if len(block) != place.length:
                raise UserError(f"{self.name} has fewer rows than when it was planned; {AGAIN}")
            at = place.start + place.length
            yield self._payload(block)

    def identity(self) -> dict[str, Any]:
        return {"name": self.name} | self._pinned()

    def _blocks(self) -> Iterator[list[Any]]:
        """Blocks of rows; in WikiText, whose rows are lines, they end where a document ends."""
        rows = self._rows(0)
        if self.spec.format != "wikitext":
            while block := list(islice(rows, PIECE_ROWS)):
                yield block
            return
        block = []
        for row in rows:
            block.append(row)
            if len(block) > PIECE_ROWS and self._line(block[-2]).startswith(" = "):
                around = "x\n" + "".join(map(self._line, block[-3:]))
                if any(cuts(around.encode(), self.spec)):
                    yield block[:-3]
                    block = block[-3:]
        if block:
            yield block

    def _payload(self, block: list[Any]) -> Payload:
        if self.spec.format != "wikitext":
            return block
        return "".join(map(self._line, block)).encode("utf-8", "surrogatepass")

    def _line(self, row: Any) -> str:
        """A WikiText row as the line that it was."""
        column = self.spec.column or "text"
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            raise UserError(f"{self.name} has a row without text in column {column}; set its column")
        return row[column] if row[column].endswith("\n") else row[column] + "\n"


AGAIN = "run prepare with --force"


def open_inputs(config: DataConfig) -> list[Input]:
    """The inputs of the training sources, then of the validation sources.

    Raises UserError for sources that are not there.
    """
    train = [one for source in config.sources for one in _inputs(source, config)]
    held_out = [one for source in config.validation for one in _inputs(source, config)]
    for one in held_out:
        one.held_out = True
    return train + held_out


def open_text(path: Path) -> Any:
    """A file's bytes as a stream, unpacked on the way; a file that ends too early raises OSError."""
    packed = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    if packed is None:
        return path.open("rb")
    return pyarrow.input_stream(str(path), compression=packed, buffer_size=PIECE)


def skip(stream: Any, count: int) -> None:
    """Pass over bytes of a stream."""
    if count and stream.seekable():
        stream.seek(count, 1)
        return
    while count > 0 and (chunk := stream.read(min(PIECE, count))):
        count -= len(chunk)


def file_identity(path: Path, name: str) -> dict[str, Any]:
    """Name, size and hash of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": name, "bytes": path.stat().st_size, "sha256": digest}


def _inputs(source: Source, config: DataConfig) -> Iterator[Input]:
    if source.files is not None:
        yield from _file_inputs(source, source.files, config)
        return
    lines = source.format != "wikitext"  # whose rows are lines of text
    spec = RowSpec(config.kind, source.format, lines, source.column, source.clean, config.max_chars)
    if source.embedded is not None:
        yield _world(source, source.embedded, spec)
    else:
        yield _hub(source, spec)


def _file_inputs(source: Source, pattern: str, config: DataConfig) -> Iterator[Input]:
    absolute = Path(pattern).is_absolute()
    base = Path("/") if absolute else config.root
    paths = sorted(p for p in base.glob(pattern.lstrip("/")) if p.is_file())
    if not paths:
        raise UserError(f"no file matches {base / pattern}; check files and data.root={config.root}")
    for path in paths:
        name = str(path if absolute else path.relative_to(base))
        packed = path.suffix in (".zst", ".gz")
        suffix = Path(path.stem).suffix if packed else path.suffix
        if suffix not in SUFFIXES:
            raise UserError(f"{path} has none of the known endings {', '.join(SUFFIXES)} (.zst, .gz)")
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty")
        lines = suffix in (".jsonl", ".json")
        text = suffix == ".txt"
        spec = RowSpec(config.kind, source.format, lines, source.column, source.clean, config.max_chars)
        for_text = ("document", "lines", "paragraphs", *(("wikitext",) if lines else ()))
        if not text and source.format in for_text:
            raise UserError(f"{path} holds JSON or a table: format {source.format} is for text files")
        if text and (config.kind == "instruct" or source.format in ("text", "alpaca", "messages")):
            raise UserError(f"{path} is plain text; {source.format} rows need jsonl, json or parquet")
        if suffix == ".parquet":
            yield _parquet(source, name, spec, path, packed)
        elif suffix == ".json" and _is_array(path):
            yield _json(source, name, spec, path)
        else:
            if text and source.format == "auto":
                spec = spec._replace(format=_guess(path, name, spec))
            yield TextInput(source, name, spec, path)


def _guess(path: Path, name: str, spec: RowSpec) -> str:
    """The format of a text file: wikitext when headings stand at its beginning."""
    with open_text(path) as stream:
        head = next(_chunks(stream, name), b"")
    return "wikitext" if any(cuts(b"x\n" + head, spec._replace(format="wikitext"))) else "lines"


def _chunks(stream: Any, name: str) -> Iterator[bytes]:
    """A stream in reads of PIECE bytes. Raises UserError when it cannot be unpacked."""
    try:
        while chunk := stream.read(PIECE):
            yield chunk
    except OSError as error:
        reason = one_line(error)
        raise UserError(f"{name} cannot be unpacked ({reason}); the file is damaged") from None


def _cut(chunks: Iterable[bytes], spec: RowSpec, limit: int) -> Iterator[Piece]:
    """Cut a stream of text into pieces between rows; a row of more than `limit` bytes has no payload."""
    buffer, start, skipped = b"", 0, 0
    for chunk in chunks:
        buffer += chunk
        if spec.format == "document" and len(buffer) <= limit:
            continue
        places = list(cuts(buffer, spec)) if spec.format != "document" else []
        if skipped and places:  # the row that was too long ends at the first place
            yield Piece(Place(start, skipped + places[0]), None)
            start, buffer = start + skipped + places[0], buffer[places[0] :]
            places, skipped = [p - places[0] for p in places[1:]], 0
        if places:
            yield Piece(Place(start, places[-1]), buffer[: places[-1]])
            start, buffer = start + places[-1], buffer[places[-1] :]
        elif len(buffer) > limit or skipped:
            keep = min(len(buffer), 4096)  # a place may straddle two reads
            skipped, buffer = skipped + len(buffer) - keep, buffer[-keep:]
    if skipped:
        yield Piece(Place(start, skipped + len(buffer)), None)
    elif raw_rows(buffer, spec):
        yield Piece(Place(start, len(buffer)), buffer)


def _is_array(path: Path) -> bool:
    """Whether a .json file is one value over all lines, rather than a row on each line."""
    with open_text(path) as stream:
        head = next(_chunks(stream, str(path)), b"")
    first, _, rest = head.lstrip().partition(b"\n")
    if first[:1] == b"[":
        return True
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return bool(rest.strip())
    return False


def _json(source: Source, name: str, spec: RowSpec, path: Path) -> Input:
    """A .json file that is an array of rows, or an object with one array of rows in it."""

    def load() -> list[Any]:
        with open_text(path) as stream:
            data = b""
            for chunk in _chunks(stream, name):
                data += chunk
                if len(data) > JSON_LIMIT:
                    raise UserError(f"{name} is too large for one JSON value; convert it to jsonl")
        try:
            tree = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} is not JSON: {' '.join(str(error).split())}") from None
        if isinstance(tree, dict):
            arrays = [value for value in tree.values() if isinstance(value, list)]
            tree = arrays[0] if len(arrays) == 1 else None
        if not isinstance(tree, list):
            raise UserError(f"{name} must be an array of rows, or an object that holds one")
        return tree

    tree = cache(load)
    return TableInput(
        source, name, spec, lambda start: iter(tree()[start:]), lambda: file_identity(path, name)
    )


def _parquet(source: Source, name: str, spec: RowSpec, path: Path, packed: bool) -> Input:
    import pyarrow.parquet

    if packed:
        raise UserError(f"{path}: parquet is packed inside; unpack the file")

    def rows(start: int) -> Iterator[Any]:
        try:
            file = pyarrow.parquet.ParquetFile(path)
            groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            first = 0
            while first < len(groups) and start >= groups[first]:
                start -= groups[first]
                first += 1
            for batch in file.iter_batches(PIECE_ROWS, row_groups=range(first, len(groups))):
                yield from batch.slice(start).to_pylist()
                start = max(0, start - batch.num_rows)
        except (pyarrow.ArrowException, OSError) as error:
            reason = one_line(error, 200)
            raise UserError(f"{name} is not readable as parquet ({reason})") from None

    return TableInput(source, name, spec, rows, lambda: file_identity(path, name))


def _hub(source: Source, spec: RowSpec) -> Input:
    """A data set of the Hugging Face hub (or a directory that `datasets` can load)."""
    name = "/".join(filter(None, (source.hub, source.config))) + f"[{source.split}]"
    loaded = cache(lambda: _load_hub(source))

    def rows(start: int) -> Iterator[Any]:
        return iter(loaded().skip(start))

    def pinned() -> dict[str, Any]:
        return {"revision": source.revision or "not pinned"}

    return TableInput(source, name, spec, rows, pinned)


def _load_hub(source: Source) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(source.hub, source.config, split=source.split, revision=source.revision)
    except Exception as error:  # offline, unknown, gated, unknown split: many classes, one meaning
        reason = one_line(error, 240)
        raise UserError(
            f"hub data set {source.hub} cannot be loaded ({reason}); check the id, config and split, or "
            "connect to the network once, or give files instead"
        ) from None


def _world(source: Source, name: str, spec: RowSpec) -> Input:
    """A corpus of data_prep/world/corpora.py."""
    count = source.limit or WORLD_ROWS

    def rows(start: int) -> Iterator[Any]:
        from data_prep.world import corpora as world

        make = {"world": world.documents, "world-instruct": world.instructions}[name]
        return islice(make(source.seed, count), start, None)

    return TableInput(source, name, spec, rows, lambda: {"seed": source.seed, "rows": count})
