"""Plain prose of the small world: portraits, stories, talks, letters, reports and facts."""

from __future__ import annotations

import random

from data_prep.world.tasks import sentence
from data_prep.world.vocabulary import (
    ANIMALS,
    CAPITALS,
    HOMES,
    KINDS,
    PEOPLE,
    PLURAL_KINDS,
    WORKPLACES,
    Animal,
    Part,
    Person,
    fill,
    sentence_case,
)

Choices = tuple[str, ...]  # sentences of which one is told

PORTRAIT: Choices = (
    "{person} is a {job} and lives in {city}, the capital of {country}.",
    "{he} works in the {workplace} every day.",
    "{he} has a {pet}, and {his} favourite food is {dish}.",
    "{his} coat is {colour}.",
    "On {day}, {he} meets {friend} in the {place}.",
    "[People say that {he} is a good {job}.|{he} has been a {job} for {number} years.]",
    "[One day {he} wants to see {city2}.|{he} has never been to {city2}.]",
)

DAY: tuple[Choices, ...] = (
    (
        "On {day} morning, {person} went to the {place} with {friend}.",
        "One day {person} got up early and fed the {pet}.",
        "It was [cold|warm|raining|sunny] in {city}, and {person} put on {his} {colour} coat.",
        "{person} woke up late and ran to the {workplace}.",
        "It was {day}, and {person} had no work to do.",
    ),
    (
        "{he} bought some {food} and a {thing} at the market.",
        "At the {place2}, {he} saw a {colour2} {vehicle} and a {animal}.",
        "{friend} gave {him} a {colour2} {garment}.",
        "There {he} met {friend}, who had a {thing} in a bag.",
        "A {mood} {job2} asked {him} the way to the {place2}.",
    ),
    (
        "Later they ate {dish} and talked about {city2}.",
        "In the afternoon {he} read a book about {animals}.",
        "After that, {he} took the {vehicle2} to the {place3}.",
        "Then {friend} told {him} a funny story about a {animal2}.",
        "It began to rain, so they ran into the {place3}.",
    ),
    (
        "In the evening {he} was tired but {happy}.",
        "At night {he} sat by the fire with the {pet}.",
        "It was a good day, and {he} slept well.",
        "At last {he} went home and cooked {dish}.",
        "Before bed, {he} wrote a letter to {friend}.",
    ),
)

LOST: tuple[Choices, ...] = (
    (
        "{person} lost {his} {thing} at the {place}.",
        "On {day}, {person} could not find {his} {thing}.",
        "Somebody took the {thing} of {person} in the {place}.",
    ),
    (
        "{he} was {sad} and asked {friend} for help.",
        "{he} looked in the {room}, but it was not there.",
        "{he} was {angry} and called {friend}.",
    ),
    (
        "They looked under the {furniture} and behind the {furniture2}.",
        "{friend} looked near the {place2} and in the {vehicle}.",
        "They asked a {job2} and a {job3}, but nobody had seen it.",
    ),
    (
        "At last the {pet} found it under the {furniture3}, and {person} was {happy}.",
        "A {mood} {job4} had it and gave it back. {person} was {happy}.",
        "They never found it, so {friend} bought {him} a new one.",
        "It was in {his} coat all the time! They laughed about it for days.",
    ),
)

JOURNEY: tuple[Choices, ...] = (
    (
        "{person}, a {job} from {city}, wanted to see {city2}.",
        "{person} had an old friend in {city2}, the capital of {country2}.",
    ),
    (
        "{he} took a {vehicle} on {day} and slept all the way.",
        "{he} put a {thing} and some {food} in a bag and took the {vehicle}.",
        "The {vehicle} was late, so {he} read a book about {animals}.",
    ),
    (
        "In {city2} it was [cold|warm|raining|sunny], and the people were {good}.",
        "In {country2} {he} ate {food2} and saw the old {place}.",
        "There {he} met a {mood} {job2} with a {animal}.",
    ),
    (
        "After {number} days {he} was {happy} to be back in {city}.",
        "{he} missed the {pet} and soon went home to {city}.",
        "{he} stayed for {number} weeks and came home with a {colour2} {garment}.",
    ),
)

LETTER: tuple[Choices, ...] = (
    ("Dear {friend},",),
    (
        "thank you for the {thing}.",
        "I am in {city2} now, and it is [cold|warm|sunny] here.",
        "my {pet} is ill and I am {sad}.",
        "I have a new [bike|car|boat], it is {colour2} and fast.",
    ),
    (
        "Yesterday I saw a {good} {genre} about a {job2}.",
        "On {day} I will go to the {place} with {friend2}.",
        "The work in the {workplace} is hard, but I like it.",
        "I ate too much {dish} and slept until noon.",
    ),
    (
        "Please come and see me soon.",
        "I hope you are well.",
        "Please bring some {food} when you come.",
    ),
    ("Your friend, {person}",),
)

TALK: tuple[Choices, ...] = (
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
    (
        '"Have you seen my {thing}?" asked {friend}.',
        '"It is in the {room}, under the {furniture}," said {person}.',
        '"Thank you, I looked for it all {day}."',
    ),
    (
        '"How was the {genre}?" asked {friend}.',
        '"The {part} was [{good}|{bad}]," said {person}.',
        '"Then let us go to the {place} on {day}."',
    ),
)

ANIMAL: Choices = (
    "A {animal} lives {home} and eats {eats}.",
    "It {does}.",
    "[People in {country} like {animals}.|There are many {animals} in {country}.]",
    "{person} saw {number} {animals} on {day}.",
    "[A {colour} {animal} is rare.|A young {animal} is small and {good}.]",
)

FACTS: Choices = (
    "{city} is the capital of {country}, a country in {land}.",
    "{things} are {kind}.",
    "A {worker} works in the {work_place}.",
    "{abbr} is short for {long}.",
    "Snow falls in winter, and leaves fall in autumn.",
    "In spring flowers open, and in summer the sun is hot.",
    "Grass is green, snow is white, honey is yellow and coal is black.",
    "{someone} lives in {home_city} and works as a {job_of}.",
)


def _bound(rng: random.Random, person: Person) -> dict[str, str]:
    """The slots that a text about one person may use, consistent with the facts."""
    friend, friend2 = rng.sample([other.name for other in PEOPLE if other.name != person.name], 2)
    he, his, him = ("she", "her", "her") if person.she else ("he", "his", "him")
    far = rng.choice([city for city in CAPITALS if city != person.city])
    return {
        "person": person.name,
        "friend": friend,
        "friend2": friend2,
        "he": he,
        "his": his,
        "him": him,
        "job": person.job,
        "workplace": WORKPLACES[person.job],
        "city": person.city,
        "country": CAPITALS[person.city][0],
        "city2": far,
        "country2": CAPITALS[far][0],
        "pet": person.pet,
        "dish": person.dish,
        "colour": person.colour,
    }


def _told(rng: random.Random, templates: list[str], bound: dict[str, str]) -> str:
    """The templates filled with the same words, as one paragraph."""
    return " ".join(sentence_case(fill(rng, template, bound)) for template in templates)


def portrait(rng: random.Random, person: Person | None = None) -> str:
    """Who somebody is: facts only."""
    rest = sorted(rng.sample(range(1, len(PORTRAIT)), rng.randint(2, 5)))
    templates = [PORTRAIT[0], *(PORTRAIT[i] for i in rest)]
    return _told(rng, templates, _bound(rng, person or rng.choice(PEOPLE)))


def _story(rng: random.Random, parts: tuple[Choices, ...], person: Person | None = None) -> str:
    """One sentence of each part, about one person."""
    bound = _bound(rng, person or rng.choice(PEOPLE))
    bound["thing"] = fill(rng, "{thing}")  # the same thing in every sentence
    bound["vehicle"] = fill(rng, "[bus|train|ship|plane|boat]")
    return _told(rng, [rng.choice(part) for part in parts], bound)


def day(rng: random.Random, person: Person | None = None) -> str:
    """What somebody did from morning to night."""
    return _story(rng, DAY, person)


def lost(rng: random.Random, person: Person | None = None) -> str:
    """Something is lost and perhaps found."""
    return _story(rng, LOST, person)


def journey(rng: random.Random, person: Person | None = None) -> str:
    """Somebody travels and comes back."""
    return _story(rng, JOURNEY, person)


def letter(rng: random.Random) -> str:
    """A short letter to a friend."""
    return _story(rng, LETTER)


def talk(rng: random.Random) -> str:
    """Two people talk."""
    return _told(rng, list(rng.choice(TALK)), _bound(rng, rng.choice(PEOPLE)))


def animal(rng: random.Random, kind: Animal | None = None) -> str:
    """Facts about a kind of animal."""
    kind = kind or rng.choice(ANIMALS)
    bound = {"animal": kind.name, "animals": kind.plural, "eats": kind.eats, "does": kind.does}
    bound["home"] = HOMES[kind.home]
    return _told(rng, [*ANIMAL[:2], *rng.sample(ANIMAL[2:], rng.randint(0, 2))], bound)


def facts(rng: random.Random) -> str:
    """A few things that everybody knows."""
    lines = []
    for template in rng.sample(FACTS, rng.randint(3, 4)):
        city, (country, land) = rng.choice(list(CAPITALS.items()))
        kind = rng.choice(tuple(PLURAL_KINDS))
        one, two, three = rng.sample(KINDS[kind], 3)
        worker = rng.choice(tuple(WORKPLACES))
        someone = rng.choice(PEOPLE)
        bound = {
            "city": city,
            "country": country,
            "land": land,
            "things": f"{one}, {two} and {three}",
            "kind": PLURAL_KINDS[kind],
            "worker": worker,
            "work_place": WORKPLACES[worker],
            "someone": someone.name,
            "home_city": someone.city,
            "job_of": someone.job,
        }
        lines.append(sentence_case(fill(rng, template, bound)))
    return " ".join(lines)


def news(rng: random.Random, part: Part | None = None) -> str:
    """A short report of two or three items on one topic."""
    label = rng.choice(("World", "Sports", "Business", "Sci/Tech"))
    return " ".join(sentence(rng, "ag_news", label, part=part)[0] for _ in range(rng.randint(2, 3)))


STORIES = {portrait: 3, day: 4, lost: 3, journey: 3, letter: 2, talk: 2, animal: 2, facts: 2, news: 2}


def prose(rng: random.Random, part: Part | None = None) -> str:
    """One text of any kind. Only the news differ by part: the others share words and facts."""
    tell = rng.choices(list(STORIES), list(STORIES.values()))[0]
    return news(rng, part) if tell is news else tell(rng)
