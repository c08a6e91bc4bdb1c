"""Metrics of a task from the records of its rows. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from datasets import Dataset

from emo.eval import stats
from emo.eval.icl.openicl_compat import AccEvaluator
from emo.eval.icl.scores import winner
from emo.eval.icl.task_data import TaskData
from emo.eval.icl.tasks import LABEL, Task

WORST = 5  # mistakes that are kept with their text


def row_text(task: Task, row: dict[str, str]) -> str:
    """The inputs of a row; equal texts mean that a test row is also in the pool."""
    return "\n".join(row[name] for name in task.inputs)


def row_texts(task: Task, rows: Dataset) -> list[str]:
    """`row_text` of all rows."""
    return ["\n".join(inputs) for inputs in zip(*(rows[name][:] for name in task.inputs), strict=True)]


def summarise(
    task: Task, records: list[dict[str, Any]], score: str, scores: Sequence[str], conditions: dict[str, Any]
) -> dict[str, Any]:
    """Metrics of a task's records. score: the one that decided; scores: all that the records hold;
    conditions: under which they were found.
    """
    gold = [r["gold"] for r in records]
    groups = [r["group"] for r in records] if task.spec.group else None
    by_score = {}  # the metrics when the smallest value of each score decides
    for name in scores:
        chosen = [task.labels[winner(r["scores"][name])] for r in records]
        by_score[name] = _accuracy([p == g for p, g in zip(chosen, gold, strict=True)], groups)
    main = by_score[score]
    correct = [r["prediction"] == r["gold"] for r in records]
    # OpenICL's evaluator counts the rows; a task with groups then averages over them.
    pooled = AccEvaluator().score([r["prediction"] for r in records], gold)["accuracy"]
    assert abs(pooled - sum(correct) / len(correct)) < 1e-12
    clean = [i for i, r in enumerate(records) if not r["leaked"]]
    counts = stats.confusion(gold, [r["prediction"] for r in records], task.labels)
    per_group = {}
    for group in sorted(set(groups or [])):
        of_group = [c for c, g in zip(correct, groups or [], strict=True) if g == group]
        per_group[group] = {"accuracy": sum(of_group) / len(of_group), "n": len(of_group)}
    return {
        "task": task.name,
        "title": task.spec.title,
        "version": task.version,
        "retriever": conditions["compared"]["retriever"],
        "shots": conditions["compared"]["shots"],
        "conditions": conditions,
        "labels": task.labels,
        "chance": 1 / len(task.labels),
        "majority": max(Counter(gold).values()) / len(gold),
        "score": score,
        **main,
        "openicl_accuracy": pooled,
        "scores": by_score,
        "macro_f1": stats.macro_f1(counts),
        "confusion": counts,
        "groups": per_group,
        "leaked": len(records) - len(clean),
        "clean": _accuracy([correct[i] for i in clean], groups and [groups[i] for i in clean]),
        "rows_shortened": sum(r["dropped"] > 0 or r["cut"] > 0 for r in records),
        "rows_cut": sum(r["cut"] > 0 for r in records),
    }


def worst(
    task: Task, data: TaskData, records: list[dict[str, Any]], score: str, count: int = WORST
) -> list[dict[str, Any]]:
    """The wrong rows whose right label lost by most, with what the model was shown."""

    def lost_by(record: dict[str, Any]) -> float:
        values = record["scores"][score]
        return values[task.labels.index(record["gold"])] - min(values)

    wrong = [r for r in records if r["prediction"] != r["gold"]]
    chosen = sorted(wrong, key=lambda r: (-lost_by(r), r["row"]))[:count]
    return [
        {
            "row": r["row"],
            "id": r["id"],
            "text": row_text(task, data.rows["test"][r["row"]]),
            "gold": r["gold"],
            "prediction": r["prediction"],
            "scores": dict(zip(task.labels, r["scores"][score], strict=True)),
            "dropped": r["dropped"],
            "demonstrations": [
                {"text": row_text(task, data.rows["train"][d]), "label": data.rows["train"][d][LABEL]}
                for d in r["demonstrations"]
            ],
        }
        for r in chosen
    ]


def _accuracy(correct: list[bool], groups: list[str] | None) -> dict[str, Any]:
    if not correct:
        return {"accuracy": None, "n": 0}
    accuracy = asdict(stats.accuracy(correct, groups))
    return {"accuracy": accuracy.pop("value"), **accuracy}
