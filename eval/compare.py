"""Models side by side on the same rows: paired tests, a table for the terminal, verdicts on regressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from emo.common.errors import ExitCode, UserError, nearest
from emo.common.text import counted, on_one_line
from emo.eval import stats
from emo.eval.icl.tasks import PAPER_ORDER
from emo.eval.results import Model

ALPHA = 0.05
# What two results must have in common, and how a reader would say it. Digests are compared, not shown.
DIGESTS = {
    "test_rows": "test rows (other data, or another --limit)",
    "pool_rows": "rows that demonstrations come from",
    "prompt": "prompts",
    "encoder": "weights of the sentence model",
}
OPTIONS = {"max_tokens": "--max_tokens", "scorer": "version of the scorer"}


@dataclass(frozen=True)
class Comparison:
    """A model against its baseline, task by task and on average."""

    model: str
    baseline: str
    tasks: dict[str, dict[str, Any]]  # task -> stats.Paired, p_holm, direction
    refused: dict[str, str]  # task -> why it cannot be compared
    mean: dict[str, Any] | None  # stats.MeanDifference, direction; over `tasks`


def compare_pair(a: Model, b: Model, tasks: Sequence[str]) -> Comparison:
    """Return model b against a on the rows of each task that both have; Holm's correction over these tasks.

    direction: +1 / -1 where b is better / worse for sure: the test rejects and the interval excludes zero.
    """
    pairs: dict[str, stats.Pairs] = {}
    refused: dict[str, str] = {}
    for task in (t for t in tasks if t in a.results and t in b.results):
        reason = differing(a.results[task], b.results[task])
        try:
            first, second = ([], []) if reason else (a.outcomes(task), b.outcomes(task))
        except UserError as error:
            reason = str(error)
        if not reason and [x[:3] for x in first] != [x[:3] for x in second]:
            reason = "their records are of different rows"
        if reason:
            refused[task] = reason
        else:
            groups = [x.group for x in first] if a.results[task]["groups"] else None
            pairs[task] = stats.pairs([x.right for x in first], [x.right for x in second], groups)
    paired = {task: stats.paired(p) for task, p in pairs.items()}
    adjusted = stats.holm([p.p_mcnemar for p in paired.values()])
    described = {}
    for (task, p), p_holm in zip(paired.items(), adjusted, strict=True):
        direction = _direction(p.difference, p.interval, p_holm)
        if (p.only_b - p.only_a) * direction <= 0:  # rows and groups disagree
            direction = 0
        described[task] = asdict(p) | {"p_holm": p_holm, "direction": direction}
    mean = None
    if pairs:
        over = stats.mean_difference(list(pairs.values()))
        mean = asdict(over) | {"direction": _direction(over.difference, over.interval, over.p)}
    return Comparison(b.name, a.name, described, refused, mean)


def differing(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Return what keeps two results of a task from being compared; empty when nothing does."""
    first, second = (result["conditions"]["compared"] for result in (a, b))
    reasons = []
    for name in sorted(first.keys() | second.keys()):
        values = first.get(name), second.get(name)
        if values[0] == values[1]:
            continue
        both = " and ".join("not set" if value is None else str(value) for value in values)
        reason = f"other {DIGESTS[name]}" if name in DIGESTS else f"{OPTIONS.get(name, name)}: {both}"
        versions = [r["conditions"]["noted"].get("prompt_version") for r in (a, b)]
        if name == "prompt" and versions[0] != versions[1]:
            reason += f" ({versions[0]} and {versions[1]})"
        reasons.append(reason)
    return ", ".join(reasons)


def _direction(difference: float, interval: stats.Interval, p: float) -> int:
    """+1 / -1 when test and interval agree that there is a difference, else 0."""
    if p >= ALPHA or interval.low <= 0 <= interval.high:
        return 0
    return 1 if difference > 0 else -1


def in_order(tasks: set[str]) -> list[str]:
    """Task names in the paper's order, others after them."""
    return [t for t in PAPER_ORDER if t in tasks] + sorted(tasks - set(PAPER_ORDER))


def compare_alike(a: Model, b: Model, only: Sequence[str] = ()) -> Comparison:
    """Return `compare_pair` on all common tasks, or on those that are named.

    UserError when there is none, when one cannot be compared, and for a name that is no task of either.
    """
    names = set(a.results) | set(b.results)
    for task in only:
        if task not in names:
            raise UserError(f"{a.name} and {b.name} have no task {task}; {nearest(task, in_order(names))}")
    tasks = [t for t in in_order(set(a.results) & set(b.results)) if not only or t in only]
    if not tasks:
        raise UserError(f"{a.name} and {b.name} have no task in common{': ' * bool(only)}{', '.join(only)}")
    comparison = compare_pair(a, b, tasks)
    if comparison.refused:
        reasons = "; ".join(f"{task}: {reason}" for task, reason in comparison.refused.items())
        raise UserError(f"{a.name} and {b.name} cannot be compared: {reasons}; evaluate both alike")
    return comparison


@dataclass(frozen=True)
class Verdict:
    """The verdict whether a model is worse than its baseline."""

    regressions: list[str]  # one sentence each
    summary: str
    missing: list[str] = field(default_factory=list)  # tasks without a usable result of both


def gate(verdicts: Sequence[Verdict]) -> int:
    """Return the exit code of --fail_on_regression, which depends on stored results alone.

    Raises UserError when nothing is worse but results are missing: an absent result is no good one.
    """
    if any(verdict.regressions for verdict in verdicts):
        return ExitCode.REGRESSION
    missing = [task for verdict in verdicts for task in verdict.missing]
    if missing:
        problem = f"no verdict without {', '.join(missing)}; evaluate both models on the same tasks"
        raise UserError(problem, code="no-verdict")
    return ExitCode.DONE


def regression(a: Model, b: Model, max_drop: float | None = None, only: Sequence[str] = ()) -> Verdict:
    """Is b worse than a? A task counts, and so does the mean over tasks, when its 95 % interval lies below
    zero and its paired test rejects (McNemar's with Holm's correction for tasks, random signs for the mean).
    max_drop: the mean may also not fall by more points than this. only: tasks that count alone; mean and
    correction are over them. UserError when they cannot be compared.
    """
    if a.name == b.name:
        raise UserError(f"{b.name} is its own baseline; name another model", code="own-baseline")
    comparison = compare_alike(a, b, only)
    assert comparison.mean is not None
    reasons = [
        f"{task} {100 * c['difference']:+.1f} points (p = {c['p_holm']:.2g})"
        for task, c in comparison.tasks.items()
        if c["direction"] < 0
    ]
    mean, interval = 100 * comparison.mean["difference"], _interval(comparison.mean["interval"])
    if comparison.mean["direction"] < 0:
        reasons.append(f"mean {mean:+.1f} points {interval} (p = {comparison.mean['p']:.2g})")
    if max_drop is not None and mean < -max_drop:
        reasons.append(f"mean {mean:+.1f} points, more than {max_drop:g} allowed")
    word = "regression: " + "; ".join(reasons) if reasons else "no regression"
    count = counted(len(comparison.tasks), "task")
    expected = set(only) or {*a.results, *b.results, *a.unreadable, *b.unreadable}
    missing = [f"{task} ({m.name})" for m in (a, b) for task in in_order(expected - {*m.results})]
    summary = f"{b.name} against {a.name} on {count}: {mean:+.1f} points {interval}; {word}"
    if missing:
        summary += f"; not compared, for want of a result: {', '.join(missing)}"
    return Verdict(reasons, summary, missing)


def table(a: Model, b: Model, only: Sequence[str] = ()) -> str:
    """Return both models' accuracies for the terminal. UserError when they cannot be compared."""
    comparison = compare_alike(a, b, only)
    names = [on_one_line(m.name) for m in (a, b)]
    head = ["task", "n", *names, "difference", "95 % interval", *(f"only {n}" for n in names), "p", "p Holm"]
    lines, levels = [head], []
    for task, c in comparison.tasks.items():
        result = a.results[task]
        levels.append([m.results[task]["accuracy"] for m in (a, b)])
        counts = [str(c["only_a"]), str(c["only_b"]), f"{c['p_mcnemar']:.3g}"]
        p_holm = f"{c['p_holm']:.3g}{' *' * abs(c['direction'])}"
        lines.append(
            [on_one_line(result["title"]), str(result["n"]), *_figures(levels[-1], c), *counts, p_holm]
        )
    mean: Any = comparison.mean
    means = [sum(column) / len(levels) for column in zip(*levels, strict=True)]
    p = f"{mean['p']:.3g}{' *' * abs(mean['direction'])}"
    lines.append(["mean", "", *_figures(means, mean), "", "", p, ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []  # the first column to the left, the others to the right
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        text.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    rule = "-" * max(map(len, text))
    note = f"* differs: p < {ALPHA} and an interval without zero "
    note += "(tasks: exact McNemar, Holm over the tasks; mean: random signs)"
    return "\n".join([text[0], rule, *text[1:-1], rule, text[-1], note])


def _figures(accuracies: Sequence[float], entry: dict[str, Any]) -> list[str]:
    difference = f"{100 * entry['difference']:+.1f}"
    return [*(f"{100 * value:.1f}" for value in accuracies), difference, _interval(entry["interval"])]


def _interval(interval: dict[str, float]) -> str:
    return f"[{100 * interval['low']:+.1f}, {100 * interval['high']:+.1f}]"
