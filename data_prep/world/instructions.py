"""Instructions about the small world and their answers, in the columns of Alpaca."""

from __future__ import annotations

import random
from collections.abc import Callable

from data_prep.world.stories import animal, day, journey, letter, lost, portrait
from data_prep.world.tasks import LABELS, NAMES, draw, sentence
from data_prep.world.vocabulary import (
    ABBREVIATIONS,
    ANIMALS,
    CAPITALS,
    HOMES,
    KINDS,
    PEOPLE,
    WORKPLACES,
    fill,
)

Example = tuple[str, str, str]  # instruction, input, output

_ASKS = {
    "sst2": "Is this review positive or negative?",
    "cr": "Does the writer like the product? Say positive or negative.",
    "rotten_tomatoes": "Is this review of a film positive or negative?",
    "tweet_emotion": "Which emotion does this message show?",
    "trec": "What is this question about?",
    "subj": "Is this sentence objective or subjective?",
    "ag_news": "What is the topic of this news?",
}


def _classify(rng: random.Random) -> Example:
    task = rng.choice(tuple(LABELS))
    label = rng.choice(LABELS[task])
    about = "about " if task in ("trec", "ag_news") else ""
    return _ASKS[task], sentence(rng, task, label)[0], f"It is {about}{NAMES[task][label]}."


def _who(rng: random.Random) -> Example:
    person = rng.choice(PEOPLE)
    ask = rng.choice(("Who is {}?", "Tell me about {}.", "What do you know about {}?"))
    return ask.format(person.name), "", portrait(rng, person)


def _person_fact(rng: random.Random) -> Example:
    person = rng.choice(PEOPLE)
    he = "she" if person.she else "he"
    ask, answer = rng.choice(
        (
            ("Where does {} live?", f"{person.name} lives in {person.city}."),
            ("What is the job of {}?", f"{person.name} is a {person.job}."),
            ("Which pet does {} have?", f"{person.name} has a {person.pet}."),
            ("What does {} like to eat?", f"{person.name} likes {person.dish}, and {he} eats it often."),
        )
    )
    return ask.format(person.name), "", answer


def _story(rng: random.Random) -> Example:
    person = rng.choice(PEOPLE)
    ask, tell = rng.choice(
        (
            ("Write a short story about a day of {}.", day),
            ("Write a short story about something that {} lost.", lost),
            ("Write a short story about a journey of {}.", journey),
        )
    )
    return ask.format(person.name), "", tell(rng, person)


def _letter(rng: random.Random) -> Example:
    return rng.choice(("Write a short letter to a friend.", "Write a letter.")), "", letter(rng)


def _animal(rng: random.Random) -> Example:
    kind = rng.choice(ANIMALS)
    ask, answer = rng.choice(
        (
            ("Where does a {} live?", f"A {kind.name} lives {HOMES[kind.home]}."),
            ("What does a {} eat?", f"A {kind.name} eats {kind.eats}."),
            ("What is a {}?", animal(rng, kind)),
        )
    )
    return fill(rng, ask.format(kind.name)), "", fill(rng, answer)


def _geography(rng: random.Random) -> Example:
    city, (country, land) = rng.choice(list(CAPITALS.items()))
    return rng.choice(
        (
            (f"What is the capital of {country}?", "", f"The capital of {country} is {city}."),
            (f"Which country has {city} as its capital?", "", f"{city} is the capital of {country}."),
            (f"Where is {country}?", "", f"{country} is a country in {land}."),
        )
    )


def _workplace(rng: random.Random) -> Example:
    job, place = rng.choice(list(WORKPLACES.items()))
    return fill(rng, f"Where does a {job} work?"), "", fill(rng, f"A {job} works in the {place}.")


def _short_form(rng: random.Random) -> Example:
    short, long = rng.choice(list(ABBREVIATIONS.items()))
    return f"What does {short} stand for?", "", f"{short} is short for {long}."


def _name_three(rng: random.Random) -> Example:
    kind = rng.choice(("food", "garment", "vehicle", "tool"))
    one, two, three = rng.sample(KINDS[kind], 3)
    return f"Name three kinds of {kind}.", "", f"Three kinds of {kind} are {one}, {two} and {three}."


def _odd_one_out(rng: random.Random) -> Example:
    kind, other = rng.sample(("food", "garment", "vehicle", "tool"), 2)
    same, odd = rng.sample(KINDS[kind], 3), rng.choice(KINDS[other])
    listed = rng.sample([*same, odd], 4)
    ask = "Which word does not belong with the others?"
    return ask, ", ".join(listed), f"The word {odd} does not belong, because it is a {other}."


def _turn(rng: random.Random) -> Example:
    frame = fill(rng, rng.choice(("the {part} is [very|really] WORD.", "I find this {genre} WORD.")))

    def write(mood: str) -> str:
        return draw(lambda: frame.replace("WORD", fill(rng, mood)), test=False)

    good, bad = write("{good}"), write("{bad}")
    if rng.random() < 0.5:
        return "Rewrite the review so that it is negative.", good, bad
    return "Rewrite the review so that it is positive.", bad, good


KINDS_OF_EXAMPLES: dict[Callable[[random.Random], Example], int] = {
    _classify: 6,
    _who: 3,
    _person_fact: 3,
    _story: 5,
    _letter: 1,
    _animal: 2,
    _geography: 2,
    _workplace: 1,
    _short_form: 1,
    _name_three: 1,
    _odd_one_out: 2,
    _turn: 2,
}


def example(rng: random.Random) -> dict[str, str]:
    """One example {"instruction", "input", "output"} of any kind."""
    make = rng.choices(list(KINDS_OF_EXAMPLES), list(KINDS_OF_EXAMPLES.values()))[0]
    return dict(zip(("instruction", "input", "output"), make(rng), strict=True))
