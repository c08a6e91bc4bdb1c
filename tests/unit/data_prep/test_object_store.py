"""Jobs on several hosts write the same bytes to an object store, in spite of failures and kills."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from emo.common.errors import FailureError
from emo.common.io import fsspec_store, objects
from emo.common.io.lease import Lease, living_users, register_user
from emo.common.io.store import version_of
from emo.data_prep import prepare as preparing
from emo.data_prep.cli import main
from emo.data_prep.config import DataConfig
from emo.data_prep.selection import row_units
from emo.data_prep.selection.units import complete_units
from emo.data_prep.shards.format import is_prepared, open_prepared
from tests.conftest import REPO
from tests.helpers import object_store
from tests.helpers.corpus import data_config, file_bytes, run, texts, tiny_tokenizer, write_jsonl
from tests.helpers.killing import FORK, to_the_end
from tests.helpers.launching import free_port, wait_for
from tests.helpers.refusals import refused
from tests.helpers.s3_server import s3_server

ADDRESS = "bucket://one/data"


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """Start an object store, and return the directory of its files."""
    with object_store.bucket(tmp_path) as directory:
        yield directory


def config_of(root: Path, directory: str = ADDRESS, **data: Any) -> DataConfig:
    """Return a configuration of five sources, which are separate units because each has a limit."""
    sources = [{"files": f"{i}.jsonl", "limit": 40} for i in range(5)]
    options = {"shards": 4, "validation_fraction": 0.2, "limit_tokens": 5000}
    return data_config(root, dir=directory, sources=sources, **options | data)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with sources, and with data that were prepared from them without a store."""
    root = tmp_path_factory.mktemp("sources")
    for i in range(5):
        write_jsonl(root / f"{i}.jsonl", texts(50, seed=i))
    run(config_of(root, str(root / "alone")))
    return root


def on_host(root: Path, mirrors: Path, host: int, hosts: int) -> None:
    """Run a job as on a host with separate local copies."""
    os.environ["EMO_MIRRORS"] = str(mirrors / f"host-{host}")
    random.seed(host)
    run(config_of(root), (host, hosts))


def test_hosts_make_the_same_bytes_while_requests_fail_and_jobs_die(
    files: Path, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_units, "UNIT_ROWS", 40)  # several units of the selection
    object_store.FAULTS.update(share=0.03, pause=0.01)
    others = [FORK.Process(target=on_host, args=(root, tmp_path, host, 3)) for host in (1, 2)]
    for process in others:
        process.start()
    moments = random.Random(1)
    killed = to_the_end(on_host, (root, tmp_path, 0, 3), 3, lambda: moments.uniform(0.1, 1.0))
    for process in others:
        process.join()
    assert [process.exitcode for process in others] == [0, 0]
    made = file_bytes(files / "one/data")
    assert killed and made == file_bytes(root / "alone")
    left = [path for path in (files / "one/data").rglob("*") if path.is_file()]
    assert not [path for path in left if ".new" in path.parts or path.name == "hashes.json"]
    assert not [*tmp_path.glob("host-*/bucket/one/data/.new/*/*")]


def test_local_copies_follow_the_store(
    files: Path, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second host renews its old copies and repeats no work. A damaged shard in the store is rejected."""
    config = config_of(root)
    assert not is_prepared(config)
    run(config)
    assert is_prepared(config) and "already prepared" in run(config)[0]
    before = open_prepared(config)[0]
    monkeypatch.setenv("EMO_MIRRORS", str(tmp_path / "second"))
    config = config_of(root)
    after = open_prepared(config)[0]
    assert (after.batch(np.arange(9))["labels"] == before.batch(np.arange(9))["labels"]).all()
    assert "already prepared" in run(config)[0] and config.dir.is_relative_to(tmp_path / "second")
    monkeypatch.setenv("EMO_MIRRORS", str(tmp_path / "mirrors"))
    for i in range(5):
        write_jsonl(tmp_path / f"{i}.jsonl", texts(40, seed=9 + i))
    run(config_of(tmp_path), force=True)
    monkeypatch.setenv("EMO_MIRRORS", str(tmp_path / "second"))
    assert open_prepared(config)[0].fingerprint != before.fingerprint
    shutil.rmtree(tmp_path / "second")
    shard = files / "one/data/train/shard-00001-of-00004.arrow"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    with refused("damaged-data"):
        open_prepared(config)


def test_verify_reads_the_store(files: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The host that prepared the data has good copies. Its advice leads to good data in the store."""
    config = config_of(root, train_tokenizer=300)
    run(config)
    good = file_bytes(files / "one/data")
    shard = files / "one/data/train/shard-00001-of-00004.arrow"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert main(["verify", ADDRESS]) == 2
    shard.unlink()
    assert main(["verify", ADDRESS]) == 2
    assert capsys.readouterr().err.count("[damaged-data]") == 2
    run(config)
    assert main(["verify", ADDRESS]) == 0 and file_bytes(files / "one/data") == good
    copy = config.dir / "plan.parquet"
    copy.write_bytes(bytes(copy.stat().st_size))
    assert "already prepared" in run(config)[0]


def test_a_job_that_was_stopped_for_long_removes_nothing(
    files: Path, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job takes over the planning meanwhile, and makes all shards."""
    config = config_of(root)
    made = {}
    hash_sources = preparing.Preparation._hash_sources

    def stop(job: preparing.Preparation, *arguments: Any) -> Any:
        hashes = hash_sources(job, *arguments)
        if not made:
            made["times"] = None
            job.planning._stop.set()
            os.utime(files / "one/data/.planning" / job.planning.path.name, (0, 0))  # type: ignore[union-attr]
            with monkeypatch.context() as other_host:
                other_host.setenv("EMO_MIRRORS", str(tmp_path / "other"))
                run(config_of(root))
            made["times"] = {p: p.stat().st_mtime_ns for p in (files / "one/data/train").iterdir()}
        return hashes

    monkeypatch.setattr(preparing.Preparation, "_hash_sources", stop)
    assert any("already prepared" in line for line in run(config))
    assert {p: p.stat().st_mtime_ns for p in made["times"]} == made["times"]
    assert file_bytes(files / "one/data") == file_bytes(root / "alone")


def test_a_file_has_one_version_in_listings_and_queries() -> None:
    """As s3fs reports them, from a server that lists fractions of seconds."""
    time = datetime(2026, 1, 2, 3, 4, 5, 678_000, timezone(timedelta(hours=2)))
    listed = {"Key": "a/b", "Size": 7, "size": 7, "ETag": '"e"', "LastModified": time, "type": "file"}
    queried = {"name": "a/b", "size": 7, "ETag": '"e"', "LastModified": time.replace(microsecond=0)}
    queried["LastModified"] = queried["LastModified"].astimezone(UTC)
    assert version_of(listed) == version_of(queried)
    for name, other in {"size": 8, "ETag": '"f"', "LastModified": time + timedelta(seconds=1)}.items():
        assert version_of(queried | {name: other}) != version_of(queried)


def test_hosts_with_copies_of_the_sources_share_parts(files: Path, tmp_path: Path, root: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")

    def keys(root: Path) -> list[str]:
        return preparing.Preparation(config_of(root), 1, print).open_scan()._keys

    first = keys(root)
    assert keys(tmp_path / "copy") == first
    (tmp_path / "copy/0.jsonl").touch()
    assert [a == b for a, b in zip(first, keys(tmp_path / "copy"), strict=True)] == [False, *[True] * 4]


def test_a_unit_that_is_lost_ends_the_job(files: Path) -> None:
    directory = objects.local_directory("bucket://one/lost")
    with refused("file-lost"):
        complete_units(2, 0, directory, lambda number: False, lambda number: None, print)


def test_commands_take_an_address(files: Path, tmp_path: Path, root: Path) -> None:
    run(config_of(root, train_tokenizer=300))
    shutil.rmtree(tmp_path / "mirrors")
    assert main(["verify", ADDRESS]) == main(["inspect", ADDRESS, "--rows", "1"]) == 0
    (files / "one/other").mkdir(parents=True)
    (files / "one/other/thesis.txt").write_text("text")
    with refused("not-claimed"):
        run(config_of(tmp_path, "bucket://one/other"))


def test_a_recipe_keeps_the_address(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    assert config.model_dump(mode="json")["dir"] == ADDRESS
    assert DataConfig.model_validate_json(config.model_dump_json()) == config
    assert objects.address_of(config.dir / "train") == f"{ADDRESS}/train"
    assert objects.address_of(tmp_path / "x") is None
    for address in (
        "bucket://one",
        "s3://key@one/data",
        "s3://one/../data",
        "s3:///one/data",
        "s3:/one/data",
    ):
        with refused("bad-value"):
            config_of(tmp_path, address)
    with refused("address"):
        run(config_of(tmp_path, "nosuch://one/data"))
    monkeypatch.setattr(fsspec_store, "PATIENCE", 0.1)
    object_store.FAULTS["share"] = 1.0
    with refused("unreachable") as error:
        run(config)
    assert isinstance(error.value, FailureError)


def test_a_store_that_replaces_existing_files_is_rejected(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two jobs could hold the same lease."""
    create = object_store.Bucket.pipe_file
    monkeypatch.setattr(object_store.Bucket, "pipe_file", lambda *args, mode="": create(*args))
    lease = Lease(objects.local_directory("bucket://one/leases"), "work")
    with refused("store-overwrites"):
        lease.acquire()


def test_a_rejected_request_is_not_repeated(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, s3fs raises EREMCHG for a bucket of another region."""

    def redirect(*args: object, **options: object) -> None:
        raise OSError(errno.EREMCHG, "the bucket must be addressed using the specified endpoint")

    monkeypatch.setattr(object_store.Bucket, "find", redirect)
    with refused("address"):
        objects.list_objects(objects.local_directory(ADDRESS))


def test_a_slow_listing_serves_many_questions(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for each of many units would otherwise take one listing each, as the answer is old at once."""
    clock, listings = [0.0], []

    def list_slowly(directory: Path, depth: int) -> dict[str, dict[str, Any]]:
        clock[0] += 3
        listings.append(directory)
        return {"7": {"size": 1}}

    monkeypatch.setattr(objects, "list_objects", list_slowly)
    monkeypatch.setattr(objects.time, "monotonic", lambda: clock[0])
    objects.forget_listings()
    directory = objects.local_directory(f"{ADDRESS}/units")
    assert [n for n in range(100) if objects.existed_recently(directory / str(n))] == [7]
    assert len(listings) == 1
    clock[0] += 3
    assert objects.existed_recently(directory / "7") and len(listings) == 2
    objects.forget_listings()


def test_a_unit_takes_few_listings(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listings, list_objects = [], objects.list_objects

    def count(directory: Path, depth: int | None = None) -> dict[str, dict[str, Any]]:
        listings.append(directory)
        return list_objects(directory, depth)

    monkeypatch.setattr(objects, "list_objects", count)
    directory = objects.local_directory("bucket://one/many")
    store, name = objects.locate(directory)
    paths = [directory / str(number) for number in range(20)]
    made: list[int] = []

    def make(number: int) -> None:
        store.write(f"{name}/{number}", [b""])
        made.append(number)

    complete_units(20, 0.5, directory, lambda n: objects.existed_recently(paths[n]), make, print)
    assert made == [*range(10, 20), *range(10)] and len(listings) <= 2 * len(made) + 4


def test_a_lease_is_taken_after_others_held_it(files: Path) -> None:
    """The names that this process listed last are outdated: others have taken or removed their numbers."""
    directory = objects.local_directory("bucket://one/leases")
    lease = Lease(directory, "work")
    for _ in range(3):
        before = dict(objects._listings)
        for _ in range(2):  # on another host
            other = Lease(directory, "work")
            assert other.acquire()
            other.release()
        objects._listings.clear()
        objects._listings.update(before)
        assert lease.acquire() and not other.acquire() and lease.is_held()
        lease.release()
    assert [path.name for path in (files / "one/leases").glob("work*")] == ["work.000009"]


def test_a_lease_that_was_held_before_is_renewed(tmp_path: Path) -> None:
    lease = Lease(tmp_path, "work", every=0.05)
    for _ in range(2):
        assert lease.acquire() and lease.path is not None
        os.utime(lease.path, (0, 0))
        wait_for(lambda: lease.path.stat().st_mtime > 0, "renewal", 10)  # type: ignore[union-attr]
        lease.release()


def test_a_lease_in_a_store_has_one_holder(files: Path) -> None:
    directory = objects.local_directory("bucket://one/leases")
    leases = [Lease(directory, "work", seconds=0.6) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(Lease.acquire, leases)) == 1
    (holder,) = (lease for lease in leases if lease.path is not None)
    other = Lease(directory, "work", seconds=0.6)
    assert holder.is_held() and not other.acquire()
    assert other.holder() is not None and other.holder().pid == os.getpid()  # type: ignore[union-attr]
    holder.release()
    assert other.acquire() and not leases[0].acquire()
    other._stop.set()  # the lease is no longer renewed
    (files / "one/leases" / other.path.name).touch()  # type: ignore[union-attr]
    os.utime(files / "one/leases" / other.path.name, (0, 0))  # type: ignore[union-attr]
    assert leases[0].acquire() and not other.is_held()
    leases[0].release()
    with register_user(directory / "users"):
        assert [user.pid for user in living_users(directory / "users")] == [os.getpid()]
    assert living_users(directory / "users") == []


def test_jobs_share_s3_while_the_server_fails_and_restarts(tmp_path: Path, root: Path) -> None:
    """Two commands use the real client. The server drops answers, is killed, and starts again."""
    pytest.importorskip("s3fs", reason="needs s3fs")
    recipe = tmp_path / "recipe.yaml"
    sources = [{"files": f"{i}.jsonl", "limit": 40} for i in range(5)]
    data = {"dir": "s3://data/made", "root": str(root), "tokenizer": str(tiny_tokenizer())}
    data |= {"sequence_len": 32, "shards": 4, "sources": sources, "validation_fraction": 0.2}
    data |= {"limit_tokens": 5000}
    recipe.write_text(yaml.safe_dump({"data": data}))
    with s3_server(tmp_path / "s3", free_port(), 0.03, 0.02, 0.05) as server:
        jobs = []
        for i in range(2):
            environment = os.environ | server.environment | {"EMO_MIRRORS": str(tmp_path / f"host-{i}")}
            command = [sys.executable, "-m", "emo", "prepare", str(recipe), "--shard", f"{i}/2"]
            jobs.append(subprocess.Popen([*command, "--workers", "1"], cwd=REPO, env=environment))
        while not list((tmp_path / "s3/data").glob("*.parquet")):
            assert None in [job.poll() for job in jobs]
        server.kill()
        server.start()
        assert [job.wait(300) for job in jobs] == [0, 0]
    expected = file_bytes(root / "alone")
    names = {"made%2F" + name.replace("/", "%2F"): content for name, content in expected.items()}
    assert {name: (tmp_path / "s3/data" / name).read_bytes() for name in names} == names
