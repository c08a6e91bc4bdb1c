"""The small world of the embedded corpora: its words, its facts, and the engine that fills sentence templates.

Everybody and everything here is invented or common knowledge. A template is plain text with slots and choices:
`{food}` draws a word from the list of that name, `{food2}` another word of the same list, `[in|near]` picks one
of the alternatives. Forms are listed, never derived, so that no rule can misspell a word.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{([a-z_]+)(\d?)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIO])")
_WORD = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True)
class Person:
    """Somebody who lives in the world, with the facts that every text about them agrees on."""

    name: str
    she: bool
    job: str
    city: str
    pet: str
    dish: str
    colour: str


PEOPLE = (
    Person("Anna", True, "baker", "Rome", "cat", "soup", "red"),
    Person("Ben", False, "farmer", "Paris", "dog", "bread", "green"),
    Person("Clara", True, "doctor", "Cairo", "horse", "rice", "blue"),
    Person("David", False, "teacher", "Tokyo", "rabbit", "cheese", "brown"),
    Person("Emma", True, "singer", "Madrid", "dog", "cake", "yellow"),
    Person("Felix", False, "painter", "Lima", "duck", "salad", "black"),
    Person("Grace", True, "nurse", "Delhi", "goat", "pasta", "white"),
    Person("Henry", False, "pilot", "Oslo", "cat", "honey", "grey"),
    Person("Ivy", True, "writer", "Paris", "horse", "jam", "pink"),
    Person("Jack", False, "driver", "Rome", "rabbit", "meat", "red"),
    Person("Lily", True, "farmer", "Tokyo", "cow", "bread", "green"),
    Person("Max", False, "cook", "Cairo", "hen", "soup", "blue"),
    Person("Nora", True, "teacher", "Lima", "cat", "cake", "pink"),
    Person("Oscar", False, "singer", "Delhi", "goat", "rice", "white"),
    Person("Rosa", True, "judge", "Oslo", "dog", "cheese", "black"),
    Person("Sam", False, "builder", "Madrid", "duck", "pasta", "brown"),
)

CAPITALS = {  # city -> country
    "Rome": "Italy",
    "Paris": "France",
    "Madrid": "Spain",
    "Cairo": "Egypt",
    "Tokyo": "Japan",
    "Lima": "Peru",
    "Delhi": "India",
    "Oslo": "Norway",
}


@dataclass(frozen=True)
class Animal:
    """A kind of animal: where it lives, what it eats, and one thing that sets it apart."""

    name: str
    plural: str
    home: str
    eats: str
    does: str


ANIMALS = (
    Animal("dog", "dogs", "house", "meat", "guards the house"),
    Animal("cat", "cats", "house", "fish", "sleeps all day"),
    Animal("horse", "horses", "farm", "grass", "pulls a cart"),
    Animal("cow", "cows", "farm", "grass", "gives milk"),
    Animal("sheep", "sheep", "farm", "grass", "gives wool"),
    Animal("goat", "goats", "farm", "leaves", "climbs hills"),
    Animal("hen", "hens", "farm", "seeds", "lays eggs"),
    Animal("duck", "ducks", "lake", "seeds", "swims in the rain"),
    Animal("frog", "frogs", "lake", "flies", "jumps high"),
    Animal("whale", "whales", "sea", "fish", "sings under water"),
    Animal("bear", "bears", "forest", "honey", "sleeps all winter"),
    Animal("owl", "owls", "forest", "mice", "hunts at night"),
    Animal("fox", "foxes", "forest", "eggs", "digs a hole"),
    Animal("rabbit", "rabbits", "forest", "leaves", "has long ears"),
)

WORKPLACES = {  # job -> where it is done
    "baker": "bakery",
    "farmer": "farm",
    "doctor": "hospital",
    "nurse": "hospital",
    "teacher": "school",
    "singer": "theatre",
    "painter": "museum",
    "pilot": "airport",
    "writer": "library",
    "driver": "station",
    "cook": "kitchen",
    "judge": "court",
    "builder": "street",
}

CATEGORIES = {  # subject -> (the word for one member, members): each member stands for one idea only
    "animals": ("animal", tuple(animal.name for animal in ANIMALS)),
    "foods": ("food", ("bread", "soup", "rice", "cheese", "cake", "salad", "pasta", "honey", "jam", "meat")),
    "countries": ("country", tuple(CAPITALS.values())),
    "jobs": ("job", tuple(WORKPLACES)),
    "clothes": ("garment", ("coat", "hat", "shirt", "scarf", "dress", "jacket", "belt", "glove")),
    "furniture": ("piece of furniture", ("chair", "table", "bed", "desk", "shelf", "sofa", "lamp")),
    "colours": ("colour", ("red", "green", "blue", "brown", "yellow", "black", "white", "grey", "pink")),
    "vehicles": ("vehicle", ("car", "bus", "train", "ship", "bike", "plane", "truck", "boat")),
}

ABBREVIATIONS = {
    "TV": "television",
    "UN": "United Nations",
    "EU": "European Union",
    "UK": "United Kingdom",
    "USA": "United States of America",
    "PC": "personal computer",
    "CD": "compact disc",
    "PM": "prime minister",
    "VIP": "very important person",
    "DIY": "do it yourself",
}

LEXICON: dict[str, tuple[str, ...]] = {
    # things and places
    "person": tuple(person.name for person in PEOPLE),
    "job": tuple(WORKPLACES),
    "city": tuple(CAPITALS),
    "country": tuple(CAPITALS.values()),
    "animal": tuple(animal.name for animal in ANIMALS),
    "animals": tuple(animal.plural for animal in ANIMALS),
    "food": CATEGORIES["foods"][1],
    "garment": CATEGORIES["clothes"][1],
    "furniture": CATEGORIES["furniture"][1],
    "colour": CATEGORIES["colours"][1],
    "vehicle": CATEGORIES["vehicles"][1],
    "place": (
        "park",
        "market",
        "river",
        "garden",
        "station",
        "school",
        "museum",
        "library",
        "lake",
        "bridge",
    ),
    "room": ("kitchen", "garden", "hall", "office", "bathroom"),
    "thing": ("book", "key", "bag", "hat", "letter", "ring", "clock", "phone", "coat", "bike"),
    "abbr": tuple(ABBREVIATIONS),
    "long": tuple(ABBREVIATIONS.values()),
    "team": ("Lions", "Bears", "Hawks", "Wolves", "Sharks", "Tigers"),
    "company": ("Sunrise Foods", "Blue Bank", "North Air", "Star Phones", "Green Motors", "City Oil"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "number": ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    "big_number": ("twenty", "thirty", "forty", "fifty", "sixty", "ninety"),
    # films
    "title": (
        "blue river",
        "night train",
        "red moon",
        "old friends",
        "the last farm",
        "the long road",
        "silent sea",
        "golden city",
    ),
    "genre": ("film", "movie", "comedy", "drama", "thriller"),
    "part": ("story", "script", "ending", "music", "plot", "acting"),
    "parts": ("songs", "jokes", "scenes", "actors", "lines", "pictures"),
    "good": (
        "lovely",
        "warm",
        "funny",
        "clever",
        "moving",
        "bright",
        "fresh",
        "gentle",
        "charming",
        "brilliant",
        "wonderful",
        "great",
        "beautiful",
        "sweet",
        "rich",
    ),
    "bad": (
        "dull",
        "cold",
        "boring",
        "silly",
        "slow",
        "weak",
        "stale",
        "empty",
        "clumsy",
        "awful",
        "terrible",
        "flat",
        "ugly",
        "noisy",
        "poor",
    ),
    # products
    "product": ("phone", "camera", "radio", "lamp", "clock", "oven", "bag", "bike", "printer", "kettle"),
    "gadget_part": ("battery", "screen", "handle", "button", "cover", "switch"),
    "handy": ("solid", "easy to use", "quiet", "light", "fast", "neat", "bright"),
    "unhandy": ("loose", "hard to use", "loud", "heavy", "slow", "cheap", "weak"),
    "works": (
        "works very well",
        "lasts all day",
        "does the job",
        "looks great",
        "feels solid",
        "never fails",
        "is worth the price",
    ),
    "fails": (
        "broke after a week",
        "stopped working",
        "gets too hot",
        "falls apart",
        "makes a strange noise",
        "is a waste of money",
        "never worked",
    ),
    # feelings
    "angry": ("angry", "mad", "furious"),
    "happy": ("happy", "glad", "excited"),
    "sad": ("sad", "lonely", "hurt"),
    "mood": ("old", "young", "tired", "poor", "lonely", "quiet", "happy"),
    # news
    "trouble": ("storm", "flood", "fire", "war", "strike"),
    "matter": ("peace", "trade", "water", "the border", "the war"),
    "device": ("robot", "computer", "phone", "camera", "engine"),
    "planet": ("the moon", "Mars", "a new planet", "a far star"),
}


def fill(rng: random.Random, template: str, bound: dict[str, str] | None = None) -> str:
    """Fill one template. Slots of the same name draw different words; `bound` fixes slots beforehand."""
    while choice := _CHOICE.search(template):
        template = template[: choice.start()] + rng.choice(choice[1].split("|")) + template[choice.end() :]
    chosen = dict(bound or {})

    def word(slot: re.Match[str]) -> str:
        key = slot[1] + slot[2]
        if key not in chosen:
            taken = {chosen[other] for other in chosen if other.rstrip("0123456789") == slot[1]}
            chosen[key] = rng.choice([entry for entry in LEXICON[slot[1]] if entry not in taken])
        return chosen[key]

    return _ARTICLE.sub(r"\1n ", _SLOT.sub(word, template))


def sentence_case(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def words(text: str) -> list[str]:
    """The words of a text in lower case, without marks and slots."""
    return [word.lower() for word in _WORD.findall(_SLOT.sub(" ", text))]
