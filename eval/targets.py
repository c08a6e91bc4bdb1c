"""What there is to evaluate in a run directory, and whether it is whole.

Ours: every file of the checkpoint's export has the size and hash that COMPLETE lists. The run's export
appears by renaming, so it is whole. A checkpoint of the Hugging Face Trainer has no such marker: it counts
when trainer_state.json, the configuration and every weight file of the index are there, the weight files are
as long as their own headers say, and nothing has changed for SETTLE_SECONDS.
"""

from __future__ import annotations

import contextlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from emo.common.errors import UserError, one_line
from emo.common.weights import shard_names
from emo.eval import store
from emo.eval.model import clean_name
from emo.pipeline.run_dir import COMPLETE, EXPORT, HF, checkpoints, is_complete, listed_files, mismatch

SETTLE_SECONDS = 20.0
TRAINER_STATE, CONFIG = "trainer_state.json", "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # one of them, or its index
FOREIGN = "checkpoint-"  # how the Trainer names its checkpoints, before the step


class NotWholeError(Exception):
    """Files are missing or still being written; they may be whole later."""


class DamagedError(Exception):
    """Files that were whole are not any more, or never will be."""


@dataclass(frozen=True)
class Target:
    """Something to evaluate: its name in the results and the directory of the model's files."""

    name: str
    path: Path
    checkpoint: Path | None = None  # ours: holds COMPLETE
    foreign: bool = False  # the Hugging Face Trainer's

    def fingerprint(self) -> str:
        """Changes when the files do; reads no weights. Empty when they are gone."""
        with contextlib.suppress(OSError):
            files = [p for p in sorted(self.path.iterdir()) if p.is_file()]
            if self.checkpoint is not None:
                files.append(self.checkpoint / COMPLETE)
            stats = [(p.name, p.stat()) for p in files]
            return store.digest([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])
        return ""

    def require_whole(self, files: Path, settled: bool) -> None:
        """Check `files`, links to those of `path`. settled: nothing has changed there for long enough.

        NotWholeError when they may be whole later, DamagedError when they will not.
        """
        if self.foreign:
            _require_trainers(files, settled)
        elif self.checkpoint is None:
            if not (files / CONFIG).is_file():
                raise NotWholeError(f"{CONFIG} is missing")
        else:
            listed = listed_files(self.checkpoint) or {}
            exported = {n.removeprefix(f"{HF}/"): f for n, f in listed.items() if n.startswith(f"{HF}/")}
            fault = f"{COMPLETE} is unreadable or lists no file of {HF}/"
            reason = mismatch(files, exported) if exported else fault
            if reason is not None and not is_complete(self.checkpoint):
                raise NotWholeError(f"{COMPLETE} was removed")  # it is being pruned
            if reason is not None:
                raise DamagedError(reason)


def targets(run_dir: Path) -> list[Target]:
    """Return what a run directory has to evaluate, oldest first; whether it is whole is asked later."""
    result, run = [], clean_name(run_dir.absolute().name)  # `.` has no name of its own
    for path in checkpoints(run_dir):
        if (path / HF).is_dir():
            result.append(Target(f"{run}-{path.name}", path / HF, checkpoint=path))
    foreign = {p.name.removeprefix(FOREIGN): p for p in run_dir.glob(f"{FOREIGN}*") if p.is_dir()}
    for _, path in sorted((int(step), path) for step, path in foreign.items() if step.isdecimal()):
        result.append(Target(f"{run}-{path.name}", path, foreign=True))
    if (run_dir / EXPORT).is_dir():
        result.append(Target(run, run_dir / EXPORT))
    return result


def _require_trainers(files: Path, settled: bool) -> None:
    weights = list(WEIGHTS[:1])
    for name in WEIGHTS:
        index = files / f"{name}.index.json"
        if index.is_file():
            try:
                weights = sorted(set(shard_names(index).values()))
            except UserError as error:
                raise NotWholeError(f"{index.name} is unreadable: {one_line(error, 80)}") from None
            break
        if (files / name).is_file():
            weights = [name]
            break
    for name in (TRAINER_STATE, CONFIG, *weights):
        if not (files / name).is_file():
            raise NotWholeError(f"{name} is missing")
    for name in weights:
        if not _as_long_as_it_says(files / name):
            raise NotWholeError(f"{name} is cut short")
    if not settled:
        raise NotWholeError(f"it changed less than {SETTLE_SECONDS:g} s ago")


def _as_long_as_it_says(path: Path) -> bool:
    """Return whether a weight file has all the bytes that its own header, or a zip file's end, promises."""
    if path.suffix != ".safetensors":
        return zipfile.is_zipfile(path)
    try:
        with safe_open(path, framework="np"):
            return True
    except (OSError, SafetensorError):
        return False
