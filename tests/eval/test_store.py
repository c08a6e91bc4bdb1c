"""Results survive anything: kills at random moments, many workers at once, stale holders.

EVAL_KILLS sets the number of kills (40).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from common import lease as lease_file
from common.errors import UserError
from common.files import DiskFullError
from common.lease import held
from eval import store
from eval.icl import job
from eval.icl.job import Job, run_all
from eval.icl.settings import Settings
from eval.icl.tasks import select_tasks
from eval.model import EvaluatedModel
from eval.store import Entry, lease
from tests.helpers.evaluating import command, tiny_model, write_tasks
from tests.helpers.said import lines

KILLS = int(os.environ.get("EVAL_KILLS", "40"))
FORK = multiprocessing.get_context("fork")  # a child starts at once, with everything imported
TASKS = "sst2,trec,mmlu"


def child(function: Callable[..., None], *arguments: Any) -> Any:
    process = FORK.Process(target=function, args=arguments)
    process.start()
    return process


# --- files ------------------------------------------------------------------------------------------------


def test_the_first_copy_of_a_chunk_counts(tmp_path: Path) -> None:
    """Whoever comes later, woken up or with other rounding, changes nothing; what is damaged is replaced."""
    entry, rows = Entry(tmp_path, {"k": 1}), range(1)
    for prediction in "ab":
        Entry(tmp_path, {"k": 1}).finish_chunk(0, rows, [{"row": 0, "prediction": prediction}])
    assert entry.chunk(0) == [{"row": 0, "prediction": "a"}]
    (path,) = tmp_path.rglob("00000.json")
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary files stay
    path.write_text("{", encoding="utf-8")
    entry = Entry(tmp_path, {"k": 1})
    entry.finish_chunk(0, rows, [{"row": 0, "prediction": "b"}])
    assert entry.chunk(0) == [{"row": 0, "prediction": "b"}]


def test_the_key_covers_everything_and_nothing_else(tmp_path: Path) -> None:
    base = {"weights": "w", "task": {"a": 1, "b": 2}}
    assert Entry(tmp_path, base).key == Entry(tmp_path, {"task": {"b": 2, "a": 1}, "weights": "w"}).key
    assert Entry(tmp_path, base).key != Entry(tmp_path, base | {"weights": "v"}).key


def test_digests_follow_content_not_names_or_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAL_CACHE", str(tmp_path / "cache"))
    first, second = tmp_path / "a.bin", tmp_path / "sub" / "a.bin"
    second.parent.mkdir()
    first.write_bytes(b"x" * 1000)
    second.write_bytes(b"x" * 1000)
    before = store.digest_files(tmp_path, [first])
    assert before == store.digest_files(second.parent, [second])
    stamp = first.stat()
    first.write_bytes(b"y" * 1000)  # the same size, and the old time
    os.utime(first, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert store.digest_files(tmp_path, [first]) != before


# --- leases -----------------------------------------------------------------------------------------------


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first, second = lease(tmp_path, "work"), lease(tmp_path, "work")
    assert first.acquire()
    assert not second.acquire()
    first.release()
    assert second.acquire()
    assert not lease(tmp_path, "work").acquire()
    assert lease(tmp_path, "other").acquire()


def test_processes_never_hold_the_same_lease_together(tmp_path: Path) -> None:
    """Six processes walk the same list; a lease that is released may be taken again, but not held twice."""
    log = tmp_path / "log"

    def exclusive(directory: Path) -> None:
        inside = directory / "inside"
        for _ in range(60):
            with held(lease(directory, "one")) as mine:
                if mine:
                    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if somebody else is inside
                    time.sleep(random.random() * 0.004)
                    inside.unlink()
                    with log.open("a") as file:
                        file.write("x")

    workers = [child(exclusive, tmp_path) for _ in range(6)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(log.read_text()) > 20


def _hold(directory: Path, seconds: float) -> None:
    assert lease(directory, "work").acquire()
    time.sleep(seconds)


def test_the_lease_of_a_dead_process_is_free_at_once(tmp_path: Path) -> None:
    holder = child(_hold, tmp_path, 60)
    _until(lambda: any(p.stat().st_size for p in tmp_path.glob("work.*")))  # the holder has signed
    assert not lease(tmp_path, "work").acquire()
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    began = time.monotonic()
    assert lease(tmp_path, "work").acquire()
    assert time.monotonic() - began < 1
    assert sorted(p.name for p in tmp_path.glob("work.*")) == ["work.000002"]


def test_a_stopped_holder_elsewhere_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine's process cannot be looked at: only its heartbeat counts."""
    monkeypatch.setattr(store, "LEASE_SECONDS", 0.4)
    first = lease(tmp_path, "work")
    assert first.acquire() and first.path is not None
    first.path.write_text(json.dumps({"machine": "elsewhere", "pid": 1, "started": 0.0}))
    time.sleep(1.2)
    assert not lease(tmp_path, "work").acquire()  # it beats
    first._stop.set()  # the machine dies
    _until(lambda: lease(tmp_path, "work").acquire(), 3)


def _until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


# --- whole evaluations ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def _chunk_as_it_was() -> Any:
    """Chunks are made small here; other modules' tests must find the usual ones."""
    usual = job.CHUNK
    yield
    job.CHUNK = usual


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, two models, warm embeddings."""
    root = tmp_path_factory.mktemp("store")
    os.environ["EVAL_CACHE"] = str(root / "cache")
    write_tasks(root / "data", TASKS.split(","), train=30, test=24)
    tiny_model(root / "model")
    tiny_model(root / "other", seed=1)
    evaluate(root, root / "reference")
    yield root
    del os.environ["EVAL_CACHE"]


def evaluate(
    root: Path, out: Path, log: Path | None = None, model: str = "model", chunk: int = 4
) -> Job | None:
    """What a job does; with `log`, a line for every chunk that is begun."""
    job.CHUNK = chunk
    if log is not None:
        original = Job._score_rows

        def logged(self: Job, task: Any, data: Any, indices: Any, rows: range, *rest: Any) -> Any:
            with log.open("a") as file:
                file.write(f"{task.name} {rows.start}\n")
            return original(self, task, data, indices, rows, *rest)

        Job._score_rows = logged  # type: ignore[method-assign]  # in this process only: it is a fork
    run_all(
        EvaluatedModel(str(root / model), "m"),
        select_tasks(TASKS),
        Settings(data=str(root / "data")),
        out,
        lambda text: None,
    )
    return None


def everything(out: Path) -> dict[str, str]:
    """All result files, leases aside."""
    files = [p for p in sorted(out.rglob("*.json")) if "leases" not in p.parts]
    return {p.relative_to(out).as_posix(): p.read_text() for p in files}


@pytest.mark.slow
def test_killed_at_any_moment_and_run_again(world: Path, tmp_path: Path) -> None:
    """Kills at random moments, over as many evaluations as they take: always the same files in the end."""
    rng = random.Random(0)
    wanted = everything(world / "reference")
    chunks = 3 * 6
    kills = campaigns = 0
    while kills < KILLS:
        out, log, killed = tmp_path / f"out{campaigns}", tmp_path / f"log{campaigns}", 0
        while True:
            worker = child(evaluate, world, out, log)
            worker.join(rng.uniform(0.0, 0.5) if kills < KILLS else None)
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGKILL)
                worker.join()
                kills, killed = kills + 1, killed + 1
                continue
            assert worker.exitcode == 0
            break
        assert everything(out) == wanted
        assert not list(out.rglob(".*.json.*")) or killed  # temporaries only where something was killed
        begun = Counter(log.read_text().splitlines())
        assert len(begun) == chunks
        assert sum(begun.values()) <= chunks + killed  # only what was in flight was begun again
        campaigns += 1
    assert campaigns >= 1 and kills >= KILLS


def test_many_workers_share_the_work(world: Path, tmp_path: Path) -> None:
    """Data parallel over processes: every chunk once, the same result as one process alone."""
    log = tmp_path / "log"
    workers = [child(evaluate, world, tmp_path / "out", log) for _ in range(3)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert everything(tmp_path / "out") == everything(world / "reference")
    assert set(Counter(log.read_text().splitlines()).values()) == {1}


def test_a_worker_continues_for_one_that_died(world: Path, tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    first, second = (child(evaluate, world, out, log) for _ in range(2))
    _until(lambda: log.is_file())
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    second.join()
    assert second.exitcode == 0
    assert everything(out) == everything(world / "reference")


def test_asking_twice_costs_nothing(world: Path, tmp_path: Path) -> None:
    tasks, settings = select_tasks(TASKS), Settings(data=str(world / "data"))
    for expected in (3 * 6, 0):
        worker = Job(EvaluatedModel(str(world / "model"), "m"), settings, tmp_path)
        job.CHUNK = 4
        for task in tasks:
            worker.run(task)
        assert worker.computed == expected
    assert "model" not in worker.model.__dict__  # the weights were not even loaded


def test_another_model_is_never_served_these_answers(world: Path, tmp_path: Path) -> None:
    evaluate(world, tmp_path)
    first = everything(tmp_path)
    evaluate(world, tmp_path, model="other")  # the same name, other weights
    second = everything(tmp_path)
    assert first["models/m/sst2.json"] != second["models/m/sst2.json"]
    keys = [json.loads(files["models/m/sst2.json"])["key"] for files in (first, second)]
    assert keys[0] != keys[1]
    assert all(f"store/{key}/result.json" in second for key in keys)


@pytest.mark.parametrize(
    "change",
    [{"shots": 2}, {"limit": 10}, {"score": "suffix_sum"}, {"max_tokens": 100}, {"retriever": "random"},
     {"faithful": True}, {"extra": ("channel",)}, {"inferencer": "ppl"}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_every_choice_is_part_of_the_key(change: dict[str, Any], world: Path, tmp_path: Path) -> None:
    model, task = EvaluatedModel(str(world / "model")), select_tasks("sst2")[0]
    Job(model, Settings(data=str(world / "data")), tmp_path).run(task)
    Job(model, Settings(data=str(world / "data"), **change), tmp_path).run(task)
    assert len(list(tmp_path.glob("store/*/result.json"))) == 2


def test_the_batch_budget_is_not_part_of_the_key(world: Path, tmp_path: Path) -> None:
    model, task = EvaluatedModel(str(world / "model")), select_tasks("sst2")[0]
    for budget in (512, 8192):
        Job(model, Settings(data=str(world / "data"), budget=budget), tmp_path).run(task)
    assert len(list(tmp_path.glob("store/*/result.json"))) == 1


def spoil(path: Path, how: str) -> None:
    """Damage a file as disks, editors and killed copies do."""
    text = path.read_bytes()
    if how == "truncated":
        path.write_bytes(text[: len(text) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "binary":
        path.write_bytes(bytes(range(256)))
    elif how == "other json":
        path.write_text("[]", encoding="utf-8")
    elif how == "changed":
        path.write_bytes(text.replace(b"1", b"2"))
    else:  # fewer rows
        value = json.loads(text)
        value["value"] = value["value"][:-1]
        path.write_text(json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize("how", ["truncated", "empty", "binary", "other json", "changed", "fewer rows"])
@pytest.mark.parametrize("file", ["*/result.json", "*/chunks/00001.json", "retrieval/*.json"])
def test_damaged_files_are_computed_again(how: str, file: str, world: Path, tmp_path: Path) -> None:
    """defects D3: it is said, and the same files come out."""
    if how == "fewer rows" and "result" in file:
        return
    model, task = EvaluatedModel(str(world / "model"), "m"), select_tasks("sst2")[0]
    settings, said = Settings(data=str(world / "data"), retriever="random"), []
    job.CHUNK = 8
    Job(model, settings, tmp_path).run(task)
    wanted = everything(tmp_path)
    [path] = (tmp_path / "store").glob(file)
    spoil(path, how)
    Job(model, settings, tmp_path, said.append).run(task)
    assert everything(tmp_path) == wanted
    assert any("is damaged" in text and str(path) in text for text in said)


def test_a_report_does_not_believe_damaged_records(world: Path, tmp_path: Path) -> None:  # defects D3
    model, task = EvaluatedModel(str(world / "model"), "m"), select_tasks("sst2")[0]
    job.CHUNK = 8
    Job(model, Settings(data=str(world / "data"), retriever="random"), tmp_path).run(task)
    [path] = (tmp_path / "store").glob("*/chunks/00001.json")
    key, whole = path.parts[-3], path.read_bytes()
    assert len(store.read_records(tmp_path, key, 24)) == 24
    spoil(path, "truncated")
    with pytest.raises(UserError, match=r"00001.json is damaged"):
        store.read_records(tmp_path, key, 24)
    path.write_bytes(whole)
    path.unlink()
    with pytest.raises(UserError, match=r"holds 16 of 24 rows"):
        store.read_records(tmp_path, key, 24)


def test_damaged_digests_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """defects D3"""
    monkeypatch.setenv("EVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "YOUNG_SECONDS", 0.0)
    (tmp_path / "a.bin").write_bytes(b"x" * 1000)
    wanted = store.digest_files(tmp_path, [tmp_path / "a.bin"])
    [remembered] = (tmp_path / "cache" / "digests").iterdir()
    for text in (b"", b"abc", b"\xff" * 64):
        remembered.write_bytes(text)
        assert store.digest_files(tmp_path, [tmp_path / "a.bin"]) == wanted


INTERRUPTED = (
    (KeyboardInterrupt(), 130, "interrupted; run the same command again to resume"),
    (PermissionError(13, "Permission denied", "/x"), 2, "Permission denied"),
    (NotADirectoryError(20, "Not a directory", "/x"), 2, "Not a directory"),
    (OSError(28, "No space left on device"), 1, "run the same command again to resume"),
    (DiskFullError("no space left while writing /x/a; make room in /x"), 1, "run the same command again"),
    (ConnectionError("reset"), 1, "run the same command again to resume"),
    (torch.OutOfMemoryError("out of memory"), 1, "lower --budget"),
)


@pytest.mark.parametrize(("error", "code", "message"), INTERRUPTED, ids=lambda v: type(v).__name__)
def test_exit_codes_tell_what_may_pass(
    error: BaseException,
    code: int,
    message: str,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # defects D3
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(job, "run_all", fail)
    found, _, err = command(
        "run", "--model", world / "model", "--data", world / "data", "--tasks", "sst2", "--out", tmp_path
    )
    assert found == code and message in err and len(lines(err)) == 1


def test_leaked_rows_are_flagged_with_a_clean_score(world: Path, tmp_path: Path) -> None:
    """Three test rows are verbatim in the pool; the score without them is beside the score with them."""
    data = tmp_path / "data"
    write_tasks(data, ["sst2"], train=30, test=24)
    test = (data / "sst2" / "test.jsonl").read_text().splitlines()
    with (data / "sst2" / "train.jsonl").open("a") as file:
        file.write("\n".join([test[3], test[7], test[20]]) + "\n")
    model, task = EvaluatedModel(str(world / "model"), "m"), select_tasks("sst2")[0]
    result = Job(model, Settings(data=str(data)), tmp_path / "out").run(task)
    [key] = [path.parent.name for path in tmp_path.glob("out/store/*/result.json")]
    records = store.read_records(tmp_path / "out", key, 24)
    assert [r["row"] for r in records if r["leaked"]] == [3, 7, 20]
    assert result["leaked"] == 3 and result["clean"]["n"] == 21
    clean = [r["prediction"] == r["gold"] for r in records if not r["leaked"]]
    assert result["clean"]["accuracy"] == pytest.approx(sum(clean) / 21)
    for row in (3, 7, 20):  # retrieval did show the answer
        assert records[row]["demonstrations"][0] in (30, 31, 32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score": "accuracy"}, "--score 'accuracy'; known: openicl_ppl"),
        ({"inferencer": "gen"}, "--inferencer 'gen'; known: prefix, ppl"),
        ({"extra": ("pmi",)}, "--extra-scores 'pmi'; known: channel, calibrated"),
        ({"inferencer": "ppl", "score": "suffix_sum"}, "gives openicl_ppl only"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"shots": -1}, "--shots must not be negative"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings(data="x", **settings)


def test_this_process_is_recognised() -> None:
    mine = lease_file._started(os.getpid())
    assert mine is not None and mine == lease_file._started(os.getpid())
    later = subprocess.Popen(["sleep", "9"])
    started = lease_file._started(later.pid)
    assert started is not None and started > mine
    later.kill()
    while psutil.Process(later.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert lease_file._started(later.pid) is None  # nobody has waited for it, yet it is gone
    later.wait()
    assert lease_file._started(2**22 + 1) is None
