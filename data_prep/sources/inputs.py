"""The recipe's sources -> inputs -> pieces: stretches of a file that can be read again on their own.

A source names files, tables or data sets, and each is an input. A text file is cut between rows into payloads
of about PIECE bytes, a table into blocks of rows, small enough for a worker. The scan goes over all pieces
once and keeps their extents; a shard's job later reads just the pieces that it needs.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
import os
import re
import sys
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NamedTuple

from emo.common.errors import UserError, one_line
from emo.common.io.files import signature

from ..config import DATA_FILES, DataConfig, Source
from .addresses import RemoteFile, remote_files
from .rows import (
    CHAT_COLUMNS,
    STRICT_JSON,
    TEXT_COLUMNS,
    Payload,
    Rejected,
    RowSpec,
    cuts,
    raw_rows,
)

PIECE = 256 << 10  # bytes of text in a piece
PIECE_ROWS = 256  # rows of a table in a piece
STRADDLE = 4096  # bytes that the place between two rows has at most
PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
ALSO = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}  # other endings of the same kinds of files
DAMAGED = (OSError, EOFError, lzma.LZMAError)  # what a read of a damaged packed file raises
DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}  # the first of them that the header has
# Times data.max_chars: characters of a line and of a field; a quote that is not closed takes all the rest.
LINE_LIMIT = 4
JSON_LIMIT = 1 << 30  # bytes of a .json value, which is held in memory
TEXT_LIMIT = 1 << 30  # bytes that `read_text` holds at most: a small packed file may unpack to any number
UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
AGAIN = "run prepare with --force to start over"

File = Path | RemoteFile


def open_inputs(config: DataConfig) -> list[Input]:
    """Return the inputs of the training sources, then of each validation set's."""
    inputs = []
    for number, split in enumerate(config.splits[:1] if config.validation_fraction else config.splits):
        for opened in (opened for source in config.sources_of(split) for opened in _inputs(source, config)):
            opened.split = number
            inputs.append(opened)
    return inputs


def is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` of a `datasets.Dataset` or `DatasetDict` wrote a directory."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _inputs(source: Source, config: DataConfig) -> Iterator[Input]:
    """Yield the inputs of a source."""
    lines = source.format != "wikitext"  # whose rows are lines of text
    columns = tuple(sorted((source.columns or {}).items()))
    keys = (config.kind, source.format, lines, source.column, source.clean, config.max_chars)
    spec = RowSpec(*keys, columns=columns, group=config.validation_group, chat=config.by_chat_template)
    if source.files is not None and "://" in source.files:
        for file in chain.from_iterable(map(remote_files, braces(source.files))):
            yield _file(source, str(file), spec, file, file.size)
    elif source.files is not None:
        matching = _matching(source.files, config.root)
        for path, name in matching:
            if path.is_dir():
                yield DatasetInput(source, name, spec, path=path)
            elif size := path.stat().st_size:
                yield _file(source, name, spec, path, size)
            elif len(matching) == 1 or config.strict:
                raise UserError(
                    f"{path} is empty; take it away, or set data.strict=false to pass over it",
                    code="empty-file",
                )
    elif source.embedded is not None:
        from . import world

        path = world.corpus(source.embedded)
        yield _file(source, source.embedded, spec, path, path.stat().st_size)
    elif is_saved(Path(str(source.hub))):
        yield DatasetInput(source, str(source.hub), spec, path=Path(str(source.hub)))
    else:
        name = "/".join(filter(None, (source.hub, source.config))) + f"[{source.split}]"
        yield DatasetInput(source, name, spec)


def braces(pattern: str) -> list[str]:
    """Return the patterns that {a,b} in a pattern stands for, as in a shell."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [each for choice in match[1].split(",") for each in braces(f"{before}{choice}{after}")]


def _matching(pattern: str, root: Path) -> list[tuple[Path, str]]:
    """Return the files and saved data sets that `files` names, in order, and their names in the manifest.

    A name that is there is meant as it stands, whatever signs of patterns are in it. As in a shell, hidden
    files and folders (.ipynb_checkpoints) match only a pattern with a dot of its own.
    """
    pattern = str(Path(pattern).expanduser()) if pattern.startswith("~") else pattern
    if not os.path.lexists(root / pattern) and len(alternatives := braces(pattern)) > 1:
        return [match for each in alternatives for match in _matching(each, root)]
    absolute, relative = Path(pattern).is_absolute(), pattern.lstrip("/")
    base = Path("/") if absolute else root
    try:
        candidates = [base / pattern] if os.path.lexists(base / pattern) else sorted(base.glob(relative))
        # Where a pattern matches nothing, its brackets may be part of names.
        candidates = candidates or sorted(base.glob(relative.replace("[", "[[]")))
    except ValueError as error:
        raise UserError(f"files: {pattern!r} is not a pattern of file names ({one_line(error)})") from None
    if not any(part.startswith(".") for part in Path(relative).parts):
        hidden = {path for path in candidates if any(p[0] == "." for p in path.relative_to(base).parts)}
        candidates = [path for path in candidates if path not in hidden]
    paths = [path for path in candidates if path.is_file() or is_saved(path)]
    if not paths:
        hint = f"check files and data.root={root}"
        if any(path.is_dir() for path in candidates):
            hint = f"it is a directory; write {pattern.rstrip('/')}/*.jsonl, for example"
        raise UserError(f"no file matches {base / pattern}; {hint}")
    return [(path, str(path if absolute else path.relative_to(base))) for path in paths]


def _file(source: Source, name: str, spec: RowSpec, path: File, size: int) -> Input:
    """Return the input that a file is, by its ending and its beginning. size: its bytes, 0: unknown."""
    suffix = _suffix(path)
    if suffix not in DATA_FILES:
        known = ", ".join((*DATA_FILES, *ALSO))
        raise UserError(
            f"{path} has none of the known endings {known}, each also with {', '.join(PACKED)}",
            code="unknown-ending",
        )
    spec = spec._replace(lines=suffix in (".jsonl", ".json"))
    text = suffix == ".txt"
    if text and spec.group is not None:
        raise UserError(f"{path} is plain text; data.validation_group needs rows with columns")
    for_text = ("document", "lines", "paragraphs", *(("wikitext",) if spec.lines else ()))
    if not text and source.format in for_text:
        raise UserError(f"{path} holds JSON or a table: format {source.format} is for text files")
    if text and (spec.kind == "instruct" or source.format in ("text", "alpaca", "messages", "tokens")):
        raise UserError(f"{path} is plain text; {source.format} rows need jsonl, json, csv or parquet")
    if suffix == ".parquet":
        return ParquetInput(source, name, spec, size, path)
    if suffix in DELIMITERS:
        return CsvInput(source, name, spec, size, path)
    if suffix == ".json" and _is_one_value(path):
        return JsonInput(source, name, spec, size, path)
    if text and source.format == "auto":  # WikiText has headings near its beginning
        wikitext = spec._replace(format="wikitext")
        with open_text(path) as stream:
            head = next(chunks(stream, str(path)), b"")
        spec = wikitext if any(cuts(b"x\n\n" + head, wikitext)) else spec._replace(format="lines")
    opened = TextInput(source, name, spec, size, path)
    opened.cuttable = isinstance(path, Path) and not _packing(path) and spec.format != "document"
    return opened


def _suffix(path: File) -> str:
    """Return the ending of a file's name before that of its packing."""
    suffix = (Path(path.stem).suffix if _packing(path) else path.suffix).lower()
    return ALSO.get(suffix, suffix)


def _packing(path: File) -> str:
    """Return how a file is packed, by its name, or ''."""
    return PACKED.get(path.suffix.lower(), "")


def _is_one_value(path: File) -> bool:
    """Return whether a .json file is one value that holds the rows, not a row on each line."""
    text = line = others = b""
    with open_text(path) as stream:
        for chunk in chunks(stream, str(path)):
            text = (text + chunk).removeprefix(UTF8_MARK).lstrip()
            line, _, others = text.partition(b"\n")
            if text.startswith(b"[") or others.strip() or len(text) > JSON_LIMIT:
                break
    single = not others.strip() and len(text) <= JSON_LIMIT
    if text.startswith(b"["):
        return True
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return not single
    return single and isinstance(row, dict) and _rows_within(row) is not None


def _rows_within(tree: dict[str, Any]) -> list[Any] | None:
    """Return the array of rows in an object that is not itself a row."""
    arrays = [(name, value) for name, value in tree.items() if isinstance(value, list)]
    if len(arrays) != 1 or arrays[0][0] in CHAT_COLUMNS or any(name in tree for name in TEXT_COLUMNS):
        return None
    return arrays[0][1]


# --- what every input can do ------------------------------------------------------------------------------


class Extent(NamedTuple):
    """The place of a piece in its file: bytes of the unpacked text, or rows of the table."""

    start: int
    length: int


class Piece(NamedTuple):
    """A place and its content; payload None: a row longer than data.max_chars allows."""

    extent: Extent
    payload: Payload | None


class Input:
    """One file, hub data set or embedded corpus of a source."""

    split = 0  # number of the split that its rows are for, among DataConfig.splits
    cuttable = False  # whether a stretch of it can be read without what is before
    # What was read in part last: the input, its stream, the place that comes next, and the piece before it,
    # which two shards may share. Shards take rows in order, so the next goes on where the last one ended. Of
    # all inputs one, since each would be an open file.
    _paused: ClassVar[tuple[Input, Any, int, tuple[Extent, Payload]] | None] = None

    def __init__(
        self, source: Source, name: str, spec: RowSpec, size: int = 0, path: File | None = None
    ) -> None:
        self.source, self.name, self.spec = source, name, spec
        self.size = size  # bytes as they are stored; 0: unknown
        self.path: Any = path  # of its file, or the directory of a saved data set
        self._raw: IO[bytes] | None = None  # the stored bytes, while they are read
        self.state = _state(path)  # before anything is read

    def position(self) -> int:
        """Return how many of the stored bytes `pieces` has read."""
        if self._raw is None:
            return 0
        return self.size if self._raw.closed else self._raw.tell()

    def probe(self) -> None:
        """Raise UserError if the input cannot be opened at all."""
        next(self._pieces(0, None), None)

    def pieces(self, begin: int = 0, end: int | None = None) -> Iterator[Piece]:
        """Yield all pieces, in order; of a `cuttable` input, those of the rows that begin in a stretch."""
        yield from self._pieces(begin, end)
        self._require_same()

    def read(self, extents: Iterable[Extent]) -> Iterator[Payload]:
        """Yield the payloads at some extents, which come in order.

        What was read of an input last is gone on with, by the next call too, so that a file which cannot be
        entered in the middle is read once however many shards take rows of it.
        """
        stream: Any = None
        end, last = 0, None
        if Input._paused is not None:
            paused, stream, end, last = Input._paused
            Input._paused = None
            if paused is not self:
                _close(stream)
                stream = last = None
        for extent in extents:
            if last is None or last[0] != extent:
                if stream is None or extent.start < end or self._jumps(end, extent.start):
                    _close(stream)
                    stream, end = self._open(extent.start)
                last = extent, self._take(stream, extent, extent.start - end)
                end = extent.start + extent.length
            yield last[1]
        if last is not None:
            Input._paused = self, stream, end, last

    def _pieces(self, begin: int, end: int | None) -> Iterator[Piece]:
        raise NotImplementedError

    def _open(self, start: int) -> tuple[Any, int]:
        """Return a stream that is at `start`, or before it, and where it is."""
        raise NotImplementedError

    def _jumps(self, end: int, start: int) -> bool:
        """Return whether opening at `start` is cheaper than reading on from `end`."""
        return False

    def _take(self, stream: Any, extent: Extent, before: int) -> Payload:
        """Return the payload at an extent, `before` bytes or rows ahead of where the stream is."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Return what pins the content that was read: name, and hash or revision."""
        pinned = {"name": self.name} | self._pinned()
        self._require_same()
        return pinned

    def _pinned(self) -> dict[str, Any]:
        return file_identity(self.path)

    def _require_same(self) -> None:
        if _state(self.path, again=True) != self.state:
            raise UserError(
                f"{self.name} changed while it was read; run the same again when nothing writes to it",
                code="source-changed",
            )


class TextInput(Input):
    """A .txt or .jsonl file, plain or packed."""

    def _pieces(self, begin: int, end: int | None) -> Iterator[Piece]:
        raw = self._raw = self.path.open("rb")
        with raw, unpacked(raw, self.path) as stream:
            left = sys.maxsize
            if end is not None:
                left = self._row_from(stream, end)
                stream.seek(0)
            start = self._row_from(stream, begin) if begin else 0
            stretches = chunks(stream, self.name, left - start)
            if not begin:
                first = next(stretches, b"")
                _require_utf8(first, self.name)
                by_lines = not self.spec.lines and self.spec.format != "document"
                if by_lines and b"\n" not in first and b"\r" in first.rstrip(b"\r"):
                    raise UserError(
                        f"{self.name} ends its lines with CR alone; convert it: tr '\\r' '\\n'",
                        code="line-ends",
                    )
                stretches = chain([first], stretches)
            for extent, payload in _cut(stretches, self.spec, start):
                yield Piece(extent, payload and _unmarked(payload, extent))

    def _row_from(self, stream: Any, byte: int) -> int:
        """Return the first place from `byte` on where a row may begin; there the stream then is.

        It depends on the file and on `byte` alone, so that the stretches on its two sides meet.
        """
        stream.seek(byte)
        buffer = b""
        for chunk in chunks(stream, self.name):
            buffer = buffer[-STRADDLE:] + chunk
            byte += len(chunk)
            cut = next(cuts(buffer, self.spec), None)
            if cut is not None:
                byte += cut - len(buffer)
                break
        stream.seek(byte)
        return byte

    def _open(self, start: int) -> tuple[Any, int]:
        return open_text(self.path), 0

    def _take(self, stream: Any, extent: Extent, before: int) -> Payload:
        if stream.seekable():
            stream.seek(before, 1)
        else:
            deque(chunks(stream, self.name, before), maxlen=0)
        payload = b"".join(chunks(stream, self.name, extent.length))
        if len(payload) != extent.length:
            raise UserError(f"{self.name} is shorter than when it was scanned; {AGAIN}")
        return _unmarked(payload, extent)


def _unmarked(payload: bytes, extent: Extent) -> bytes:
    """Return the payload of a text without the byte order mark that its file may begin with."""
    return payload.removeprefix(UTF8_MARK) if extent.start == 0 else payload


def _cut(stretches: Iterable[bytes], spec: RowSpec, start: int) -> Iterator[tuple[Extent, bytes | None]]:
    """Cut a stream of text, from byte `start` of its file on, into pieces between rows.

    A row that is too long for data.max_chars in any encoding has no payload.
    """
    buffer, skipped, limit = b"", 0, 4 * spec.max_chars
    for chunk in stretches:
        buffer += chunk
        if spec.format == "document" and len(buffer) <= limit:
            continue
        ends = list(cuts(buffer, spec)) if spec.format != "document" else []
        if skipped and ends:  # the row that was too long ends at the first extent
            yield Extent(start, skipped + ends[0]), None
            start, buffer = start + skipped + ends[0], buffer[ends[0] :]
            ends, skipped = [p - ends[0] for p in ends[1:]], 0
        if ends:
            yield Extent(start, ends[-1]), buffer[: ends[-1]]
            start, buffer = start + ends[-1], buffer[ends[-1] :]
        elif len(buffer) > limit or skipped:
            keep = min(len(buffer), STRADDLE)  # a place may straddle two reads
            skipped, buffer = skipped + len(buffer) - keep, buffer[-keep:]
    if skipped:
        yield Extent(start, skipped + len(buffer)), None
    elif raw_rows(buffer, spec):
        yield Extent(start, len(buffer)), buffer


class TableInput(Input):
    """Rows that can be had by number: csv, parquet, .json, a hub data set."""

    def rows(self, start: int) -> Iterator[Any]:
        """Return the rows from number `start` on."""
        raise NotImplementedError

    def _pieces(self, begin: int, end: int | None) -> Iterator[Piece]:
        start = 0
        for block in self._blocks():
            yield Piece(Extent(start, len(block)), self._payload(block))
            start += len(block)

    def _blocks(self) -> Iterator[list[Any]]:
        """Yield blocks of rows; in WikiText, whose rows are lines, they end where a document ends."""
        rows = self.rows(0)
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

    def _open(self, start: int) -> tuple[Any, int]:
        return self.rows(start), start

    def _take(self, stream: Any, extent: Extent, before: int) -> Payload:
        block = list(islice(stream, before, before + extent.length))
        if len(block) != extent.length:
            raise UserError(f"{self.name} has fewer rows than when it was scanned; {AGAIN}")
        return self._payload(block)

    def _payload(self, block: list[Any]) -> Payload:
        if self.spec.format != "wikitext":
            return block
        return "".join(map(self._line, block)).encode("utf-8", "surrogatepass")

    def _line(self, row: Any) -> str:
        """Return a WikiText row as the line that it was."""
        column = self.spec.column or "text"
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            raise UserError(f"{self.name} has a row without text in column {column}; set its column")
        return row[column] if row[column].endswith("\n") else row[column] + "\n"


class JsonInput(TableInput):
    """A .json file that is an array of rows, or an object with one array of rows in it."""

    def rows(self, start: int) -> Iterator[Any]:
        return iter(self._values[start:])

    @cached_property
    def _values(self) -> list[Any]:
        with open_text(self.path) as stream:
            data = b"".join(chunks(stream, self.name, JSON_LIMIT + 1))
        if len(data) > JSON_LIMIT:
            raise UserError(f"{self.name} is too large for one JSON value; convert it to jsonl")
        _require_utf8(data, self.name)
        try:
            tree = STRICT_JSON.decode(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.name} is not JSON: {one_line(error)}") from None
        rows = _rows_within(tree) if isinstance(tree, dict) else tree
        if not isinstance(rows, list):
            raise UserError(f"{self.name} must be an array of rows, or an object that holds one")
        return rows


class CsvInput(TableInput):
    """A csv or tsv file, plain or packed: rows by its header.

    A csv file quotes as RFC 4180 says, a tsv file not at all: a tab or line break ends a field there. A quote
    that is never closed would make one row of all that follow, so what does not quote properly is refused.
    """

    def rows(self, start: int) -> Iterator[Any]:
        """Yield the rows from number `start` on: {column: text}, or what is wrong with one."""
        delimiters, quoted = DELIMITERS[_suffix(self.path)], _suffix(self.path) == ".csv"
        raw = self._raw = self.path.open("rb")
        line = 0
        with raw, unpacked(raw, self.path) as stream:
            try:
                lines = self._lines(stream)
                header = next((text for text in lines if text.strip()), "")
                _require_utf8(header[:64].encode("utf-8", "surrogateescape"), self.name)
                delimiter = next((d for d in delimiters if d in header), delimiters[0])
                csv.field_size_limit(LINE_LIMIT * self.spec.max_chars)  # its own is far below a document
                quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
                reader = csv.reader(chain([header], lines), delimiter=delimiter, quoting=quoting, strict=True)
                names = [name.strip() or f"column {i}" for i, name in enumerate(next(reader, []), 1)]
                twice = next((name for name, count in Counter(names).items() if count > 1), None)
                if twice is not None:
                    raise UserError(f"{self.name} has two columns {twice!r} in its first line; rename one")
                number = 0
                while True:
                    line = reader.line_num
                    try:
                        fields = next(reader)
                    except StopIteration:
                        return
                    except csv.Error as error:
                        if reader.line_num != line + 1:  # it took in other rows
                            raise
                        row: Any = Rejected("wrong_type", f"line {line + 1}: {one_line(error)}")
                    else:
                        if not fields:  # a blank line
                            continue
                        row = _table_row(fields, names, quoted)
                    if number >= start:
                        yield row
                    number += 1
            except (csv.Error, *DAMAGED) as error:
                raise UserError(
                    f"{self.name}, after line {line}: not a row of a table ({one_line(error)}); is a quote "
                    "not closed, or the file damaged?",
                    code="broken-table",
                ) from None

    def _lines(self, stream: Any) -> Iterator[str]:
        """Yield lines with their ends; bytes that are not UTF-8 become half characters, and are rejected."""
        text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        limit = LINE_LIMIT * self.spec.max_chars
        while line := text.readline(limit):
            if len(line) >= limit:
                raise csv.Error("it is too long")
            yield line


def _table_row(fields: list[str], names: list[str], quoted: bool) -> dict[str, str] | Rejected:
    """Return a row by its columns, or what is wrong with it."""
    if len(fields) != len(names):
        problem = (
            f"{len(fields)} fields under a header of {len(names)}; quote what holds delimiters or line breaks"
        )
        return Rejected("wrong_type", problem)
    if not quoted and any(len(text) > 2 and text[0] == text[-1] == '"' and '""' in text for text in fields):
        return Rejected("wrong_type", "a field is quoted as in a csv file; call the file .csv")
    return dict(zip(names, fields, strict=True))


class ParquetInput(TableInput):
    """A parquet file, which is entered at any of its row groups."""

    _read = 0.0  # of 1, so far
    _ends: tuple[int, ...] = ()  # the row after the last of each row group

    def rows(self, start: int) -> Iterator[Any]:
        import pyarrow.parquet

        number = start
        try:
            opened = self.path.open(at_random=True) if isinstance(self.path, RemoteFile) else self.path
            file = pyarrow.parquet.ParquetFile(opened)
            groups = range(file.num_row_groups)
            self._ends = tuple(accumulate(file.metadata.row_group(i).num_rows for i in groups))
            first = bisect_right(self._ends, start)
            start -= self._ends[first - 1] if first else 0
            for batch in file.iter_batches(PIECE_ROWS, row_groups=groups[first:]):
                yield from batch.slice(start).to_pylist(maps_as_pydicts="strict")
                number += max(0, batch.num_rows - start)
                start = max(0, start - batch.num_rows)
                self._read = number / file.metadata.num_rows
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
            reason = one_line(error, 200)
            raise UserError(f"{self.name} is not readable as parquet ({reason})") from None

    def position(self) -> int:
        return int(self._read * self.size)

    def _jumps(self, end: int, start: int) -> bool:
        return bisect_right(self._ends, start) > bisect_right(self._ends, end)


class DatasetInput(TableInput):
    """A data set that `datasets` loads: of the hub, or where there is a path, one that it saved there."""

    def rows(self, start: int) -> Iterator[Any]:
        return iter(self._loaded.skip(start))

    def _jumps(self, end: int, start: int) -> bool:
        return start != end  # which takes no time

    def _pinned(self) -> dict[str, Any]:
        if self.path is None:
            return {"revision": self.source.revision or "not pinned"}
        digests = [file_identity(Path(file["filename"]))["sha256"] for file in self._loaded.cache_files]
        return {"sha256": hashlib.sha256("".join(digests).encode()).hexdigest()}

    @cached_property
    def _loaded(self) -> Any:
        import datasets

        source = self.source
        datasets.disable_progress_bars()
        try:
            if self.path is None:
                return datasets.load_dataset(
                    source.hub, source.config, split=source.split, revision=source.revision
                )
            loaded = datasets.load_from_disk(str(self.path))
            return loaded[source.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        except (
            Exception
        ) as error:  # offline, unknown, gated, damaged, no such split: many classes, one meaning
            kind = "hub data set" if self.path is None else "saved data set"
            raise UserError(
                f"{kind} {self.name} cannot be loaded ({one_line(error, 240)}); check the name, config and "
                "split, or connect to the network once, or give files instead"
            ) from None


# --- bytes ------------------------------------------------------------------------------------------------


def open_text(path: File) -> Any:
    """Return a file's bytes as a stream, unpacked on the way."""
    return unpacked(path.open("rb"), path)


def unpacked(raw: IO[bytes], path: File) -> Any:
    """Return the stored bytes of a file unpacked, if its name says that they are packed.

    Of a file that is damaged or ends too early, a read raises OSError.
    """
    packing = _packing(path)
    if not packing:
        return raw
    if packing == "xz":
        return lzma.open(raw)
    import pyarrow  # most of a second, which a command's first word does not wait for

    return pyarrow.input_stream(raw, compression=packing, buffer_size=PIECE)


def chunks(stream: Any, name: str, left: int = sys.maxsize) -> Iterator[bytes]:
    """Yield a stream in reads of PIECE bytes, `left` bytes at most. Raises UserError for a damaged file."""
    try:
        while left > 0 and (chunk := stream.read(min(PIECE, left))):
            left -= len(chunk)
            yield chunk
    except DAMAGED as error:
        raise UserError(f"{name} cannot be unpacked ({one_line(error)}); the file is damaged") from None


def _require_utf8(beginning: bytes, name: str) -> None:
    """Raise UserError for a file that begins as UTF-16 does."""
    if beginning.startswith(UTF16_MARKS) or beginning[:64].count(0) * 3 >= len(beginning[:64]) > 0:
        raise UserError(f"{name} is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8 FILE", code="not-utf8")


def read_text(path: Path) -> str:
    """Return a whole file as text, unpacked: of those that are small by nature, as tasks and prefixes are."""
    with open_text(path) as stream:
        content = b"".join(chunks(stream, str(path), TEXT_LIMIT + 1))
    if len(content) > TEXT_LIMIT:
        raise UserError(f"{path} holds more than {TEXT_LIMIT >> 20:,} MiB of text; give it in part")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path} line {line} is not UTF-8 text") from None


def file_identity(path: File) -> dict[str, Any]:
    """Return size and hash of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        return {"bytes": file.tell(), "sha256": digest}


def _state(path: File | None, again: bool = False) -> list[Any]:
    """Return what changes when a file does, or one of a directory; nothing where it is not there.

    Of a file at an address it is what its server said when it was listed, unless it shall be asked `again`.
    """
    if isinstance(path, Path):
        files = sorted(path.rglob("*")) if path.is_dir() else []
        return [signature(file) for file in (path, *files) if file.exists()]
    return [] if path is None else path.state(again)


def _close(stream: Any) -> None:
    """Close a stream, or an iterator of rows that can be."""
    if hasattr(stream, "close"):
        stream.close()
