"""Copies of a run in `train.copy_to`, a directory or any store of fsspec: made beside training, resumed from.

A copy has the names of a run directory: checkpoints, config.yaml, and the records that reports read. One rank
of every host copies a part of each checkpoint's files. Which parts are there is said by UPLOADING-i-of-n, one
for each host; whoever finds that the last is there writes COMPLETE. So nobody waits for another host.

What is left to copy is read from the two directories: checkpoints whose COMPLETE the copy lacks. So a launch
goes on where an earlier one was interrupted, and no upload, however slow, holds up a save.

A run directory that is not there, as on another cluster, is fetched: its records before anything is compared,
the newest checkpoint that is whole, a part by each rank, before it is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec

from emo.common.errors import FailureError, UserError, one_line
from emo.common.files import part_file
from emo.pipeline.run_dir import (
    BAD_BATCHES,
    COMPLETE,
    CONFIG,
    LAUNCHES,
    METRICS,
    SAMPLES,
    VALIDATION,
    checkpoints,
    is_complete,
)

log = logging.getLogger(__name__)

RECORDS = (CONFIG, METRICS, LAUNCHES, SAMPLES, BAD_BATCHES)  # and the files of VALIDATION
STALL = 600.0  # seconds without a piece after which the end of a run no longer waits
PIECE = 16 << 20  # bytes
AT_ONCE = 8  # files


class Uploads:
    """A thread that copies a part of each checkpoint of a run, oldest first. The first has the records."""

    def __init__(self, run_dir: Path, target: str, part: int = 0, parts: int = 1) -> None:
        self.run_dir, self.target, self.part, self.parts = run_dir, target, part, parts
        self.current: Path | None = None  # is being copied, and must not be pruned
        self._copied: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "upload")
        self.wake()  # for what an earlier launch has left

    def wake(self) -> None:
        """Let the thread look for checkpoints that have become complete."""
        self._move()
        self._last = self._thread.submit(self._copy_new)

    def goes_on(self) -> bool:
        """Return whether something is being copied and moves."""
        return not self._last.done() and time.monotonic() - self._moved < STALL

    def unfinished(self) -> list[str]:
        """Return the names of complete checkpoints that the target has not whole."""
        names = [directory.name for directory in checkpoints(self.run_dir)]
        with contextlib.suppress(Exception):  # of whatever store it is
            system, root = fsspec.core.url_to_fs(self.target)
            system.invalidate_cache()
            return [name for name in names if not system.exists(f"{root}/{name}/{COMPLETE}")]
        return names

    def _copy_new(self) -> None:
        for directory in checkpoints(self.run_dir):
            if directory.name in self._copied:
                continue
            self.current = directory
            self._move()
            try:
                if self.part == 0:
                    copy_records(self.run_dir, self.target)
                copy_checkpoint(directory, self.target, self._move, self.part, self.parts)
                self._copied.add(directory.name)
            except Exception as error:  # of whatever store it is; the next `wake` tries again
                why = one_line(error, 200)
                if not is_complete(directory):
                    why = "it was removed before its turn came: copies are slower than saves"
                log.warning("%s was not copied to train.copy_to=%s: %s", directory.name, self.target, why)
        self.current = None

    def _move(self) -> None:
        self._moved = time.monotonic()


def copy_records(run_dir: Path, target: str) -> None:
    """Copy what reports read of a run to `target`, whole lines of it."""
    system, root = fsspec.core.url_to_fs(target)
    paths = [run_dir / name for name in RECORDS]
    for path in filter(Path.is_file, (*paths, *(run_dir / VALIDATION).rglob("*"))):
        name, content = path.relative_to(run_dir).as_posix(), path.read_bytes()
        if path.suffix == ".jsonl":  # the last line may be under way
            content = content[: content.rfind(b"\n") + 1]
        system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        system.pipe_file(f"{root}/{name}", content)


def copy_checkpoint(
    directory: Path, target: str, moved: Callable[[], None], part: int = 0, parts: int = 1
) -> None:
    """Copy one of the `parts` of a complete checkpoint into `target`, calling `moved` after every piece.

    Files that an interrupted copy of the same part has left whole stay. Whoever copies the last part
    completes the copy. Raises OSError for a file that is no longer what COMPLETE says.
    """
    system, root = fsspec.core.url_to_fs(f"{target}/{directory.name}")
    system.invalidate_cache()
    marker = (directory / COMPLETE).read_bytes()
    listed = json.loads(marker)["files"]
    names = sorted(listed, key=lambda name: (-listed[name]["size"], name))[part::parts]  # alike in size
    complete, uploading = f"{root}/{COMPLETE}", [f"{root}/UPLOADING-{i}-of-{parts}" for i in range(parts)]
    whole = marker + b"\nwhole"

    def content(path: str) -> bytes | None:
        return system.cat_file(path) if system.exists(path) else None

    def copy(name: str) -> None:
        path = f"{root}/{name}"
        if resumes and system.exists(path) and system.size(path) == listed[name]["size"]:
            return
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        digest = hashlib.sha256()
        with (directory / name).open("rb") as source, system.open(path, "wb") as sink:
            while piece := source.read(PIECE):
                sink.write(piece)
                digest.update(piece)
                moved()
        if digest.hexdigest() != listed[name]["sha256"]:
            raise OSError(f"{name} has another content than {COMPLETE} says")

    state = content(complete)
    if state == marker:
        return
    if state is not None:  # of another checkpoint of this name
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(complete)
    resumes = content(uploading[part]) in (marker, whole)
    if not resumes:
        system.makedirs(root, exist_ok=True)
        system.pipe_file(uploading[part], marker)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(copy, names))
    system.pipe_file(uploading[part], whole)
    system.invalidate_cache()
    if all(content(path) == whole for path in uploading):
        system.pipe_file(complete, marker)
        for path in system.glob(f"{root}/UPLOADING-*"):
            with contextlib.suppress(FileNotFoundError):  # of another host, which found the same
                system.rm_file(path)


class Store:
    """The copy of a run, to be read."""

    def __init__(self, target: str) -> None:
        """Raises FailureError where the store cannot be reached."""
        self.target = target
        with self._reached():
            self.system, self.root = fsspec.core.url_to_fs(target)

    @contextlib.contextmanager
    def _reached(self) -> Any:
        try:
            yield
        except Exception as error:  # of whatever store it is
            problem = f"train.copy_to={self.target} cannot be read ({one_line(error, 200)})"
            raise FailureError(f"{problem}; leave it out to begin without its checkpoints") from None

    def holds_a_run(self) -> bool:
        """Return whether there is a configuration of a run."""
        with self._reached():
            return bool(self.system.exists(f"{self.root}/{CONFIG}"))

    def checkpoints(self) -> list[str]:
        """Return the names of the complete checkpoints, the newest first."""
        with self._reached():
            paths = self.system.glob(f"{self.root}/step-*/{COMPLETE}")
        names = [path.split("/")[-2] for path in paths]
        numbered = [name for name in names if re.fullmatch(r"step-\d+", name)]
        return sorted(numbered, key=lambda name: int(name[5:]), reverse=True)

    def fetch_records(self, run_dir: Path) -> None:
        """Write the records of the run to `run_dir`, its configuration last."""
        with self._reached():
            names = [name for name in RECORDS if self.system.exists(f"{self.root}/{name}")]
            paths = self.system.find(f"{self.root}/{VALIDATION}")
            names += [path[path.rindex(f"/{VALIDATION}/") + 1 :] for path in paths]
            inside = [name for name in names if ".." not in name.split("/")]
            for name in sorted(inside, key=lambda name: name == CONFIG):
                (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
                content = self.system.cat_file(f"{self.root}/{name}")
                with part_file(run_dir / name) as sink:
                    sink.write(content)

    def fetch(self, name: str, directory: Path, files: list[str]) -> None:
        """Write `files` of the checkpoint `name` below `directory`."""

        def copy(file: str) -> None:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            with (
                contextlib.suppress(FileNotFoundError),  # which makes the checkpoint one that is not whole
                self.system.open(f"{self.root}/{name}/{file}", "rb") as source,
                (directory / file).open("wb") as sink,
            ):
                while piece := source.read(PIECE):
                    sink.write(piece)

        with self._reached(), ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(copy, files))


def restore(run_dir: Path, target: str | None, compare: Callable[[], None]) -> None:
    """Fetch the records of a run that is in its copy alone, and `compare` them with what is to run.

    What was fetched does not stay where that raises UserError.
    """
    if target is None or (run_dir / CONFIG).is_file() or checkpoints(run_dir):
        return
    store = Store(target)
    if not store.holds_a_run() or not store.checkpoints():
        return
    store.fetch_records(run_dir)
    try:
        compare()
    except UserError as error:
        for name in RECORDS:
            (run_dir / name).unlink(missing_ok=True)
        shutil.rmtree(run_dir / VALIDATION, ignore_errors=True)
        problem = f"{error} (train.copy_to={target} holds that run: set it elsewhere for another one)"
        raise UserError(problem, code=error.code) from None
    log.info("%s is the run that is copied to train.copy_to=%s", run_dir, target)
