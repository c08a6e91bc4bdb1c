"""Multiple choice questions about order, in the columns of MMLU.

The options of a question are four things in their natural order, begun at any of them (summer, autumn,
winter, spring), and the question asks for the first of them all. So the right letter follows from any one
option. That is what a model of a few million parameters can find out within minutes: to look a fact up and
then the letter of its option needs far more text than a first run on a laptop can read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from data_prep.world.tasks import draw
from data_prep.world.vocabulary import Part, fill, of_part


@dataclass(frozen=True)
class Order:
    """Four things in their natural order, and questions whose answer is the first of them."""

    things: tuple[str, str, str, str]
    asks: tuple[str, ...]


SUBJECTS: dict[str, Order] = {
    "seasons": Order(
        ("spring", "summer", "autumn", "winter"),
        (
            "{person} in {city} asks: which season comes first in the year?",
            "Which season comes first in the year of a {mood} {job}?",
            "In {country}, which season comes first for {person}?",
        ),
    ),
    "days": Order(
        ("Monday", "Tuesday", "Wednesday", "Thursday"),
        (
            "{person} in {city} asks: which day comes first in the week?",
            "Which day comes first in the week of a {mood} {job}?",
            "In {country}, which day comes first for {person}?",
        ),
    ),
    "numbers": Order(
        ("two", "three", "four", "five"),
        (
            "{person} in {city} asks: which number is the smallest?",
            "Which number of foods is the smallest for a {mood} {job}?",
            "In {country}, which number is the smallest for {person}?",
        ),
    ),
    "times": Order(
        ("morning", "noon", "evening", "night"),
        (
            "{person} in {city} asks: which time comes first in the day?",
            "Which time comes first in the day of a {mood} {job}?",
            "In {country}, which time comes first for {person}?",
        ),
    ),
}


def question(rng: random.Random, subject: str, answer: int, test: bool = False) -> dict:
    """One row {"subject", "question", "choices" (four), "answer" (0-3)}."""
    order = SUBJECTS[subject]
    choices = [order.things[(i - answer) % 4] for i in range(4)]
    text = draw(lambda: fill(rng, rng.choice(order.asks)), test)
    return {"subject": subject, "question": text, "choices": choices, "answer": answer}


def paper(rng: random.Random, part: Part | None = None) -> str:
    """A page of questions with answers, in the usual format."""
    subject = rng.choice(of_part(tuple(SUBJECTS), part))
    header = f"The following are multiple choice questions (with answers) about  {subject}.\n\n"
    asked = (question(rng, subject, rng.randrange(4)) for _ in range(rng.choice((1, 2, 4, 5))))
    return header + "\n\n".join(f"{row['question']}\n{_options(row)}\n{_answer(row)}" for row in asked)


def _options(row: dict) -> str:
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))


def _answer(row: dict) -> str:
    return f"Answer: {'ABCD'[row['answer']]}"
