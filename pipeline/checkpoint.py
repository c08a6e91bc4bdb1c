"""Writing, publishing and removing the checkpoints of a run.

A checkpoint is written as step-N.partial, hashed, given COMPLETE (every file with its size and hash) and
renamed. So a directory without a matching COMPLETE is not a checkpoint, and a torn one is never resumed.
The names and the readers are in `run_dir.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from common.files import write_text
from pipeline.run_dir import COMPLETE, FileFacts, checkpoints, partial_directory, step_directory, step_of


def write_complete(directory: Path, files: dict[str, FileFacts]) -> None:
    """Mark `directory` complete; the marker appears whole or not at all."""
    write_text(directory / COMPLETE, json.dumps({"files": files}, indent=1))


def publish(run_dir: Path, step: int) -> Path:
    """Give a finished partial directory its final name."""
    final = step_directory(run_dir, step)
    remove(final)
    partial_directory(run_dir, step).rename(final)
    return final


def remove(directory: Path) -> None:
    """Delete a checkpoint, its marker first, so that an interrupted removal leaves no valid one."""
    (directory / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def prune(run_dir: Path, keep_last: int, keep_every: int = 0, spared: Path | None = None) -> None:
    """Delete complete checkpoints but the newest `keep_last`, those of every `keep_every`-th step, `spared`.

    What is left partial or converted goes too.
    """
    for directory in checkpoints(run_dir)[:-keep_last]:
        if directory != spared and (not keep_every or step_of(directory) % keep_every):
            remove(directory)
    for directory in (*run_dir.glob("step-*.partial"), *run_dir.glob("step-*.universal")):
        shutil.rmtree(directory, ignore_errors=True)
