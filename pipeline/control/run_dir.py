"""The files of a run directory and how to read them. This module imports no large library.

config.yaml      the resolved configuration, and the identity of its inputs (identity.py)
trunk.yaml       config.yaml of the run that train.decay_from names
data_hashes.json the shards whose content was verified
metrics.jsonl    a line per logged step, and per validation set and validated step
validation/      the NLL of every document of each validation set, by step (monitor/documents.py), and the
                 predictions of the model before training (validation/base.py)
launches.jsonl   a line when a launch starts to train, and a line with the reason when it ends
samples.jsonl    the model's continuations of train.sample_prompts at each checkpoint
log.txt          output of the launcher, compilers and libraries
heartbeat.json   the run's current activity and its start, rewritten every few seconds
ranks/           the same for every rank, and traces of collectives that failed (heartbeat.py)
ranks.before/    ranks/ of the previous launch
profile/         a trace of each rank and its GPU's memory, from train.profile (monitor/profiler.py)
lock.000001      the launch that owns the directory (the highest number counts)
initial/         the initial weights of a new model
step-000100/     a checkpoint: state/ (DeepSpeed), state.json, COMPLETE, and hf/ if it is exported, or else
                 hf-settings/, the files of an export except weights
task_scores.jsonl
                 a line for each score that a watcher gives a checkpoint: step, digest of the checkpoint,
                 task, value, digest of the settings
selection.jsonl  the scores that training has taken at each save point (validation/task_scores.py)
best.json        step, metric and value of the best checkpoint, from train.keep_best
export/          the trained model for Hugging Face, with its origin in export.json
STOP             created by a user to make the run save and stop
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.io.files import sha256
from emo.common.io.untrusted import parse_json, read_json

CONFIG = "config.yaml"
TRUNK = "trunk.yaml"  # the configuration of the run that train.decay_from names
DATA_HASHES = "data_hashes.json"
METRICS = "metrics.jsonl"
LAUNCHES = "launches.jsonl"
SAMPLES = "samples.jsonl"
VALIDATION = "validation"
LOG = "log.txt"
HEARTBEAT = "heartbeat.json"  # with an old `time` the run is dead, with an old `since` it hangs
ENDED = ("finished", "stopped", "failed")  # activities of a launch that has ended
ALIVE = 60.0  # largest age in seconds of the heartbeat of a live run
RANKS = "ranks"
RANKS_BEFORE = "ranks.before"
TRACE = "collectives-"  # followed by the rank: trace of PyTorch's flight recorder
LOCK = "lock"
LOCK_SECONDS = 120.0  # after which a lock that was not renewed is free, if its holder is on another host
WANDB_ID = "wandb-id"
MLFLOW_ID = "mlflow-id"
TRACKIO_ID = "trackio-id"
PROFILE = "profile"
BAD_BATCHES = "bad_batches.jsonl"
STOP = "STOP"
INITIAL = "initial"
EXPORT = "export"  # of the run
EXPORT_INFO = "export.json"  # inside an export
BEST = "best.json"
TASK_SCORES = "task_scores.jsonl"
SELECTION = "selection.jsonl"
HF = "hf"  # export inside a checkpoint
HF_SETTINGS = "hf-settings"  # files of an export except weights, inside a checkpoint without an export
COMPLETE = "COMPLETE"
STATE = "state.json"


class Best(NamedTuple):
    """The content of best.json: the best checkpoint of a run."""

    step: int
    metric: str
    value: float


Record = dict[str, Any]  # a line of JSON
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
    """Return whether the checkpoint was written completely. `checkpoint_problem` checks its content."""
    return (directory / COMPLETE).is_file()


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    directories = [d for d in run_dir.glob("step-*") if d.name[5:].isdigit() and is_complete(d)]
    return sorted(directories, key=step_of)


def read_best(run_dir: Path) -> Best | None:
    """Return the best checkpoint of a run with train.keep_best, or None."""
    try:
        return Best(**read_json(run_dir / BEST))
    except (OSError, ValueError, TypeError):
        return None


def checkpoint_digest(directory: Path) -> str:
    """Return a digest of a checkpoint's content, or "" if it is not complete."""
    with contextlib.suppress(OSError):
        return hashlib.sha256((directory / COMPLETE).read_bytes()).hexdigest()[:16]
    return ""


def append_scores(run_dir: Path, step: int, digest: str, scores: Iterable[tuple[str, float, str]]) -> None:
    """Append a checkpoint's scores to task_scores.jsonl in one write, because watchers may share the file.

    Args:
        run_dir: The run directory.
        step: Step of the checkpoint.
        digest: `checkpoint_digest` of the checkpoint that was evaluated.
        scores: Task, value (higher is better) and digest of the settings of each evaluation.
    """
    append_records(
        run_dir / TASK_SCORES,
        (
            {"step": step, "checkpoint": digest, "task": task, "value": value, "setting": setting}
            for task, value, setting in scores
        ),
    )


def checkpoint_files(directory: Path) -> list[str]:
    """Return the relative names of a checkpoint's files except COMPLETE, sorted."""
    files = (p for p in directory.rglob("*") if p.is_file() and p.name != COMPLETE)
    return sorted(p.relative_to(directory).as_posix() for p in files)


def hash_files(directory: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Return size and sha256 of files, by name."""
    facts: dict[str, FileFacts] = {}
    for name in names:
        path = directory / name
        facts[name] = {"size": path.stat().st_size, "sha256": sha256(path)}
    return facts


def checkpoint_problem(directory: Path, part: int = 0, parts: int = 1) -> str | None:
    """Return why a checkpoint must not be loaded, or None.

    To share the work, rank `part` of `parts` hashes every parts-th file.
    """
    listed = listed_files(directory)
    if not listed:
        return f"{COMPLETE} is missing, unreadable or empty"
    if difference := sorted(set(listed) ^ set(checkpoint_files(directory))):
        return f"{difference[0]} is missing or was not written by the trainer"
    return mismatch(directory, listed, part, parts)


def listed_files(directory: Path) -> dict[str, FileFacts] | None:
    """Return size and sha256 of a checkpoint's files from COMPLETE, by relative name.

    None if COMPLETE cannot be read or names files outside the checkpoint.
    """
    try:
        listed = read_json(directory / COMPLETE)["files"]
        valid = all({"size", "sha256"} <= facts.keys() for facts in listed.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    outside = any(name.startswith("/") or ".." in name.split("/") or "\0" in name for name in listed)
    return listed if valid and not outside else None


def mismatch(directory: Path, listed: dict[str, FileFacts], part: int = 0, parts: int = 1) -> str | None:
    """Return the first difference between files and their listed facts, or None."""
    for name in sorted(listed):
        if not (directory / name).is_file():
            return f"{name} is missing"
        if (directory / name).stat().st_size != listed[name]["size"]:
            return f"{name} does not have the size that {COMPLETE} lists"
    for name, facts in hash_files(directory, sorted(listed)[part::parts]).items():
        if facts != listed[name]:
            return f"{name} does not have the content that {COMPLETE} lists"
    return None


def read_metrics(run_dir: Path) -> list[Record]:
    """Return a run's records, each with numbers by name. A record of a validation has a `set`."""
    return read_records(run_dir / METRICS)[0]


def read_records(path: Path) -> tuple[list[Record], int]:
    """Return the objects with a `step` in a file of JSON lines, and the number of other lines."""
    records = []
    damaged = 0
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        if (record := _record(line)) is not None:
            records.append(record)
        elif line.strip():
            damaged += 1
    return records, damaged


def _record(line: bytes) -> Record | None:
    with contextlib.suppress(ValueError):
        record = parse_json(line.decode())
        if isinstance(record, dict) and type(record.get("step")) is int:
            return record
    return None


def append_records(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Append records to a file of JSON lines in one write, after ending a line that a crash cut off."""
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        data = b"\n" * torn + text.encode()
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, f"{path} could not be written completely")


def drop_records(path: Path, step: int) -> None:
    """Remove the records after `step` from a file of JSON lines, or all records for step 0.

    Records are in the order of their steps, so only the end of the file is read.
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
        if torn:  # only the end of the last line is missing
            file.seek(end)
            file.write(b"\n")


def read_heartbeat(run_dir: Path) -> dict[str, object]:
    """Return the content of heartbeat.json, empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(read_json(run_dir / HEARTBEAT))
    return {}


def read_export_info(export: Path) -> dict[str, Any]:
    """Return the origin of an export from export.json, empty without this file.

    Raises ValueError if the file does not hold a JSON object.
    """
    path = export / EXPORT_INFO
    info = read_json(path) if path.is_file() else {}
    if not isinstance(info, dict):
        raise ValueError(f"{path} is not a JSON object")
    return info
