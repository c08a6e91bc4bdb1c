"""Task files, rows and prompts: exactly the paper's texts, labels by name, mistakes in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import zstandard

from emo.common.errors import UserError
from emo.eval.icl.openicl_compat import Template, openicl
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import known_tasks, load_task, select_tasks
from tests.conftest import REPO
from tests.helpers.refusals import refused

EIGHT = ["tweet_emotion", "sst2", "trec", "subj", "cr", "rotten_tomatoes", "ag_news", "mmlu"]

# The paper's Table 5 and the released script, written out: (task, version) -> (prompt of X, words of labels).
EMOTIONS = ("anger", "joy", "optimism", "sadness")
TOPICS = ("world", "sports", "business", "science and technology")
KINDS = ("abbreviation", "entity", "description and abstract concept", "human being", "location")
PROMPTS = {
    ("sst2", "paper"): ('Review: "X" It is {}.', ("positive", "negative")),
    ("sst2", "released"): ('Review: "X" It is {}.', ("positive", "negative")),
    ("tweet_emotion", "paper"): ('Tweet: "X" It is {}.', EMOTIONS),
    ("tweet_emotion", "released"): ("X It is {}.", EMOTIONS),
    ("trec", "paper"): ('Question: "X" It is about {}.', (*KINDS, "numerical value")),
    ("trec", "released"): ('"X" It is about {}.', (*KINDS, "numeric value")),
    ("subj", "paper"): ('"X" It is {}.', ("objective", "subjective")),
    ("subj", "released"): ("X It is {}.", ("objective", "subjective")),
    ("cr", "paper"): ('Review: "X" It is {}.', ("negative", "positive")),
    ("cr", "released"): ("Review: X It is {}.", ("positive", "negative")),
    ("rotten_tomatoes", "paper"): ('Review: "X" It is {}.', ("negative", "positive")),
    ("rotten_tomatoes", "released"): ("Review: X It is {}", ("positive", "negative")),
    ("ag_news", "paper"): ('"X" It is about {}.', TOPICS),
    ("ag_news", "released"): ('"X" It is about {}.', TOPICS),
}


@pytest.mark.parametrize(("name", "version"), list(PROMPTS))
def test_prompts_are_the_papers_and_the_released_scripts(name: str, version: str) -> None:
    task = load_task(name, version)
    assert known_tasks() == EIGHT == [task.name for task in select_tasks("all")]
    prompt, words = PROMPTS[name, version]
    template, row = Template(task), {"text": "X"}
    prompts = [template.generate_label_prompt_item(row, "ICE\n", label) for label in task.labels]
    assert prompts == [f"ICE\n{prompt.format(word)}" for word in words]
    view = [template.generate_ice_item(row, label) for label in task.labels]
    assert view == [prompt.format(word) for word in words]
    assert task.spec.shots.count == 8


def test_mmlu_prompt_is_opencompass() -> None:
    task = load_task("mmlu")
    row = {"subject": "high school physics", "question": "Q?", "A": "a", "B": "b", "C": "c", "D": "d"}
    shot = "Q?\nA. a\nB. b\nC. c\nD. d\nAnswer: C\n"
    template = Template(task)
    assert template.generate_ice_item(row, "C") == shot
    header = "The following are multiple choice questions (with answers) about  high school physics.\n\n"
    shared = header + shot + "\n" + "Q?\nA. a\nB. b\nC. c\nD. d\nAnswer: "
    assert template.generate_label_prompt_item(row, shot + "\n", "D") == f"{shared}D"
    assert template.shared_prompt(row, shot + "\n") == shared
    assert (task.spec.shots.count, task.spec.shots.by, task.spec.group) == (5, "group", "subject")


def test_a_demonstration_that_holds_a_slot_stays_as_it_is() -> None:
    arguments = {"a": "</E>Text: </text> a"}, {"text": "</text>"}, None, None, "</E>"
    row, ice = {"text": "query"}, "Text: see </text> {text} here\n"
    stock = openicl.PromptTemplate(*arguments)
    assert "see query" in stock.generate_label_prompt_item(row, ice, "a")  # the fault
    assert Template(load_task("sst2")).generate_label_prompt_item(row, ice, "positive").startswith(ice)


# --- rows -------------------------------------------------------------------------------------------------


def write(directory: Path, task: str, rows: list[dict], split: str) -> Path:
    (directory / task).mkdir(parents=True, exist_ok=True)
    path = directory / task / f"{split}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_labels_are_read_by_name_and_limited_rows_keep_their_numbers(tmp_path: Path) -> None:
    names = ["negative", "positive"]
    rows = [{"text": f"t{i}", "label": i % 2, "label_text": names[i % 2], "row": 2 * i} for i in range(100)]
    write(tmp_path, "sst2", rows, "train")
    plain = write(tmp_path, "sst2", rows, "test")
    plain.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    plain.unlink()
    test = load_data(load_task("sst2"), str(tmp_path)).rows["test"]
    assert [row["label"] for row in test[:2]] == names
    test = load_data(load_task("sst2"), str(tmp_path), limit=4).rows["test"]  # evenly spaced
    assert [(row["text"], row["row"]) for row in test] == [("t0", 0), ("t25", 50), ("t50", 100), ("t75", 150)]


def test_hub_rows_take_the_names_that_the_data_set_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ClassLabel column whose order differs from the task file's must still give the right names."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["pos", "neg"])}
    )
    data = datasets.Dataset.from_dict({"text": ["x"] * 9, "label": [0, 1] * 4 + [0]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)
    rows = load_data(load_task("rotten_tomatoes"), "hub").rows["test"]
    assert [row["label"] for row in rows[:2]] == ["positive", "negative"]
    wrong = data.cast_column("label", datasets.ClassLabel(names=["good", "bad"]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: wrong)
    with pytest.raises(UserError):
        load_data(load_task("rotten_tomatoes"), "hub")


# --- mistakes ---------------------------------------------------------------------------------------------

GOOD = """
title: T
input: {text: text}
label: {columns: [label], names: {a: [a], b: [b]}}
prompts: {paper: {text: '{text} is {label}'}}
"""
MALFORMED = {
    "not yaml": "a: [",
    "same value twice": GOOD.replace("b: [b]", "b: [a]"),
    "unknown slot": GOOD.replace("{text} is", "{txt} is"),
    "no label slot": GOOD.replace("is {label}", "is"),
    "label in header": GOOD.replace("{text: '{text}", "{before: '{label}', text: '{text}"),
    "half an order": GOOD.replace("is {label}'}", "is {label}', order: [a]}"),
    "shots without group": GOOD + "shots: {by: group}",
    "reserved input": GOOD.replace("{text: text}", "{text: text, row: x}"),
    # What would silently stay in the prompt.
    "attribute": GOOD.replace("{text} is", "{text.__class__} is"),
    "doubled braces": GOOD.replace("{text} is", "{{text}} is"),
    "other version": GOOD.replace("paper", "other"),
}


@pytest.mark.parametrize("kind", list(MALFORMED))
def test_a_malformed_task_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load_task(str(path)).labels == ["a", "b"]
    path.write_text(MALFORMED[kind])
    with pytest.raises(UserError) as error:
        load_task(str(path))
    assert error.value.code == "task" and "mine" in str(error.value)  # it says which file


@pytest.mark.parametrize(
    "names", ["sst22", "sst2,sst2", "sst2,{dir}/sst2.yaml", "", "no/such.yaml", "{dir}/model.yaml"]
)
def test_wrong_task_names(names: str, tmp_path: Path) -> None:
    for name in ("sst2", "model"):
        (tmp_path / f"{name}.yaml").write_text(GOOD)
    with refused("task"):
        select_tasks(names.format(dir=tmp_path))


ROWS = {
    "not JSON": "{", "no object": "[1]", "empty": "", "no text": '{"txt": "a", "label_text": "positive"}',
    "no label": '{"text": "a"}', "number": '{"text": "t", "label": 0}',
    "too few": '{"text": "a", "label_text": "positive"}', "null": '{"text": null, "label_text": "positive"}',
    "half a pair": '{"text": "a\\ud83d", "label_text": "positive"}',
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_wrong_rows_are_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train.jsonl").write_text(ROWS[kind])
    (tmp_path / "sst2" / "test.jsonl").write_text('{"text": "a", "label_text": "positive"}')
    with pytest.raises(UserError):
        load_data(load_task("sst2"), str(tmp_path))
    (tmp_path / "sst2" / "train.jsonl").write_text('{"text": "a", "label_text": "positive"}\n' * 8)
    load_data(load_task("sst2"), str(tmp_path))


def test_without_openicl_one_line_says_how_to_install_it() -> None:
    """No installation of this project's package can bring it: its pins contradict the rest."""
    code = (
        "import sys\nsys.modules['openicl'] = None\nfrom emo.common.errors import UserError\n"
        "try:\n    import emo.eval.icl.openicl_compat\nexcept UserError as error:\n    print(error.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.stdout == "openicl\n", done.stderr
