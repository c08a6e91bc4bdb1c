"""Comparisons of models on the same rows: paired tests, a table for the terminal, verdicts on regressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from emo.common.errors import ExitCode, UserError, nearest
from emo.common.text import align, counted, on_one_line

from ..icl.tasks import PAPER_ORDER
from ..results import stats
from ..results.directory import Lost, Model, TaskResult

ALPHA = 0.05
# Conditions that are digests, with a description. Other conditions are shown with their values.
DIGESTS = {
    "test_rows": "test rows (other data, or another --limit)",
    "pool_rows": "rows that demonstrations come from",
    "prompt": "prompts",
    "metrics": "filters or metrics",
    "encoder": "weights of the sentence model",
}


@dataclass(frozen=True)
class TaskDifference(stats.Paired):
    """The accuracies of two models on a task. direction: +1 or -1 if b is better or worse, else 0."""

    p_holm: float
    direction: int


@dataclass(frozen=True)
class MeanOfDifferences(stats.MeanDifference):
    """The mean of `TaskDifference` over tasks."""

    direction: int


@dataclass(frozen=True)
class MeasureDifference:
    """Two models on a task without accuracy. difference: measure of b minus measure of a."""

    difference: float
    interval: stats.Interval
    p: float
    p_holm: float
    direction: int  # as in TaskDifference


@dataclass(frozen=True)
class Comparison:
    """A model compared with its baseline, by task and on average."""

    model: str
    baseline: str
    tasks: dict[str, TaskDifference]
    refused: dict[str, str]  # task -> why it cannot be compared
    mean: MeanOfDifferences | None  # over `tasks`
    lost: dict[str, str]  # task -> how many prompts lost demonstrations or text to the context
    uneven: dict[str, str]  # the entries of `lost` in which rows lost more for one of the models
    measures: dict[str, MeasureDifference]

    @property
    def warning(self) -> str:
        """A warning about prompts that differ from what the settings say, or ""."""
        if self.uneven:
            return f"Not the same prompts: {'; '.join(self.uneven.values())}"
        return f"Shortened equally for both: {'; '.join(self.lost.values())}" if self.lost else ""


def compare_models(a: Model, b: Model, tasks: Sequence[str], alpha: float = ALPHA) -> Comparison:
    """Compare model b with baseline a on all tasks that both have, with Holm's correction over these tasks.

    Args:
        a: The baseline.
        b: The other model.
        tasks: Tasks to compare.
        alpha: Level of the tests. `direction` is +1 or -1 (b is better or worse) if the test rejects and the
            interval excludes zero, else 0.
    """
    counts = {}
    refused: dict[str, str] = {}
    lost: dict[str, str] = {}
    uneven: dict[str, str] = {}
    tests: dict[str, MeasureTest] = {}
    for task in tasks:
        first, second = (m.all_results.get(task) for m in (a, b))
        if first is None or second is None:
            continue
        try:
            require_same_rows(a, b, task, first, second)
            if "measure" not in first:
                counts[task] = _count_pairs(a, b, task)
            elif (test := _compare_measures(a, b, task)) is not None:
                tests[task] = test
        except UserError as error:
            refused[task] = str(error)
            continue
        of_both = a.records(task).lost, b.records(task).lost
        if any(any(row) for rows in of_both for row in rows):
            lost[task] = describe_lost(first["title"], {a.name: of_both[0], b.name: of_both[1]})
        if of_both[0] != of_both[1]:
            uneven[task] = lost[task]
    described, measures = _describe_tasks(counts, tests, alpha)
    mean = None
    if counts:
        overall = stats.mean_difference(list(counts.values()))
        direction = _direction(overall.difference, overall.interval, overall.p, alpha)
        mean = MeanOfDifferences(overall.difference, overall.interval, overall.p, direction)
    return Comparison(b.name, a.name, described, refused, mean, lost, uneven, measures)


def require_same_rows(a: Model, b: Model, task: str, first: TaskResult, second: TaskResult) -> None:
    """Raise UserError if the models' results on a task cannot be compared."""
    if reason := find_differences(first, second):
        raise UserError(reason, code="not-comparable")
    if ("measure" in first) != ("measure" in second) or a.records(task).rows != b.records(task).rows:
        raise UserError("their records have different rows", code="not-comparable")


def _count_pairs(a: Model, b: Model, task: str) -> np.ndarray:
    """Return `stats.count_pairs` of a task."""
    first = a.records(task)
    groups = [group for *_, group in first.rows] if a.results[task]["groups"] else None
    return stats.count_pairs(first.correct, b.records(task).correct, groups)


class MeasureTest(NamedTuple):
    """A measure of model b minus that of model a."""

    difference: float
    interval: stats.Interval
    p: float
    higher: bool  # whether a positive difference is better for b


def _compare_measures(a: Model, b: Model, task: str) -> MeasureTest | None:
    """Return the difference of a measure, or None if rows do not add up to it or are all in one cluster.

    Perplexities are compared by the difference of their logarithms, in nats per word, byte or row. Values
    from 0 to 1 are compared by random signs of clusters, because all clusters may have the same difference.
    """
    about = a.measured[task]["measure"]
    if not about["scale"] or about["higher_is_better"] is None:
        return None
    values: list[list[float]] = []
    estimates = []
    for model in (a, b):
        records = model.read_records(task)
        values.append([r["value"] for r in records])
        weights = [r["weight"] for r in records]
        clusters = [r["cluster"] if "cluster" in r else r["row"] for r in records]
        estimates.append(stats.estimate_measure(values[-1], weights, about["scale"], clusters))
    difference = estimates[1] - estimates[0]
    if (interval := difference.interval()) is None:
        return None
    higher = bool(about["higher_is_better"])
    if about.get("bounded"):
        return MeasureTest(*stats.compare_scores(values[0], values[1], list(map(str, clusters))), higher)
    return MeasureTest(difference.value, interval, difference.p_value(), higher)


def _describe_tasks(
    counts: dict[str, np.ndarray], tests: dict[str, MeasureTest], alpha: float
) -> tuple[dict[str, TaskDifference], dict[str, MeasureDifference]]:
    """Return the comparisons by task, of accuracies and of measures, with Holm's correction over both."""
    paired = {task: stats.compare_paired(count) for task, count in counts.items()}
    p_values = [p.p_mcnemar for p in paired.values()]
    adjusted = stats.holm(p_values + [test.p for test in tests.values()])
    measures = {}
    for (task, test), p_holm in zip(tests.items(), adjusted[len(paired) :], strict=True):
        direction = _direction(test.difference, test.interval, p_holm, alpha) * (1 if test.higher else -1)
        measures[task] = MeasureDifference(test.difference, test.interval, test.p, p_holm, direction)
    described = {}
    for (task, p), p_holm in zip(paired.items(), adjusted[: len(paired)], strict=True):
        direction = _direction(p.difference, p.interval, p_holm, alpha)
        if (p.only_b - p.only_a) * direction <= 0:  # rows and groups disagree
            direction = 0
        described[task] = TaskDifference(**vars(p), p_holm=p_holm, direction=direction)
    return described, measures


def describe_lost(title: str, lost: dict[str, list[Lost]]) -> str:
    """Return how many prompts of a task lost demonstrations or text to the context of each model.

    If the models have the same number of rows, it also states how many prompts differ between models.
    """
    counts = [
        f"{name} {sum(map(any, rows))} of {len(rows)} (at most {max(n for n, _ in rows)} each)"
        for name, rows in lost.items()
    ]
    differ = 0
    if len({len(rows) for rows in lost.values()}) == 1:
        differ = sum(len(set(row)) > 1 for row in zip(*lost.values(), strict=True))
    uneven = f"; {differ} differ between models" if differ else ""
    return f"{title}: prompts that lost demonstrations to the context: {', '.join(counts)}{uneven}"


def find_differences(a: TaskResult, b: TaskResult) -> str:
    """Return the conditions that prevent comparing two results of a task, or ""."""
    first, second = (result["conditions"]["compared"] for result in (a, b))
    versions = " and ".join(sorted({r["conditions"]["noted"]["prompt_version"] for r in (a, b)}))
    names = [n for n in sorted(first.keys() | second.keys()) if first.get(n) != second.get(n)]
    both = {name: f"{name}: {first.get(name)} and {second.get(name)}" for name in names}
    if "dtype" in both:
        both["dtype"] += " (set --dtype)"
    reasons = [f"different {DIGESTS[name]}" if name in DIGESTS else both[name] for name in names]
    return ", ".join(reasons) + (f" ({versions})" if "prompt" in names else "")


def _direction(difference: float, interval: stats.Interval, p: float, alpha: float = ALPHA) -> int:
    """Return +1 or -1 if test and interval agree that there is a difference, else 0."""
    if p >= alpha or interval.low <= 0 <= interval.high:
        return 0
    return 1 if difference > 0 else -1


def sort_tasks(tasks: set[str]) -> list[str]:
    """Return task names in the paper's order, followed by the others."""
    return [t for t in PAPER_ORDER if t in tasks] + sorted(tasks - set(PAPER_ORDER))


def require_comparison(a: Model, b: Model, only: Sequence[str] = (), alpha: float = ALPHA) -> Comparison:
    """Return `compare_models` on all common tasks, or on those in `only`.

    Raises UserError if there is no common task, if a task cannot be compared, or if `only` has an unknown
    name.
    """
    of_a, of_b = ({*model.results, *model.measures} for model in (a, b))
    for task in only:
        if task not in of_a | of_b:
            names = sort_tasks(of_a | of_b)
            raise UserError(
                f"{a.name} and {b.name} have no task {task}. {nearest(task, names)}", code="not-comparable"
            )
    tasks = [t for t in sort_tasks(of_a & of_b) if not only or t in only]
    if not tasks:
        raise UserError(
            f"{a.name} and {b.name} have no task in common{': ' * bool(only)}{', '.join(only)}",
            code="not-comparable",
        )
    comparison = compare_models(a, b, tasks, alpha)
    if comparison.refused:
        reasons = "; ".join(f"{task}: {reason}" for task, reason in comparison.refused.items())
        raise UserError(
            f"{a.name} and {b.name} cannot be compared: {reasons}. Evaluate both with the same settings.",
            code="not-comparable",
        )
    if not (comparison.tasks or comparison.measures):
        raise UserError(
            f"{a.name} and {b.name} have no metric that is a mean over several rows: {', '.join(tasks)}",
            code="not-comparable",
        )
    return comparison


class Verdict(NamedTuple):
    """Whether a model is worse than its baseline."""

    regressions: list[str]  # a sentence each
    summary: str
    missing: list[str]  # tasks without a usable result of both, and limits that no result can exceed
    uneven: str = ""  # tasks whose prompts lost more to the context of one of the models


def gate(verdicts: Sequence[Verdict]) -> int:
    """Return the exit code of --fail_on_regression, which depends only on stored results.

    Raises UserError if prompts differ between the models, and if no regression was found but results are
    missing.
    """
    if uneven := "; ".join(dict.fromkeys(verdict.uneven for verdict in verdicts if verdict.uneven)):
        raise UserError(
            f"no verdict: {uneven}. Evaluate both with the same --max_tokens, or a lower --num_fewshot.",
            code="lost-demonstrations",
        )
    if any(verdict.regressions for verdict in verdicts):
        return ExitCode.REGRESSION
    if missing := ", ".join(task for verdict in verdicts for task in verdict.missing):
        raise UserError(
            f"no verdict: missing {missing}. Evaluate both models on the same tasks, or name others.",
            code="no-verdict",
        )
    return ExitCode.DONE


def checkpoint_levels(count: int, final: int | None) -> list[float]:
    """Return the levels of the tests of `count` successive checkpoints, which sum to at most ALPHA.

    The probability of any false alarm in a run is then at most ALPHA, however many checkpoints follow. The
    k-th checkpoint gets 1 / (k (k + 1)) of half of ALPHA. The final export (number `final`) gets the other
    half.
    """
    return [ALPHA / 2 if k == final else ALPHA / 2 / ((k + 1) * (k + 2)) for k in range(count)]


def find_regression(
    a: Model, b: Model, max_drop: float | None = None, only: Sequence[str] = (), alpha: float = ALPHA
) -> Verdict:
    """Return the verdict whether b is worse than a.

    A task, or the mean over tasks, is worse if its 95 % interval lies below zero and its paired test rejects:
    McNemar's with Holm's correction for tasks, random signs for the mean. Raises UserError if the models
    cannot be compared.

    Args:
        a: The baseline.
        b: The other model.
        max_drop: The largest allowed drop of the mean in points, or None.
        only: The tasks that count. Empty: all common tasks.
        alpha: Level of the tests.
    """
    if a.name == b.name:
        raise UserError(f"{b.name} is compared with itself. Choose another baseline.", code="own-baseline")
    comparison = require_comparison(a, b, only, alpha)
    mean = comparison.mean
    reasons = [
        f"{task} {100 * c.difference:+.1f} points (p = {c.p_holm:.2g})"
        for task, c in comparison.tasks.items()
        if c.direction < 0
    ]
    for task, m in comparison.measures.items():
        if m.direction < 0:
            before, after = (model.measured[task]["measure"]["value"] for model in (a, b))
            values = f"{a.measured[task]['score']} from {before:.4g} to {after:.4g}"
            reasons.append(f"{task} {values} (p = {m.p_holm:.2g})")
    text = _format_difference(mean, " points ") if mean else "no accuracy"
    if mean and mean.direction < 0:
        reasons.append(f"mean {text} (p = {mean.p:.2g})")
    if mean and max_drop is not None and -100 * mean.difference > max_drop + 1e-9:  # rounding
        reasons.append(f"mean {text}, more than {max_drop:g} allowed")
    verdict = "regression: " + "; ".join(reasons) if reasons else "no regression"
    expected = set(only)
    for model in (a, b) if not only else ():
        expected |= {*model.results, *model.measures, *model.unreadable}
    missing = [
        f"{task} ({model.name})"
        for model in (a, b)
        for task in sort_tasks(expected - {*model.results, *model.measures})
    ]
    untested = sorted((a.measures.keys() & b.measures.keys()) - comparison.measures.keys())
    count = len(comparison.tasks) + len(comparison.measures)
    summary = f"{b.name} against {a.name} on {counted(count, 'task')}: {text}; {verdict}"
    if comparison.warning:
        summary = f"{comparison.warning}. {summary}"
    if untested:
        summary += f"; not tested, because the metric is not a mean over several rows: {', '.join(untested)}"
    if missing:
        summary += f"; not compared, because a result is missing: {', '.join(missing)}"
    missing += [f"a test of {task}" for task in untested if task in only]
    if max_drop is not None and mean is None:
        missing.append("an accuracy for --max_drop")
    return Verdict(reasons, summary, missing, "; ".join(comparison.uneven.values()))


def format_table(a: Model, b: Model, only: Sequence[str] = ()) -> str:
    """Return tables of both models' accuracies and measures. Raises UserError if they cannot be compared."""
    comparison = require_comparison(a, b, only)
    warning = [on_one_line(comparison.warning)] if comparison.warning else []
    tables = [_format_accuracies(a, b, comparison, comparison.mean)] if comparison.mean else []
    tables += [_format_measures(a, b, comparison)] if comparison.measures else []
    return "\n".join(warning) + "\n" * len(warning) + "\n\n".join(tables)


def _format_measures(a: Model, b: Model, comparison: Comparison) -> str:
    names = [on_one_line(m.name) for m in (a, b)]
    lines = [["task", "measure", "n", *names, "difference", "95 % interval", "p", "p Holm"]]
    for task, c in comparison.measures.items():
        result = a.measured[task]
        values = [f"{m.measured[task]['measure']['value']:.4g}" for m in (a, b)]
        interval = f"[{c.interval.low:+.4g}, {c.interval.high:+.4g}]"
        tests = [f"{c.p:.3g}", _starred(c.p_holm, c.direction)]
        cells = [str(result["n"]), *values, f"{c.difference:+.4g}", interval, *tests]
        lines.append([on_one_line(result["title"]), result["score"], *cells])
    note = (
        "Student's test for paired rows (passkeys: random signs), Holm over all tasks. Perplexities are "
        "compared by their logarithms."
    )
    return "\n".join([*align(lines, right=True), note])


def _format_accuracies(a: Model, b: Model, comparison: Comparison, mean: MeanOfDifferences) -> str:
    names = [on_one_line(m.name) for m in (a, b)]
    accuracies = []
    head = ["task", "n", *names, "difference", "95 % interval", *(f"only {n}" for n in names), "p", "p Holm"]
    lines = [head]
    for task, c in comparison.tasks.items():
        result = a.results[task]
        accuracies.append([m.results[task]["accuracy"] for m in (a, b)])
        counts = [str(c.only_a), str(c.only_b), f"{c.p_mcnemar:.3g}", _starred(c.p_holm, c.direction)]
        lines.append([on_one_line(result["title"]), str(result["n"]), *_figures(accuracies[-1], c), *counts])
    means = [sum(column) / len(accuracies) for column in zip(*accuracies, strict=True)]
    lines.append(["mean", "", *_figures(means, mean), "", "", _starred(mean.p, mean.direction), ""])
    text = align(lines, right=True)
    rule = "-" * max(map(len, text))
    note = f"* differs: p < {ALPHA} and an interval without zero "
    note += "(tasks: exact McNemar, Holm over the tasks; mean: random signs)"
    return "\n".join([text[0], rule, *text[1:-1], rule, text[-1], note])


def _figures(accuracies: Sequence[float], entry: TaskDifference | MeanOfDifferences) -> list[str]:
    return [*(f"{100 * value:.1f}" for value in accuracies), *_format_difference(entry, "\t").split("\t")]


def _starred(p: float, direction: int) -> str:
    return f"{p:.3g}{' *' * abs(direction)}"


def _format_difference(entry: TaskDifference | MeanOfDifferences, separator: str) -> str:
    low, high = 100 * entry.interval.low, 100 * entry.interval.high
    return f"{100 * entry.difference:+.1f}{separator}[{low:+.1f}, {high:+.1f}]"
