"""Bytes and text of source files, plain or compressed, local or at an address."""

from __future__ import annotations

import hashlib
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from emo.common.errors import UserError, one_line
from emo.common.io.files import signature

from .addresses import RemoteFile

READ_BYTES = 256 << 10  # bytes of one read
TEXT_LIMIT = 1 << 30  # bytes that `read_text` loads at most: a small compressed file may unpack to any size
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
SAME_ENDINGS = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}  # other endings of the same formats
READ_ERRORS = (OSError, EOFError, lzma.LZMAError)  # errors of reading a damaged compressed file
UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
AGAIN = "run prepare with --force to start over"

File = Path | RemoteFile


def format_ending(path: File) -> str:
    """Return the ending that names a file's format, without the ending of its compression."""
    suffix = (Path(path.stem).suffix if compression_of(path) else path.suffix).lower()
    return SAME_ENDINGS.get(suffix, suffix)


def compression_of(path: File) -> str:
    """Return the compression that a file's name indicates, or ''."""
    return COMPRESSIONS.get(path.suffix.lower(), "")


def open_text(path: File) -> Any:
    """Open a file as a stream of uncompressed bytes."""
    return decompress(path.open("rb"), path)


def decompress(raw: IO[bytes], path: File) -> Any:
    """Wrap the stored bytes of a file in a decompressing stream if its name indicates a compression.

    Reading a damaged or incomplete file raises one of READ_ERRORS.
    """
    compression = compression_of(path)
    if not compression:
        return raw
    if compression == "xz":
        return lzma.open(raw)
    import pyarrow  # takes most of a second, so only when it is needed

    return pyarrow.input_stream(raw, compression=compression, buffer_size=READ_BYTES)


def read_chunks(stream: Any, name: str, left: int = sys.maxsize) -> Iterator[bytes]:
    """Yield a stream in chunks of READ_BYTES, at most `left` bytes. Raises UserError for a damaged file."""
    try:
        while left > 0 and (chunk := stream.read(min(READ_BYTES, left))):
            left -= len(chunk)
            yield chunk
    except READ_ERRORS as error:
        reject_large_window(error, name)
        raise UserError(
            f"{name} cannot be unpacked ({one_line(error)}); the file is damaged", code="damaged-file"
        ) from None


def reject_large_window(error: BaseException, name: str) -> None:
    """Raise UserError if reading a file failed because of the window of its zstd compression."""
    if "requires too much memory" in str(error):
        raise UserError(
            f"{name} is compressed by zstd with a window of more than 128 MiB (--long=28 or higher). Convert "
            "it: zstd -d --long=31 -c FILE | zstd > NEW.zst",
            code="zstd-window",
        ) from None


def require_utf8(beginning: bytes, name: str) -> None:
    """Raise UserError for a file that begins like UTF-16."""
    if beginning.startswith(UTF16_MARKS) or beginning[:64].count(0) * 3 >= len(beginning[:64]) > 0:
        raise UserError(f"{name} is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8 FILE", code="not-utf8")


def read_text(path: Path) -> str:
    """Return a complete file as text, uncompressed. For small files such as tasks and prefixes."""
    with open_text(path) as stream:
        content = b"".join(read_chunks(stream, str(path), TEXT_LIMIT + 1))
    if len(content) > TEXT_LIMIT:
        raise UserError(
            f"{path} has more than {TEXT_LIMIT >> 20:,} MiB of text. Use a part of it", code="too-large"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path} line {line} is not UTF-8 text", code="not-utf8") from None


def identify_file(path: File) -> dict[str, object]:
    """Return the size and the hash of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        return {"bytes": file.tell(), "sha256": digest}


def file_state(path: File | None, refresh: bool = False) -> list[Any]:
    """Return values that change when a file, or a file in a directory, changes. Empty if there is none.

    For a file at an address this is what its server reported in the listing. With `refresh` the server is
    queried again.
    """
    if isinstance(path, Path):
        files = sorted(path.rglob("*")) if path.is_dir() else []
        return [signature(file) for file in (path, *files) if file.exists()]
    return [] if path is None else path.state(refresh)


def file_mark(path: File | None) -> list[Any]:
    """Return values like `file_state` that are the same for copies of a file that have its time."""
    state = file_state(path)
    return [[size, time] for size, time, *_ in state] if isinstance(path, Path) else state
