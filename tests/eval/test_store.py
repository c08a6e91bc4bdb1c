"""Results survive anything: kills at random moments, many workers at once, damaged files.

EVAL_KILLS sets the number of kills (10).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import emo.eval.cli
from emo.common.errors import ExitCode, UserError
from emo.eval import store
from emo.eval.icl import job
from emo.eval.icl.job import Job, run_all
from emo.eval.icl.settings import Settings
from emo.eval.icl.tasks import select_tasks
from emo.eval.model import EvaluatedModel
from emo.eval.store import Entry
from tests.helpers.evaluating import command

KILLS = int(os.environ.get("EVAL_KILLS", "10"))
FORK = multiprocessing.get_context("fork")  # a child starts at once, with everything imported
TASKS = "sst2,trec,mmlu"
ROWS, CHUNK = 12, 2
CHUNKS = 3 * ROWS // CHUNK
LEAKED = [3, 7, 10]


# --- files ------------------------------------------------------------------------------------------------


def test_the_first_copy_of_a_chunk_counts(tmp_path: Path) -> None:
    """Whoever comes later, woken up or with other rounding, changes nothing; what is damaged is replaced."""
    entry, rows = Entry(tmp_path, {"k": 1}), range(1)
    for prediction in "ab":
        Entry(tmp_path, {"k": 1}).finish_chunk(0, rows, [{"row": 0, "prediction": prediction}])
    assert entry.chunk(0, rows) == [{"row": 0, "prediction": "a"}]
    (path,) = tmp_path.rglob("00000.json")
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary files stay
    path.write_text("{", encoding="utf-8")
    entry = Entry(tmp_path, {"k": 1})
    entry.finish_chunk(0, rows, [{"row": 0, "prediction": "b"}])
    assert entry.chunk(0, rows) == [{"row": 0, "prediction": "b"}]


def test_digests_follow_content_not_names_or_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAL_CACHE", str(tmp_path / "cache"))
    first, second = tmp_path / "a.bin", tmp_path / "sub" / "a.bin"
    second.parent.mkdir()
    for path in (first, second):
        path.write_bytes(b"x" * 1000)
    before = store.digest_files(tmp_path, [first])
    assert before == store.digest_files(second.parent, [second])
    stamp = first.stat()
    first.write_bytes(b"y" * 1000)  # the same size, and the old time
    os.utime(first, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert store.digest_files(tmp_path, [first]) != before
    (tmp_path / "cache" / "hashes.json").write_text("{")  # damaged: made again
    assert store.digest_files(second.parent, [second]) == before


# --- whole evaluations ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "CHUNK", CHUNK)
        yield


@pytest.fixture(scope="module")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of an evaluation, which also leaves the embeddings."""
    out = tmp_path_factory.mktemp("store")
    evaluate(world, out)
    return everything(out)


def evaluate(world: Path, out: Path, log: Path | None = None) -> None:
    """Evaluate all tasks as a job does; with `log`, note every chunk that is begun."""
    if log is not None:
        original = Job.score_rows

        def logged(self: Job, task: Any, data: Any, indices: Any, rows: range, *others: Any) -> Any:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{task.name} {rows.start}\n")
            return original(self, task, data, indices, rows, *others)

        Job.score_rows = logged  # type: ignore[method-assign]  # in this process only: it is a fork
    settings = Settings(data=str(world / "data"))
    run_all(EvaluatedModel(str(world / "model"), "m"), select_tasks(TASKS), settings, out, lambda text: None)


def start(*arguments: Any) -> Any:
    process = FORK.Process(target=evaluate, args=arguments)
    process.start()
    return process


def everything(out: Path) -> dict[str, str]:
    """Return all result files, leases aside."""
    files = [p for p in sorted(out.rglob("*.json")) if "leases" not in p.parts]
    return {p.relative_to(out).as_posix(): p.read_text() for p in files}


@pytest.mark.slow
def test_killed_at_any_moment_and_run_again(world: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    """Three processes share every evaluation and are killed at random: always the same files in the end."""
    rng, kills = random.Random(0), 0
    while kills < KILLS:
        out, log, killed = tmp_path / f"out{kills}", tmp_path / f"log{kills}", 0
        workers = [start(world, out, log) for _ in range(3)]
        while any(worker.is_alive() for worker in workers):
            number = rng.randrange(3)
            workers[number].join(rng.uniform(0.0, 0.5))
            if workers[number].is_alive() and kills < KILLS:
                workers[number].kill()
                workers[number].join()
                workers[number] = start(world, out, log)
                kills, killed = kills + 1, killed + 1
        assert all(worker.exitcode == 0 for worker in workers)
        assert everything(out) == undisturbed
        begun = Counter(log.read_text().splitlines())
        assert len(begun) == CHUNKS
        assert sum(begun.values()) <= CHUNKS + killed  # only what was in flight was begun again
        kills += not killed


def test_every_choice_is_part_of_the_key_but_the_batch_size(world: Path, tmp_path: Path) -> None:
    model, task = EvaluatedModel(str(world / "model")), select_tasks("sst2")[0]

    def results(**settings: Any) -> int:
        Job(model, Settings(data=str(world / "data"), **settings), tmp_path).run(task)
        return len(list(tmp_path.glob("store/*/result.json")))

    changes = [{"shots": 2}, {"limit": 10}, {"max_tokens": 100}, {"faithful": True}, {"extra": ("channel",)}]
    assert results() == 1
    assert [results(**change) for change in changes] == [2, 3, 4, 5, 6]  # type: ignore[arg-type]
    assert results(batch_size=2) == 6


@pytest.mark.parametrize("file", ["*/result.json", "*/chunks/00001.json", "retrieval/*.json"])
def test_damaged_files_are_computed_again(file: str, world: Path, tmp_path: Path) -> None:
    """It is said, and the same files come out; nobody believes the damaged ones."""
    model, task = EvaluatedModel(str(world / "model"), "m"), select_tasks("sst2")[0]
    settings, messages = Settings(data=str(world / "data"), retriever="random"), list[str]()
    Job(model, settings, tmp_path).run(task)
    whole = everything(tmp_path)
    [path] = (tmp_path / "store").glob(file)
    text = path.read_bytes()
    for damaged in (text[: len(text) // 2], bytes(range(256)), b"[]", text.replace(b"1", b"2")):
        path.write_bytes(damaged)
        if "chunks" in file:
            with pytest.raises(UserError):
                store.read_records(tmp_path, path.parts[-3], ROWS)
        Job(model, settings, tmp_path, messages.append).run(task)
        assert everything(tmp_path) == whole
        assert any(str(path) in message for message in messages)
        messages.clear()


def test_leaked_rows_are_flagged_with_a_clean_score(world: Path, tmp_path: Path) -> None:
    """Three test rows are verbatim in the pool; the score without them is beside the score with them."""
    shutil.copytree(world / "data" / "sst2", tmp_path / "data" / "sst2")
    test = (tmp_path / "data" / "sst2" / "test.jsonl").read_text().splitlines()
    with (tmp_path / "data" / "sst2" / "train.jsonl").open("a") as file:
        file.write("\n".join(test[row] for row in LEAKED) + "\n")
    model, task = EvaluatedModel(str(world / "model"), "m"), select_tasks("sst2")[0]
    result = Job(model, Settings(data=str(tmp_path / "data")), tmp_path).run(task)
    [key] = [path.parent.name for path in tmp_path.glob("store/*/result.json")]
    records = store.read_records(tmp_path, key, ROWS)
    assert [r["row"] for r in records if r["leaked"]] == LEAKED
    clean = [r["prediction"] == r["gold"] for r in records if not r["leaked"]]
    assert result["leaked"] == 3 and result["clean"]["n"] == ROWS - 3
    assert result["clean"]["accuracy"] == pytest.approx(np.mean(clean))
    for row in LEAKED:  # retrieval did show the answer
        assert records[row]["demonstrations"][0] in (20, 21, 22)


def test_memory_that_others_use_may_be_free_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(args: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(emo.eval.cli, "_compare", full)
    assert command("compare", "a", "b")[0] == ExitCode.FAILURE
