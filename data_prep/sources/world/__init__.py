"""A small made-up world in simple English: text, instructions and eight tasks, as compressed JSON lines.

`home` and `abroad` are documents about the two halves of the world, `world` about both, `instruct` examples
in Alpaca's columns. `tasks` holds the rows of the eight evaluation tasks in the columns and label ids of the
real data sets, with their `task` and `split`. The tasks cover both halves, so a model trained on one half can
learn from the other. No document and no demonstration contains a test row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pyarrow as pa

FOLDER = Path(__file__).parent
CORPORA = {  # as recipes name them
    "world": "world.jsonl.zst",
    "world-home": "home.jsonl.zst",
    "world-abroad": "abroad.jsonl.zst",
    "world-instruct": "instruct.jsonl.zst",
}
LABELS = {  # label id -> label_text, in the order of the real data sets
    "sst2": ("positive", "negative"),
    "tweet_emotion": ("anger", "joy", "optimism", "sadness"),
    "trec": ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
    "subj": ("objective", "subjective"),
    "cr": ("negative", "positive"),
    "rotten_tomatoes": ("negative", "positive"),
    "ag_news": ("World", "Sports", "Business", "Sci/Tech"),
}
TASKS = (*LABELS, "mmlu")


def corpus(name: str) -> Path:
    """Return the file of an embedded corpus: JSON lines, compressed."""
    return FOLDER / CORPORA[name]


def read_json_lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the rows of a compressed file of JSON lines."""
    with pa.input_stream(str(path), compression="zstd") as stream:
        for line in stream.read().splitlines():
            yield json.loads(line)


@cache
def _tasks() -> list[dict[str, object]]:
    return list(read_json_lines(FOLDER / "tasks.jsonl.zst"))


def task_rows(task: str, split: str, limit: int | None = None) -> list[dict[str, object]]:
    """Return the first rows of a task's split: `test`, and `train` or for mmlu `dev`."""
    rows = [row for row in _tasks() if (row["task"], row["split"]) == (task, split)]
    return [{key: row[key] for key in row if key not in ("task", "split")} for row in rows[:limit]]


def write_tasks(directory: Path, train: int | None = None, test: int | None = None) -> None:
    """Write <directory>/<task>/{train|dev,test}.jsonl and labels.json, in the layout of the real data."""
    for task in TASKS:
        folder = directory / task
        folder.mkdir(parents=True, exist_ok=True)
        for split, limit in {"dev" if task == "mmlu" else "train": train, "test": test}.items():
            rows = task_rows(task, split, limit)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
        if task in LABELS:
            (folder / "labels.json").write_text(json.dumps(LABELS[task]) + "\n", encoding="utf-8")
