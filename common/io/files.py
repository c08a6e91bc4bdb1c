"""Files that are whole or not there whatever happens to their writer, directories that a tool may clear
because it made them, and hashes that are computed again only when a file was touched.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import DiskFullError, UserError, one_line
from .lease import file_system_now, marked_process_ended, process_mark

PART = ".part"  # ending of files that are being written
ABANDONED = 86400.0  # seconds without a write after which a part of another machine's writer is abandoned
TICK = 0.05  # seconds; file systems count time in steps that are shorter


@contextlib.contextmanager
def part_file(path: Path, publish: Callable[[Path, Path], Any] = Path.replace) -> Iterator[IO[bytes]]:
    """Yield a hidden file beside `path` that becomes `path` when the block ends without an error.

    Its name tells its writer, so that `remove_abandoned` knows whether that lives. Raises DiskFullError when
    the disk is full; nothing stays behind then.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.{process_mark()}{PART}")
    try:
        with full_disk(path), part.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            publish(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Turn "no space left", as Python or a library reports it, into a DiskFullError about `path`."""
    try:
        yield
    except Exception as error:
        code = getattr(error, "errno", None)
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left on device" in str(error):
            directory = path if path.is_dir() else path.parent
            raise DiskFullError(f"no space left while writing {path}; make room in {directory}") from None
        raise


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Call `write` with a new file, which then takes the place of `path` in one step."""
    with part_file(path) as file:
        write(file)


def write_text(path: Path, text: str) -> None:
    """Write text to `path`, whole or not at all."""
    write_atomically(path, lambda sink: sink.write(text.encode()))


def reset_modes(directory: Path) -> None:
    """Give the files in a directory the mode of any other new file.

    Some libraries write a temporary file that only its owner may read, and rename it.
    """
    probe = directory / f".mode{PART}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in directory.iterdir():
        file.chmod(mode)


def replace_nonfinite(value: Any) -> Any:
    """Return the value with None where a number in it is NaN or infinite, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_once(path: Path, text: str) -> bool:
    """Write text to `path` unless it exists; return True to only one of all writers."""
    if path.exists():
        return False
    try:
        with part_file(path, lambda part, target: os.link(part, target)) as file:
            file.write(text.encode())
    except FileExistsError:
        return False
    return True


def remove_abandoned(directory: Path) -> int:
    """Delete parts whose writers died, and return how many: those of this machine, and old ones of others."""
    removed = 0
    for part in directory.glob(f".*{PART}"):
        with contextlib.suppress(OSError):
            ended = marked_process_ended(part.name.removesuffix(PART).rpartition(".")[2])
            if ended is None:
                ended = file_system_now(directory) - part.stat().st_mtime > ABANDONED
            if ended:
                part.unlink()
                removed += 1
    return removed


def claim_directory(directory: Path, marker: str, note: str, setting: str) -> None:
    """Make `directory` one that its tool may clear: it is new or empty and gets a `marker` file, or has one.

    Raises UserError, naming the `setting` that gave it, when it holds anything else or cannot be written.
    """
    reason = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            reason = "cannot be written"
        elif not (directory / marker).is_file():
            beginning = f".{marker}.*{PART}"  # of another process that does the same
            names = sorted(p.name for p in directory.iterdir() if not fnmatch.fnmatchcase(p.name, beginning))
            if not names:
                write_once(directory / marker, note)
            elif not (directory / marker).is_file():  # another process may have begun since
                reason = f"is not empty ({names[0]} is there) and not marked by {marker} as made here"
    except DiskFullError:
        raise
    except OSError as error:
        reason = f"cannot be written: {error.strerror or one_line(error)}"
    if reason:
        raise UserError(f"{setting}={directory} {reason}; set another {setting}", code="not-claimed")


def find_foreign_files(directory: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yield files and links below `directory` that match none of the patterns, such as `train/*.arrow`."""
    return (path for path, matches in _files(directory, patterns) if not matches)


def remove_matching(directory: Path, patterns: Sequence[str]) -> None:
    """Delete the files that match one of the patterns, and directories that this leaves empty."""
    paths = [path for path, matches in _files(directory, patterns) if matches]
    for path in paths:
        path.unlink(missing_ok=True)
    parents = {parent for path in paths for parent in path.parents if directory in parent.parents}
    for parent in sorted(parents, reverse=True):
        with contextlib.suppress(OSError):
            parent.rmdir()


def _files(directory: Path, patterns: Sequence[str]) -> Iterator[tuple[Path, bool]]:
    """Yield all files and links below a directory, and whether each matches a pattern.

    Links are not followed. Paths match part by part: a star stays within its part.
    """
    split = [pattern.split("/") for pattern in patterns]
    for folder, names, files in os.walk(directory):
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        for path in (Path(folder) / name for name in sorted(files + links)):
            parts = path.relative_to(directory).parts
            same = (p for p in split if len(p) == len(parts))
            yield path, any(all(map(fnmatch.fnmatchcase, parts, pattern)) for pattern in same)


Signature = tuple[int, ...]  # changes whenever a file's content may have changed


def signature(path: Path) -> Signature:
    """Return size, times and inode of a file; no program can set the time of change, so an edit shows."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def sha256(path: Path) -> str:
    """Return the hash of a file's content, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Hashes:
    """Hashes of files, remembered in a file of their own while the files' signatures stay as they are.

    Losing the memory only costs time: a file that is missing or damaged is an empty memory.
    """

    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self._known: dict[str, tuple[Signature, str]] = {}
        self._new: dict[str, tuple[Signature, str]] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            tree = json.loads(memory.read_text(encoding="utf-8"))
            self._known = {name: (tuple(times), str(digest)) for name, (times, digest) in tree.items()}

    def sha256(self, path: Path) -> str:
        """Return the hash of a file, from memory if the file was not touched since."""
        current = signature(path)
        name = str(path.absolute())
        entry = self._new.get(name) or self._known.get(name)
        if entry is not None and entry[0] == current:
            return entry[1]
        digest = sha256(path)
        self.remember(path, current, digest)
        return digest

    def remember(self, path: Path, times: Signature, digest: str) -> None:
        """Note the hash of what the file held when it had the signature `times`."""
        self._new[str(path.absolute())] = times, digest

    def new(self) -> dict[str, tuple[Signature, str]]:
        """Return the hashes learned since the memory was read."""
        return dict(self._new)

    def save(self, others: Iterable[dict[str, tuple[Signature, str]]] = ()) -> None:
        """Write what was learned, here and by `others`, to the memory, where that is possible.

        Files so young that a change would not show in their times, or changed meanwhile, are left out.
        """
        learned = {name: entry for entries in (self._new, *others) for name, entry in entries.items()}
        if not learned:
            return
        time.sleep(TICK)
        now = time.time_ns() - int(TICK * 1e9)
        for name, (current, digest) in learned.items():
            with contextlib.suppress(OSError):
                if signature(Path(name)) == current and max(current[1:3]) <= now:
                    self._known[name] = current, digest
        with contextlib.suppress(OSError):
            write_text(self.memory, json.dumps(self._known, indent=1, sort_keys=True) + "\n")
