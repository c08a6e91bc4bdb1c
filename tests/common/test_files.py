"""Files that are whole or absent, hashes that are remembered, directories that a tool made."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from emo.common.errors import DiskFullError, UserError
from emo.common.files import TICK, Hashes, claim, foreign, remove_made, sha256, write_once, write_text

MADE = ("train/*.arrow", "plan.parquet", ".new/tokenizer/tokenizer.json")


def put(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusing(code: int) -> Callable[..., None]:
    """Return a call of the system that always fails with `code`."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def test_a_full_disk_is_no_mistake_of_the_user_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", refusing(errno.ENOSPC))
    for write in (write_text, write_once):
        with pytest.raises(DiskFullError, match=str(tmp_path)):
            write(tmp_path / "a.json", "text")
    with pytest.raises(DiskFullError):
        claim(tmp_path / "new", "marker.json", "{}", "dir")
    assert [p.name for p in tmp_path.rglob("*")] == ["new"]


def test_hashes_are_remembered_until_a_file_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit shows, also one of equal size whose time of modification was set back."""
    file, memory = put(tmp_path / "a"), tmp_path / "hashes.json"
    first = Hashes(memory)
    before = first.sha256(file)
    assert before == sha256(file)
    first.save()
    with monkeypatch.context() as patch:
        patch.setattr("emo.common.files.sha256", refusing(errno.EIO))
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


def test_only_what_was_made_is_removed(tmp_path: Path) -> None:
    outside, directory = put(tmp_path / "outside" / "a.arrow"), tmp_path / "place"
    made = [
        put(directory / name) for name in ("train/a.arrow", "plan.parquet", ".new/tokenizer/tokenizer.json")
    ]
    others = [
        put(directory / name)
        for name in ("train/a.txt", "train/deep/a.arrow", "a.arrow", "plan.parquet.bak", "other/plan.npz")
    ]
    (directory / "linked").symlink_to(outside.parent)
    assert set(foreign(directory, MADE)) == {*others, directory / "linked"}
    remove_made(directory, MADE)
    assert not any(path.exists() for path in made) and not (directory / ".new").exists()
    assert all(path.exists() for path in [*others, outside, directory / "linked"])
    remove_made(directory, ("linked/*.arrow",))
    assert outside.exists(), "links are not followed"


def test_a_directory_is_claimed_once_and_only_if_empty(tmp_path: Path) -> None:
    new = tmp_path / "a" / "b"
    claim(new, "marker.json", "{}", "dir")
    put(new / "anything")
    claim(new, "marker.json", "other", "dir")
    assert (new / "marker.json").read_text() == "{}"
    put(tmp_path / "used" / "thesis.txt")
    for directory in ("used", "used/thesis.txt", "used/thesis.txt/deeper"):
        with pytest.raises(UserError) as error:
            claim(tmp_path / directory, "marker.json", "{}", "dir")
        assert error.value.code == "not-claimed" and "\n" not in str(error.value)
    assert [p.name for p in (tmp_path / "used").iterdir()] == ["thesis.txt"]
