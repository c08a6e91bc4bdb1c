"""Metrics of a task from the records of its rows. Pure functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from emo.eval import stats
from emo.eval.icl.settings import Settings, winner
from emo.eval.icl.task_data import TaskData
from emo.eval.icl.tasks import LABEL, Task

WORST = 5  # mistakes that are kept with their text


def summarise(
    task: Task, records: list[dict[str, Any]], settings: Settings, conditions: dict[str, Any]
) -> dict[str, Any]:
    """Return the metrics of a task's records, which were made under `settings` and `conditions`."""
    gold = [r["gold"] for r in records]
    groups = [r["group"] for r in records] if task.spec.group else None
    by_score = {}  # the metrics when the smallest value of each score decides
    for name in settings.scores:
        chosen = [task.labels[winner(r["scores"][name])] for r in records]
        by_score[name] = _accuracy([p == g for p, g in zip(chosen, gold, strict=True)], groups)
    correct = [r["prediction"] == r["gold"] for r in records]
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
        "score": settings.score,
        **by_score[settings.score],
        "openicl_accuracy": sum(correct) / len(correct),  # over rows; a task with groups averages over them
        "scores": by_score,
        "macro_f1": stats.macro_f1(counts),
        "confusion": counts,
        "groups": per_group,
        "leaked": len(records) - len(clean),
        "clean": _accuracy([correct[i] for i in clean], groups and [groups[i] for i in clean]),
        "rows_shortened": sum(r["dropped"] > 0 or r["cut"] > 0 for r in records),
        "rows_cut": sum(r["cut"] > 0 for r in records),
    }


def worst(task: Task, data: TaskData, records: list[dict[str, Any]], score: str) -> list[dict[str, Any]]:
    """Return the wrong rows whose right label lost by most, with what the model was shown."""

    def lost_by(record: dict[str, Any]) -> float:
        values = record["scores"][score]
        return values[task.labels.index(record["gold"])] - min(values)

    wrong = [r for r in records if r["prediction"] != r["gold"]]
    pool = data.rows["train"]
    return [
        {
            "row": r["row"],
            "id": r["id"],
            "text": task.text(data.rows["test"][r["row"]]),
            "gold": r["gold"],
            "prediction": r["prediction"],
            "scores": dict(zip(task.labels, r["scores"][score], strict=True)),
            "dropped": r["dropped"],
            "demonstrations": [
                {"text": task.text(row), "label": row[LABEL]}
                for row in map(pool.__getitem__, r["demonstrations"])
            ],
        }
        for r in sorted(wrong, key=lambda r: (-lost_by(r), r["row"]))[:WORST]
    ]


def _accuracy(correct: list[bool], groups: list[str] | None) -> dict[str, Any]:
    if not correct:
        return {"accuracy": None, "n": 0}
    accuracy = asdict(stats.accuracy(correct, groups))
    return {"accuracy": accuracy.pop("value"), **accuracy}
