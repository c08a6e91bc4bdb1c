"""The recipe's sources -> inputs: the files, tables and data sets that they name."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

from emo.common.errors import UserError, one_line
from emo.data_prep import world
from emo.data_prep.addresses import RemoteFile, remote_files
from emo.data_prep.config import DATA_FILES, DataConfig, Source
from emo.data_prep.inputs import (
    PACKED,
    PIECE_ROWS,
    UTF8_MARK,
    File,
    Input,
    TableInput,
    TextInput,
    chunks,
    file_identity,
    open_text,
    refuse_other_encodings,
    unpacked,
)
from emo.data_prep.rows import CHAT_COLUMNS, TEXT_COLUMNS, Rejected, RowSpec, cuts

DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}  # the first of them that the header has
# Times data.max_chars: characters of a line and of a field; a quote that is not closed takes all the rest.
LINE_LIMIT = 4
JSON_LIMIT = 1 << 30  # bytes of a .json value, which is held in memory


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
    lines = source.format != "wikitext"  # whose rows are lines of text
    columns = tuple(sorted((source.columns or {}).items()))
    keys = (config.kind, source.format, lines, source.column, source.clean, config.max_chars)
    spec = RowSpec(*keys, columns=columns, chat=config.by_chat_template)
    if source.files is not None and "://" in source.files:
        for file in remote_files(source.files):
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
        path = world.corpus(source.embedded)
        yield _file(source, source.embedded, spec, path, path.stat().st_size)
    elif is_saved(Path(str(source.hub))):
        yield DatasetInput(source, str(source.hub), spec, path=Path(str(source.hub)))
    else:
        name = "/".join(filter(None, (source.hub, source.config))) + f"[{source.split}]"
        yield DatasetInput(source, name, spec)


def _matching(pattern: str, root: Path) -> list[tuple[Path, str]]:
    """Return the files and saved data sets that `files` names, in order, and their names in the manifest.

    A name that is there is meant as it stands, whatever signs of patterns are in it. As in a shell, hidden
    files and folders (.ipynb_checkpoints) match only a pattern with a dot of its own.
    """
    pattern = str(Path(pattern).expanduser()) if pattern.startswith("~") else pattern
    absolute = Path(pattern).is_absolute()
    base = Path("/") if absolute else root
    if os.path.lexists(base / pattern):  # False for what is too long for a name
        candidates = [base / pattern]
    else:
        relative = pattern.lstrip("/")
        try:
            # Where a pattern matches nothing, its brackets may be part of names.
            candidates = sorted(base.glob(relative)) or sorted(base.glob(relative.replace("[", "[[]")))
        except ValueError as error:
            raise UserError(
                f"files: {pattern!r} is not a pattern of file names ({one_line(error)})"
            ) from None
        if not any(part.startswith(".") for part in Path(relative).parts):
            hidden = {path for path in candidates if any(p[0] == "." for p in path.relative_to(base).parts)}
            candidates = [path for path in candidates if path not in hidden]
    paths = [path for path in candidates if path.is_file() or is_saved(path)]
    if not paths:
        where = f"no file matches {base / pattern}"
        if any(path.is_dir() for path in candidates):
            raise UserError(f"{where}: it is a directory; write {pattern.rstrip('/')}/*.jsonl, for example")
        raise UserError(f"{where}; check files and data.root={root}")
    for path in paths:
        if str(path).encode("utf-8", "ignore").decode() != str(path):
            raise UserError(f"the file name {os.fsencode(path)!r} is not UTF-8; rename it")
    return [(path, str(path if absolute else path.relative_to(base))) for path in paths]


def _file(source: Source, name: str, spec: RowSpec, path: File, size: int) -> Input:
    """Return the input that a file is, by its ending and its beginning. size: its bytes, 0: unknown."""
    suffix = _suffix(path)
    if suffix not in DATA_FILES:
        raise UserError(f"{path} has none of the known endings {', '.join(DATA_FILES)} (.zst, .gz)")
    spec = spec._replace(lines=suffix in (".jsonl", ".json"))
    text = suffix == ".txt"
    for_text = ("document", "lines", "paragraphs", *(("wikitext",) if spec.lines else ()))
    if not text and source.format in for_text:
        raise UserError(f"{path} holds JSON or a table: format {source.format} is for text files")
    if text and (spec.kind == "instruct" or source.format in ("text", "alpaca", "messages", "tokens")):
        raise UserError(f"{path} is plain text; {source.format} rows need jsonl, json, csv or parquet")
    if suffix == ".parquet":
        if path.suffix in PACKED:
            raise UserError(f"{path}: parquet is packed inside; unpack the file")
        return ParquetInput(source, name, spec, size, path)
    if suffix in DELIMITERS:
        return CsvInput(source, name, spec, size, path)
    if suffix == ".json" and _is_one_value(path):
        return JsonInput(source, name, spec, size, path)
    if suffix == ".jsonl":
        beginning = _head(path).removeprefix(UTF8_MARK).split()
        if b"".join(beginning[:2]).startswith((b"[{", b"[[{")):
            raise UserError(f"{name} is one array, not a row on each line; call it {path.stem}.json")
    if text and source.format == "auto":  # WikiText has headings near its beginning
        wikitext = spec._replace(format="wikitext")
        headed = any(cuts(b"x\n\n" + _head(path), wikitext))
        spec = wikitext if headed else spec._replace(format="lines")
    return TextInput(source, name, spec, path, size)


def _suffix(path: File) -> str:
    """Return the ending of a file's name before that of its packing."""
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def _head(path: File) -> bytes:
    with open_text(path) as stream:
        return next(chunks(stream, str(path)), b"")


def _is_one_value(path: File) -> bool:
    """Return whether a .json file is one value that holds the rows, not a row on each line."""
    text = line = others = b""
    with open_text(path) as stream:
        for chunk in chunks(stream, str(path)):
            text = (text + chunk).removeprefix(UTF8_MARK).lstrip()
            line, _, others = text.partition(b"\n")
            if text.startswith(b"["):
                return True
            if others.strip() or len(text) > JSON_LIMIT:
                break
    several = bool(others.strip()) or len(text) > JSON_LIMIT
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return several
    return not several and isinstance(row, dict) and _rows_within(row) is not None


def _rows_within(tree: dict[str, Any]) -> list[Any] | None:
    """Return the array of rows in an object that is not itself a row."""
    arrays = [(name, value) for name, value in tree.items() if isinstance(value, list)]
    if len(arrays) != 1 or arrays[0][0] in CHAT_COLUMNS or any(name in tree for name in TEXT_COLUMNS):
        return None
    return arrays[0][1]


class JsonInput(TableInput):
    """A .json file that is an array of rows, or an object with one array of rows in it."""

    def rows(self, start: int) -> Iterator[Any]:
        return iter(self._values[start:])

    @cached_property
    def _values(self) -> list[Any]:
        assert self.path is not None
        with open_text(self.path) as stream:
            data = b"".join(chunks(stream, self.name, JSON_LIMIT + 1))
        if len(data) > JSON_LIMIT:
            raise UserError(f"{self.name} is too large for one JSON value; convert it to jsonl")
        try:
            tree = json.loads(data.decode("utf-8-sig"))
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
        assert self.path is not None
        suffix = _suffix(self.path)
        quoted = suffix == ".csv"
        self._raw, line = self.path.open("rb"), 0
        with self._raw, unpacked(self._raw, self.path) as stream:
            try:
                lines = self._lines(stream)
                header = next((text for text in lines if text.strip()), "")
                delimiter = next((d for d in DELIMITERS[suffix] if d in header), DELIMITERS[suffix][0])
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
                        row = _row(fields, names, quoted)
                    if number >= start:
                        yield row
                    number += 1
            except csv.Error as error:
                raise UserError(
                    f"{self.name}, after line {line}: not a row of a table ({one_line(error)}); is a quote "
                    "not closed?",
                    code="broken-table",
                ) from None
            except OSError as error:
                raise UserError(
                    f"{self.name} cannot be unpacked ({one_line(error)}); it is damaged"
                ) from None

    def _lines(self, stream: Any) -> Iterator[str]:
        """Yield lines with their ends; bytes that are not UTF-8 become half characters, and are rejected."""
        text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        limit, first = LINE_LIMIT * self.spec.max_chars, True
        while line := text.readline(limit):
            if first:
                refuse_other_encodings(line[:4].encode("utf-8", "surrogateescape"), self.name)
                first = False
            if len(line) >= limit:
                raise csv.Error("it is too long")
            yield line


def _row(row: list[str], names: list[str], quoted: bool) -> dict[str, str] | Rejected:
    """Return a row by its columns, or what is wrong with it."""
    if len(row) != len(names):
        problem = (
            f"{len(row)} fields under a header of {len(names)}; quote what holds delimiters or line breaks"
        )
        return Rejected("wrong_type", problem)
    if not quoted and any(len(text) > 2 and text[0] == text[-1] == '"' and '""' in text for text in row):
        return Rejected("wrong_type", "a field is quoted as in a csv file; call the file .csv")
    return dict(zip(names, row, strict=True))


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
                yield from batch.slice(start).to_pylist()
                number += max(0, batch.num_rows - start)
                start = max(0, start - batch.num_rows)
                self._read = number / file.metadata.num_rows
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
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
        if self.path is not None:
            try:
                loaded = datasets.load_from_disk(str(self.path))
            except Exception as error:  # a missing or damaged file: many classes, one meaning
                reason = one_line(error, 240)
                raise UserError(f"{self.path} cannot be loaded as a saved data set ({reason})") from None
            if not isinstance(loaded, datasets.DatasetDict):
                return loaded
            if source.split not in loaded:
                raise UserError(f"{self.path} has no split {source.split}; it has {', '.join(loaded)}")
            return loaded[source.split]
        if "://" in str(source.hub):
            raise UserError(f"hub: {source.hub} is an address; give the data set's id, owner/name")
        try:
            return datasets.load_dataset(
                source.hub, source.config, split=source.split, revision=source.revision
            )
        except Exception as error:  # offline, unknown, gated, unknown split: many classes, one meaning
            raise UserError(
                f"hub data set {source.hub} cannot be loaded ({one_line(error, 240)}); check the id, config "
                "and split, or connect to the network once, or give files instead"
            ) from None
