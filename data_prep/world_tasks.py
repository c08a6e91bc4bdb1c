"""The eight tasks of the paper, built from the small world of `world_words`.

Seven tasks classify one sentence; each label has its own templates. The eighth, MMLU, asks about the world with
four options. Every text belongs for ever either to the test rows or to everything else (train rows, demonstrations,
documents): a checksum of the text decides, see `held_out`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

from data_prep.world_words import ANIMALS, CAPITALS, CATEGORIES, PEOPLE, WORKPLACES, fill

HELD_OUT_IN = 5  # one text in so many is a test text

_SST2 = {
    "positive": (
        "the {part} is {good}.",
        "the {parts} are {good}.",
        "a {good} and {good2} {genre}.",
        "{title} is a {good} {genre}.",
        "the {parts} are {good} and the {part} is {good2}.",
        "I [loved|enjoyed] the {parts} in this {good} {genre}.",
        "what a {good} {genre}, with {good2} {parts}.",
        "the {part} is never {bad}.",
        "the {parts} are {bad}, but the {part} is {good}.",
        "a {genre} with {good} {parts} and a {good2} heart.",
    ),
    "negative": (
        "the {part} is {bad}.",
        "the {parts} are {bad}.",
        "a {bad} and {bad2} {genre}.",
        "{title} is a {bad} {genre}.",
        "the {parts} are {bad} and the {part} is {bad2}.",
        "I [hated|disliked] the {parts} in this {bad} {genre}.",
        "what a {bad} {genre}, with {bad2} {parts}.",
        "the {part} is never {good}.",
        "the {parts} are {good}, but the {part} is {bad}.",
        "a {genre} with {bad} {parts} and a {bad2} heart.",
    ),
}

_ROTTEN_TOMATOES = {
    "negative": (
        "{title} gives us a {bad} {part} about a {job} in {city}.",
        "even the {good} {part} cannot save these {bad} {parts}.",
        "[so much|all this] work, and still the {genre} feels {bad}.",
        "the director turns a {job} and a {animal} into a {bad} {genre}.",
        "{title} wants to be {good}, but it is only {bad}.",
        "[two|three] hours of {bad} {parts} and {bad2} {parts2}.",
        "you will leave {title} [early|before the end], it is that {bad}.",
    ),
    "positive": (
        "{title} gives us a {good} {part} about a {job} in {city}.",
        "even the {bad} {part} cannot spoil these {good} {parts}.",
        "[so much|all this] work, and at last the {genre} feels {good}.",
        "the director turns a {job} and a {animal} into a {good} {genre}.",
        "{title} looks {bad} at first, but it is really {good}.",
        "[two|three] hours of {good} {parts} and {good2} {parts2}.",
        "you will watch {title} [twice|to the end], it is that {good}.",
    ),
}

_CR = {
    "negative": (
        "the {product} {fails}.",
        "the {gadget_part} is {unhandy} and the {product} {fails}.",
        "I bought this {product} last [week|month] and it {fails}.",
        "[my|our] new {product} is {unhandy}, and the {gadget_part} {fails}.",
        "I sent the {product} back after {number} days, the {gadget_part} is {unhandy}.",
        "the {gadget_part} is {handy}, but the {product} {fails}.",
        "do not buy this {product}, it is {unhandy} and {unhandy2}.",
    ),
    "positive": (
        "the {product} {works}.",
        "the {gadget_part} is {handy} and the {product} {works}.",
        "I bought this {product} last [week|month] and it {works}.",
        "[my|our] new {product} is {handy}, and the {gadget_part} {works}.",
        "I use the {product} every day, the {gadget_part} is {handy}.",
        "the {gadget_part} is {unhandy}, but the {product} {works}.",
        "you should buy this {product}, it is {handy} and {handy2}.",
    ),
}

_TWEET_EMOTION = {
    "anger": (
        "I am so {angry} at {person} right now!",
        "The {vehicle} is late again and I am {angry}!",
        "Somebody took my {thing} from the {place} again!",
        "Why does {person} always break my {thing}?",
        "Stop shouting at me, {person}!",
        "I hate this {vehicle}, it never comes on {day}!",
        "{person} lied to me about the {thing}, how rude!",
        "No food, no seat, and the {vehicle} is dirty. I want my money back!",
    ),
    "joy": (
        "I am so {happy} with my new {thing}!",
        "Best {day} ever with {person} at the {place}!",
        "We laughed all [day|night] with {person}.",
        "The {team} won and I am {happy}!",
        "{person} made me a {colour} {garment}, I love it!",
        "A sweet little {animal} came to play at the {place} today!",
        "Dancing in the {place} with {person}, what fun!",
        "{person} gave me {food} and a {thing}, such a nice day!",
    ),
    "optimism": (
        "I believe the {team} will win on {day}.",
        "Tomorrow will be better, {person}.",
        "Keep going, {person}, you can do it.",
        "One day I will be a {job} in {city}.",
        "I was {sad} today, but {day} will be better.",
        "I hope {person} will find the {thing} soon.",
        "Bad week, but I will try again on {day}.",
        "Do not worry about the {thing}, we will find it.",
    ),
    "sadness": (
        "I miss my {animal} so much.",
        "I feel so {sad} without {person}.",
        "Crying in the {place} again.",
        "{person} went back to {city} and I am {sad}.",
        "The {team} lost and I cried all [day|night].",
        "My old {animal} died on {day}.",
        "I lost the {thing} that {person} gave me, and it is gone.",
        "Nobody came to the {place} on my birthday.",
    ),
}

_TREC = {  # by fine label, as in the real data
    "ABBR:exp": (
        "What does {abbr} stand for [in {country}|on the {product}|in this letter]?",
        "What is {abbr} short for [in {country}|on the {product}|in this letter]?",
        "What do the letters {abbr} mean [in {country}|on the {product}|in this book]?",
        "What is the full name of the {abbr} that {person} wrote about?",
    ),
    "ABBR:abb": (
        "What is the short form of {long} [in {country}|in the news|in this book]?",
        "How do you write {long} in [two|three] letters [in {country}|on the {product}]?",
    ),
    "ENTY:animal": (
        "What animal [lives in|sleeps in|comes from] the {place}?",
        "Which animal does {person} [keep|like|feed] in {city}?",
    ),
    "ENTY:food": (
        "What food do people eat in {country} on {day}?",
        "What does {person} [eat|cook|buy] on {day}?",
    ),
    "ENTY:color": ("What colour is the {garment} of the {job}?", "What colour is the {thing} of {person}?"),
    "ENTY:product": (
        "What kind of {vehicle} does {person} drive?",
        "Which {thing} did {person} lose in {city}?",
    ),
    "DESC:reason": (
        "Why do {animals} [run|sleep|sing] in the {place}?",
        "Why did {person} [leave|go to|come back to] {city}?",
    ),
    "DESC:manner": (
        "How do you make {food} in {country}?",
        "How does a {vehicle} [stop|start|work] in the rain?",
    ),
    "DESC:def": (
        "What is a {animal}, and why is it {good}?",
        "What does the word {good} mean in this {part}?",
        "What is a {device} for?",
    ),
    "HUM:ind": (
        "Who [made|ate|bought] the {food} in {city}?",
        "Who is the [best|first|new] {job} in {city}?",
        "Who [took|found|lost] the {thing} of {person}?",
        "What is the name of the {job} in {city}?",
    ),
    "HUM:gr": ("Which team won the cup in {city} on {day}?", "Which {job} lives near {person}?"),
    "LOC:city": (
        "What city is the home of {person}?",
        "In which city does the {job} live?",
        "What is the capital of {country}?",
    ),
    "LOC:other": (
        "Where does {person} [live|work|sleep]?",
        "Where can I buy a {colour} {garment}?",
        "Which country sells the best {food}?",
        "Where did {person} lose the {thing}?",
    ),
    "NUM:count": (
        "How many {animals} [live|are|sleep] in the {place}?",
        "How many {animals} does {person} have?",
    ),
    "NUM:money": (
        "How much does a {colour} {garment} cost in {city}?",
        "What is the price of {food} in {country}?",
    ),
    "NUM:dist": ("How far is the {place} from {city}?", "How old is the {job} in {city}?"),
    "NUM:date": (
        "When did {person} [leave|go to|come back to] {city}?",
        "What year did {person} buy the {thing}?",
    ),
}

_SUBJ = {
    "objective": (
        "{person} is a {job} who moves to {city}.",
        "a {mood} {job} finds a {animal} in the {place}.",
        "after the {trouble}, {person} goes back to {country}.",
        "the {genre} was made in {country} and shown in {city}.",
        "{person} and {person2} look for a {thing} in {city}.",
        "the {job} loses a {thing} and meets a {mood} {job2}.",
        "in this {genre}, {person} leaves the {place} on {day}.",
        "a {genre} about a {mood} {job} from {country}.",
        "{person} plays a {mood} {job} in {title}.",
    ),
    "subjective": (
        "I found the {part} [{good} and {good2}|{bad} and {bad2}].",
        "{person} plays the {job} with a [{good}|{bad}] heart.",
        "it is a [{good}|{bad}] look at a {job} from {country}.",
        "the scenes in {city} are [{good}|{bad}] to watch.",
        "you will [love|hate|forget] the {animal} and the {mood} {job}.",
        "the {part} about {person} is just too [{good}|{bad}].",
        "sadly, the {genre} about a {job} feels [{good}|{bad}].",
        "at its best, {title} is as {good} as {city}.",
        "a [{good}|{bad}] {genre} about a {mood} {job}.",
    ),
}

_AG_NEWS = {
    "World": (
        "The leaders of {country} and {country2} met in {city} to talk about {matter}.",
        "People in {country} chose a new leader on {day}.",
        "A {trouble} hit {country} and many people left their homes.",
        "{country} sent food and water to {country2} after the {trouble}.",
        "Police in {city} stopped a crowd near the {place} on {day}.",
        "The leader of {country} asked {country2} to end the {trouble}.",
        "Soldiers from {country} left {city} on {day}, the army said.",
    ),
    "Sports": (
        "The {team} beat the {team2} {number} to one in {city}.",
        "{person} scored {number} goals as the {team} won the cup.",
        "The coach of the {team} said that {person} will not play on {day}.",
        "{country} will play {country2} in the final in {city}.",
        "The {team} lost again, and their fans left the game early.",
        "{person} of {country} won the race in {city} on {day}.",
    ),
    "Business": (
        "Shares of {company} rose {number} percent on {day}.",
        "{company} will buy {company2} for {big_number} million dollars.",
        "The price of {food} fell again in {country}.",
        "{company} will cut {big_number} jobs in {city}.",
        "{company} said that it sold more {food} in {country} this year.",
        "The {team} were sold to {company} for {big_number} million dollars.",
        "Banks in {city} closed on {day} as the price of oil rose.",
    ),
    "Sci/Tech": (
        "Scientists in {country} found water on {planet}.",
        "A new {device} from {company} can talk and learn.",
        "{company} showed a {device} that runs without a battery.",
        "A team in {city} built a {device} that can see in the dark.",
        "Scientists say that {animals} in {country} sleep {number} hours a day.",
        "A ship from {country} will fly to {planet} on {day}.",
        "A new test in {city} finds the illness of {animals} early.",
    ),
}

LABELS: dict[str, tuple[str, ...]] = {  # label id -> label_text, in the order of the real data sets
    "sst2": ("positive", "negative"),
    "tweet_emotion": ("anger", "joy", "optimism", "sadness"),
    "trec": ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
    "subj": ("objective", "subjective"),
    "cr": ("negative", "positive"),
    "rotten_tomatoes": ("negative", "positive"),
    "ag_news": ("World", "Sports", "Business", "Sci/Tech"),
}

TEMPLATES: dict[str, dict[str, tuple[str, ...]]] = {
    "sst2": _SST2,
    "tweet_emotion": _TWEET_EMOTION,
    "trec": _TREC,
    "subj": _SUBJ,
    "cr": _CR,
    "rotten_tomatoes": _ROTTEN_TOMATOES,
    "ag_news": _AG_NEWS,
}

SUBJECTS = tuple(CATEGORIES)


def held_out(text: str) -> bool:
    """Whether a text is kept for test rows. Depends on the text alone, so no seed can leak one."""
    return zlib.crc32(text.encode()) % HELD_OUT_IN == 0


def draw(make: Callable[[], str], test: bool) -> str:
    """Call `make` until its text stands on the wanted side of the split."""
    while held_out(text := make()) != test:
        pass
    return text


def sentence(
    rng: random.Random, task: str, label: str, test: bool = False, bound: dict[str, str] | None = None
) -> tuple[str, str]:
    """One text of a classification task and its group of templates (for TREC the fine label)."""
    groups = [group for group in TEMPLATES[task] if group.split(":")[0] == label]
    group = rng.choice(groups)
    return draw(lambda: fill(rng, rng.choice(TEMPLATES[task][group]), bound), test), group


def question(rng: random.Random, subject: str, answer: int, test: bool = False) -> dict:
    """One MMLU row: {"subject", "question", "choices" (four), "answer" (0-3)}."""
    row: dict = {}

    def make() -> str:
        text, right, wrong = _ask(rng, subject)
        choices = rng.sample(wrong, 3)
        choices.insert(answer, right)
        row.update(subject=subject, question=text, choices=choices, answer=answer)
        return "\n".join([text, *choices])

    draw(make, test)
    return row


def _ask(rng: random.Random, subject: str) -> tuple[str, str, list[str]]:
    """A question, its right answer and the wrong ones."""
    word, members = CATEGORIES[subject]
    if subject in _FACTS and rng.random() < FACT_SHARE:
        return _FACTS[subject](rng)
    article = "an" if word[0] in "aeiou" else "a"
    others = [m for name in SUBJECTS if name != subject for m in CATEGORIES[name][1]]
    return f"Which of these is {article} {word}?", rng.choice(members), others


FACT_SHARE = 0.25  # of the questions of a subject that has facts to ask about


def _animal_fact(rng: random.Random) -> tuple[str, str, list[str]]:
    animal = rng.choice(ANIMALS)
    wrong = [other.name for other in ANIMALS if other.home != animal.home]
    return f"Which animal {animal.does}?", animal.name, wrong


def _country_fact(rng: random.Random) -> tuple[str, str, list[str]]:
    city, country = rng.choice(list(CAPITALS.items()))
    return f"Which country has the capital {city}?", country, [c for c in CAPITALS.values() if c != country]


def _job_fact(rng: random.Random) -> tuple[str, str, list[str]]:
    if rng.random() < 0.5:
        person = rng.choice(PEOPLE)
        return f"What is the job of {person.name}?", person.job, [j for j in WORKPLACES if j != person.job]
    job, place = rng.choice(list(WORKPLACES.items()))
    return f"Who works in the {place}?", job, [j for j in WORKPLACES if WORKPLACES[j] != place]


def _food_fact(rng: random.Random) -> tuple[str, str, list[str]]:
    person = rng.choice(PEOPLE)
    wrong = [food for food in CATEGORIES["foods"][1] if food != person.dish]
    return f"Which food does {person.name} like best?", person.dish, wrong


def _colour_fact(rng: random.Random) -> tuple[str, str, list[str]]:
    person = rng.choice(PEOPLE)
    wrong = [colour for colour in CATEGORIES["colours"][1] if colour != person.colour]
    return f"What colour is the coat of {person.name}?", person.colour, wrong


_FACTS = {
    "animals": _animal_fact,
    "foods": _food_fact,
    "countries": _country_fact,
    "jobs": _job_fact,
    "colours": _colour_fact,
}
