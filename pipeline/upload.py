"""Checkpoints are copied to `train.copy_to` beside training; what is there already is not copied again.

What is left to do is read from the two directories: checkpoints of the run whose COMPLETE the target lacks.
So a launch goes on where an earlier one was interrupted, and no upload, however slow, holds up a save. In the
target UPLOADING holds what COMPLETE will say while files are missing, and COMPLETE comes last.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec

from emo.common.errors import one_line
from emo.pipeline.run_dir import COMPLETE, checkpoints, is_complete

log = logging.getLogger(__name__)

STALL = 600.0  # seconds without a piece after which the end of a run no longer waits


class Uploads:
    """A thread that copies the checkpoints of a run, oldest first."""

    def __init__(self, run_dir: Path, target: str) -> None:
        self.run_dir, self.target = run_dir, target
        self.current: Path | None = None  # is being copied, and must not be pruned
        self._copied: set[str] = set()
        self._work, self._idle = threading.Event(), threading.Event()
        self._moved = time.monotonic()
        self.wake()  # for what an earlier launch has left
        threading.Thread(target=self._run, name="upload", daemon=True).start()

    def wake(self) -> None:
        """Let the thread look for checkpoints that have become complete."""
        self._idle.clear()
        self._work.set()

    def goes_on(self) -> bool:
        """Return whether something is being copied and moves."""
        return not self._idle.is_set() and time.monotonic() - self._moved < STALL

    def unfinished(self) -> list[str]:
        """Return the names of complete checkpoints that are not in the target."""
        return [d.name for d in checkpoints(self.run_dir) if d.name not in self._copied]

    def _run(self) -> None:
        while self._work.wait():
            self._work.clear()
            for directory in checkpoints(self.run_dir):
                if directory.name in self._copied:
                    continue
                self.current = directory
                self._move()
                try:
                    copy_checkpoint(directory, self.target, self._move)
                    self._copied.add(directory.name)
                except Exception as error:  # of whatever store it is; the next `wake` tries again
                    why = one_line(error, 200)
                    if not is_complete(directory):
                        why = "it was removed before its turn came: copies are slower than saves"
                    log.warning("%s was not copied to train.copy_to=%s: %s", directory.name, self.target, why)
            self.current = None
            if not self._work.is_set():
                self._idle.set()

    def _move(self) -> None:
        self._moved = time.monotonic()


def copy_checkpoint(directory: Path, target: str, moved: Callable[[], None]) -> None:
    """Copy a complete checkpoint into `target`, calling `moved` after every piece.

    Files that an interrupted copy of the same checkpoint has left whole stay. Raises OSError for a file that
    is no longer what COMPLETE says.
    """
    system, root = fsspec.core.url_to_fs(f"{target}/{directory.name}")
    system.invalidate_cache()
    marker = (directory / COMPLETE).read_bytes()
    listed = json.loads(marker)["files"]
    complete, uploading = f"{root}/{COMPLETE}", f"{root}/UPLOADING"

    def content(path: str) -> bytes | None:
        return system.cat_file(path) if system.exists(path) else None

    def copy(name: str) -> None:
        path = f"{root}/{name}"
        if resumes and system.exists(path) and system.size(path) == listed[name]["size"]:
            return
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        digest = hashlib.sha256()
        with (directory / name).open("rb") as source, system.open(path, "wb") as sink:
            while piece := source.read(16 << 20):
                sink.write(piece)
                digest.update(piece)
                moved()
        if digest.hexdigest() != listed[name]["sha256"]:
            raise OSError(f"{name} has another content than {COMPLETE} says")

    if content(complete) != marker:
        resumes = content(uploading) == marker
        if system.exists(complete):  # of another checkpoint of this name
            system.rm_file(complete)
        if not resumes:
            system.makedirs(root, exist_ok=True)
            system.pipe_file(uploading, marker)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(copy, sorted(listed)))
        system.pipe_file(complete, marker)
    if system.exists(uploading):
        system.rm_file(uploading)
