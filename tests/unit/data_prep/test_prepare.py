"""`prepare` makes the same bytes however jobs share the work, wait, are killed, or run out of disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from emo.common.errors import UserError
from emo.common.io.files import DiskFullError
from emo.common.io.lease import Lease
from emo.data_prep.checks import planned_inputs
from emo.data_prep.cli import main
from emo.data_prep.config import DataConfig, load_data_config
from emo.data_prep.prepare import Preparation, prepare
from emo.data_prep.selection import buckets, plan, row_units, scan, stages, units
from emo.data_prep.selection.scan import Scan, Unit, divide_into_units
from emo.data_prep.shards.format import TokenDataset
from emo.data_prep.shards.verify import verify
from tests.conftest import REPO
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    file_bytes,
    run,
    texts,
    tiny_tokenizer,
    train_set,
    write_jsonl,
)
from tests.helpers.refusals import refused


def world(root: Path, rows: list[Any], **data: Any) -> DataConfig:
    """Return a configuration of two large files that share rows, and four small files with a row limit."""
    small, large = rows[:24], rows[24:]
    write_jsonl(root / "a.jsonl", large[: len(large) * 2 // 3])
    write_jsonl(root / "b.jsonl", large[len(large) // 2 :])
    for i in range(4):
        write_jsonl(root / f"c{i}.jsonl", small[i::4])
    sources = [{"files": "a.jsonl", "weight": 1.5}, {"files": "b.jsonl"}, {"files": "c*.jsonl", "limit": 15}]
    common = {"sources": sources, "validation_fraction": 0.2, "dedup": "near", "shards": 3}
    return data_config(root, **(common | data))


def small_units(monkeypatch: pytest.MonkeyPatch, size: int = 2000) -> None:
    """Make units, stretches and batches so small that little data needs many of each."""
    for module, name, value in (
        *((plan, "GROUP_ROWS", 7), (scan, "GROUP_ROWS", 7)),
        *((row_units, "UNIT_ROWS", 400), (row_units, "BLOCK_ROWS", 5), (buckets, "BATCH_BYTES", 4000)),
        *((scan, "UNIT_BYTES", size), (units, "POLL", 0.01)),
    ):
        monkeypatch.setattr(module, name, value)


def interrupt_stages(monkeypatch: pytest.MonkeyPatch, most: int) -> list[Path]:
    """Return a list of the selection's files as they are written, and interrupt after about `most` files."""
    paths: list[Path] = []
    write = stages.write_buckets
    left = most

    def counted(path: Path, *others: Any) -> None:
        nonlocal left
        left = left - 1 if left else most
        if left == 0:
            raise KeyboardInterrupt
        write(path, *others)
        paths.append(path)

    monkeypatch.setattr(stages, "write_buckets", counted)
    return paths


def noted_units(monkeypatch: pytest.MonkeyPatch, most: int = 1000) -> list[int]:
    """Return a list of unit numbers as they are scanned, and interrupt the process after `most` units."""
    numbers: list[int] = []
    make = Scan.make_part

    def noted(self: Scan, unit: Unit, *others: Any) -> None:
        if len(numbers) == most:
            raise KeyboardInterrupt
        numbers.append(unit.number)
        make(self, unit, *others)

    monkeypatch.setattr(Scan, "make_part", noted)
    return numbers


@pytest.mark.parametrize("kind", ["text", "instruct"])
def test_bytes_do_not_depend_on_workers_jobs_or_units(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last case has many units and three concurrent jobs on a file system without locks."""

    def without_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    rows = texts(400, sentences=60) if kind == "text" else alpaca_rows(1500)  # several pieces

    def config_of(name: str) -> DataConfig:
        options = {"kind": kind, "sequence_len": 128, "limit_tokens": 40_000}
        return world(tmp_path, rows, dir=str(tmp_path / name), **options)

    run(config_of("alone"))
    run(config_of("workers"), workers=3)
    for job in (3, 1, 4, 0, 2):
        run(config_of("jobs"), shard=(job, 5))
    small_units(monkeypatch, 40_000)
    monkeypatch.setattr(fcntl, "flock", without_locks)
    monkeypatch.setattr(fcntl, "lockf", without_locks)
    scanned, config = noted_units(monkeypatch), config_of("units")
    jobs = [threading.Thread(target=run, args=(config, (i, 3))) for i in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert sorted(scanned) == list(range(len(scanned))) and len(scanned) > 8, "each unit once"
    assert len(train_set(config)) > 50 and verify(config.dir)[1] == [] and not (config.dir / ".new").exists()
    expected = file_bytes(tmp_path / "alone")
    assert all(file_bytes(tmp_path / name) == expected for name in ("workers", "jobs", "units"))


def test_complete_parts_and_stages_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted job resumes. It repeats only damaged files and the units of a changed source."""
    small_units(monkeypatch)
    monkeypatch.setattr(row_units, "UNIT_ROWS", 60)
    rows = texts(160, sentences=8)
    run(other := world(tmp_path, rows, dir=str(tmp_path / "other")))
    config = world(tmp_path, rows)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        scanned = noted_units(patch, most=7)
        run(config)
    assert scanned == list(range(7))
    part = config.dir / ".new/scan/000002.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    first = tmp_path / "a.jsonl"
    first.write_bytes(first.read_bytes())  # the same text, but with a new modification time
    changed = [u.number for u in divide_into_units(planned_inputs(config)) if u.stretches[0].input == 0]
    again, files = noted_units(monkeypatch), interrupt_stages(monkeypatch, most=12)
    damages: list[Callable[[bytes], bytes]] = [
        lambda content: content[:8] + bytes([content[8] ^ 1]) + content[9:],
        lambda content: content[:-1],
        lambda content: bytes(len(content)),
    ]
    damaged = []
    while not (config.dir / "plan.parquet").is_file():
        with contextlib.suppress(KeyboardInterrupt):
            run(config)
            continue
        if damages:
            damaged.append(files[-1])
            files[-1].write_bytes(damages.pop(0)(files[-1].read_bytes()))
    assert Counter(files) == Counter(set(files)) + Counter(damaged) and len(files) > 30 and not damages
    assert set(again) == {2, *changed} | set(range(7, max(again) + 1)) and len(again) == len(set(again))
    assert file_bytes(config.dir) == file_bytes(other.dir)


def test_sources_are_only_read_again_if_a_setting_of_the_scan_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice for a broken row, and changed settings of later steps, keep the rows that were read."""
    small_units(monkeypatch)
    scanned = noted_units(monkeypatch)
    sources = [{"files": "[ab].jsonl", "weight": 1.5}, {"files": "c*.jsonl"}]
    config = world(tmp_path, texts(160, sentences=8), sources=sources)
    with (tmp_path / "c3.jsonl").open("a") as file:
        file.write("{broken\n")

    def rescanned(**changes: Any) -> list[int]:
        """Prepare with changed settings up to the plan, and return the units that were scanned."""
        nonlocal config
        scanned.clear()
        config = config.model_copy(update=changes)
        with monkeypatch.context() as patch, contextlib.suppress(UserError):
            patch.setattr(plan.Plan, "save", interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                run(config)
        return list(scanned)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    first = rescanned()
    last = first[-1]
    assert first == list(range(last + 1)), "the unit with the broken row comes last"
    assert rescanned(strict=False) == [last]
    assert rescanned(seed=1) == first
    assert rescanned(sequence_len=16, shards=2, limit_rows=90) == []
    assert rescanned(strict=True) == [last], "a part with a broken row is not used if strict"
    assert rescanned(strict=False) == []
    run(config)
    fresh = config.model_copy(update={"dir": tmp_path / "fresh"})
    run(fresh)
    assert file_bytes(config.dir) == file_bytes(fresh.dir)


def test_a_job_takes_over_from_a_dead_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_units(monkeypatch)
    config = world(tmp_path, texts(160, sentences=8))
    other = Lease(config.dir / ".new/scan/leases-0", "000001.lease")
    set_up = Preparation.set_up
    waiting: list[str] = []

    def taken(*arguments: Any) -> None:
        set_up(*arguments)
        assert other.acquire()

    def released(line: str) -> None:
        if "waiting for" in line:
            waiting.append(line)
            other.release()  # the other job died before it wrote its part

    monkeypatch.setattr(Preparation, "set_up", taken)
    prepare(config, (0, 1), 1, False, False, released)
    assert len(waiting) == 1 and verify(config.dir)[1] == []


def recipe_of(root: Path, out: Path) -> Path:
    recipe = root / f"{out.name}.yaml"
    recipe.write_text(
        f"data: {{dir: {out}, root: {root}, tokenizer: {tiny_tokenizer()}, sequence_len: 64, shards: 6, "
        "validation_fraction: 0.2, sources: [{files: a.jsonl}]}"
    )
    return recipe


def start(root: Path, out: Path, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "emo", "prepare", str(recipe_of(root, out)), "--workers", str(workers)]
    return subprocess.Popen(command, cwd=REPO)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], float]:
    """Return a directory with a.jsonl, the bytes of an undisturbed run, and its duration in seconds."""
    root = tmp_path_factory.mktemp("crash")
    write_jsonl(root / "a.jsonl", texts(1200, sentences=20))
    began = time.monotonic()
    assert start(root, root / "reference", 2).wait(120) == 0
    seconds = time.monotonic() - began
    assert verify(root / "reference")[1] == []
    return root, file_bytes(root / "reference"), seconds


@pytest.mark.slow
def test_killed_at_random_moments_then_run_again(undisturbed: tuple[Path, dict[str, bytes], float]) -> None:
    root, expected, seconds = undisturbed
    partial = 0
    for trial in range(6):
        if trial >= 2 and partial:
            break
        rng, out = random.Random(trial), root / f"killed-{trial}"
        job = start(root, out, 1 + trial % 2)
        if trial == 0:
            time.sleep(rng.uniform(0.1, 0.9) * seconds)
        count = rng.randint(1, 6) if trial else 0  # the shards appear within a moment, so wait for some
        while job.poll() is None and len(list((out / "train").glob("shard-*"))) < count:
            time.sleep(0.001)
        workers = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        job.send_signal(signal.SIGKILL)
        job.wait(120)
        assert not psutil.wait_procs(workers, timeout=10)[1], "workers outlived their job"
        partial += bool(list(out.glob("*/shard-*"))) and len(list(out.glob("*/manifest.json"))) < 2
        run(load_data_config(recipe_of(root, out), []))
        assert file_bytes(out) == expected, f"trial {trial}"
    assert partial, "some trials must leave some shards"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system. Use `resize` before you write to it."""
    (disk := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)]).returncode:
        pytest.skip("cannot mount a small file system here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def resize(disk: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(disk)], check=True)


def test_a_full_disk_leaves_no_partial_data(
    undisturbed: tuple[Path, dict[str, bytes], float], disk: Path
) -> None:
    """A full disk at any step gives one line and leaves no partial files, and a later run completes."""
    root, expected, _ = undisturbed
    config = load_data_config(recipe_of(root, disk / "out"), [])
    total = sum(map(len, expected.values())) // 1024
    steps = set()
    for kilobytes in sorted({8, 24, 60, 160, total // 3, total - 20}):
        resize(disk, kilobytes)
        with pytest.raises(DiskFullError) as caught:
            run(config)
        assert "\n" not in str(caught.value)
        steps.add(str(caught.value).split("writing ")[1].split(";")[0])
        assert list(config.dir.rglob("*.part")) == []
        for manifest in config.dir.rglob("manifest.json"):
            assert kilobytes > total // 2
            TokenDataset(manifest.parent)
    assert len(steps) >= 3, steps
    resize(disk, total * 3)
    run(config)
    assert file_bytes(config.dir) == expected


def test_force_with_one_of_several_jobs_is_rejected(tmp_path: Path) -> None:
    config = data_config(tmp_path)
    with refused("force-with-shard"):
        run(config, shard=(0, 2), force=True)
    assert not config.dir.exists()


def test_exit_codes(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(60))
    command = ["prepare", str(recipe_of(tmp_path, tmp_path / "out")), "--workers", "1"]
    assert main([*command, "--shard=1/2"]) == 0
    assert main([*command, "--finish"]) == 2  # some shards are missing
    assert main([*command, "--shard=0/2"]) == main([*command, "--finish"]) == 0
    assert main([*command, "data.shard=2"]) == main(["prepare", str(tmp_path / "no.yaml")]) == 2
    for bad in ("2/2", "x", "1", "-1/2"):
        with pytest.raises(SystemExit):
            main([*command, f"--shard={bad}"])
