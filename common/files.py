"""Files that are whole or not there, whatever happens to the process that writes them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from common.errors import UserError

PART = ".part"  # ending of files that are being written
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def part_file(path: Path, publish: Callable[[Path, Path], Any] = Path.replace) -> Iterator[IO[bytes]]:
    """A hidden file beside `path` that becomes `path` when the block ends without an error.

    It is locked while its writer lives, so that `remove_abandoned` can tell. Raises UserError when the
    disk is full; nothing stays behind then.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        with full_disk(path), _open_locked(part) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            publish(part, path)
    finally:
        part.unlink(missing_ok=True)


def _open_locked(part: Path) -> IO[bytes]:
    """A new file that this process holds the lock of, still under its name."""
    while True:
        file = part.open("w+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another job took it for abandoned before it was locked


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Turn "no space left", as Python or a library reports it, into a UserError about `path`."""
    try:
        yield
    except Exception as error:
        code = getattr(error, "errno", None)
        if code in FULL or "No space left on device" in str(error):
            raise UserError(
                f"no space left while writing {path}; free some, or set another data.dir"
            ) from None
        raise


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """`write` into a new file, which then takes the place of `path` in one step."""
    with part_file(path) as file:
        write(file)


def write_text(path: Path, text: str) -> None:
    """Text into `path`, whole or not at all."""
    write_atomically(path, lambda sink: sink.write(text.encode()))


def write_once(path: Path, text: str) -> bool:
    """Like `write_text`, but True for only one of all writers: a file that is there stays as it is."""
    if path.exists():
        return False
    try:
        with part_file(path, lambda part, place: os.link(part, place)) as file:
            file.write(text.encode())
    except FileExistsError:
        return False
    return True


def remove_abandoned(directory: Path) -> int:
    """Delete parts whose writers died; those of living writers are locked. Returns how many."""
    removed = 0
    for part in directory.glob(f".*{PART}"):
        with contextlib.suppress(OSError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()
            removed += 1
    return removed


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; calls `waiting` once if another process holds it.

    The system releases it when its holder dies.
    """
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
