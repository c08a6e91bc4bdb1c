"""Plain prose of the small world: stories, portraits, reports, reviews, letters and instructions about it."""

from __future__ import annotations

import random

from data_prep.world_tasks import sentence
from data_prep.world_words import (
    ANIMALS,
    CAPITALS,
    CATEGORIES,
    PEOPLE,
    WORKPLACES,
    Person,
    fill,
    sentence_case,
)

PORTRAIT = (
    "{person} is a {job} and lives in {city}, the capital of {country}.",
    "{he} works in the {workplace} every day.",
    "{he} has a {pet}, and {his} favourite food is {dish}.",
    "{his} coat is {colour}.",
    "On {day}, {he} meets {friend} in the {place}.",
    "[People say that {he} is a good {job}.|{he} has been a {job} for {number} years.]",
)

DAY = (
    (
        "On {day} morning, {person} went to the {place} with {friend}.",
        "One day {person} got up early and fed the {pet}.",
        "It was [cold|warm|raining|sunny] in {city}, and {person} put on {his} {colour} coat.",
        "{person} woke up late and ran to the {workplace}.",
    ),
    (
        "{he} bought some {food} and a {thing}.",
        "At the {place}, {he} saw a {vehicle} and a {animal}.",
        "{friend} gave {him} a {colour} {garment}.",
        "Then {he} worked in the {workplace} until noon.",
    ),
    (
        "Later they ate {dish} and talked about {day}.",
        "In the afternoon {he} read a book about {animals}.",
        "After that, {he} took the {vehicle} to the {place}.",
        "Then {friend} told {him} a funny story about a {animal}.",
    ),
    (
        "In the evening {he} was tired but {happy}.",
        "At night {he} sat by the fire with the {pet}.",
        "It was a good day, and {he} slept well.",
        "At last {he} went home and cooked {dish}.",
    ),
)

LOST = (
    ("{person} lost {his} {thing} at the {place}.", "On {day}, {person} could not find {his} {thing}."),
    ("{he} was {sad} and asked {friend} for help.", "{he} looked in the {room}, but it was not there."),
    ("They looked under the {furniture} and behind the {furniture2}.", "{friend} looked near the {place2}."),
    (
        "At last the {pet} found it under the {furniture}, and {person} was {happy}.",
        "A {job2} had it and gave it back. {person} thanked {him2}.",
        "They never found it, so {friend} bought {him} a new one.",
    ),
)

ANIMAL = (
    "The {animal} lives in the {home} and eats {eats}.",
    "It {does}.",
    "[People in {country} like {animals}.|There are many {animals} in {country}.]",
    "{person} saw {number} {animals} on {day}.",
)

TALK = (
    (
        '"Where do you live?" asked {friend}.',
        '"In {city}," said {person}.',
        '"And what do you do?" "I am a {job}, I work in the {workplace}."',
    ),
    (
        '"What do you want to eat?" asked {friend}.',
        '"I want {dish}, please," said {person}.',
        '"You always eat {dish}!" "Yes, I like it best."',
    ),
    (
        '"Is this your {pet}?" asked {friend}.',
        '"Yes, it is {number} years old," said {person}.',
        '"It is very [sweet|quiet|small]." "Thank you, I love it."',
    ),
)

KIND = (
    "{one}, {two} and {three} are all {kind}.",
    "{one} and {two} are {kind}, but {other} is not.",
)


def people_words(rng: random.Random, person: Person) -> dict[str, str]:
    """The slots that a text about one person may use, consistent with the facts."""
    friend = rng.choice([other.name for other in PEOPLE if other.name != person.name])
    he, his, him = ("she", "her", "her") if person.she else ("he", "his", "him")
    return {
        "person": person.name,
        "friend": friend,
        "he": he,
        "his": his,
        "him": him,
        "him2": rng.choice(["him", "her"]),
        "job": person.job,
        "workplace": WORKPLACES[person.job],
        "city": person.city,
        "country": CAPITALS[person.city],
        "pet": person.pet,
        "dish": person.dish,
        "colour": person.colour,
    }


def _told(rng: random.Random, templates: list[str], bound: dict[str, str]) -> str:
    """The templates filled with the same words, as one paragraph."""
    return " ".join(sentence_case(fill(rng, template, bound)) for template in templates)


def portrait(rng: random.Random) -> str:
    """Who somebody is: facts only."""
    rest = sorted(rng.sample(range(1, len(PORTRAIT)), rng.randint(2, 5)))
    templates = [PORTRAIT[0], *(PORTRAIT[i] for i in rest)]
    return _told(rng, templates, people_words(rng, rng.choice(PEOPLE)))


def day(rng: random.Random) -> str:
    """What somebody did from morning to night."""
    bound = people_words(rng, rng.choice(PEOPLE))
    return _told(rng, [rng.choice(part) for part in DAY], bound)


def lost(rng: random.Random) -> str:
    """Something is lost and perhaps found."""
    bound = people_words(rng, rng.choice(PEOPLE))
    bound["thing"] = rng.choice(("book", "key", "bag", "letter", "ring", "clock", "phone"))
    return _told(rng, [rng.choice(part) for part in LOST], bound)


def animal(rng: random.Random) -> str:
    """Facts about a kind of animal."""
    kind = rng.choice(ANIMALS)
    bound = {
        "animal": kind.name,
        "animals": kind.plural,
        "home": kind.home,
        "eats": kind.eats,
        "does": kind.does,
    }
    return _told(rng, [*ANIMAL[:2], *rng.sample(ANIMAL[2:], rng.randint(0, 2))], bound)


def talk(rng: random.Random) -> str:
    """Two people talk."""
    return _told(rng, list(rng.choice(TALK)), people_words(rng, rng.choice(PEOPLE)))


def news(rng: random.Random) -> str:
    """A short report of two or three items on one topic."""
    label = rng.choice(("World", "Sports", "Business", "Sci/Tech"))
    return " ".join(sentence(rng, "ag_news", label)[0] for _ in range(rng.randint(2, 3)))


def kinds(rng: random.Random) -> str:
    """Which things are of one kind."""
    lines = []
    for subject in rng.sample(list(CATEGORIES), 3):
        one, two, three = rng.sample(CATEGORIES[subject][1], 3)
        other_kind = rng.choice([name for name in CATEGORIES if name != subject])
        other = rng.choice(CATEGORIES[other_kind][1])
        bound = {"one": one, "two": two, "three": three, "kind": subject, "other": other}
        lines.append(sentence_case(fill(rng, rng.choice(KIND), bound)))
    return " ".join(lines)


STORIES = ((portrait, 3), (day, 4), (lost, 3), (animal, 2), (talk, 2), (news, 3), (kinds, 1))


def prose(rng: random.Random) -> str:
    """One text of any kind."""
    tellers, weights = zip(*STORIES, strict=True)
    return rng.choices(tellers, weights)[0](rng)
