"""Heartbeats and traces of ranks show the late rank of a hang, and feed a host's health check."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from emo.pipeline.control.heartbeat import (
    BEAT,
    COPY,
    RankHeartbeat,
    find_late_rank,
    is_accounted_for,
    read_ranks,
)
from emo.pipeline.control.run_dir import LAUNCHES, RANKS, TRACE, append_records, read_records
from emo.pipeline.control.world import record_collectives
from emo.pipeline.monitor.console import Console
from emo.pipeline.monitor.launches import Launch


def write_rank(run_dir: Path, rank: int, enqueued: int, started: int, **state: Any) -> None:
    """Write a rank's heartbeat, and its trace in PyTorch's format unless `enqueued` is 0."""
    (run_dir / RANKS).mkdir(exist_ok=True)
    state = {"rank": rank, "host": f"node-{rank // 2}", "doing": "training", "step": 7, "time": 0.0} | state
    (run_dir / RANKS / f"rank-{rank}.json").write_text(json.dumps(state))
    frames = [
        {"filename": "/x/site-packages/torch/distributed.py", "line": 1},
        {"filename": "/x/emo/pipeline/engine.py", "line": 9},
    ]
    entries = [
        {"profiling_name": f"nccl:{name}", "state": state, "frames": frames}
        for name, state in (("broadcast", "completed"), ("all_gather", "started"), ("reduce", "scheduled"))
    ]
    group = {"last_enqueued_collective": enqueued, "last_started_collective": started}
    trace = {"pg_status": {"0": group, "1": group}, "entries": entries}
    if enqueued:
        (run_dir / RANKS / f"{TRACE}{rank}").write_bytes(pickle.dumps(trace))


@pytest.mark.parametrize(
    ("counts", "culprit"),
    [
        ([(9, 8), (9, 8), (7, 7), (9, 8)], "rank 2 on node-1 (training)"),  # has not called the collective
        ([(9, 8), (9, -1), (9, 8), (9, 8)], "rank 1 on node-0 (training)"),  # its device has not started
        ([(9, 8), (9, 8), (0, 0), (0, 0)], "rank 2 on node-1 and 1 more (training)"),  # a lost node
        ([(9, 8)] * 4, None),
        ([(0, 0)] * 4, None),
    ],
)
def test_the_late_rank_is_found_in_the_traces(
    tmp_path: Path, counts: list[tuple[int, int]], culprit: str | None
) -> None:
    for rank, (enqueued, started) in enumerate(counts):
        write_rank(tmp_path, rank, enqueued, started)
    expected = culprit and f"the first that was late: {culprit}; others waited in all_gather (engine.py:9)"
    assert find_late_rank(tmp_path) == expected
    assert is_accounted_for(tmp_path) == all(enqueued for enqueued, _ in counts)


class Code:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("made-by-a-trace"),)


def test_traces_with_damage_or_code_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in range(4):
        write_rank(tmp_path, rank, 9, 9, doing="failed" if rank == 1 else "training")
    content = (tmp_path / RANKS / f"{TRACE}1").read_bytes()
    (tmp_path / RANKS / f"{TRACE}1").write_bytes(content[:-20])
    (tmp_path / RANKS / f"{TRACE}x").write_bytes(content)
    assert "rank 1 on node-0 (failed)" in (find_late_rank(tmp_path) or "") and is_accounted_for(tmp_path)
    (tmp_path / RANKS / f"{TRACE}2").write_bytes(pickle.dumps(Code()))
    assert "rank 1 on node-0 and 1 more" in (find_late_rank(tmp_path) or "")
    assert not is_accounted_for(tmp_path)
    assert not Path("made-by-a-trace").exists()


def test_the_next_launch_reports_the_late_rank_of_an_aborted_one(tmp_path: Path) -> None:
    """NCCL's watchdog aborts all ranks before they can report it."""
    append_records(tmp_path / LAUNCHES, [{"event": "begin", "step": 3}])
    for rank, enqueued in enumerate((9, 5)):
        write_rank(tmp_path, rank, enqueued, 5, step=7 + rank)
    for _ in range(2):
        Launch(tmp_path, Console(), main=True).report_previous_failure()
    _, *ends = read_records(tmp_path / LAUNCHES)[0]
    assert [(r["event"], r["step"], r["how"]) for r in ends] == [("end", 8, "failed")]
    assert "rank 1 on node-0" in ends[0]["reason"]


def test_collectives_are_recorded_in_the_run_directory_and_settings_of_the_user_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", environment := {"TORCH_FR_BUFFER_SIZE": "0"})
    record_collectives(Path("run"))
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "run" / RANKS / TRACE)
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1" and environment["TORCH_FR_BUFFER_SIZE"] == "0"


def test_the_first_rank_of_a_host_writes_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host of rank 0, the lock of the run writes the copy."""
    copy, now = tmp_path / "copy.json", 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setenv(COPY, str(copy))
    (tmp_path / RANKS).mkdir()
    for rank, local, expected in ((0, "0", False), (9, "1", False), (8, "0", True)):
        monkeypatch.setenv("LOCAL_RANK", local)
        entry = RankHeartbeat(tmp_path, rank)
        entry.write({"doing": "training", "step": 1, "since": 1.0}, seconds=0.5)
        assert copy.exists() == expected
    for waited, step in ((BEAT - 1, 1), (BEAT + 1, 3)):
        now = 1000 + waited
        entry.write_copy({"doing": "training", "step": 3, "since": 2.0})
        assert json.loads(copy.read_text())["step"] == step
    assert list(read_ranks(tmp_path)) == [0, 8, 9] and read_ranks(tmp_path)[8]["seconds"] == 0.5
    entry.close()
    assert not copy.exists()
