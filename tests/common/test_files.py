"""Files that are whole or absent, hashes that are remembered, directories that a tool made, locks."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import UserError
from common.files import (
    TICK,
    DiskFullError,
    Hashes,
    claim,
    foreign,
    may_pass,
    remove_made,
    sha256,
    write_once,
    write_text,
)

MADE = ("train/*.arrow", "plan.parquet", ".new/tokenizer/tokenizer.json")


def put(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusing(code: int) -> Callable[..., None]:
    """A call of the system that always fails with `code`."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_with_its_place_and_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """It is no mistake in the input: exit codes and the watcher's marks follow from the type."""
    monkeypatch.setattr("os.fsync", refusing(code))
    for write in (write_text, write_once):
        with pytest.raises(DiskFullError) as caught:
            write(tmp_path / "a.json", "text")
        wanted = f"no space left while writing {tmp_path / 'a.json'}; make room in {tmp_path}"
        assert str(caught.value) == wanted
    with pytest.raises(DiskFullError, match="make room in"):
        claim(tmp_path / "new", "marker.json", "{}", "dir")
    assert not isinstance(caught.value, UserError)
    assert [p.name for p in tmp_path.rglob("*")] == ["new"], "nothing half stays"


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (DiskFullError("no space left"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), True),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (FileNotFoundError("not in the cache, and the hub cannot be reached"), False),  # without a number
        (OSError(errno.EROFS, "Read-only file system"), False),
        (OSError("nobody knows"), None),
        (OSError(errno.ENODEV, "No such device"), None),
    ],
)
def test_errors_tell_whether_they_may_pass(error: OSError, passes: bool | None) -> None:
    assert may_pass(error) is passes


def test_files_are_written_without_locks_in_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of many machines lie on file systems that need not have locks."""
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    write_text(tmp_path / "a", "text")
    assert write_once(tmp_path / "b", "one") and not write_once(tmp_path / "b", "two")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "text", "b": "one"}


def test_hashes_are_remembered_until_a_file_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """defects A9: an edit shows, also one of equal size whose time of modification was set back."""
    file, memory = put(tmp_path / "a"), tmp_path / "hashes.json"
    first = Hashes(memory)
    before = first.sha256(file)
    assert before == sha256(file)
    first.save()

    def never(path: Path) -> str:
        raise AssertionError(f"{path} was read")

    with monkeypatch.context() as patch:
        patch.setattr("common.files.sha256", never)
        assert Hashes(memory).sha256(file) == before
    times = file.stat()
    with file.open("r+b") as stream:
        stream.write(b"y")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_mtime_ns == times.st_mtime_ns
    assert Hashes(memory).sha256(file) == sha256(file) != before


def test_a_file_that_changes_before_its_hash_is_saved_is_not_remembered(tmp_path: Path) -> None:
    file, memory = put(tmp_path / "a"), tmp_path / "hashes.json"
    hashes = Hashes(memory)
    hashes.sha256(file)
    time.sleep(TICK)
    put(file, "y")
    hashes.save()
    assert Hashes(memory).sha256(file) == sha256(file)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"/a": 3}', '{"/a": [[1], 2, 3]}', "\udcff"])
def test_a_damaged_memory_is_an_empty_one(tmp_path: Path, content: str) -> None:
    file, memory = put(tmp_path / "a"), tmp_path / "hashes.json"
    memory.write_bytes(content.encode("utf-8", "surrogateescape"))
    hashes = Hashes(memory)
    assert hashes.sha256(file) == sha256(file)
    hashes.save()
    assert Hashes(memory).sha256(file) == sha256(file)


def test_a_memory_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    hashes = Hashes(tmp_path / "nowhere" / "hashes.json")
    hashes.sha256(put(tmp_path / "a"))
    hashes.save()


def test_only_what_was_made_is_removed(tmp_path: Path) -> None:
    """defects B1"""
    outside = put(tmp_path / "outside" / "a.arrow")
    place = tmp_path / "place"
    mine = [put(place / name) for name in ("train/a.arrow", "plan.parquet", ".new/tokenizer/tokenizer.json")]
    theirs = [
        put(place / name)
        for name in ("train/a.txt", "train/deep/a.arrow", "a.arrow", "plan.parquet.bak", "other/plan.npz")
    ]
    (place / "linked").symlink_to(outside.parent)
    assert set(foreign(place, MADE)) == {*theirs, place / "linked"}
    remove_made(place, MADE)
    assert not any(path.exists() for path in mine) and not (place / ".new").exists()
    assert all(path.exists() for path in [*theirs, outside, place / "linked"])
    remove_made(place, ("linked/*.arrow",))
    assert outside.exists(), "links are not followed"


def test_a_directory_is_claimed_once_and_only_if_empty(tmp_path: Path) -> None:
    """defects B1"""
    new = tmp_path / "a" / "b"
    claim(new, "marker.json", "{}", "dir")
    put(new / "anything")
    claim(new, "marker.json", "other", "dir")
    assert (new / "marker.json").read_text() == "{}"
    put(tmp_path / "used" / "thesis.txt")
    for place, reason in (
        ("used", r"is not empty \(thesis.txt is there\)"),
        ("used/thesis.txt", "it is a file; set another dir"),
    ):
        with pytest.raises(UserError, match=reason) as caught:
            claim(tmp_path / place, "marker.json", "{}", "dir")
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="Not a directory"):
        claim(tmp_path / "used/thesis.txt/deeper", "marker.json", "{}", "dir")
    assert [p.name for p in (tmp_path / "used").iterdir()] == ["thesis.txt"]


def test_a_full_write_leaves_no_part(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
