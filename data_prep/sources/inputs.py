"""The files and data sets that the recipe's sources name, each with a reader of its format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from emo.common.errors import UserError, one_line

from ..config import DataConfig, Source
from .addresses import remote_files
from .files import COMPRESSIONS, SAME_ENDINGS, File, compression_of, format_ending, open_text, read_chunks
from .hub import DatasetReader, is_saved
from .json_array import JsonReader, is_one_value
from .reader import SourceReader
from .rows import cut_positions
from .spec import RowSpec
from .tables import CsvReader, ParquetReader
from .text import TextReader

# The reader of each file ending. A new format is a class in a new module and an entry here.
READERS: dict[str, type[SourceReader]] = {
    ".txt": TextReader,
    ".jsonl": TextReader,
    ".json": JsonReader,  # TextReader if it has a row on each line
    ".csv": CsvReader,
    ".tsv": CsvReader,
    ".parquet": ParquetReader,
}
TEXT_FORMATS = ("document", "lines", "paragraphs", "wikitext")
RECORD_FORMATS = ("text", "alpaca", "messages", "tokens")


def open_inputs(config: DataConfig) -> list[SourceReader]:
    """Return the readers of the training sources, then those of each validation set."""
    inputs = []
    for number, split in enumerate(config.splits[:1] if config.validation_fraction else config.splits):
        for source in config.sources_of(split):
            for reader in _open_source(source, config):
                reader.split = number
                inputs.append(reader)
    return inputs


def _open_source(source: Source, config: DataConfig) -> Iterator[SourceReader]:
    """Yield a reader for each file or data set of a source."""
    spec = RowSpec(
        kind=config.kind,
        format=source.format,
        lines=source.format != "wikitext",  # the rows of WikiText are lines of text
        column=source.column,
        clean=source.clean,
        max_chars=config.max_chars,
        columns=tuple(sorted((source.columns or {}).items())),
        group=config.validation_group,
        chat=config.by_chat_template,
    )
    if spec.group is not None and spec.format == "wikitext":  # a document is made of several rows
        problem = (
            f"data.validation_group needs rows with columns, but {source.hub or source.files} is WikiText"
        )
        raise UserError(problem, code="source-format")
    if source.files is not None and "://" in source.files:
        for file in chain.from_iterable(map(remote_files, expand_braces(source.files))):
            yield _open_file(source, str(file), spec, file, file.size)
    elif source.files is not None:
        yield from _open_matches(source, spec, config)
    elif source.embedded is not None:
        from . import world

        path = world.corpus(source.embedded)
        yield _open_file(source, source.embedded, spec, path, path.stat().st_size)
    elif is_saved(Path(str(source.hub))):
        yield DatasetReader(source, str(source.hub), spec, path=Path(str(source.hub)))
    else:
        name = "/".join(filter(None, (source.hub, source.config))) + f"[{source.split}]"
        yield DatasetReader(source, name, spec)


def _open_matches(source: Source, spec: RowSpec, config: DataConfig) -> Iterator[SourceReader]:
    """Yield a reader for each local file and saved data set that matches `files` of a source."""
    matches = _find_matches(str(source.files), config.root)
    for path, name in matches:
        if path.is_dir():
            yield DatasetReader(source, name, spec, path=path)
        elif size := path.stat().st_size:
            yield _open_file(source, name, spec, path, size)
        elif len(matches) == 1 or config.strict:
            raise UserError(
                f"{path} is empty. Remove it, or set data.strict=false to skip it", code="empty-file"
            )


def expand_braces(pattern: str) -> list[str]:
    """Return the patterns that a pattern with {a,b} stands for, as in a shell."""
    for match in re.finditer(r"\{", pattern):
        choices, end = _split_choices(pattern, match.end())
        if len(choices) > 1:
            rests = expand_braces(pattern[end:])
            inner = [text for choice in choices for text in expand_braces(choice)]
            return [pattern[: match.start()] + text + rest for text in inner for rest in rests]
    return [pattern]


def _split_choices(pattern: str, start: int) -> tuple[list[str], int]:
    """Return the choices of the braces that open before `start`, and the position after them.

    Returns no choices if the braces are not closed. Before the first comma, a closing brace is text, as in
    bash.
    """
    choices: list[str] = []
    depth = 0
    begin = start
    for position in range(start, len(pattern)):
        character = pattern[position]
        if depth == 0 and (character == "," or (character == "}" and choices)):
            choices.append(pattern[begin:position])
            begin = position + 1
            if character == "}":
                return choices, begin
        depth = max(0, depth + {"{": 1, "}": -1}.get(character, 0))
    return [], len(pattern)


def _find_matches(pattern: str, root: Path) -> list[tuple[Path, str]]:
    """Return the files and saved data sets that match `files`, in order, with their names in the manifest.

    An existing name is used literally, even if it has characters of patterns. As in a shell, hidden files and
    folders (.ipynb_checkpoints) match only a pattern with an explicit dot.
    """
    pattern = str(Path(pattern).expanduser()) if pattern.startswith("~") else pattern
    if not os.path.lexists(root / pattern) and len(alternatives := expand_braces(pattern)) > 1:
        return [match for each in alternatives for match in _find_matches(each, root)]
    absolute = Path(pattern).is_absolute()
    relative = pattern.lstrip("/")
    base = Path("/") if absolute else root
    try:
        candidates = [base / pattern] if os.path.lexists(base / pattern) else sorted(base.glob(relative))
        # If nothing matches, the brackets may be part of names.
        candidates = candidates or sorted(base.glob(relative.replace("[", "[[]")))
    except ValueError as error:
        raise UserError(
            f"files: {pattern!r} is not a pattern of file names ({one_line(error)})", code="no-file"
        ) from None
    if not any(part.startswith(".") for part in Path(relative).parts):
        hidden = {path for path in candidates if any(p[0] == "." for p in path.relative_to(base).parts)}
        candidates = [path for path in candidates if path not in hidden]
    paths = [path for path in candidates if path.is_file() or is_saved(path)]
    if not paths:
        hint = f"check files and data.root={root}"
        if any(path.is_dir() for path in candidates):
            hint = f"it is a directory; write {pattern.rstrip('/')}/*.jsonl, for example"
        raise UserError(f"no file matches {base / pattern}; {hint}", code="no-file")
    return [(path, str(path if absolute else path.relative_to(base))) for path in paths]


def _open_file(source: Source, name: str, spec: RowSpec, path: File, size: int) -> SourceReader:
    """Return the reader of a file, chosen by its ending and its beginning.

    size: stored bytes, or 0 if unknown.
    """
    ending = format_ending(path)
    if ending not in READERS:
        raise UserError(
            f"{path} has an unknown ending. Known: {', '.join((*READERS, *SAME_ENDINGS))}, each also with "
            f"{', '.join(COMPRESSIONS)}",
            code="unknown-ending",
        )
    if source.split != "train":
        raise UserError(
            f"{path} is a file, and only hub and saved data sets have splits. Remove split={source.split}, "
            "or name the file of the split",
            code="source-format",
        )
    spec = spec._replace(lines=ending in (".jsonl", ".json"))
    reader = READERS[ending]
    if ending == ".txt":
        spec = _text_spec(source, spec, path)
    elif source.format in TEXT_FORMATS and (source.format != "wikitext" or spec.lines):
        raise UserError(
            f"{path} holds JSON or a table; format {source.format} is for text files", code="source-format"
        )
    elif ending == ".json" and not is_one_value(path):
        reader = TextReader
    opened = reader(source, name, spec, size, path)
    if isinstance(opened, TextReader):
        opened.cuttable = isinstance(path, Path) and not compression_of(path) and spec.format != "document"
    return opened


def _text_spec(source: Source, spec: RowSpec, path: File) -> RowSpec:
    """Return how the rows of a .txt file are parsed. Raises UserError if the recipe needs columns."""
    if spec.group is not None:
        raise UserError(
            f"{path} is plain text; data.validation_group needs rows with columns", code="source-format"
        )
    if spec.kind == "instruct" or source.format in RECORD_FORMATS:
        raise UserError(
            f"{path} is plain text; {source.format} rows need jsonl, json, csv or parquet",
            code="source-format",
        )
    if source.format != "auto":
        return spec
    wikitext = spec._replace(format="wikitext")  # WikiText has headings near its beginning
    with open_text(path) as stream:
        head = next(read_chunks(stream, str(path)), b"")
    return wikitext if any(cut_positions(b"x\n\n" + head, wikitext)) else spec._replace(format="lines")
