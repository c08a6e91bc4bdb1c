"""The embedded world: no test row in what a model reads, columns and labels as in the real tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard

from emo.data_prep.world import LABELS, TASKS, corpus, read_rows, task_rows, write_tasks


def first_split(task: str) -> str:
    return "dev" if task == "mmlu" else "train"


@pytest.mark.parametrize("task", TASKS)
def test_no_test_row_stands_in_a_document_or_a_demonstration(task: str) -> None:
    key = "question" if task == "mmlu" else "text"
    corpora = map(corpus, ("world", "world-home", "world-abroad"))
    texts = [row["text"] for path in corpora for row in read_rows(path)]
    demonstrations = [row[key] for row in task_rows(task, first_split(task))]
    everything = "\n".join([*texts, *demonstrations])
    assert all(row[key] not in everything for row in task_rows(task, "test"))
    assert all(text in everything for text in demonstrations)  # the search itself works


@pytest.mark.parametrize("task", TASKS)
def test_rows_look_like_those_of_the_real_task(task: str, tmp_path: Path, shared_data: Path) -> None:
    write_tasks(tmp_path, train=24, test=12)
    for split, limit in ((first_split(task), 24), ("test", 12)):
        lines = (tmp_path / task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        assert 0 < len(rows) <= limit
        path = shared_data / "nlu" / task / f"{split}.jsonl.zst"
        with zstandard.open(path, "rt", encoding="utf-8") as file:
            real = [json.loads(line) for line in file]
        assert all(row.keys() == real[0].keys() for row in rows)
        for number, text in (("label", "label_text"), ("coarse_label", "coarse_label_text")):
            if text in rows[0]:
                labels, known = ({(row[number], row[text]) for row in group} for group in (rows, real))
                assert labels <= known
    if task in LABELS:
        assert {row["label"] for row in task_rows(task, "test")} == set(range(len(LABELS[task])))
