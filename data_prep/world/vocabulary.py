"""The small world of the embedded corpora: its words, its facts, and how templates are filled.

Everybody and everything here is invented or common knowledge. A template is plain text with slots and
choices: `{food}` draws a word from the list of that name, `{food2}` another word of the same list,
`[in|near]` picks one of the alternatives. Forms are listed, never derived, so that no rule can misspell one.

The world has two parts, home and abroad. Both share people, places and facts; what is said of them differs:
each part has half of the words for opinions and feelings, half of the tasks' templates, half of the quiz.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{([a-z_]+)(\d?)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIO])")
_WORD = re.compile(r"[A-Za-z]+")

Part = Literal["home", "abroad"]
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Person:
    """Somebody who lives in the world, with the facts that every portrait of them agrees on."""

    name: str
    she: bool
    job: str
    city: str
    pet: str
    dish: str
    colour: str


PEOPLE = (
    Person("Anna", True, "baker", "Rome", "cat", "soup", "red"),
    Person("Ben", False, "farmer", "Cairo", "dog", "bread", "green"),
    Person("Clara", True, "doctor", "Tokyo", "horse", "rice", "blue"),
    Person("David", False, "teacher", "Lima", "rabbit", "cheese", "brown"),
    Person("Emma", True, "singer", "Rome", "dog", "cake", "yellow"),
    Person("Felix", False, "painter", "Cairo", "duck", "salad", "black"),
    Person("Grace", True, "nurse", "Tokyo", "goat", "pasta", "white"),
    Person("Henry", False, "pilot", "Lima", "cat", "honey", "grey"),
    Person("Ivy", True, "writer", "Cairo", "horse", "jam", "pink"),
    Person("Jack", False, "driver", "Rome", "rabbit", "fish", "red"),
    Person("Lily", True, "farmer", "Tokyo", "cow", "bread", "green"),
    Person("Max", False, "cook", "Lima", "hen", "soup", "blue"),
    Person("Nora", True, "teacher", "Cairo", "cat", "cake", "pink"),
    Person("Oscar", False, "singer", "Rome", "goat", "rice", "white"),
    Person("Rosa", True, "judge", "Lima", "dog", "cheese", "black"),
    Person("Sam", False, "builder", "Tokyo", "duck", "pasta", "brown"),
)

CAPITALS = {  # city -> (country, continent)
    "Rome": ("Italy", "Europe"),
    "Paris": ("France", "Europe"),
    "Oslo": ("Norway", "Europe"),
    "Cairo": ("Egypt", "Africa"),
    "Nairobi": ("Kenya", "Africa"),
    "Accra": ("Ghana", "Africa"),
    "Tokyo": ("Japan", "Asia"),
    "Delhi": ("India", "Asia"),
    "Beijing": ("China", "Asia"),
    "Lima": ("Peru", "America"),
    "Havana": ("Cuba", "America"),
    "Ottawa": ("Canada", "America"),
}


@dataclass(frozen=True)
class Animal:
    """A kind of animal: where it lives, what it eats, and one thing that it does."""

    name: str
    plural: str
    home: str
    eats: str
    does: str


ANIMALS = (
    Animal("dog", "dogs", "house", "meat", "guards the door"),
    Animal("cat", "cats", "house", "fish", "sleeps all day"),
    Animal("parrot", "parrots", "house", "seeds", "talks and sings"),
    Animal("horse", "horses", "farm", "grass", "pulls a cart"),
    Animal("cow", "cows", "farm", "grass", "gives milk"),
    Animal("sheep", "sheep", "farm", "grass", "gives wool"),
    Animal("goat", "goats", "farm", "leaves", "climbs on rocks"),
    Animal("hen", "hens", "farm", "seeds", "lays eggs"),
    Animal("frog", "frogs", "water", "flies", "jumps high"),
    Animal("whale", "whales", "water", "fish", "sings under the sea"),
    Animal("duck", "ducks", "water", "seeds", "swims in the rain"),
    Animal("shark", "sharks", "water", "fish", "never stops swimming"),
    Animal("bear", "bears", "forest", "honey", "sleeps all winter"),
    Animal("owl", "owls", "forest", "mice", "hunts at night"),
    Animal("fox", "foxes", "forest", "eggs", "digs a hole"),
    Animal("rabbit", "rabbits", "forest", "leaves", "has long ears"),
)
HOMES = {"house": "in a house", "farm": "on a farm", "water": "in the water", "forest": "in the forest"}

WORKPLACES = {  # job -> where it is done
    "doctor": "hospital",
    "nurse": "hospital",
    "dentist": "hospital",
    "teacher": "school",
    "student": "school",
    "baker": "kitchen",
    "cook": "kitchen",
    "waiter": "kitchen",
    "singer": "theatre",
    "actor": "theatre",
    "dancer": "theatre",
    "farmer": "farm",
    "driver": "station",
    "builder": "workshop",
    "writer": "library",
    "painter": "museum",
    "pilot": "airport",
    "judge": "court",
}

KINDS = {  # kind -> its things
    "food": ("bread", "soup", "rice", "cheese", "cake", "salad", "pasta", "honey", "jam", "meat"),
    "garment": ("coat", "hat", "shirt", "scarf", "dress", "jacket", "belt", "glove"),
    "vehicle": ("car", "bus", "train", "ship", "bike", "plane", "truck", "boat"),
    "tool": ("hammer", "saw", "knife", "spoon", "brush", "axe", "rope", "needle"),
    "colour": ("red", "green", "blue", "brown", "yellow", "black", "white", "grey", "pink"),
    "furniture": ("chair", "table", "bed", "desk", "shelf", "sofa"),
}
PLURAL_KINDS = {"food": "foods", "garment": "garments", "vehicle": "vehicles", "tool": "tools"}

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
    # people, things and places
    "person": tuple(person.name for person in PEOPLE),
    "job": tuple(WORKPLACES),
    "city": tuple(CAPITALS),
    "country": tuple(country for country, _ in CAPITALS.values()),
    "animal": tuple(animal.name for animal in ANIMALS),
    "animals": tuple(animal.plural for animal in ANIMALS),
    **KINDS,
    "place": (
        "park",
        "market",
        "garden",
        "station",
        "school",
        "museum",
        "library",
        "lake",
        "bridge",
        "river",
    ),
    "room": ("kitchen", "hall", "office", "bathroom", "garage"),
    "thing": ("book", "key", "bag", "letter", "ring", "clock", "phone", "ticket", "guitar", "umbrella"),
    "abbr": tuple(ABBREVIATIONS),
    "long": tuple(ABBREVIATIONS.values()),
    "team": ("Lions", "Bears", "Hawks", "Wolves", "Sharks", "Tigers"),
    "company": ("Sunrise Foods", "Blue Bank", "North Air", "Star Phones", "Green Motors", "City Oil"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "number": ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    "big_number": ("twenty", "thirty", "forty", "fifty", "sixty", "ninety"),
    # films
    "title": ("blue river", "night train", "red moon", "old friends", "the last farm", "silent sea"),
    "genre": ("film", "movie", "comedy", "drama", "thriller"),
    "part": ("story", "script", "ending", "music", "plot", "acting"),
    "parts": ("songs", "jokes", "scenes", "actors", "lines", "pictures"),
    "good": (
        *("lovely", "warm", "funny", "clever", "moving", "bright", "fresh", "gentle", "charming"),
        *("brilliant", "wonderful", "great", "beautiful", "sweet", "rich", "perfect"),
    ),
    "bad": (
        *("dull", "cold", "boring", "silly", "slow", "weak", "stale", "empty", "clumsy"),
        *("awful", "terrible", "flat", "ugly", "noisy", "bad", "messy"),
    ),
    # products
    "product": ("phone", "camera", "radio", "lamp", "clock", "oven", "printer", "kettle", "heater"),
    "gadget_part": ("battery", "screen", "handle", "button", "cover", "switch"),
    "handy": ("solid", "easy to use", "quiet", "light", "fast", "neat", "strong"),
    "unhandy": ("loose", "hard to use", "loud", "heavy", "slow", "cheap", "weak"),
    "works": (
        *("works well", "lasts all day", "does the job", "looks great", "feels solid"),
        *("never fails", "is worth the price", "saves me time"),
    ),
    "fails": (
        *("broke", "stopped working", "gets too hot", "falls apart", "makes a strange noise"),
        *("wastes money", "never worked", "lost its colour"),
    ),
    # feelings
    "angry": ("angry", "mad", "furious", "upset"),
    "happy": ("happy", "glad", "excited", "thankful"),
    "sad": ("sad", "lonely", "hurt", "empty"),
    "mood": ("old", "young", "tired", "poor", "lonely", "quiet", "happy", "shy", "brave", "rich"),
    # news
    "trouble": ("storm", "flood", "fire", "war", "strike"),
    "matter": ("peace", "trade", "water", "the border", "the war", "prices"),
    "device": ("robot", "computer", "phone", "camera", "engine"),
    "planet": ("the moon", "Mars", "a new planet", "a far star"),
}
OPINIONS = ("good", "bad", "handy", "unhandy", "works", "fails", "angry", "happy", "sad")  # differ by part


def of_part(entries: Sequence[Entry], part: Part | None) -> Sequence[Entry]:
    """The entries that a part of the world has: the first half at home, the others abroad; None: all."""
    half = len(entries) // 2
    return entries if part is None else entries[:half] if part == "home" else entries[half:]


def fill(
    rng: random.Random, template: str, bound: dict[str, str] | None = None, part: Part | None = None
) -> str:
    """Fill one template. Slots of the same name draw different words; `bound` fixes slots beforehand."""
    while choice := _CHOICE.search(template):
        template = template[: choice.start()] + rng.choice(choice[1].split("|")) + template[choice.end() :]
    chosen = dict(bound or {})

    def word(slot: re.Match[str]) -> str:
        key = slot[1] + slot[2]
        if key not in chosen:
            taken = {chosen[other] for other in chosen if other.rstrip("0123456789") == slot[1]}
            entries = of_part(LEXICON[slot[1]], part if slot[1] in OPINIONS else None)
            chosen[key] = rng.choice([entry for entry in entries if entry not in taken])
        return chosen[key]

    return _ARTICLE.sub(r"\1n ", _SLOT.sub(word, template))


def sentence_case(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def words(text: str) -> list[str]:
    """The words of a text or template in lower case, without marks and slots."""
    return [word.lower() for word in _WORD.findall(_SLOT.sub(" ", text))]
