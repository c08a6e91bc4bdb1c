"""`emo top`: running and finished runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from emo.common.errors import ExitCode
from emo.pipeline.control.run_dir import HEARTBEAT, RANKS
from emo.pipeline.report.top import format_ranks

HEAVY = {"torch", "numpy", "deepspeed"}


def write(run_dir: Path, now: float, **beat: Any) -> None:
    """Write the files of a run with three ranks. The last one has been silent for five minutes."""
    (run_dir / RANKS).mkdir(parents=True, exist_ok=True)
    (run_dir / HEARTBEAT).write_text(json.dumps({"time": now - 4, "doing": "training", "step": 1203} | beat))
    for rank, age in enumerate((10, 10, 310)):
        state: dict[str, Any] = {"rank": rank, "host": f"node-{rank // 2}", "time": now - age}
        state |= {"step": 1200 - age, "doing": "training"}
        state |= {"seconds": 0.123456, "memory_gib": 61.23, "temperature": 71}
        if rank == 2:
            state |= {"host": "node\x1b[31m", "seconds": None, "step": "many"}
        (run_dir / RANKS / f"rank-{rank}.json").write_text(json.dumps(state))


def test_every_rank_is_a_line_whatever_its_file_contains(tmp_path: Path) -> None:
    write(tmp_path, 1000.0)
    (tmp_path / RANKS / "rank-3.json").write_text("[]")
    text, over = format_ranks(tmp_path, 1000.0)
    summary, _, first, _, last = text.splitlines()
    assert not over and "\x1b" not in text
    assert summary == f"{tmp_path}: training, step 1,203, 4 s ago; 3 ranks on 2 hosts"
    assert " ".join(first.split()) == "0 node-0 training 1,190 10 s 0.123 s 61.2 GiB 71 C"
    assert "5 min" in last and "many" not in last


@pytest.mark.parametrize(
    ("beat", "doing"),
    [({"time": 900.0}, "over, last training"), ({"doing": "failed"}, "over, last failed")],
)
def test_a_run_that_is_over_keeps_its_last_state(tmp_path: Path, beat: dict[str, Any], doing: str) -> None:
    write(tmp_path, 1000.0, **beat)
    text, over = format_ranks(tmp_path, 1000.0)
    assert over and f": {doing}, step 1,203" in text


def test_the_command_imports_no_large_library(tmp_path: Path) -> None:
    write(tmp_path / "run", time.time())
    made = ["data_prep.json", "train/manifest.json", *(f"train/shard-0000{i}-of-00002.arrow" for i in (0, 1))]
    for name in (*made, "validation/shard-00000-of-00002.arrow", ".new/scan/000000.parquet"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    progress = "1 part of the sources read; train has 2 of 2 shards, complete; validation has 1 of 2 shards"
    code = "import sys; from emo.pipeline.cli import main; code = main(sys.argv[1:])\n"
    code += f"assert not {HEAVY} & sys.modules.keys(); sys.exit(code)"
    for directory, expected, word in (
        ("run", ExitCode.DONE, "node-0"),
        ("data", ExitCode.DONE, progress),
        ("none", ExitCode.MISTAKE, "output_dir"),
    ):
        command = [sys.executable, "-c", code, "top", str(tmp_path / directory)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == expected and word in done.stdout + done.stderr, done.stderr
