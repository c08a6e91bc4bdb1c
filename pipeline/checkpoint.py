"""The run directory and the protocol of its checkpoints.

    config.yaml      the resolved configuration
    metrics.jsonl    one line per logged step
    step-000100/     a checkpoint: state/ (DeepSpeed), state.json, COMPLETE
    export/          the trained model for Hugging Face

A checkpoint is written as step-N.partial, hashed, given COMPLETE (every file with its size and hash) and
renamed. So a directory without a matching COMPLETE is not a checkpoint, and a torn one is never resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

COMPLETE = "COMPLETE"
STATE = "state.json"
EXPORT = "export"  # of the run
HF = "hf"  # export inside a checkpoint


def step_directory(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps stands."""
    return run_dir / f"step-{step:06d}"


def partial_directory(run_dir: Path, step: int) -> Path:
    """Where that checkpoint is written before it is complete."""
    return run_dir / f"step-{step:06d}.partial"


def step_of(directory: Path) -> int:
    """The step in a checkpoint directory's name."""
    return int(directory.name.removeprefix("step-"))


def is_complete(directory: Path) -> bool:
    """Whether the checkpoint has been written whole (its content is checked by `problem`)."""
    return (directory / COMPLETE).is_file()


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [d for d in run_dir.glob("step-*") if d.name[5:].isdigit() and is_complete(d)]
    return sorted(found, key=step_of)


def list_files(directory: Path) -> list[str]:
    """Relative names of the files of a checkpoint except COMPLETE, sorted."""
    files = (p for p in directory.rglob("*") if p.is_file())
    return sorted(p.relative_to(directory).as_posix() for p in files if p.name != COMPLETE)


def describe(directory: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    """Size and sha256 of files; on several ranks each describes a part."""
    described: dict[str, dict[str, int | str]] = {}
    for name in names:
        path = directory / name
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        described[name] = {"size": path.stat().st_size, "sha256": digest}
    return described


def write_complete(directory: Path, files: dict[str, dict[str, int | str]]) -> None:
    """Mark `directory` complete; the marker appears whole or not at all."""
    write_atomic(directory / COMPLETE, json.dumps({"files": files}, indent=1))


def problem(directory: Path, part: int = 0, parts: int = 1) -> str | None:
    """Why a checkpoint must not be loaded, or None. `part` of `parts` hashes every parts-th file."""
    try:
        listed = json.loads((directory / COMPLETE).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{COMPLETE} is missing or unreadable"
    if not listed:
        return f"{COMPLETE} lists no files"
    if sorted(listed) != list_files(directory):
        difference = sorted(set(listed) ^ set(list_files(directory)))
        return f"{difference[0]} is missing or was not written by the trainer"
    for name in sorted(listed):
        if (directory / name).stat().st_size != listed[name]["size"]:
            return f"{name} has another size than {COMPLETE} says"
    mine = sorted(listed)[part::parts]
    for name, found in describe(directory, mine).items():
        if found != listed[name]:
            return f"{name} has another content than {COMPLETE} says"
    return None


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


def prune(run_dir: Path, keep_last: int, keep_every: int = 0) -> None:
    """Delete complete checkpoints but the newest `keep_last` and those of every `keep_every`-th step.

    What is left partial or converted goes too.
    """
    for directory in checkpoints(run_dir)[:-keep_last]:
        if not keep_every or step_of(directory) % keep_every:
            remove(directory)
    for directory in (*run_dir.glob("step-*.partial"), *run_dir.glob("step-*.universal")):
        shutil.rmtree(directory, ignore_errors=True)


def write_atomic(path: Path, text: str) -> None:
    """Write a small file so that it is seen whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
