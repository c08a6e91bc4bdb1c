"""What a run directory contains, by name, and how it is read. Standard library only: anybody may import it.

config.yaml      the resolved configuration
data_hashes.json the shards that were found to hold what was prepared
metrics.jsonl    one line per logged step
launches.jsonl   a line when a launch begins to train, and one when it ends, with the reason
samples.jsonl    how the model continued train.sample_prompts at each checkpoint
log.txt          what the launcher, compilers and libraries printed
heartbeat.json   what the run is doing, and since when; rewritten every few seconds while it lives
lock.000001      which launch owns the directory (the highest number counts)
initial/         the first weights of a new model
step-000100/     a checkpoint: state/ (DeepSpeed), state.json, COMPLETE, and hf/ if it is exported
export/          the trained model for Hugging Face; export.json says where it comes from
STOP             made by whoever wants the run to save and stop
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CONFIG = "config.yaml"
DATA_HASHES = "data_hashes.json"
METRICS = "metrics.jsonl"
LAUNCHES = "launches.jsonl"
SAMPLES = "samples.jsonl"
LOG = "log.txt"
HEARTBEAT = "heartbeat.json"  # an old `time` means that the run is dead, an old `since` that it hangs
LOCK = "lock"
WANDB_ID = "wandb-id"
PROFILE = "profile.json"  # for chrome://tracing or ui.perfetto.dev
BAD_BATCHES = "bad_batches.jsonl"
STOP = "STOP"
INITIAL = "initial"
EXPORT = "export"  # of the run
EXPORT_INFO = "export.json"  # inside an export
HF = "hf"  # export inside a checkpoint
COMPLETE = "COMPLETE"
STATE = "state.json"

FileFacts = dict[str, int | str]  # size and sha256 of a file


def step_directory(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps is."""
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


def describe(directory: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Size and sha256 of files; on several ranks each describes a part."""
    described: dict[str, FileFacts] = {}
    for name in names:
        path = directory / name
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        described[name] = {"size": path.stat().st_size, "sha256": digest}
    return described


def problem(directory: Path, part: int = 0, parts: int = 1) -> str | None:
    """Why a checkpoint must not be loaded, or None. `part` of `parts` hashes every parts-th file."""
    listed = listed_files(directory)
    if listed is None:
        return f"{COMPLETE} is missing or unreadable"
    if not listed:
        return f"{COMPLETE} lists no files"
    if sorted(listed) != list_files(directory):
        difference = sorted(set(listed) ^ set(list_files(directory)))
        return f"{difference[0]} is missing or was not written by the trainer"
    return mismatch(directory, listed, part, parts)


def listed_files(directory: Path) -> dict[str, FileFacts] | None:
    """What COMPLETE says about a checkpoint's files, by relative name; None when it cannot be read."""
    try:
        listed = json.loads((directory / COMPLETE).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(listed, dict):
        return None
    whole = (isinstance(facts, dict) and {"size", "sha256"} <= facts.keys() for facts in listed.values())
    return listed if all(whole) else None


def mismatch(directory: Path, listed: dict[str, FileFacts], part: int = 0, parts: int = 1) -> str | None:
    """The first difference between files and what is listed of them, or None."""
    for name in sorted(listed):
        if not (directory / name).is_file():
            return f"{name} is missing"
        if (directory / name).stat().st_size != listed[name]["size"]:
            return f"{name} has another size than {COMPLETE} says"
    mine = sorted(listed)[part::parts]
    for name, found in describe(directory, mine).items():
        if found != listed[name]:
            return f"{name} has another content than {COMPLETE} says"
    return None


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The records of a run; lines that are torn or damaged are left out."""
    return read_records(run_dir / METRICS)[0]


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects with a `step` in a file of JSON lines, and how many other lines it has; none if absent."""
    records, damaged = [], 0
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        record = None
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        elif line.strip():
            damaged += 1
    return records, damaged


def read_heartbeat(run_dir: Path) -> dict[str, Any]:
    """What heartbeat.json says; empty where it says nothing."""
    with contextlib.suppress(OSError, ValueError):
        beat = json.loads((run_dir / HEARTBEAT).read_text())
        return beat if isinstance(beat, dict) else {}
    return {}


def read_export_info(export: Path) -> dict[str, Any]:
    """What an export says of its origin; empty when it says nothing.

    Raises ValueError when export.json holds anything but an object.
    """
    path = export / EXPORT_INFO
    if not path.is_file():
        return {}
    info = json.loads(path.read_text())
    if not isinstance(info, dict):
        raise ValueError(f"{path} is not a JSON object")
    return info
