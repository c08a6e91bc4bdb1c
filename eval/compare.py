"""Models side by side on the same rows: paired tests, a table for the terminal, verdicts on regressions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import UserError
from eval import stats, store
from eval.icl.tasks import PAPER_ORDER
from eval.report.views import SAMPLES, require_views

ALPHA = 0.05


@dataclass
class Model:
    """One evaluated model: its description, its result per task, its text and its training log."""

    name: str
    description: dict[str, Any]
    results: dict[str, dict[str, Any]]
    keys: dict[str, str]
    out: Path
    samples: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """step, tokens, objective, run: as far as the trainer left them."""
        return self.description["facts"]

    def records(self, task: str) -> list[dict[str, Any]]:
        """Per-row records of a task, in row order."""
        return store.read_records(self.out, self.keys[task], self.results[task]["n"])


def compare_models(models: list[Model], baseline: str, tasks: list[str]) -> list[dict[str, Any]]:
    """Every model against `baseline` on the same rows of each task; Holm over a model's tasks."""
    first = next(m for m in models if m.name == baseline)
    comparisons = []
    for other in models:
        if other is first:
            continue
        family = []
        for task in tasks:
            if task in first.results and task in other.results:
                found = compare_task(first, other, task)
                if found is not None:
                    family.append({"model": other.name, "baseline": baseline, "task": task, **found})
        for item, p in zip(family, stats.holm([f["p_mcnemar"] for f in family]), strict=True):
            item["p_holm"] = p
        comparisons += family
    return comparisons


def compare_task(a: Model, b: Model, task: str) -> dict[str, Any] | None:
    """Paired statistics of two models, or None when they were not asked the same rows."""
    first, second = a.records(task), b.records(task)
    asked = [[(r["row"], r["gold"], r["group"]) for r in records] for records in (first, second)]
    if asked[0] != asked[1]:
        return None
    right_a, right_b = ([r["prediction"] == r["gold"] for r in records] for records in (first, second))
    groups = [r["group"] for r in first] if a.results[task]["groups"] else None
    return stats.as_dict(stats.paired(right_a, right_b, groups))


def read_models(outs: Sequence[Path]) -> list[Model]:
    """All models evaluated under some results directories. UserError when one name stands for two."""
    models = [_model(out, *view) for out in outs for view in require_views(out)]
    names = [m.name for m in models]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UserError(f"model {twice!r} stands in two directories; evaluate one under another --name")
    return models


def _model(out: Path, description: dict[str, Any], found: dict[str, dict[str, Any]]) -> Model:
    samples_file = out / "models" / description["name"] / SAMPLES
    samples = json.loads(samples_file.read_text()) if samples_file.is_file() else {"samples": []}
    current = samples.get("weights") == description["weights"]
    return Model(
        name=description["name"],
        description=description,
        results={task: view["result"] for task, view in found.items()},
        keys={task: view["key"] for task, view in found.items()},
        out=out,
        samples=samples["samples"] if current else [],
    )


def pick(models: list[Model], name: str) -> Model:
    """The model called `name`, or UserError with the names there are."""
    for model in models:
        if model.name == name:
            return model
    raise UserError(f"no results of a model {name!r}; there are: {', '.join(m.name for m in models)}")


def in_order(tasks: set[str]) -> list[str]:
    """Task names in the paper's order, others after them."""
    return [t for t in PAPER_ORDER if t in tasks] + sorted(tasks - set(PAPER_ORDER))


@dataclass(frozen=True)
class Verdict:
    """Whether a model is worse than its baseline."""

    regressions: list[str]  # one sentence each
    summary: str


def regression(a: Model, b: Model, max_drop: float | None = None) -> Verdict:
    """Is b worse than a? A task counts when its exact McNemar test says so after Holm's correction, the mean
    when its 95 % interval lies below zero. max_drop: the mean may also not fall by more points than this.
    """
    if a is b:
        return Verdict([], f"{b.name} is its own baseline; no regression")
    tasks = in_order(set(a.results) & set(b.results))
    if not tasks:
        raise UserError(f"{a.name} and {b.name} have no task in common")
    found = compare_models([a, b], a.name, tasks)
    if not found:
        raise UserError(f"{a.name} and {b.name} were not asked the same rows; use the same --limit for both")
    reasons = [
        f"{c['task']} {100 * c['difference']:+.1f} points (p = {c['p_holm']:.2g})"
        for c in found
        if c["difference"] < 0 and c["p_holm"] < ALPHA
    ]
    mean, low, high = mean_difference(found)
    if high < 0:
        reasons.append(f"mean {100 * mean:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]")
    if max_drop is not None and 100 * mean < -max_drop:
        reasons.append(f"mean {100 * mean:+.1f} points, more than {max_drop:g} allowed")
    word = "regression: " + "; ".join(reasons) if reasons else "no regression"
    return Verdict(
        reasons, f"{b.name} against {a.name} on {len(found)} tasks: {100 * mean:+.1f} points; {word}"
    )


def mean_difference(comparisons: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Mean difference over tasks with its interval; half-widths of independent tasks add in squares."""
    n = len(comparisons)
    mean = sum(c["difference"] for c in comparisons) / n
    down = sum((c["difference"] - c["interval"]["low"]) ** 2 for c in comparisons) ** 0.5 / n
    up = sum((c["interval"]["high"] - c["difference"]) ** 2 for c in comparisons) ** 0.5 / n
    return mean, mean - down, mean + up


def table(a: Model, b: Model) -> str:
    """Both models' accuracies, task by task, for the terminal."""
    tasks = in_order(set(a.results) & set(b.results))
    found = {c["task"]: c for c in compare_models([a, b], a.name, tasks)}
    only = [f"only {m.name}" for m in (a, b)]
    lines = [["task", "n", a.name, b.name, "difference", "95 % interval", *only, "p", "p Holm"]]
    for task in tasks:
        c, results = found.get(task), [m.results[task] for m in (a, b)]
        line = [results[0]["title"], str(results[1]["n"]), *(f"{100 * r['accuracy']:.1f}" for r in results)]
        if c is None:
            line += ["not the same rows", "", "", "", "", ""]
        else:
            line += [f"{100 * c['difference']:+.1f}", _interval(c["interval"]["low"], c["interval"]["high"])]
            line += [str(c["only_a"]), str(c["only_b"]), f"{c['p_mcnemar']:.3g}", f"{c['p_holm']:.3g}"]
            line[-1] += " *" if c["p_holm"] < ALPHA else ""
        lines.append(line)
    if found:
        mean, low, high = mean_difference(list(found.values()))
        of = [100 * sum(m.results[t]["accuracy"] for t in found) / len(found) for m in (a, b)]
        shown = [f"{of[0]:.1f}", f"{of[1]:.1f}", f"{100 * mean:+.1f}", _interval(low, high)]
        lines.append(["mean", "", *shown, "", "", "", ""])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        text.append("  ".join([first.strip().ljust(widths[0]), *rest]))
    rule = "-" * len(text[0])
    note = f"* differs at {ALPHA} (exact McNemar, Holm over the tasks)"
    return "\n".join([text[0], rule, *text[1:], rule, note])


def _interval(low: float, high: float) -> str:
    return f"[{100 * low:+.1f}, {100 * high:+.1f}]"
