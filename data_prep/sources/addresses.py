"""Files at addresses that fsspec reads (s3://, gs://, https:// ...), with the interface of local files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any, Literal
from urllib.parse import urlsplit

from emo.common.errors import FailureError, UserError, one_line
from emo.common.io.store import NEEDS, version_of

BUFFER = 1 << 20  # bytes of one request
WEB = ("http", "https")


class RemoteFile:
    """A file at an address, with the parts of Path's interface that readers use."""

    def __init__(self, address: str, system: Any, path: str) -> None:
        info = system.info(path)
        self.address = address
        self._system = system
        self._path = path
        self.size: int = info.get("size") or 0
        self._listed = version_of(info)
        name = PurePosixPath(urlsplit(address).path if address.startswith(WEB) else address)
        self.suffix = name.suffix
        self.stem = name.stem

    def __str__(self) -> str:
        return self.address

    def open(self, mode: Literal["rb"] = "rb", at_random: bool = False) -> IO[bytes]:
        """Open the file. It is read in order unless `at_random`: web servers may not support ranges."""
        in_order = "https" in self._system.protocol and not at_random
        with _explained(self.address):
            file = self._system.open(self._path, mode, **({"block_size": 0} if in_order else {}))
        return io.BufferedReader(_Stream(file, self.address, seekable=not in_order), BUFFER)

    def state(self, refresh: bool) -> list[str]:
        """Return values that change with the file, as listed, or with `refresh` from a new query."""
        if not refresh:
            return self._listed
        with _explained(self.address):
            self._system.invalidate_cache()
            return version_of(self._system.info(self._path))


class _Stream(io.RawIOBase):
    """A file of fsspec that raises UserError and FailureError."""

    def __init__(self, file: Any, address: str, seekable: bool) -> None:
        self._file = file
        self._address = address
        self._seekable = seekable
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._seekable

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _explained(self._address):
            self._at = self._file.seek(offset, whence)
        return self._at

    def readinto(self, buffer: Any) -> int:
        with _explained(self._address):
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def remote_files(pattern: str) -> list[RemoteFile]:
    """Return the files of an address, or of a pattern of addresses with * ? [ ], in order."""
    import fsspec

    protocol = re.split("::|://", pattern, maxsplit=1)[0]
    if "@" in urlsplit(pattern).netloc and protocol in WEB:
        raise UserError(
            "files: the address has a name or password. Remove it: recipes are stored and printed",
            code="secret",
        )
    try:
        system, path = fsspec.core.url_to_fs(pattern)
    except (ImportError, ValueError) as error:
        advice = f"pip install {NEEDS[protocol]}" if protocol in NEEDS else one_line(error, 200)
        raise UserError(
            f"files: {pattern} is not an address that fsspec can read ({advice})", code="address"
        ) from None
    web = "https" in system.protocol  # has no lists of files, and is read from the beginning
    with _explained(pattern):
        paths = [path] if not web and system.isfile(path) else []
        if not paths and any(sign in path for sign in ("*" if web else "*?[")):
            paths = [file for file in sorted(system.glob(path)) if web or system.isfile(file)]
        elif not paths and (web or not system.isdir(path)):
            paths = [path]  # `info` fails if it does not exist
        files = [RemoteFile(file if web else system.unstrip_protocol(file), system, file) for file in paths]
    if not files:
        raise UserError(
            f"no file matches {pattern}. Use a pattern of files: {pattern.rstrip('/')}/*.jsonl",
            code="no-file",
        )
    return files


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """Convert the errors of file systems, which have many classes."""
    try:
        yield
    except UserError:
        raise
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        missing = isinstance(error, FileNotFoundError)
        problem = "no file matches" if missing else "no permission to read a file"
        raise UserError(
            f"{problem} {address}. Check the address and its permissions", code="address"
        ) from None
    except Exception as error:
        if isinstance(error, ValueError):  # for example a server without ranges
            raise UserError(
                f"{address}: {one_line(error, 200)}. Download the file first", code="address"
            ) from None
        raise FailureError(
            f"{address} cannot be read ({one_line(error, 200)}). Run the command again when it is reachable",
            code="unreachable",
        ) from None
