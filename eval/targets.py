"""Models to evaluate in a run directory, and whether their files are whole.

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
from emo.common.weights import CONFIG, opened_files
from emo.eval import store
from emo.eval.model import clean_name
from emo.pipeline.run_dir import COMPLETE, EXPORT, HF, checkpoints, is_complete, listed_files, mismatch

SETTLE_SECONDS = 20.0
TRAINER_STATE = "trainer_state.json"
FOREIGN = "checkpoint-"  # how the Trainer names its checkpoints, before the step


class NotWholeError(Exception):
    """Files are missing or still being written; they may be whole later."""


@dataclass(frozen=True)
class Target:
    """A model to evaluate: its name in the results and the directory of its files."""

    name: str
    path: Path
    checkpoint: Path | None = None  # ours: holds COMPLETE
    foreign: bool = False  # the Hugging Face Trainer's

    def fingerprint(self) -> str:
        """Return a digest that changes when the files do, without reading them; empty when they are gone."""
        with contextlib.suppress(OSError):
            files = [p for p in sorted(self.path.iterdir()) if p.is_file()]
            if self.checkpoint is not None:
                files.append(self.checkpoint / COMPLETE)
            stats = [(p.name, p.stat()) for p in files]
            return store.digest([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])
        return ""

    def require_whole(self, files: Path, settled: bool) -> None:
        """Check `files`, links to those of `path`. settled: nothing has changed there for long enough.

        NotWholeError when they may be whole later, UserError when they will not.
        """
        if self.checkpoint is not None:
            listed = listed_files(self.checkpoint) or {}
            exported = {n.removeprefix(f"{HF}/"): f for n, f in listed.items() if n.startswith(f"{HF}/")}
            fault = f"{COMPLETE} is unreadable or lists no file of {HF}/"
            if (reason := mismatch(files, exported) if exported else fault) is not None:
                if not is_complete(self.checkpoint):
                    raise NotWholeError(f"{COMPLETE} was removed")  # it is being pruned
                raise UserError(reason)
            return
        for name in (CONFIG, TRAINER_STATE) if self.foreign else (CONFIG,):
            if not (files / name).is_file():
                raise NotWholeError(f"{name} is missing")
        try:
            opened = opened_files(files) if self.foreign else []
        except (OSError, ValueError, UserError) as error:
            raise NotWholeError(one_line(error, 200)) from None
        for path in opened:
            if not _is_as_long_as_its_header_says(path):
                raise NotWholeError(f"{path.name} is cut short")
        if self.foreign and not settled:
            raise NotWholeError(f"it changed less than {SETTLE_SECONDS:g} s ago")


def targets(run_dir: Path) -> list[Target]:
    """Return the models to evaluate in a run directory, oldest first, whether they are whole or not."""
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


def _is_as_long_as_its_header_says(path: Path) -> bool:
    """Return whether a weight file has all the bytes that its own header, or a zip file's end, promises."""
    if path.suffix != ".safetensors":
        return path.suffix != ".bin" or zipfile.is_zipfile(path)
    try:
        with safe_open(path, framework="np"):
            return True
    except (OSError, SafetensorError):
        return False
