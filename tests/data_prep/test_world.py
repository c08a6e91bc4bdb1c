"""The embedded world: no test row in what a model reads, columns and labels as in the real tasks."""

from __future__ import annotations

import pytest

from emo.data_prep.world import TASKS, corpus, read_rows, task_rows


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
