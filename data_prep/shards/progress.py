"""The progress of a preparation, from the names of its files. Imports no large library."""

from __future__ import annotations

from pathlib import Path

from emo.common.io.files import exists, list_files, match_name
from emo.common.io.objects import in_store, list_objects, shown
from emo.common.text import counted

from ..config import MANIFEST, MARKER

PARTS = ".new/scan/*.parquet"  # parts of the scan, while jobs read the sources


def is_data_directory(directory: Path) -> bool:
    """Return whether a directory is one of prepared data, complete or not."""
    return exists(directory / MARKER)


def describe_progress(directory: Path) -> str:
    """Return how much of a preparation is done, by the names of its files."""
    if in_store(directory):
        names = list(list_objects(directory))
    else:
        names = [path.relative_to(directory).as_posix() for path in list_files(directory)]
    parts = sum(match_name(name, [PARTS]) for name in names)
    lines = [f"{counted(parts, 'part')} of the sources read"] if parts else []
    shards = [name for name in names if match_name(name, ["*/shard-*.arrow"])]
    for split in sorted({name.partition("/")[0] for name in shards}):
        made = [name for name in shards if name.startswith(f"{split}/")]
        complete = ", complete" * (f"{split}/{MANIFEST}" in names)
        total = int(made[0].rpartition("-")[2].removesuffix(".arrow"))
        lines.append(f"{split} has {len(made)} of {counted(total, 'shard')}{complete}")
    return f"{shown(directory)}: {'; '.join(lines) or 'nothing is made yet'}"
