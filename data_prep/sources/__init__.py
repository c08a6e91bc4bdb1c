"""The recipe's sources -> inputs: the files, tables and data sets that they name."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from emo.common.errors import UserError, one_line
from emo.data_prep import world
from emo.data_prep.config import DATA_FILES, DataConfig, Source
from emo.data_prep.inputs import (
    PIECE_ROWS,
    File,
    Input,
    TableInput,
    TextInput,
    chunks,
    file_identity,
    open_text,
    unreadable,
)
from emo.data_prep.rows import RowSpec, cuts
from emo.data_prep.rows.columns import CHAT_COLUMNS, TEXT_COLUMNS
from emo.data_prep.sources.addresses import RemoteFile, remote_files
from emo.data_prep.sources.tables import DELIMITERS, TextTable

JSON_LIMIT = 1 << 30  # bytes of a .json value, which is held in memory


def open_inputs(config: DataConfig) -> list[Input]:
    """The inputs of the training sources, then of each validation set's.

    Raises UserError for sources that are not there.
    """
    inputs = []
    for number, split in enumerate(config.splits[:1] if config.validation_fraction else config.splits):
        for opened in (opened for source in config.sources_of(split) for opened in _inputs(source, config)):
            opened.split = number
            inputs.append(opened)
    return inputs


def _inputs(source: Source, config: DataConfig) -> Iterator[Input]:
    lines = source.format != "wikitext"  # whose rows are lines of text
    columns = tuple(sorted((source.columns or {}).items()))
    keys = (config.kind, source.format, lines, source.column, source.clean, config.max_chars)
    spec = RowSpec(*keys, columns=columns, chat=config.by_chat_template)
    if source.files is not None:
        if "://" in source.files:
            for file in remote_files(source.files):
                yield _file(source, str(file), spec, file, file.size)
            return
        matching = _matching(source.files, config.root)
        for path, name in matching:
            if path.is_dir():
                yield _saved(source, name, spec, path)
                continue
            if path.stat().st_size == 0:
                if len(matching) > 1 and not config.strict:
                    continue
                raise UserError(
                    f"{path} is empty; take it away, or set data.strict=false to pass over it",
                    code="empty-file",
                )
            yield _file(source, name, spec, path, path.stat().st_size)
    elif source.embedded is not None:
        path = world.corpus(source.embedded)
        yield _file(source, source.embedded, spec, path, path.stat().st_size)
    elif is_saved(Path(str(source.hub))):
        yield _saved(source, str(source.hub), spec, Path(str(source.hub)))
    else:
        yield _hub(source, spec)


def _matching(pattern: str, root: Path) -> list[tuple[Path, str]]:
    """Files and saved data sets that `files` names, in order, and what they are called in the manifest.

    A name that is there is meant as it stands, whatever signs of patterns are in it.
    """
    pattern = str(Path(pattern).expanduser()) if pattern.startswith("~") else pattern
    absolute = Path(pattern).is_absolute()
    base = Path("/") if absolute else root
    try:
        candidates = [base / pattern] if _exists(base / pattern) else _globbed(base, pattern.lstrip("/"))
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"files: {pattern!r} is not a pattern of file names ({one_line(error)})") from None
    except OSError as error:
        raise unreadable(str(base), error) from None
    paths = [path for path in candidates if path.is_file() or is_saved(path)]
    if not paths:
        where = f"no file matches {base / pattern}"
        if any(path.is_dir() for path in candidates):
            raise UserError(f"{where}: it is a directory; write {pattern.rstrip('/')}/*.jsonl, for example")
        raise UserError(f"{where}; check files and data.root={root}")
    strange = [path for path in paths if not _is_utf8(path)]
    if strange:
        others = f" and {len(strange) - 1:,} others" if len(strange) > 1 else ""
        raise UserError(f"the file name {os.fsencode(strange[0])!r}{others} is not UTF-8; rename it")
    return [(path, str(path if absolute else path.relative_to(base))) for path in paths]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a name, for example
        return False


def _globbed(base: Path, pattern: str) -> list[Path]:
    """Return what a pattern matches; where that is nothing, its brackets may be part of names.

    As in a shell, hidden files and folders (.ipynb_checkpoints) match only a pattern with a dot of its own.
    """
    if not Path(pattern).parts:
        return [base]
    paths = sorted(base.glob(pattern)) or sorted(base.glob(pattern.replace("[", "[[]")))
    if any(part.startswith(".") for part in Path(pattern).parts):
        return paths
    return [path for path in paths if not any(part[0] == "." for part in path.relative_to(base).parts)]


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _file(source: Source, name: str, spec: RowSpec, path: File, size: int) -> Input:
    """The input that a file is, by its ending and its beginning. size: its bytes, 0: unknown."""
    packed = path.suffix in (".zst", ".gz")
    suffix = Path(path.stem).suffix if packed else path.suffix
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
        return _parquet(source, name, spec, path, packed, size)
    if suffix in DELIMITERS:
        table = TextTable(path, name, suffix, spec.max_chars, size)
        return TableInput(source, name, spec, table.rows, None, size, table.position, path)
    if suffix == ".json" and _is_one_value(path):
        return _json(source, name, spec, path, size)
    if suffix == ".jsonl" and _is_array(path):
        raise UserError(f"{name} is one array, not a row on each line; call it {path.stem}.json")
    if text and source.format == "auto":
        spec = spec._replace(format=_guess(path, name, spec))
    return TextInput(source, name, spec, path, size)


def _guess(path: File, name: str, spec: RowSpec) -> str:
    """The format of a text file: wikitext when there are headings near its beginning."""
    with open_text(path) as stream:
        head = next(chunks(stream, name), b"")
    return "wikitext" if any(cuts(b"x\n\n" + head, spec._replace(format="wikitext"))) else "lines"


def _is_array(path: File) -> bool:
    """Return whether a .jsonl file is one array of rows."""
    with open_text(path) as stream:
        beginning = next(chunks(stream, str(path)), b"").removeprefix(b"\xef\xbb\xbf").split()
    return b"".join(beginning[:2]).startswith((b"[{", b"[[{"))


def _is_one_value(path: File) -> bool:
    """Return whether a .json file is one value that holds the rows, not a row on each line."""
    with open_text(path) as stream:
        first, others = _first_line(chunks(stream, str(path)))
    if first.startswith(b"["):
        return True
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return others
    return not others and isinstance(row, dict) and _rows_within(row) is not None


def _first_line(stretches: Iterator[bytes]) -> tuple[bytes, bool]:
    """The first line that is not blank, and whether others follow it."""
    text = bytearray()
    for chunk in stretches:
        text += chunk
        line, _, others = text.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
        if others.strip() or len(text) > JSON_LIMIT:
            return bytes(line), True
        if line[:1] == b"[":
            break
    return bytes(text.removeprefix(b"\xef\xbb\xbf").strip()), False


def _rows_within(tree: dict[str, Any]) -> list[Any] | None:
    """The array of rows in an object that is not itself a row."""
    arrays = [(name, value) for name, value in tree.items() if isinstance(value, list)]
    if len(arrays) != 1 or arrays[0][0] in CHAT_COLUMNS or any(name in tree for name in TEXT_COLUMNS):
        return None
    return arrays[0][1]


def _json(source: Source, name: str, spec: RowSpec, path: File, size: int) -> Input:
    """A .json file that is an array of rows, or an object with one array of rows in it."""

    def load() -> list[Any]:
        data = bytearray()
        with open_text(path) as stream:
            for chunk in chunks(stream, name):
                data += chunk
                if len(data) > JSON_LIMIT:
                    raise UserError(f"{name} is too large for one JSON value; convert it to jsonl")
        try:
            tree = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} is not JSON: {one_line(error)}") from None
        rows = _rows_within(tree) if isinstance(tree, dict) else tree
        if not isinstance(rows, list):
            raise UserError(f"{name} must be an array of rows, or an object that holds one")
        return rows

    rows = cache(load)
    return TableInput(source, name, spec, lambda start: iter(rows()[start:]), None, size, path=path)


def _parquet(source: Source, name: str, spec: RowSpec, path: File, packed: bool, size: int) -> Input:
    import pyarrow.parquet

    if packed:
        raise UserError(f"{path}: parquet is packed inside; unpack the file")

    read = [0.0]  # of 1, so far
    ends: list[int] = []  # the row after the last of each row group

    def rows(start: int) -> Iterator[Any]:
        number = start
        try:
            opened = path.open_at_random() if isinstance(path, RemoteFile) else path
            file = pyarrow.parquet.ParquetFile(opened)
            counts = (file.metadata.row_group(i).num_rows for i in range(file.num_row_groups))
            ends[:] = accumulate(counts)
            first = bisect_right(ends, start)
            start -= ends[first - 1] if first else 0
            for batch in file.iter_batches(PIECE_ROWS, row_groups=range(first, len(ends))):
                yield from batch.slice(start).to_pylist()
                number += max(0, batch.num_rows - start)
                start = max(0, start - batch.num_rows)
                read[0] = number / file.metadata.num_rows
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = one_line(error, 200)
            raise UserError(f"{name} is not readable as parquet ({reason})") from None

    def jumps(end: int, start: int) -> bool:
        return bisect_right(ends, start) > bisect_right(ends, end)

    return TableInput(source, name, spec, rows, None, size, lambda: int(read[0] * size), path, jumps)


def is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` of a `datasets.Dataset` or `DatasetDict` wrote a directory."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _saved(source: Source, name: str, spec: RowSpec, path: Path) -> Input:
    """A data set, or the split of one, that `save_to_disk` wrote."""
    loaded = cache(lambda: _load_saved(source, path))

    def pinned() -> dict[str, Any]:
        files = [file_identity(Path(cached["filename"]), "") for cached in loaded().cache_files]
        digests = "".join(file["sha256"] for file in files)
        return {"sha256": hashlib.sha256(digests.encode()).hexdigest()}

    rows = partial(_skipped, loaded)
    return TableInput(source, name, spec, rows, pinned, path=path, jumps=_any_jump)


def _skipped(loaded: Callable[[], Any], start: int) -> Iterator[Any]:
    """Return the rows of a data set from a number on, which takes no time to reach."""
    return iter(loaded().skip(start))


def _any_jump(end: int, start: int) -> bool:
    return start != end


def _load_saved(source: Source, path: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # a missing or damaged file: many classes, one meaning
        raise UserError(f"{path} cannot be loaded as a saved data set ({one_line(error, 240)})") from None
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if source.split not in loaded:
        raise UserError(f"{path} has no split {source.split}; it has {', '.join(loaded)}")
    return loaded[source.split]


def _hub(source: Source, spec: RowSpec) -> Input:
    """A data set of the Hugging Face hub (or a directory that `datasets` can load)."""
    name = "/".join(filter(None, (source.hub, source.config))) + f"[{source.split}]"
    loaded = cache(lambda: _load_hub(source))
    pin = {"revision": source.revision or "not pinned"}
    return TableInput(source, name, spec, partial(_skipped, loaded), lambda: pin, jumps=_any_jump)


def _load_hub(source: Source) -> Any:
    import datasets

    if "://" in str(source.hub):
        raise UserError(f"hub: {source.hub} is an address; give the data set's id, owner/name")
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(source.hub, source.config, split=source.split, revision=source.revision)
    except Exception as error:  # offline, unknown, gated, unknown split: many classes, one meaning
        reason = one_line(error, 240)
        raise UserError(
            f"hub data set {source.hub} cannot be loaded ({reason}); check the id, config and split, or "
            "connect to the network once, or give files instead"
        ) from None
