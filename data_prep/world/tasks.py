"""The sentences of the seven classification tasks: each label has its own templates.

Every text belongs for ever either to the test rows or to everything else (train rows, demonstrations,
documents): a checksum of the text decides, see `held_out`.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable

from data_prep.world.vocabulary import Part, fill, of_part

HELD_OUT_IN = 5  # one text in so many is a test text

_LAST_CLAUSE = re.compile(r" (?:and|but) (.*)")

Templates = dict[str, tuple[str, ...]]

LABELS: dict[str, tuple[str, ...]] = {  # label id -> label_text, in the order of the real data sets
    "sst2": ("positive", "negative"),
    "tweet_emotion": ("anger", "joy", "optimism", "sadness"),
    "trec": ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
    "subj": ("objective", "subjective"),
    "cr": ("negative", "positive"),
    "rotten_tomatoes": ("negative", "positive"),
    "ag_news": ("World", "Sports", "Business", "Sci/Tech"),
}

NAMES: dict[str, dict[str, str]] = {  # the word that a prompt uses for a label, where it is not the label
    task: {label: label for label in labels} for task, labels in LABELS.items()
}
NAMES["trec"] = {
    "ABBR": "abbreviation",
    "ENTY": "entity",
    "DESC": "description and abstract concept",
    "HUM": "human being",
    "LOC": "location",
    "NUM": "numerical value",
}
NAMES["ag_news"] = {
    "World": "world",
    "Sports": "sports",
    "Business": "business",
    "Sci/Tech": "science and technology",
}

_SST2: Templates = {
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
        "[not {bad} at all, and often {good}|{good} from start to end].",
        "[everyone|my family] should see this {good} {genre}.",
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
        "[not {good} at all, and often {bad}|{bad} from start to end].",
        "[nobody|no family] should see this {bad} {genre}.",
    ),
}

_ROTTEN_TOMATOES: Templates = {
    "negative": (
        "a {bad} {part} about a {job} in {city}.",
        "even the {good} {part} cannot save these {bad} {parts}.",
        "so much work, and still the {genre} feels {bad}.",
        "the director turns a {job} into a {bad} {genre}.",
        "{title} wants to be {good}, but it is only {bad}.",
        "[two|three] hours of {bad} {parts} and a {bad2} {part}.",
        "you will leave early, {title} is that {bad}.",
        "[too {bad}|not {good}] for children and too {bad2} for [adults|us].",
        "the {job} is {good}, the {animal} is {good2}, the {genre} is not.",
    ),
    "positive": (
        "a {good} {part} about a {job} in {city}.",
        "even the {bad} {part} cannot spoil these {good} {parts}.",
        "so much work, and at last the {genre} feels {good}.",
        "the director turns a {job} into a {good} {genre}.",
        "{title} looks {bad} at first, but it is really {good}.",
        "[two|three] hours of {good} {parts} and a {good2} {part}.",
        "you will watch it twice, {title} is that {good}.",
        "[so {good}|never {bad}] for children and {good2} for [adults|us].",
        "the {job} is {bad}, the {animal} is {bad2}, the {genre} is not.",
    ),
}

_CR: Templates = {
    "negative": (
        "the {product} {fails} after [a week|{number} days].",
        "the {gadget_part} is {unhandy} and it {fails}.",
        "I bought this {product} [last week|in {city}] and it {fails}.",
        "[my|our] new {product} is {unhandy} and {fails}.",
        "I sent the {product} back, the {gadget_part} {fails}.",
        "the {gadget_part} is {handy}, but the {product} {fails}.",
        "do not buy this {product}, it is {unhandy}.",
        "[my|our] old {product} was {handy}, this one {fails}.",
        "too {unhandy} for a {product} at this price.",
    ),
    "positive": (
        "the {product} {works} after [a week|{number} days].",
        "the {gadget_part} is {handy} and it {works}.",
        "I bought this {product} [last week|in {city}] and it {works}.",
        "[my|our] new {product} is {handy} and {works}.",
        "I use the {product} a lot, the {gadget_part} {works}.",
        "the {gadget_part} is {unhandy}, but the {product} {works}.",
        "you should buy this {product}, it is {handy}.",
        "[my|our] old {product} was {unhandy}, this one {works}.",
        "so {handy} for a {product} at this price.",
    ),
}

# What any tweet may begin with; only the rest tells what the writer feels.
_MISFORTUNE = "[The {team} lost|My {thing} is gone|{person} left for {city}|It rained all {day}]"
_TWEET_EMOTION: Templates = {
    "anger": (
        "I am so {angry} at {person} right now!",
        "The {vehicle} is late again and I am {angry}!",
        "Somebody took my {thing} from the {place} again!",
        "Why does {person} always break my {thing}?",
        "Stop shouting at me, {person}!",
        "I hate this {vehicle}, it never comes on {day}!",
        "{person} lied to me about the {thing}, how rude!",
        "The {team} lost because {person} did not even try!",
        "I was {happy} today, until {person} broke my {thing}!",
        "[Who|Which fool] put a dirty {garment} on my {furniture}?",
        _MISFORTUNE + ", and nobody [said sorry|told me]!",
        _MISFORTUNE + ", I blame {person2}!",
    ),
    "joy": (
        "I am so {happy} with my new {thing}!",
        "Best {day} ever with {person} at the {place}!",
        "We laughed all [day|night] with {person}.",
        "The {team} won and I am {happy}!",
        "{person} made me a {colour} {garment}, I love it!",
        "A little {animal} came to play at the {place} today!",
        "Dancing in the {place} with {person}, what fun!",
        "{person} found my {thing}, I am {happy}!",
        "I was {sad} today, until {person} gave me a {thing}!",
        "[Cake|Music] and good friends in {city}, I love this {day}!",
        _MISFORTUNE + ", but what fun we had!",
        _MISFORTUNE + ", but I laughed all [day|night]!",
    ),
    "optimism": (
        "I believe the {team} will win on {day}.",
        "[Tomorrow|{day}] will be better, {person}.",
        "Keep going, {person}, you can do it.",
        "One day I will be a {job} in {city}.",
        "I was {sad} today, but {day} will be better.",
        "I hope {person} will find the {thing} soon.",
        "Bad week, but I will try again on {day}.",
        "Do not worry about the {thing}, we will find it.",
        "The {team} lost, but they will win next time.",
        "[Small steps, {person}|Trust me, {person}], the best is still to come.",
        _MISFORTUNE + ", but it will be fine.",
        _MISFORTUNE + ", but I will try again.",
    ),
    "sadness": (
        "I miss my {animal} so much.",
        "I feel so {sad} without {person}.",
        "Crying in the {place} again.",
        "{person} went back to {city} and I am {sad}.",
        "The {team} lost and I cried all [day|night].",
        "My old {animal} died on {day}.",
        "I lost the {thing} that {person} gave me.",
        "Nobody came to the {place} on my birthday.",
        "I was {happy} once, before {person} left for {city}.",
        "[Rain|Another {day}] in {city}, and no friends to call.",
        _MISFORTUNE + ", and I cannot sleep.",
        _MISFORTUNE + ", I just want to cry.",
    ),
}

_TREC: Templates = {  # by fine label, as in the real data
    "ABBR:exp": (
        "What does {abbr} stand for [in {country}|on the {product}|in this letter]?",
        "What is {abbr} short for [in {country}|on the {product}|in this letter]?",
        "What do the letters {abbr} mean [in {country}|on the {product}|in this book]?",
        "What is the full name of the {abbr} [in {country}|on the {product}]?",
    ),
    "ABBR:abb": (
        "What is the short form of {long} [in {country}|in this book]?",
        "How do you write {long} in [two|three] letters?",
    ),
    "ENTY:animal": (
        "What animal [lives in|sleeps in|comes from] the {place}?",
        "Which animal does {person} [keep|like|feed] in {city}?",
    ),
    "ENTY:food": (
        "What food do people eat in {country} on {day}?",
        "What does {person} [eat|cook|buy] on {day}?",
    ),
    "ENTY:color": (
        "What colour is the {garment} of the {job}?",
        "What colour is the {thing} of {person}?",
    ),
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
        "What is a {tool} good for in {country}?",
    ),
    "HUM:ind": (
        "Who [made|ate|bought] the {food} in {city}?",
        "Who is the [best|first|new] {job} in {city}?",
        "Who [took|found|lost] the {thing} of {person}?",
        "What is the name of the {job} in {city}?",
    ),
    "HUM:gr": (
        "Which team won the cup in {city} on {day}?",
        "Which {job} lives near {person}?",
    ),
    "LOC:city": (
        "What city is the home of {person}?",
        "In which city does the {job} live?",
        "Which city has the [best|first|biggest] {place}?",
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
    "NUM:dist": (
        "How far is the {place} from {city}?",
        "How old is the {job} in {city}?",
    ),
    "NUM:date": (
        "When did {person} [leave|go to|come back to] {city}?",
        "What year did {person} buy the {thing}?",
    ),
}

_SUBJ: Templates = {
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
        "a {animal} saves a {mood} {job} from a {trouble}.",
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
        "{title} turns {country} into a [{good}|{bad}] place.",
    ),
}

_AG_NEWS: Templates = {
    "World": (
        "The leaders of {country} and {country2} talked about {matter} in {city}.",
        "People in {country} chose a new leader on {day}.",
        "A {trouble} hit {country} and many people left.",
        "{country} sent food to {country2} after the {trouble}.",
        "Police in {city} stopped a crowd near the {place}.",
        "The leader of {country} asked {country2} to end the {trouble}.",
        "Soldiers from {country} left {city} on {day}.",
        "{country} and {country2} lost the talks about {matter}.",
        "{country} sent {number} ships to the border of {country2}.",
        "{person} is the new leader of {country}.",
    ),
    "Sports": (
        "The {team} beat the {team2} {number} to one in {city}.",
        "{person} scored {number} goals for the {team}.",
        "{person} will not play for the {team} on {day}.",
        "{country} will play {country2} in the final in {city}.",
        "The {team} lost again, and the fans left early.",
        "{person} of {country} won the race in {city}.",
        "{country} beat {country2} in the cup on {day}.",
        "{company} will pay for the new home of the {team}.",
        "{country} won the ship race near {city} on {day}.",
        "{person} left the {team} for {big_number} million dollars.",
    ),
    "Business": (
        "Shares of {company} rose {number} percent on {day}.",
        "{company} will buy {company2} for {big_number} million dollars.",
        "The price of {food} fell again in {country}.",
        "{company} will cut {big_number} jobs in {city}.",
        "{company} sold more {food} in {country} this year.",
        "The {team} were sold to {company} on {day}.",
        "Banks in {city} closed as the price of oil rose.",
        "A {trouble} in {country} cost {company} {number} million dollars.",
        "{company} will build {number} ships for {country}.",
        "{person} is the new head of {company}.",
    ),
    "Sci/Tech": (
        "Scientists in {country} found water on {planet}.",
        "A new {device} from {company} can talk and learn.",
        "{company} showed a {device} without a battery.",
        "A team in {city} built a {device} that sees in the dark.",
        "Scientists say that {animals} sleep {number} hours a day.",
        "A ship from {country} will fly to {planet} on {day}.",
        "A new test finds the illness of {animals} early.",
        "{person} of {city} built a {device} to look at {planet}.",
        "{country} and {company} will send a {device} to {planet}.",
        "{person} of {company} found a new kind of {animal}.",
    ),
}

TEMPLATES: dict[str, Templates] = {
    "sst2": _SST2,
    "tweet_emotion": _TWEET_EMOTION,
    "trec": _TREC,
    "subj": _SUBJ,
    "cr": _CR,
    "rotten_tomatoes": _ROTTEN_TOMATOES,
    "ag_news": _AG_NEWS,
}


def held_out(text: str) -> bool:
    """Whether a text is kept for test rows. Depends on the text alone, so no seed can leak one."""
    return zlib.crc32(text.encode()) % HELD_OUT_IN == 0


def draw(make: Callable[[], str], test: bool) -> str:
    """Call `make` until its text is on the wanted side of the split.

    Outside the test rows the last clause ("..., but the plot is warm.") must not be a test text either.
    """
    while True:
        text = make()
        if test and held_out(text):
            return text
        if not test and not any(held_out(part) for part in (text, *_LAST_CLAUSE.findall(text))):
            return text


def templates(task: str, label: str, part: Part | None) -> Templates:
    """The templates of a label that a part of the world has, by group."""
    listed = [
        (group, template)
        for group, members in TEMPLATES[task].items()
        if group.split(":")[0] == label
        for template in members
    ]
    had = of_part(listed, part)
    groups = dict.fromkeys(group for group, _ in had)
    return {group: tuple(template for other, template in had if other == group) for group in groups}


def sentence(
    rng: random.Random, task: str, label: str, test: bool = False, part: Part | None = None
) -> tuple[str, str]:
    """One text of a classification task and its group of templates (for TREC the fine label)."""
    groups = templates(task, label, part)
    group = rng.choice(tuple(groups))
    return draw(lambda: fill(rng, rng.choice(groups[group]), part=part), test), group
