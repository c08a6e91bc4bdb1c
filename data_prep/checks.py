"""Checks that a prepared directory still belongs to the recipe, its sources and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import FailureError, UserError, one_line
from emo.common.io.files import Hashes
from emo.common.io.objects import shown
from emo.common.io.untrusted import read_json

from .config import FORMAT, SETTINGS, DataConfig, describe_differences, differences
from .encoding.chat_templates import ChatTemplate, read_template
from .encoding.tokenizer import TokenizerFacts, chat_template, tokenizer_facts
from .selection.plan import Plan
from .selection.similarity.contamination import task_files
from .shards.format import MANIFEST
from .shards.write import TOKENIZER
from .sources.files import AGAIN
from .sources.inputs import open_inputs
from .sources.reader import SourceReader


class PlannedInputs(NamedTuple):
    """The readers of the sources of a plan."""

    inputs: list[SourceReader]
    problem: str = ""  # why a source that is not needed any more cannot be read


def planned_inputs(config: DataConfig) -> list[SourceReader]:
    """Return the readers of all sources. Raises UserError if one of them is in data.dir."""
    inputs = open_inputs(config)
    read = [config.root / name for name in (config.tokenizer, config.contamination) if name is not None]
    home = config.dir.resolve()
    for path in (*filter(None, map(local_file, inputs)), *read):
        if path.exists() and path.resolve().is_relative_to(home):
            raise UserError(
                f"{path} lies in data.dir={config.dir}, which is for prepared data. Set another data.dir",
                code="source-in-data-dir",
            )
    return inputs


def local_file(reader: SourceReader) -> Path | None:
    """Return the file or directory of an input that is on this host. Corpora of this package do not count."""
    return reader.path if reader.source.embedded is None and isinstance(reader.path, Path) else None


def hash_tasks(config: DataConfig, hashes: Hashes) -> str | None:
    """Return the hash of the task rows that data.contamination names, or None without files."""
    if config.contamination is None:
        return None
    directory = config.root / config.contamination
    files = task_files(directory)
    return _hash_files(directory, files, hashes) if files else None


def hash_content(path: Path, hashes: Hashes) -> str:
    """Return the hash of a file, or of the names and contents of all files in a directory."""
    if path.is_file():
        return hashes.sha256(path)
    return _hash_files(path, sorted(file for file in path.rglob("*") if file.is_file()), hashes)


def _hash_files(root: Path, files: Iterable[Path], hashes: Hashes) -> str:
    """Return the hash of the names below `root` and the contents of files."""
    listed = [[str(file.relative_to(root)), hashes.sha256(file)] for file in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def read_chat_template(config: DataConfig, directory: Path) -> ChatTemplate | None:
    """Return the chat template of the tokenizer saved in a directory, or None if the recipe uses none."""
    if not config.by_chat_template:
        return None
    return read_template(
        directory / TOKENIZER,
        str(config.tokenizer),
        config.template,
        config.template_variables,
        config.reasoning,
        config.reasoning_weight,
    )


def check_settings(config: DataConfig, directory: Path) -> None:
    """Raise UserError if the settings in a directory are not those of the recipe."""
    file = directory / SETTINGS
    try:
        prepared = read_json(file)
        version = prepared.pop("format")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(
            f"{file} is missing or damaged ({one_line(error)}); {AGAIN}", code="settings-damaged"
        ) from None
    if version != FORMAT:
        raise UserError(
            f"{shown(config.dir)} was prepared in format {version}, this version has {FORMAT}; {AGAIN}",
            code="other-version",
        )
    changed = differences(prepared, config)
    if changed:
        raise UserError(
            f"{shown(config.dir)} was {describe_differences(changed)}. Set another data.dir, or {AGAIN}",
            code="settings-differ",
        )


def check_inputs(config: DataConfig, plan: Plan, hashes: Hashes) -> PlannedInputs:
    """Return the readers of the planned sources.

    A source may be missing if all data are there. Raises UserError for any other difference.
    """
    planned = {source["name"]: source for source in plan.summary["sources"]}
    complete = all((config.dir / split / MANIFEST).is_file() for split in config.splits)
    try:
        inputs = planned_inputs(config)
    except UserError as error:
        if complete and ("no file matches" in str(error) or isinstance(error, FailureError)):
            return PlannedInputs([], str(error))
        raise
    if hash_tasks(config, hashes) not in (None, plan.summary.get("contamination")):
        problem = f"the tasks in data.contamination={config.contamination} changed since {config.dir} was"
        raise UserError(f"{problem} prepared; {AGAIN}", code="source-changed")
    for reader in inputs:
        if reader.name not in planned:
            raise UserError(
                f"{reader.name} did not exist when {config.dir} was prepared. Remove it, or {AGAIN}",
                code="source-new",
            )
        if not _is_planned(reader, planned[reader.name], hashes):
            raise UserError(
                f"{reader.name} changed since {config.dir} was prepared; {AGAIN}", code="source-changed"
            )
    names = {reader.name for reader in inputs}
    missing = next((name for name in planned if name not in names), None)
    if missing is None:
        return PlannedInputs(inputs)
    problem = f"{missing} is gone since {config.dir} was prepared"
    if not complete:
        raise UserError(f"{problem}. Restore it, or {AGAIN}", code="source-gone")
    return PlannedInputs([], problem)


def _is_planned(reader: SourceReader, source: Mapping[str, Any], hashes: Hashes) -> bool:
    """Return whether an input has the content that a plan was made from.

    A file at an address is only read if its server reports another version than during the scan.
    """
    path = local_file(reader)
    size = source.get("bytes")
    if path is not None:
        expected = source.get("content") if size is None else source["sha256"]
        same_size = size is None or path.stat().st_size == size
        return expected is None or (same_size and hash_content(path, hashes) == expected)
    if "://" not in reader.name or size is None:
        return True
    if reader.size not in (0, size):
        return False
    return source.get("state") in (None, reader.state) or reader.pinned()["sha256"] == source["sha256"]


def check_tokenizer(config: DataConfig, plan: Plan) -> None:
    """Raise UserError unless the saved tokenizer and the recipe's local one are those of the plan."""
    planned = TokenizerFacts(**plan.summary["tokenizer"])
    directories = [config.dir / TOKENIZER]
    if config.tokenizer is not None and (config.root / config.tokenizer).exists():
        directories.insert(0, config.root / config.tokenizer)
    for directory in directories:
        problem = ""
        try:
            same = tokenizer_facts(directory) == planned
            if config.template == "chat_template" and config.by_chat_template:
                same = same and chat_template(directory) == chat_template(config.dir / TOKENIZER)
            chat = read_chat_template(config, config.dir)
            same = same and (None if chat is None else chat.digest) == plan.summary.get("chat_template")
        except (UserError, OSError) as error:
            same = False
            problem = f" ({one_line(error)})"
        if not same:
            raise UserError(
                f"{directory} is missing, damaged or not the tokenizer that {config.dir} was prepared "
                f"with{problem}; {AGAIN}",
                code="tokenizer-changed",
            )
