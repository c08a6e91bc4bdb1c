"""A judgement as a few lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Count -> how a reader is told about it.
REMARKS = {
    "changed": "verdicts change with the order; they count as ties",
    "unreadable": "pairs have an unreadable verdict; they are left out",
    "replies_cut_off": "replies were cut off before their end (--tokens)",
    "identical": "pairs have the same answer twice: ties, not asked",
    "cut": "pairs did not fit into the judge's context; both answers were cut alike",
    "no_room": "pairs do not fit even without their answers; they are left out",
    "empty_a": "answers of A are empty",
    "empty_b": "answers of B are empty",
}


def lines(numbers: dict[str, Any]) -> Iterator[str]:
    """The numbers of `results.summary`, the most important first."""
    parties = f"{numbers['b']} against {numbers['a']}, judged by {numbers['by']} ({numbers['judge']})"
    if not numbers["read"]:
        yield f"{parties}: none of the verdicts on {numbers['pairs']} pairs can be read"
    else:
        shares = ", ".join(f"{name} {_percent(numbers[name])}" for name in ("win", "tie", "loss"))
        yield f"{parties}: {shares}"
        yield _rate(numbers)
    for name, text in remarks(numbers):
        yield f"  {numbers['counts'][name]} {text}"
    if numbers["consistency"] is not None:
        yield f"  the same verdict in both orders: {100 * numbers['consistency']:.2f} %"
    if numbers["human"] is not None:
        yield f"  {_human(numbers['human'])}"


def _rate(numbers: dict[str, Any]) -> str:
    controlled = numbers["length_controlled"]
    at_equal = "" if controlled is None else f"; at equal lengths {100 * controlled:.2f}"
    rate, lengths = numbers["win_rate"], numbers["lengths"]
    return (
        f"  win rate {100 * rate['value']:.2f} [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}] on "
        f"{numbers['read']} of {numbers['pairs']} pairs{at_equal}; characters {lengths['b']:.0f} against "
        f"{lengths['a']:.0f}"
    )


def remarks(numbers: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) of the counts that are not zero."""
    return ((name, text) for name, text in REMARKS.items() if numbers["counts"][name])


def _percent(share: dict[str, float]) -> str:
    return f"{100 * share['value']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def _human(human: dict[str, Any]) -> str:
    parts = [f"agreement with {human['raters']} human labels a pair: {_percent(human['agreement'])}"]
    if human["unreadable_as_ties"] != human["agreement"]["value"]:
        parts.append(f"with unreadable verdicts as ties {100 * human['unreadable_as_ties']:.1f}")
    if human["kappa"] is not None:
        parts.append(f"Cohen's kappa {human['kappa']:.3f}")
    if human["kappa_of_people"] is not None:
        parts.append(f"people among themselves (Fleiss) {human['kappa_of_people']:.3f}")
    return "; ".join(parts)
