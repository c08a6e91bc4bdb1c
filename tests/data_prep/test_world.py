"""The embedded corpora: the same for everybody, nothing leaked, everything spelled, laid out as real data."""

from __future__ import annotations

import ast
import inspect
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data_prep.tokenizer import load_tokenizer, train_sentencepiece
from data_prep.world import corpora as world
from data_prep.world import instructions as world_instructions
from data_prep.world import quiz as world_quiz
from data_prep.world import stories as world_stories
from data_prep.world import tasks as world_tasks
from data_prep.world import vocabulary as world_words
from data_prep.world.corpora import (
    CORPORA,
    PROMPTS,
    SPLITS,
    TASKS,
    documents,
    instructions,
    task_rows,
    write_tasks,
)
from data_prep.world.tasks import LABELS, NAMES, TEMPLATES, draw, held_out, sentence, templates
from data_prep.world.vocabulary import CAPITALS, LEXICON, OPINIONS, PEOPLE, fill, of_part, words
from tests.conftest import REPO

TEST_ROWS = 200
RARE = {"digs", "peru"}  # English, but not in the samples of real text
MODULES = (world, world_words, world_tasks, world_quiz, world_stories, world_instructions)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    made = (documents(3, 2000), documents(3, 500, "home"), documents(3, 500, "abroad"))
    return [document["text"] for corpus in made for document in corpus]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], list[dict]]:
    """Rows of every task and split, each split from another seed."""
    return {
        (task, split): task_rows(task, split, TEST_ROWS, seed)
        for task in TASKS
        for seed, split in enumerate(SPLITS[task])
    }


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(0, 12), more=st.integers(0, 12))
def test_a_corpus_is_a_prefix_of_a_longer_one(seed: int, n: int, more: int) -> None:
    for make in CORPORA.values():
        assert list(make(seed, n)) == list(make(seed, n + more))[:n]


def test_seeds_give_different_text() -> None:
    first, second = ({d["text"] for d in documents(seed, 400)} for seed in (0, 1))
    assert len(first & second) < 40  # short texts may coincide
    assert task_rows("trec", "test", 60, 0) != task_rows("trec", "test", 60, 1)


def test_text_does_not_depend_on_the_process() -> None:
    """Two interpreters with different hash seeds write the same documents, rows and examples."""
    code = "import json; from data_prep.world.corpora import *;"
    rows = "*(task_rows(t, 'test', 9, 5) for t in TASKS)"
    code += f"print(json.dumps([[*documents(5, 60)], [*instructions(5, 40)], {rows}]))"
    written = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=REPO,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert written[0] == written[1]
    assert json.loads(written[0])[0] == list(documents(5, 60))


@settings(max_examples=25, deadline=None)
@given(task=st.sampled_from(TASKS), seed=st.integers(0, 2**31), n=st.integers(1, 90))
def test_rows_are_repeatable_distinct_and_balanced(task: str, seed: int, n: int) -> None:
    for split in SPLITS[task]:
        made = task_rows(task, split, n, seed)
        assert made == task_rows(task, split, n, seed)
        assert (
            len({json.dumps([row.get("text"), row.get("question"), row.get("choices")]) for row in made}) == n
        )
        name = "answer" if task == "mmlu" else "label"
        counts = Counter(row[name] for row in made)
        slack = len(world_quiz.SUBJECTS) if task == "mmlu" else 1  # MMLU is balanced within each subject
        labels = range(4 if task == "mmlu" else len(LABELS[task]))
        assert max(counts[k] for k in labels) - min(counts[k] for k in labels) <= slack


def test_dev_questions_give_five_shots_per_subject() -> None:
    dev = task_rows("mmlu", "dev", 5 * len(world_quiz.SUBJECTS), 0)
    assert Counter(row["subject"] for row in dev) == dict.fromkeys(world_quiz.SUBJECTS, 5)


@pytest.mark.parametrize("task", TASKS)
def test_no_test_text_stands_in_any_document_or_train_row(task: str, texts: list[str], rows: dict) -> None:
    key = "question" if task == "mmlu" else "text"
    first, test = SPLITS[task]
    everything = "\n".join(
        [*texts, *(row[key] for other in TASKS for row in rows[other, SPLITS[other][0]] if key in row)]
    )
    leaked = [row[key] for row in rows[task, test] if row[key] in everything]
    assert not leaked
    assert all(row[key] in everything for row in rows[task, first])  # the search itself works


def test_both_sides_of_the_split_are_drawn() -> None:
    rng = random.Random(0)
    for test in (False, True):
        drawn = [
            draw(lambda: fill(rng, "the {part} is {good}, but the {parts} are {bad}."), test)
            for _ in range(50)
        ]
        assert {held_out(text) for text in drawn} == {test}


def test_a_train_text_does_not_end_in_a_test_text() -> None:
    rng = random.Random(0)
    ends = {sentence(rng, "sst2", "positive")[0].split(" but ")[-1] for _ in range(2000)}
    assert len(ends) > 100 and not any(map(held_out, ends))


def test_the_parts_of_the_world_share_no_template() -> None:
    for task, labels in LABELS.items():
        for label in labels:
            home, abroad, both = (
                [(group, one) for group, of in templates(task, label, part).items() for one in of]
                for part in ("home", "abroad", None)
            )
            assert home and abroad and home + abroad == both and not set(home) & set(abroad)
            assert all(one in TEMPLATES[task][group] for group, one in both)
    for name in OPINIONS:
        parts = [set(of_part(LEXICON[name], part)) for part in ("home", "abroad")]
        assert all(len(words) > 1 for words in parts) and not parts[0] & parts[1]  # templates use up to two


def test_documents_of_a_part_are_of_that_part_only() -> None:
    """Runs of annotated lines use its opinions, quizzes its subjects; prose and facts are the same."""
    texts = {part: [d["text"] for d in documents(7, 900, part)] for part in ("home", "abroad")}
    quizzes = {part: set(re.findall(r"about  (\w+)\.", "\n".join(of))) for part, of in texts.items()}
    assert quizzes == {"home": {"seasons", "days"}, "abroad": {"numbers", "times"}}
    for part, other in (("home", "abroad"), ("abroad", "home")):
        said = set(words(" ".join(text for text in texts[part] if text.startswith("Review:"))))
        foreign = {word for name in ("good", "bad") for word in of_part(LEXICON[name], other)}
        own = {word for name in ("handy", "unhandy", "works", "fails") for word in LEXICON[name]}
        assert len(said) > 100 and not said & foreign - set(words(" ".join(own)))
    portraits = [
        {text for text in of if " and lives in " in text and "is of" not in text} for of in texts.values()
    ]
    assert portraits[0] == portraits[1] != set()


def _literals(module: ModuleType) -> Iterator[str]:
    """The strings that a module writes in its source, without docstrings."""
    tree = ast.parse(inspect.getsource(module))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.fixture(scope="module")
def used(texts: list[str], rows: dict) -> set[str]:
    """Every word of 3000 documents, 1500 instructions and all rows."""
    examples = [" ".join(example.values()) for example in instructions(0, 1500)]
    tasks = [
        " ".join([row.get("text", ""), row.get("question", "")]) for made in rows.values() for row in made
    ]
    return set(words(" ".join([*texts, *examples, *tasks])))


def test_words_are_few_and_all_from_the_lists(used: set[str]) -> None:
    listed = {word for module in MODULES for literal in _literals(module) for word in words(literal)}
    assert used <= listed | set("abcd")  # the letters of the options
    assert 500 < len(used) < 900


def test_words_are_english(used: set[str], shared_data: Path) -> None:
    """Real text knows them all: no list and no template has a misspelled word."""
    known: set[str] = set()
    for name in ("tinystories/train.jsonl", "openwebtext-sample/train.jsonl", "wikipedia-demo/train.txt"):
        with zstandard.open(shared_data / "lm" / f"{name}.zst", "rt", encoding="utf-8") as lines:
            known.update(words(lines.read()))
    assert used - known <= RARE


def test_a_document_fits_a_block_of_256(texts: list[str], tmp_path: Path) -> None:
    train_sentencepiece(texts, 1024, tmp_path / "tokenizer.model")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"))
    lengths = sorted(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    assert lengths[-1] <= 254
    assert lengths[len(lengths) // 2] > 40


def test_documents_have_no_leftover_slots_or_wrong_articles(texts: list[str]) -> None:
    for text in texts:
        assert not re.search(r"[{}\[\]|]|  (?![a-z]+\.\n\n)", text), text
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiouAEIO]", text), text
        assert "None" not in text and text == text.strip()


def test_annotated_lines_read_as_the_prompts_of_the_paper(texts: list[str]) -> None:
    runs = [
        text
        for text in texts
        if text.startswith(("Review:", "Tweet:", "Question:", '"')) and " It is " in text
    ]
    frames = [
        re.escape(frame)
        .replace(r"\{text\}", '[^"]+')
        .replace(r"\{label\}", "(" + "|".join(NAMES[task].values()) + ")")
        for task, frame in PROMPTS.items()
    ]
    assert len(runs) > 300
    for text in runs:
        lines = text.split("\n")
        assert 4 <= len(lines) <= 8
        assert any(all(re.fullmatch(frame, line) for line in lines) for frame in frames), text


def test_people_are_the_same_everywhere(texts: list[str]) -> None:
    told = re.findall(r"(\w+) is an? (\w+) and lives in (\w+), the capital of (\w+)\.", "\n".join(texts))
    facts = {(p.name, p.job, p.city, CAPITALS[p.city][0]) for p in PEOPLE}
    assert set(told) == facts


def test_labels_follow_the_words() -> None:
    """A review with good words only is positive: the labels mean what they say."""
    for task in ("sst2", "cr", "rotten_tomatoes"):
        assert set(NAMES[task]) == {"positive", "negative"}
    rows = task_rows("sst2", "train", 400, 0)
    plain = [r for r in rows if re.fullmatch(r"the \w+ (is|are) (\w+)\.", r["text"])]
    good = set(world_words.LEXICON["good"])
    assert len(plain) > 20
    assert all(
        (row["text"].split()[-1].rstrip(".") in good) == (row["label_text"] == "positive") for row in plain
    )


def test_quiz_answers_are_right() -> None:
    letters = Counter()
    for row in task_rows("mmlu", "test", 160, 0):
        things = world_quiz.SUBJECTS[row["subject"]].things
        assert row["choices"][row["answer"]] == things[0]
        begun = things.index(row["choices"][0])
        assert tuple(row["choices"]) == things[begun:] + things[:begun]
        letters[row["answer"]] += 1
    assert set(letters.values()) == {40}


def test_files_have_the_layout_of_the_real_data(tmp_path: Path, shared_data: Path) -> None:
    assert shared_data / "MANIFEST.json"  # the hub's rows have other columns
    write_tasks(tmp_path, train_n=24, test_n=12, seed=0)
    for task in TASKS:
        real = shared_data / "nlu" / task
        for split in SPLITS[task]:
            ours = [
                json.loads(line) for line in (tmp_path / task / f"{split}.jsonl").read_text().splitlines()
            ]
            with zstandard.open(real / f"{split}.jsonl.zst", "rt", encoding="utf-8") as lines:
                theirs = [json.loads(line) for line in lines]
            assert all(row.keys() == theirs[0].keys() for row in ours)
            assert {k: type(v) for k, v in ours[0].items()} == {k: type(v) for k, v in theirs[0].items()}
            for pair in (("label", "label_text"), ("coarse_label", "coarse_label_text")):
                if pair[1] in ours[0]:
                    meanings = ({(row[pair[0]], row[pair[1]]) for row in given} for given in (ours, theirs))
                    assert len(set(map(frozenset, meanings))) == 1
            if task == "trec":
                assert {r["fine_label_text"] for r in ours} <= {r["fine_label_text"] for r in theirs}
        if task != "mmlu":
            assert json.loads((tmp_path / task / "labels.json").read_text()) == json.loads(
                (real / "labels.json").read_text()
            )


def test_instructions_have_the_columns_of_alpaca() -> None:
    examples = list(instructions(0, 600))
    assert all(list(example) == ["instruction", "input", "output"] for example in examples)
    assert all(example["instruction"] and example["output"] for example in examples)
    assert 100 < sum(bool(example["input"]) for example in examples) < 500
    answers = {e["instruction"]: e["output"] for e in examples}
    assert answers["What is the capital of Italy?"] == "The capital of Italy is Rome."


@pytest.mark.parametrize(
    ("task", "split", "names"),
    [("sst5", "test", "sst2"), ("mmlu", "train", "dev, test"), ("sst2", "dev", "train, test")],
)
def test_unknown_task_or_split_is_one_clear_line(task: str, split: str, names: str) -> None:
    with pytest.raises(UserError, match=names) as error:
        task_rows(task, split, 4, 0)
    assert "\n" not in str(error.value)
