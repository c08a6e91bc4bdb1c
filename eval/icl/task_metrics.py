"""Metrics of a task from the records of its rows. Pure functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from ..results import stats
from .settings import Settings, winner
from .task_data import TaskData
from .tasks import LABEL, Task

WORST = 5  # mistakes that are kept with their text


def summarise(
    task: Task,
    data: TaskData,
    records: list[dict[str, Any]],
    settings: Settings,
    conditions: dict[str, Any],
) -> dict[str, Any]:
    """Return the metrics of a task's records, which were made under `settings` and `conditions`.

    `worst`: the wrong rows whose right label lost by most, with what the model was shown.
    """
    score, pool = settings.score, data.rows["train"]
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
    worst = []
    for r in records:
        if r["prediction"] != r["gold"]:
            values = r["scores"][score]
            worst.append((min(values) - values[task.labels.index(r["gold"])], r["row"], r))
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
        **by_score[score],
        "openicl_accuracy": sum(correct) / len(correct),  # over rows; a task with groups averages over them
        "scores": by_score,
        "macro_f1": stats.macro_f1(counts),
        "confusion": counts,
        "groups": per_group,
        "leaked": len(records) - len(clean),
        "clean": _accuracy([correct[i] for i in clean], groups and [groups[i] for i in clean]),
        "rows_shortened": sum(r["dropped"] > 0 or r["cut"] > 0 for r in records),
        "rows_cut": sum(r["cut"] > 0 for r in records),
        "worst": [
            {
                **{key: r[key] for key in ("row", "id", "gold", "prediction", "dropped")},
                "text": task.text(data.rows["test"][r["row"]]),
                "scores": dict(zip(task.labels, r["scores"][score], strict=True)),
                "demonstrations": [
                    {"text": task.text(pool[d]), "label": pool[d][LABEL]} for d in r["demonstrations"]
                ],
            }
            for _, _, r in sorted(worst, key=lambda wrong: wrong[:2])[:WORST]
        ],
    }


def _accuracy(correct: list[bool], groups: list[str] | None) -> dict[str, Any]:
    if not correct:
        return {"accuracy": None, "n": 0}
    accuracy = asdict(stats.accuracy(correct, groups))
    return {"accuracy": accuracy.pop("value"), **accuracy}
