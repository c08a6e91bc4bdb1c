"""The embedded corpora: a seeded generator of simple English about one small world.

`documents` is text to pre-train on, `instructions` Alpaca-style examples, `task_rows` the eight in-context
tasks with the columns and label ids of the real data sets. All three speak of the same people, places and
facts. A document is prose, or a run of annotated lines such as people write them, in the prompt formats of
the paper. No document and no train row contains a test row: see `tasks.held_out`.

Documents may come from one part of the world (see `vocabulary`); the tasks ask about both. So a model that
has read one part only has something to learn from the other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from common.errors import UserError
from data_prep.world.instructions import example
from data_prep.world.quiz import SUBJECTS, paper, question
from data_prep.world.stories import prose
from data_prep.world.tasks import LABELS, NAMES, sentence
from data_prep.world.vocabulary import Part

TASKS = (*LABELS, "mmlu")
SPLITS = {task: ("dev", "test") if task == "mmlu" else ("train", "test") for task in TASKS}
SHOTS = 5  # dev questions per MMLU subject

_REVIEW = 'Review: "{text}" It is {label}.'
PROMPTS = {  # the paper's Table 5
    "sst2": _REVIEW,
    "cr": _REVIEW,
    "rotten_tomatoes": _REVIEW,
    "tweet_emotion": 'Tweet: "{text}" It is {label}.',
    "trec": 'Question: "{text}" It is about {label}.',
    "subj": '"{text}" It is {label}.',
    "ag_news": '"{text}" It is about {label}.',
}

_KINDS = {"prose": 8, "annotated": 8, "quiz": 2}  # how often each kind of document comes
_LINES = (4, 8)  # annotated lines of a document


def documents(seed: int, n: int, part: Part | None = None) -> Iterator[dict]:
    """Yield n documents {"text"} of a part of the world. Document i depends on seed, i and part only."""
    kinds, weights = tuple(_KINDS), tuple(_KINDS.values())
    for i in range(n):
        rng = random.Random(f"documents {seed} {i}")
        kind = rng.choices(kinds, weights)[0]
        text = {"prose": prose, "annotated": _annotated, "quiz": paper}[kind](rng, part)
        yield {"text": text}


def _annotated(rng: random.Random, part: Part | None) -> str:
    """A run of labelled lines of one task."""
    task = rng.choice(tuple(LABELS))
    lines = []
    for _ in range(rng.randint(*_LINES)):
        label = rng.choice(LABELS[task])
        text, _ = sentence(rng, task, label, part=part)
        lines.append(PROMPTS[task].format(text=text, label=NAMES[task][label]))
    return "\n".join(lines)


def task_rows(task: str, split: str, n: int, seed: int) -> list[dict]:
    """n different rows of one task, labels balanced, in the columns of the real data set.

    MMLU has the splits dev (balanced over subjects: n = 5 per subject gives the usual shots) and test, the
    other tasks train and test.
    """
    if task not in TASKS:
        raise UserError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    if split not in SPLITS[task]:
        raise UserError(f"task {task} has no split {split!r}; it has {', '.join(SPLITS[task])}")
    rng = random.Random(f"{task} {split} {seed}")
    make = _mmlu_row if task == "mmlu" else _sentence_row
    rows: list[dict] = []
    seen: set[str] = set()
    while len(rows) < n:
        row = make(rng, task, len(rows), split == "test")
        key = json.dumps([row.get("text"), row.get("question"), row.get("choices")])
        if key not in seen:
            seen.add(key)
            rows.append(row)
    rng.shuffle(rows)
    if task != "mmlu":
        for index, row in enumerate(rows):
            row["row"] = index
    return rows


def _sentence_row(rng: random.Random, task: str, index: int, test: bool) -> dict:
    label = index % len(LABELS[task])
    name = LABELS[task][label]
    text, group = sentence(rng, task, name, test)
    if task == "trec":
        names = {"coarse_label_text": name, "fine_label_text": group}
        return {"text": text, "coarse_label": label, "label": label, **names}
    return {"text": text, "label": label, "label_text": name}


def _mmlu_row(rng: random.Random, task: str, index: int, test: bool) -> dict:
    subject = tuple(SUBJECTS)[index % len(SUBJECTS)]
    return question(rng, subject, index // len(SUBJECTS) % 4, test)


def write_tasks(directory: Path, train_n: int, test_n: int, seed: int) -> None:
    """Write <directory>/<task>/{train|dev,test}.jsonl and labels.json, laid out as the real data."""
    for task in TASKS:
        folder = Path(directory) / task
        folder.mkdir(parents=True, exist_ok=True)
        for split in SPLITS[task]:
            n = {"train": train_n, "test": test_n, "dev": SHOTS * len(SUBJECTS)}[split]
            rows = task_rows(task, split, n, seed)
            (folder / f"{split}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
            )
        if task in LABELS:
            (folder / "labels.json").write_text(json.dumps(LABELS[task]) + "\n", encoding="utf-8")


def instructions(seed: int, n: int) -> Iterator[dict]:
    """Yield n examples {"instruction", "input", "output"}. Example i depends on the seed and i only."""
    for i in range(n):
        yield example(random.Random(f"instructions {seed} {i}"))


CORPORA: dict[str, Callable[[int, int], Iterator[dict]]] = {  # as recipes name them
    "world": documents,
    "world-home": partial(documents, part="home"),
    "world-abroad": partial(documents, part="abroad"),
    "world-instruct": instructions,
}
