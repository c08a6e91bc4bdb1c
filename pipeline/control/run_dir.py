"""What a run directory contains, by name, and how it is read. Nothing heavy is imported: anybody may.

config.yaml      the resolved configuration, and the identity of what was read (identity.py)
data_hashes.json the shards that were found to hold what was prepared
metrics.jsonl    one line per logged step, and per validation set and measured step
validation/      the NLL of every document of each validation set, by step (report/validation.py)
launches.jsonl   a line when a launch begins to train, and one when it ends, with the reason
samples.jsonl    how the model continued train.sample_prompts at each checkpoint
log.txt          what the launcher, compilers and libraries printed
heartbeat.json   what the run is doing, and since when; rewritten every few seconds while it lives
ranks/           the same of every rank, and where ranks stood that waited for another in vain (liveness.py)
ranks.before/    ranks/ of the launch before
profile/         what train.profile recorded: a trace of each rank, and its GPU's memory (report/profile.py)
lock.000001      which launch owns the directory (the highest number counts)
initial/         the first weights of a new model
step-000100/     a checkpoint: state/ (DeepSpeed), state.json, COMPLETE, and hf/ if it is exported
export/          the trained model for Hugging Face; export.json says where it comes from
STOP             made by whoever wants the run to save and stop
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from emo.common.io.untrusted import parse_json, read_json

CONFIG = "config.yaml"
DATA_HASHES = "data_hashes.json"
METRICS = "metrics.jsonl"
LAUNCHES = "launches.jsonl"
SAMPLES = "samples.jsonl"
VALIDATION = "validation"
LOG = "log.txt"
HEARTBEAT = "heartbeat.json"  # an old `time` means that the run is dead, an old `since` that it hangs
ENDED = ("finished", "stopped", "failed")  # what a heartbeat says of a launch that is over
ALIVE = 60.0  # seconds that a heartbeat of a living run is old at most
RANKS = "ranks"
RANKS_BEFORE = "ranks.before"
TRACE = "collectives-"  # and a rank's number: of PyTorch's flight recorder
LOCK = "lock"
LOCK_SECONDS = 120.0  # a holder on another host that has not renewed its lock for so long is dead
WANDB_ID = "wandb-id"
PROFILE = "profile"
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
    """Return the directory of the checkpoint after `step` optimizer steps."""
    return run_dir / f"step-{step:06d}"


def partial_directory(run_dir: Path, step: int) -> Path:
    """Return the directory in which that checkpoint is written before it is complete."""
    return run_dir / f"step-{step:06d}.partial"


def step_of(directory: Path) -> int:
    """Return the step in a checkpoint directory's name."""
    return int(directory.name.removeprefix("step-"))


def is_complete(directory: Path) -> bool:
    """Return whether the checkpoint has been written whole (its content is checked by `problem`)."""
    return (directory / COMPLETE).is_file()


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    directories = [d for d in run_dir.glob("step-*") if d.name[5:].isdigit() and is_complete(d)]
    return sorted(directories, key=step_of)


def list_files(directory: Path) -> list[str]:
    """Return the relative names of a checkpoint's files except COMPLETE, sorted."""
    files = (p for p in directory.rglob("*") if p.is_file() and p.name != COMPLETE)
    return sorted(p.relative_to(directory).as_posix() for p in files)


def describe(directory: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Return size and sha256 of files; on several ranks each describes a part."""
    described: dict[str, FileFacts] = {}
    for name in names:
        path = directory / name
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        described[name] = {"size": path.stat().st_size, "sha256": digest}
    return described


def problem(directory: Path, part: int = 0, parts: int = 1) -> str | None:
    """Return why a checkpoint must not be loaded, or None. `part` of `parts` hashes every parts-th file."""
    listed = listed_files(directory)
    if not listed:
        return f"{COMPLETE} is missing, unreadable or empty"
    if difference := sorted(set(listed) ^ set(list_files(directory))):
        return f"{difference[0]} is missing or was not written by the trainer"
    return mismatch(directory, listed, part, parts)


def listed_files(directory: Path) -> dict[str, FileFacts] | None:
    """Return what COMPLETE says about a checkpoint's files, by relative name; None when it cannot be read.

    No name leads out of the checkpoint.
    """
    try:
        listed = read_json(directory / COMPLETE)["files"]
        whole = all({"size", "sha256"} <= facts.keys() for facts in listed.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    outside = any(name.startswith("/") or ".." in name.split("/") or "\0" in name for name in listed)
    return listed if whole and not outside else None


def mismatch(directory: Path, listed: dict[str, FileFacts], part: int = 0, parts: int = 1) -> str | None:
    """Return the first difference between files and what is listed of them, or None."""
    for name in sorted(listed):
        if not (directory / name).is_file():
            return f"{name} is missing"
        if (directory / name).stat().st_size != listed[name]["size"]:
            return f"{name} has another size than {COMPLETE} says"
    for name, facts in describe(directory, sorted(listed)[part::parts]).items():
        if facts != listed[name]:
            return f"{name} has another content than {COMPLETE} says"
    return None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return a run's records: numbers by name, those of single `domains`, and the `set` of a validation."""
    return read_records(run_dir / METRICS)[0]


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return objects with a `step` in a file of JSON lines, and how many others there are; none if absent."""
    records, damaged = [], 0
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        if (record := _record(line)) is not None:
            records.append(record)
        elif line.strip():
            damaged += 1
    return records, damaged


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, or None where it holds none."""
    with contextlib.suppress(ValueError):
        record = parse_json(line.decode())
        if isinstance(record, dict) and type(record.get("step")) is int:
            return record
    return None


def drop_records(path: Path, step: int) -> None:
    """Remove the records of later steps than `step` from a file of JSON lines, of step 0 all.

    Only the end of the file is read, for records are written in the order of their steps.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = len(content) if step else 0
            while end:
                start = content.rfind(b"\n", 0, end - 1) + 1
                record = _record(content[start:end])
                if record is not None and record["step"] <= step:
                    break
                end = start
            torn = end and content[end - 1 : end] != b"\n"
        file.truncate(end)
        if torn:  # all but the end of its line was written
            file.seek(end)
            file.write(b"\n")


def read_heartbeat(run_dir: Path) -> dict[str, Any]:
    """Return the content of heartbeat.json; empty where it says nothing."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(read_json(run_dir / HEARTBEAT))
    return {}


def read_export_info(export: Path) -> dict[str, Any]:
    """Return what an export says of its origin; empty when it says nothing.

    Raises ValueError when export.json holds anything but an object.
    """
    path = export / EXPORT_INFO
    info = read_json(path) if path.is_file() else {}
    if not isinstance(info, dict):
        raise ValueError(f"{path} is not a JSON object")
    return info
