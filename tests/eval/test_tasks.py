"""Task files, rows and prompts: exactly the paper's texts, labels by name, mistakes in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import zstandard

from common.errors import UserError
from eval.icl.openicl_compat import PromptTemplate, Template
from eval.icl.task_data import load_data
from eval.icl.tasks import DIRECTORY, known_tasks, load_task, select_tasks
from tests.conftest import REPO
from tests.helpers.evaluating import command

EIGHT = ["tweet_emotion", "sst2", "trec", "subj", "cr", "rotten_tomatoes", "ag_news", "mmlu"]

# The paper's Table 5 and the released script, written out: (task, version) -> prompts of all labels for X.
PROMPTS = {
    ("sst2", "paper"): ['Review: "X" It is positive.', 'Review: "X" It is negative.'],
    ("sst2", "released"): ['Review: "X" It is positive.', 'Review: "X" It is negative.'],
    ("tweet_emotion", "paper"): [f'Tweet: "X" It is {e}.' for e in ("anger", "joy", "optimism", "sadness")],
    ("tweet_emotion", "released"): [f"X It is {e}." for e in ("anger", "joy", "optimism", "sadness")],
    ("trec", "paper"): [
        'Question: "X" It is about abbreviation.',
        'Question: "X" It is about entity.',
        'Question: "X" It is about description and abstract concept.',
        'Question: "X" It is about human being.',
        'Question: "X" It is about location.',
        'Question: "X" It is about numerical value.',
    ],
    ("trec", "released"): [
        '"X" It is about abbreviation.',
        '"X" It is about entity.',
        '"X" It is about description and abstract concept.',
        '"X" It is about human being.',
        '"X" It is about location.',
        '"X" It is about numeric value.',
    ],
    ("subj", "paper"): ['"X" It is objective.', '"X" It is subjective.'],
    ("subj", "released"): ["X It is objective.", "X It is subjective."],
    ("cr", "paper"): ['Review: "X" It is negative.', 'Review: "X" It is positive.'],
    ("cr", "released"): ["Review: X It is positive.", "Review: X It is negative."],
    ("rotten_tomatoes", "paper"): ['Review: "X" It is negative.', 'Review: "X" It is positive.'],
    ("rotten_tomatoes", "released"): ["Review: X It is positive", "Review: X It is negative"],
    ("ag_news", "paper"): [
        f'"X" It is about {t}.' for t in ("world", "sports", "business", "science and technology")
    ],
    ("ag_news", "released"): [
        f'"X" It is about {t}.' for t in ("world", "sports", "business", "science and technology")
    ],
}


def test_the_eight_tasks_in_the_papers_order() -> None:
    assert known_tasks() == EIGHT
    assert [t.name for t in select_tasks("all")] == EIGHT


@pytest.mark.parametrize(("name", "version"), list(PROMPTS))
def test_prompts_are_the_papers_and_the_released_scripts(name: str, version: str) -> None:
    task = load_task(name, version)
    row = {"text": "X"}
    prompts = [task.template.generate_label_prompt_item(row, "ICE\n", label) for label in task.labels]
    assert prompts == [f"ICE\n{prompt}" for prompt in PROMPTS[name, version]]
    shown = [task.demonstration_template.generate_ice_item(row, label) for label in task.labels]
    assert shown == PROMPTS[name, version]
    assert task.spec.shots.count == 8


def test_mmlu_prompt_is_opencompass() -> None:
    task = load_task("mmlu")
    row = {"subject": "high school physics", "question": "Q?", "A": "a", "B": "b", "C": "c", "D": "d"}
    shot = "Q?\nA. a\nB. b\nC. c\nD. d\nAnswer: C\n"
    assert task.demonstration_template.generate_ice_item(row, "C") == shot
    header = "The following are multiple choice questions (with answers) about  high school physics.\n\n"
    expected = header + shot + "\n" + "Q?\nA. a\nB. b\nC. c\nD. d\nAnswer: D"
    assert task.template.generate_label_prompt_item(row, shot + "\n", "D") == expected
    assert (task.spec.shots.count, task.spec.shots.by, task.spec.group) == (5, "group", "subject")


def test_a_demonstration_that_holds_a_column_token_stays_as_it_is() -> None:
    stock = PromptTemplate({"a": "</E>Text: </text> a"}, {"text": "</text>"}, ice_token="</E>")
    row, ice = {"text": "query"}, "Text: see </text> here a\n"
    assert "see query here" in stock.generate_label_prompt_item(row, ice, "a")  # the fault
    assert Template.of(stock).generate_label_prompt_item(row, ice, "a") == ice + "Text: query a"


def test_a_separator_token_does_not_reach_the_prompt() -> None:
    template = PromptTemplate({"a": "</E></X><SEP> a"}, {"text": "</X>"}, ice_token="</E>", sep_token="<SEP>")
    assert "<SEP>" in template.generate_label_prompt_item({"text": "q"}, "", "a")  # the fault
    assert Template.of(template).generate_label_prompt_item({"text": "q"}, "", "a") == "q a"
    assert Template.of(template).generate_label_prompt_item({"text": "q"}, "", "a", True) == "q<SEP> a"


# --- rows -------------------------------------------------------------------------------------------------


def write(directory: Path, task: str, rows: list[dict], split: str, packed: bool = False) -> None:
    (directory / task).mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = directory / task / f"{split}.jsonl"
    if packed:
        path.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(text))
    else:
        path.write_bytes(text)


def test_labels_are_read_by_name_whatever_their_number(tmp_path: Path) -> None:
    rows = [
        {"text": f"t{i}", "label": i % 2, "label_text": ["negative", "positive"][i % 2]} for i in range(10)
    ]
    write(tmp_path, "sst2", rows, "train")
    write(tmp_path, "sst2", rows, "test", packed=True)
    data = load_data(load_task("sst2"), str(tmp_path))
    assert data.rows["test"]["label"][:2] == ["negative", "positive"]
    assert data.reader(load_task("sst2")).references[:2] == ["negative", "positive"]


def test_a_number_without_a_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "sst2", [{"text": "t", "label": 0}] * 9, "train")
    with pytest.raises(UserError, match=r"label 0 is a number without a name"):
        load_data(load_task("sst2"), str(tmp_path))


def test_hub_rows_take_the_names_that_the_data_set_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ClassLabel column whose order differs from the task file's must still give the right names."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["pos", "neg"])}
    )
    data = datasets.Dataset.from_dict({"text": ["x"] * 9, "label": [0, 1] * 4 + [0]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)
    rows = load_data(load_task("rotten_tomatoes"), "hub").rows["test"]
    assert rows["label"][:2] == ["positive", "negative"]
    wrong = data.cast_column("label", datasets.ClassLabel(names=["good", "bad"]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: wrong)
    with pytest.raises(UserError, match="unknown label 'good'; known: negative, neg, positive, pos"):
        load_data(load_task("rotten_tomatoes"), "hub")


def test_a_hub_id_without_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError) as error:
        load_data(load_task("sst2"), "hub")
    assert "\n" not in str(error.value) and "--data DIRECTORY" in str(error.value)


def test_limit_takes_evenly_spaced_rows_and_keeps_their_numbers(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "label_text": "positive", "row": 2 * i} for i in range(100)]
    write(tmp_path, "sst2", rows, "train")
    write(tmp_path, "sst2", rows, "test")
    data = load_data(load_task("sst2"), str(tmp_path), limit=4)
    assert data.rows["test"]["text"][:] == ["t0", "t25", "t50", "t75"]
    assert data.rows["test"]["row"][:] == [0, 50, 100, 150]


def test_real_rows_load(shared_data: Path) -> None:
    # Halves of the published splits, or the whole.
    sizes = {
        "sst2": (911, 1821),
        "trec": (250, 500),
        "mmlu": (7658, 14042),
        "ag_news": (3800, 7600),
        "cr": (377, 753),
    }
    for name in EIGHT:
        data = load_data(load_task(name), str(shared_data / "nlu"))
        if name in sizes:
            assert len(data.rows["test"]) in sizes[name]
    pool = load_data(load_task("ag_news", "released"), str(shared_data / "nlu")).rows["train"]
    assert len(pool) in (10429, 36000)
    assert set(data.rows["train"]["group"]) >= set(data.rows["test"]["group"])  # every subject has shots


# --- mistakes ---------------------------------------------------------------------------------------------

GOOD = """
title: T
input: {text: text}
label: {columns: [label], names: {a: [a], b: [b]}}
prompts: {paper: {text: '{text} is {label}'}}
"""
MALFORMED = {
    "not yaml": ("a: [", "not YAML"),
    "not a mapping": ("- a\n- b", "must be a mapping"),
    "binary": ("\x00\x01", "not YAML"),
    "no input": (GOOD.replace("input: {text: text}", ""), "input: Field required"),
    "typo": (GOOD + "metrc: accuracy", "unknown key metrc; did you mean metric?"),
    "typo deep": (GOOD + "shots: {cuont: 3}", "unknown key shots.cuont; did you mean count?"),
    "one label": (GOOD.replace(", b: [b]", ""), "at least 2"),
    "same value twice": (GOOD.replace("b: [b]", "b: [a]"), "stands for two labels"),
    "unknown slot": (GOOD.replace("{text} is", "{txt} is"), "names {txt}, which `input` does not define"),
    "no label slot": (GOOD.replace("is {label}", "is"), "must name {label}"),
    "label in header": (
        GOOD.replace("{text: '{text}", "{before: '{label}', text: '{text}"),
        "must not name {label}",
    ),
    "unknown word": (
        GOOD.replace("is {label}'}", "is {label}', words: {c: x}}"),
        "'c' is not one of the labels a, b",
    ),
    "half an order": (GOOD.replace("is {label}'}", "is {label}', order: [a]}"), "must list every label once"),
    "shots without group": (GOOD + "shots: {by: group}", "needs the key `group`"),
    "negative shots": (GOOD + "shots: {count: -1}", "greater than or equal to 0"),
    "reserved input": (GOOD.replace("{text: text}", "{text: text, row: x}"), "is a name that every row has"),
    "wrong type": (GOOD.replace("title: T", "title: [T]"), "title"),
    # defects D3: what would silently stay in the prompt
    "attribute": (GOOD.replace("{text} is", "{text.__class__} is"), "{text.__class__} would stay as it is"),
    "spaced slot": (GOOD.replace("{text} is", "{ text } is"), "{ text } would stay as it is"),
    "conversion": (GOOD.replace("{text} is", "{text!r} is"), "{text!r} would stay as it is"),
    "empty slot": (GOOD.replace("{text} is", "{} is"), "{} would stay as it is"),
    "doubled braces": (GOOD.replace("{text} is", "{{text}} is"), "braces around a slot would stay"),
    "demonstrations' token": (
        GOOD.replace("{text} is", "</E> {text} is"),
        "contains </E>, which is reserved",
    ),
    "an input's token": (GOOD.replace("{text} is", "</text> {text} is"), "contains </text>"),
    "input called E": (GOOD.replace("{text: text}", "{text: text, E: e}"), "OpenICL's name"),
    "unusable input": (GOOD.replace("{text: text}", "{text: text, a b: c}"), "cannot be written as {name}"),
    "other version": (GOOD.replace("paper", "other"), "no prompt version 'paper'; it has other"),
}


@pytest.mark.parametrize("kind", list(MALFORMED))
def test_a_malformed_task_file_is_one_clear_line(kind: str, tmp_path: Path) -> None:
    text, message = MALFORMED[kind]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_task(str(path))
    said = str(error.value)
    assert message in said and "\n" not in said
    assert "mine" in said  # it says which file


def test_the_good_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load_task(str(path)).labels == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("sst22", "did you mean sst2?"),
        ("nothing_like_it", "known: tweet_emotion"),
        ("sst2,sst2", "names a task twice"),
        ("", "--tasks is empty"),
        ("no/such.yaml", "does not exist"),
    ],
)
def test_wrong_task_names(names: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        select_tasks(names)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("{", r"train.jsonl line 1 is not JSON"),
        ("[1]", r"line 1 is not an object"),
        ("", r"has no rows"),
        ('{"txt": "a", "label_text": "positive"}', r"no column text; did you mean txt\?"),
        ('{"text": "a"}', r"none of the label columns label_text, label"),
        ('{"text": "a", "label_text": "good"}', r"unknown label 'good'; known: positive, negative"),
        ('{"text": "a", "label_text": "positive"}', r"8 demonstrations wanted of 1 rows"),
        ('{"text": null, "label_text": "positive"}', r"column text is None, not text"),
        ('{"text": ["a"], "label_text": "positive"}', r"column text is \['a'\], not text"),
        ('{"text": "a\\ud83d", "label_text": "positive"}', r"line 1 holds half of a surrogate pair"),
    ],
)
def test_wrong_rows_are_one_clear_line(rows: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train.jsonl").write_text(rows)
    (tmp_path / "sst2" / "test.jsonl").write_text('{"text": "a", "label_text": "positive"}')
    with pytest.raises(UserError, match=message) as error:
        load_data(load_task("sst2"), str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["model", "samples"])
def test_a_task_cannot_have_the_name_of_a_file_beside_its_result(name: str, tmp_path: Path) -> None:
    """defects D3"""
    path = tmp_path / f"{name}.yaml"
    path.write_text(GOOD)
    with pytest.raises(UserError, match=f"results use the name {name} themselves"):
        load_task(str(path))


def test_a_task_named_by_path_and_by_name_is_named_twice(tmp_path: Path) -> None:
    path = tmp_path / "sst2.yaml"
    path.write_text((DIRECTORY / "sst2.yaml").read_text())
    with pytest.raises(UserError, match="names a task twice"):
        select_tasks(f"sst2,{path}")


def test_damaged_rows_are_one_clear_line(tmp_path: Path) -> None:
    write(tmp_path, "sst2", [{"text": "t", "label_text": "positive"}] * 9, "train", packed=True)
    path = tmp_path / "sst2" / "train.jsonl.zst"
    path.write_bytes(b"not zstandard")
    with pytest.raises(UserError, match=r"train.jsonl.zst cannot be unpacked"):
        load_data(load_task("sst2"), str(tmp_path))
    path.with_suffix("").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"train.jsonl line 2 is not UTF-8"):
        load_data(load_task("sst2"), str(tmp_path))


def test_mistakes_are_told_before_anything_heavy_is_imported() -> None:  # defects C2
    """Reports and comparisons, and mistakes in arguments, wait for neither torch nor datasets."""
    code = (
        "import sys, eval.cli, eval.compare, eval.report.gather\n"
        "heavy = {'torch', 'transformers', 'datasets', 'openicl', 'matplotlib'} & set(sys.modules)\n"
        "print(*heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.mark.slow
def test_openicl_is_imported_without_what_it_seldom_needs() -> None:  # defects C2
    code = (
        "import sys, eval.icl.job\n"
        "print(*({'evaluate', 'nltk', 'openai', 'sentence_transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_without_openicl_one_line_says_how_to_install_it() -> None:
    """No installation of this project's package can bring it: its pins contradict the rest."""
    code = (
        "import sys\nsys.modules['openicl'] = None\nfrom common.errors import UserError\n"
        "try:\n    import eval.icl.openicl_compat\nexcept UserError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.stdout.endswith("pip install --no-deps openicl\n") and done.stdout.count("\n") == 1, (
        done.stderr
    )


def test_missing_data_names_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no train.jsonl or train.jsonl.zst in .*sst2"):
        load_data(load_task("sst2"), str(tmp_path))


def test_the_documented_example_is_a_task(tmp_path: Path) -> None:
    """What eval/icl/tasks/README.md shows is a file that works."""
    guide = (DIRECTORY / "README.md").read_text()
    text = re.search(r"```yaml\n(.*?)```", guide, re.DOTALL)
    assert text is not None
    path = tmp_path / "language.yaml"
    path.write_text(text.group(1))
    task = load_task(str(path))
    rows = [{"sentence": f"s{i}", "lang": ["de", "fr"][i % 2]} for i in range(20)]
    for split in ("train", "test"):
        write(tmp_path, "language", rows, split)
    data = load_data(task, str(tmp_path))
    assert set(data.rows["test"]["label"]) == set(task.labels)


def test_the_command_ends_with_one_line_and_code_2() -> None:
    found = command("run", "--model", "x", "--tasks", "sst22", "--data", "x")
    assert found == (2, "", "error: unknown task 'sst22'; did you mean sst2?\n")


def test_the_module_is_a_command(tmp_path: Path) -> None:
    arguments = ["run", "--model", tmp_path, "--tasks", "sst2", "--data", "x"]
    done = subprocess.run(
        [sys.executable, "-m", "eval", *arguments], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path} is not a model directory: config.json is missing\n"
