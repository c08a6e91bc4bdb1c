"""Metrics of a task from the records of its rows. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..results import stats
from ..results.directory import Conditions, Record, TaskResult
from .settings import Settings, best_label
from .task_data import TaskData
from .tasks import LABEL, Task

WORST = 5  # mistakes that are stored with their text


def summarise_task(
    task: Task, data: TaskData, records: list[Record], settings: Settings, conditions: Conditions
) -> TaskResult:
    """Return the result of a task: all metrics of its records, and the worst mistakes.

    Args:
        task: The task.
        data: Its rows.
        records: The records of the test rows, in row order.
        settings: The settings that made the records.
        conditions: The conditions of the result that decide what it can be compared with.
    """
    gold = [r["gold"] for r in records]
    groups = [r["group"] for r in records] if task.spec.group else None
    by_score = {}  # the accuracy if each score decided
    for name in settings.scores:
        chosen = [task.labels[best_label(r["scores"][name])] for r in records]
        by_score[name] = stats.accuracy([p == g for p, g in zip(chosen, gold, strict=True)], groups).to_json()
    correct = [r["prediction"] == r["gold"] for r in records]
    clean = [i for i, r in enumerate(records) if not r["leaked"]]
    of_clean = [correct[i] for i in clean], groups and [groups[i] for i in clean]
    counts = stats.confusion(gold, [r["prediction"] for r in records], task.labels)
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
        "openicl_accuracy": sum(correct) / len(correct),  # over rows, also if the task has groups
        "scores": by_score,
        "macro_f1": stats.macro_f1(counts),
        "confusion": counts,
        "groups": _group_accuracies(correct, groups or []),
        "leaked": len(records) - len(clean),
        "clean": stats.accuracy(*of_clean).to_json() if clean else {"accuracy": None, "n": 0},
        "rows_shortened": sum(r["dropped"] > 0 or r["cut"] > 0 for r in records),
        "rows_cut": sum(r["cut"] > 0 for r in records),
        "worst": _worst_mistakes(task, data, records, settings.score),
    }


def _group_accuracies(correct: Sequence[bool], groups: Sequence[str]) -> dict[str, dict[str, float]]:
    accuracies = {}
    for group in sorted(set(groups)):
        outcomes = [c for c, g in zip(correct, groups, strict=True) if g == group]
        accuracies[group] = {"accuracy": sum(outcomes) / len(outcomes), "n": len(outcomes)}
    return accuracies


def _worst_mistakes(task: Task, data: TaskData, records: list[Record], score: str) -> list[Record]:
    """Return the mistakes with the largest gap to the right label, with the prompts' contents."""
    pool = data.rows["train"]
    mistakes = []
    for r in records:
        if r["prediction"] != r["gold"]:
            values = r["scores"][score]
            mistakes.append((min(values) - values[task.labels.index(r["gold"])], r["row"], r))
    return [
        {
            **{key: r[key] for key in ("row", "id", "gold", "prediction", "dropped")},
            "text": task.text(data.rows["test"][r["row"]]),
            "scores": dict(zip(task.labels, r["scores"][score], strict=True)),
            "demonstrations": [
                {"text": task.text(pool[d]), "label": pool[d][LABEL]} for d in r["demonstrations"]
            ],
        }
        for _, _, r in sorted(mistakes, key=lambda mistake: mistake[:2])[:WORST]
    ]
