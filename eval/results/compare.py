"""Models side by side on the same rows: paired tests, a table for the terminal, verdicts on regressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from emo.common.errors import ExitCode, UserError, nearest
from emo.common.text import counted, on_one_line

from ..icl.tasks import PAPER_ORDER
from . import stats
from .directory import Model

ALPHA = 0.05
# Conditions whose digests are compared, for a reader; others are shown with their values.
DIGESTS = {
    "test_rows": "test rows (other data, or another --limit)",
    "pool_rows": "rows that demonstrations come from",
    "prompt": "prompts",
    "encoder": "weights of the sentence model",
}


@dataclass(frozen=True)
class Comparison:
    """A model against its baseline, task by task and on average."""

    model: str
    baseline: str
    tasks: dict[str, dict[str, Any]]  # task -> stats.Paired, p_holm, direction
    refused: dict[str, str]  # task -> why it cannot be compared
    mean: dict[str, Any] | None  # stats.MeanDifference, direction; over `tasks`
    lost: dict[str, str]  # task -> how many prompts lost demonstrations or text to the context
    uneven: dict[str, str]  # those of `lost` where rows lost more for one model than for the other

    @property
    def warning(self) -> str:
        """Return what a reader must know first: prompts that are not what the settings say."""
        if self.uneven:
            return f"Not the same prompts: {'; '.join(self.uneven.values())}"
        return f"Shortened alike for both: {'; '.join(self.lost.values())}" if self.lost else ""


def compare_pair(a: Model, b: Model, tasks: Sequence[str], alpha: float = ALPHA) -> Comparison:
    """Return model b against a on the rows of each task that both have; Holm's correction over these tasks.

    alpha: the level of the tests.
    direction: +1 / -1 where b is better / worse for sure: the test rejects and the interval excludes zero.
    """
    pairs = {}
    refused: dict[str, str] = {}
    lost: dict[str, str] = {}
    uneven: dict[str, str] = {}
    for task in (t for t in tasks if t in a.results and t in b.results):
        try:
            if reason := differing(a.results[task], b.results[task]):
                raise UserError(reason)
            (rows, first), (others, second) = a.outcomes(task), b.outcomes(task)
            if rows != others:
                raise UserError("their records are of different rows")
            groups = [group for *_, group in rows] if a.results[task]["groups"] else None
            pairs[task] = stats.pairs(first, second, groups)
            both = a.lost(task), b.lost(task)
            if any(any(row) for rows in both for row in rows):
                lost[task] = shortened(a.results[task]["title"], {a.name: both[0], b.name: both[1]})
            if both[0] != both[1]:
                uneven[task] = lost[task]
        except UserError as error:
            refused[task] = str(error)
    paired = {task: stats.paired(p) for task, p in pairs.items()}
    adjusted = stats.holm([p.p_mcnemar for p in paired.values()])
    described = {}
    for (task, p), p_holm in zip(paired.items(), adjusted, strict=True):
        direction = _direction(p.difference, p.interval, p_holm, alpha)
        if (p.only_b - p.only_a) * direction <= 0:  # rows and groups disagree
            direction = 0
        described[task] = asdict(p) | {"p_holm": p_holm, "direction": direction}
    mean = None
    if pairs:
        over = stats.mean_difference(list(pairs.values()))
        mean = asdict(over) | {"direction": _direction(over.difference, over.interval, over.p, alpha)}
    return Comparison(b.name, a.name, described, refused, mean, lost, uneven)


def shortened(title: str, lost: dict[str, list[tuple[int, int]]]) -> str:
    """Return how many prompts of a task lost demonstrations or text to each model's context.

    Says how many prompts lost different ones, where the models have the same number of rows.
    """
    counts = [
        f"{name} {sum(map(any, rows))} of {len(rows)} (at most {max(n for n, _ in rows)} each)"
        for name, rows in lost.items()
    ]
    differ = 0
    if len({len(rows) for rows in lost.values()}) == 1:
        differ = sum(len(set(of_row)) > 1 for of_row in zip(*lost.values(), strict=True))
    uneven = f"; {differ} differ between models" if differ else ""
    return f"{title}: prompts that lost demonstrations to the context: {', '.join(counts)}{uneven}"


def differing(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Return what keeps two results of a task from being compared; empty when nothing does."""
    first, second = (result["conditions"]["compared"] for result in (a, b))
    versions = " and ".join(sorted({r["conditions"]["noted"]["prompt_version"] for r in (a, b)}))
    names = [n for n in sorted(first.keys() | second.keys()) if first.get(n) != second.get(n)]
    both = {name: f"{name}: {first.get(name)} and {second.get(name)}" for name in names}
    reasons = [f"other {DIGESTS[name]}" if name in DIGESTS else both[name] for name in names]
    return ", ".join(reasons) + (f" ({versions})" if "prompt" in names else "")


def _direction(difference: float, interval: stats.Interval, p: float, alpha: float = ALPHA) -> int:
    """Return +1 / -1 when test and interval agree that there is a difference, else 0."""
    if p >= alpha or interval.low <= 0 <= interval.high:
        return 0
    return 1 if difference > 0 else -1


def in_order(tasks: set[str]) -> list[str]:
    """Return task names in the paper's order, others after them."""
    return [t for t in PAPER_ORDER if t in tasks] + sorted(tasks - set(PAPER_ORDER))


def compare_alike(a: Model, b: Model, only: Sequence[str] = (), alpha: float = ALPHA) -> Comparison:
    """Return `compare_pair` on all common tasks, or on those in `only`.

    UserError when there is none, when one cannot be compared, and for a name that is no task of either.
    """
    for task in only:
        if task not in a.results | b.results:
            names = in_order({*a.results, *b.results})
            raise UserError(f"{a.name} and {b.name} have no task {task}; {nearest(task, names)}")
    tasks = [t for t in in_order(a.results.keys() & b.results.keys()) if not only or t in only]
    if not tasks:
        raise UserError(f"{a.name} and {b.name} have no task in common{': ' * bool(only)}{', '.join(only)}")
    comparison = compare_pair(a, b, tasks, alpha)
    if comparison.refused:
        reasons = "; ".join(f"{task}: {reason}" for task, reason in comparison.refused.items())
        raise UserError(f"{a.name} and {b.name} cannot be compared: {reasons}; evaluate both alike")
    return comparison


class Verdict(NamedTuple):
    """The verdict whether a model is worse than its baseline."""

    regressions: list[str]  # one sentence each
    summary: str
    missing: list[str]  # tasks without a usable result of both
    uneven: str = ""  # which tasks were not asked alike, as prompts lost more to one model's context


def gate(verdicts: Sequence[Verdict]) -> int:
    """Return the exit code of --fail_on_regression, which depends on stored results alone.

    Raises UserError when nothing is worse but results are missing: an absent result is no good one. Likewise
    where prompts were not the same for both models, whatever their results.
    """
    if uneven := "; ".join(dict.fromkeys(verdict.uneven for verdict in verdicts if verdict.uneven)):
        problem = f"no verdict: {uneven}; evaluate both with the same --max_tokens, or a lower --num_fewshot"
        raise UserError(problem, code="lost-demonstrations")
    if any(verdict.regressions for verdict in verdicts):
        return ExitCode.REGRESSION
    if missing := ", ".join(task for verdict in verdicts for task in verdict.missing):
        problem = f"no verdict without {missing}; evaluate both models on the same tasks"
        raise UserError(problem, code="no-verdict")
    return ExitCode.DONE


def levels(count: int, final: int | None) -> list[float]:
    """Return the level of each of `count` checkpoints' tests, in their order; together at most ALPHA.

    However many checkpoints follow, a run in which nothing is worse is called worse with a probability of
    ALPHA at most: the k-th checkpoint gets 1 / (k (k + 1)) of half of it, the final export (number `final`)
    the other half.
    """
    return [ALPHA / 2 if k == final else ALPHA / 2 / ((k + 1) * (k + 2)) for k in range(count)]


def regression(
    a: Model, b: Model, max_drop: float | None = None, only: Sequence[str] = (), alpha: float = ALPHA
) -> Verdict:
    """Return the verdict whether b is worse than a.

    A task counts, and so does the mean over tasks, when its 95 % interval lies below zero and its paired test
    rejects (McNemar's with Holm's correction for tasks, random signs for the mean).
    alpha: the level of these tests.
    max_drop: the mean may also not fall by more points than this. only: tasks that count alone; mean and
    correction are over them. UserError when they cannot be compared.
    """
    if a.name == b.name:
        raise UserError(f"{b.name} is its own baseline; name another model", code="own-baseline")
    comparison = compare_alike(a, b, only, alpha)
    assert comparison.mean is not None
    reasons = [
        f"{task} {100 * c['difference']:+.1f} points (p = {c['p_holm']:.2g})"
        for task, c in comparison.tasks.items()
        if c["direction"] < 0
    ]
    drop = -100 * comparison.mean["difference"]
    mean = f"mean {_difference(comparison.mean, ' points ')}"
    if comparison.mean["direction"] < 0:
        reasons.append(f"{mean} (p = {comparison.mean['p']:.2g})")
    if max_drop is not None and drop > max_drop:
        reasons.append(f"{mean}, more than {max_drop:g} allowed")
    word = "regression: " + "; ".join(reasons) if reasons else "no regression"
    count = counted(len(comparison.tasks), "task")
    expected = set(only) or {*a.results, *b.results, *a.unreadable, *b.unreadable}
    missing = [f"{task} ({m.name})" for m in (a, b) for task in in_order(expected - {*m.results})]
    summary = f"{b.name} against {a.name} on {count}: {mean.removeprefix('mean ')}; {word}"
    if comparison.warning:
        summary = f"{comparison.warning}. {summary}"
    if missing:
        summary += f"; not compared, for want of a result: {', '.join(missing)}"
    return Verdict(reasons, summary, missing, "; ".join(comparison.uneven.values()))


def table(a: Model, b: Model, only: Sequence[str] = ()) -> str:
    """Return both models' accuracies for the terminal. UserError when they cannot be compared."""
    comparison = compare_alike(a, b, only)
    names, levels = [on_one_line(m.name) for m in (a, b)], []
    head = ["task", "n", *names, "difference", "95 % interval", *(f"only {n}" for n in names), "p", "p Holm"]
    lines = [head]
    for task, c in comparison.tasks.items():
        result = a.results[task]
        levels.append([m.results[task]["accuracy"] for m in (a, b)])
        counts = [str(c["only_a"]), str(c["only_b"]), f"{c['p_mcnemar']:.3g}", _starred(c["p_holm"], c)]
        lines.append([on_one_line(result["title"]), str(result["n"]), *_figures(levels[-1], c), *counts])
    mean: Any = comparison.mean
    means = [sum(column) / len(levels) for column in zip(*levels, strict=True)]
    lines.append(["mean", "", *_figures(means, mean), "", "", _starred(mean["p"], mean), ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []  # the first column to the left, the others to the right
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        text.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    rule = "-" * max(map(len, text))
    note = f"* differs: p < {ALPHA} and an interval without zero "
    note += "(tasks: exact McNemar, Holm over the tasks; mean: random signs)"
    warning = [on_one_line(comparison.warning)] if comparison.warning else []
    return "\n".join([*warning, text[0], rule, *text[1:-1], rule, text[-1], note])


def _figures(accuracies: Sequence[float], entry: dict[str, Any]) -> list[str]:
    return [*(f"{100 * value:.1f}" for value in accuracies), *_difference(entry, "\t").split("\t")]


def _starred(p: float, entry: dict[str, Any]) -> str:
    return f"{p:.3g}{' *' * abs(entry['direction'])}"


def _difference(entry: dict[str, Any], between: str) -> str:
    low, high = (100 * entry["interval"][end] for end in ("low", "high"))
    return f"{100 * entry['difference']:+.1f}{between}[{low:+.1f}, {high:+.1f}]"
