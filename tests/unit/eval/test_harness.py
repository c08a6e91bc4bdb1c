"""Tasks of lm-evaluation-harness have its numbers in our store, comparisons and reports."""

from __future__ import annotations

import json
import math
import shutil
from importlib import util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from emo.common.errors import ExitCode, UserError
from emo.eval.harness import tasks
from emo.eval.harness.tasks import select_all
from emo.eval.models.model import EvaluatedModel
from emo.eval.results.directory import Model, find_model, read_models
from emo.eval.results.stats import estimate_measure
from tests.helpers.evaluating import command, is_mistake, tiny_model, write_lines

TASKS = {
    "choice": {
        "tag": "mood",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}} The mood is",
        "doc_to_target": "{{label}}",
        "doc_to_choice": ["e", "s", "neither of both"],
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "shots": {
        "include": "choice.yaml",
        "num_fewshot": 2,
        "training_split": "train",
        "fewshot_split": "train",
    },
    "few": {"include": "choice.yaml", "test_split": "few"},
    "last": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": " {{word}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": m} for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}\nAnswer:",
        "doc_to_target": "{{word}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 6, "do_sample": False},
        "filter_list": [
            {
                "name": "letter",
                "filter": [{"function": "regex", "regex_pattern": "([a-z])"}, {"function": "take_first"}],
            },
            {"name": "whole", "filter": [{"function": "take_first"}]},
        ],
        "metric_list": [{"metric": "exact_match", "ignore_case": True}],
    },
}  # fmt: skip
GROUPS = {
    "rows": (["choice", "shots"], True),
    "halves": (["choice", "few"], False),
}  # tasks, and whether they are weighted by size


def write_harness_tasks(directory: Path) -> Path:
    """Write lm-eval task files that read rows from `directory` instead of the Hub."""
    directory.mkdir()
    texts = [
        "The film was long.",
        "A warm day by the sea",
        "Nobody came to the party!",
        "Rain again",
        "So kind of you",
    ]
    rows = [{"text": f"{t} {n}", "label": n % 3, "word": "aeiou"[n % 5]} for n in range(3) for t in texts]
    splits = {"train": rows[::-1], "test": rows, "few": rows[3:7]}
    data = {name: str(write_lines(directory / f"{name}.jsonl", part)) for name, part in splits.items()}
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": data}, "test_split": "test"}
    for name, task in TASKS.items():
        text = yaml.safe_dump({"task": name} | common | task)
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")
    for name, (parts, weighted) in GROUPS.items():
        metrics = [{"metric": "acc", "weight_by_size": weighted}]
        text = yaml.safe_dump({"group": name, "task": parts, "aggregate_metric_list": metrics})
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")
    return directory


if util.find_spec("lm_eval") is None:
    pytest.skip("lm-eval is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of two models with results on all tasks."""
    root = tmp_path_factory.mktemp("harness")
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_DATASETS_CACHE", str(root / "datasets"))
    files = write_harness_tasks(root / "tasks")
    for seed, name in enumerate("ab"):
        model = tiny_model(root / name, seed)
        names = ",".join(f"lm-eval:{files / task}.yaml" for task in [*TASKS, *GROUPS])
        done = command(*evaluation(model, names, root / "out"))
        assert done[0] == ExitCode.DONE, done
    return root


@pytest.fixture
def measured(place: Path, tmp_path: Path) -> Path:
    """Return results of both models on a task that has no accuracy."""
    for name in "ab":
        done = command(*evaluation(place / name, f"lm-eval:{place / 'tasks' / 'rolling.yaml'}", tmp_path))
        assert done[0] == ExitCode.DONE, done
    return tmp_path


def evaluation(model: Path, names: str, out: Path) -> list[object]:
    return ["eval", "--model", model, "--tasks", names, "--output_path", out, "--batch_size", 4]


def model_of(place: Path, name: str = "a") -> Model:
    return find_model(read_models([place / "out"]), name)


def own_numbers(place: Path, task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results and samples of a task from lm-eval's own model and evaluation."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
    model = HFLM(pretrained=str(place / "a"), batch_size=4, device="cpu")
    with mock.patch("lm_eval.evaluator.add_env_info"):  # it starts many programs
        run = lm_eval.simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0)
    return run["results"], run["samples"]


@pytest.mark.parametrize("task", TASKS)
def test_numbers_equal_those_of_lm_eval(place: Path, task: str) -> None:
    results, samples = own_numbers(place, task)
    model = model_of(place)
    name = f"lm-eval:{task}"
    result = (model.views.get(name) or model.measures[name])["result"]
    expected = {k: v for k, v in results[task].items() if "," in k and "stderr" not in k}
    assert expected and result["metrics"] == pytest.approx(expected, rel=1e-9)
    records = model.read_records(name)
    for sample in samples[task]:
        ours = records[sample["doc_id"]]["metrics"]
        for metric in sample["metrics"]:
            assert ours[f"{metric},{sample['filter']}"] == pytest.approx(sample[metric], rel=1e-9)


def test_answers_of_a_bfloat16_model_are_summed_in_float32(place: Path, tmp_path: Path) -> None:
    """Otherwise long answers of similar probability would be equal."""
    name = f"lm-eval:{place / 'tasks' / 'rolling.yaml'}"
    done = command(*evaluation(place / "a", name, tmp_path), "--dtype", "bfloat16")
    assert done[0] == ExitCode.DONE, done
    values = [
        record["value"] for record in find_model(read_models([tmp_path]), "a").read_records("lm-eval:rolling")
    ]
    assert any(value != torch.tensor(value).bfloat16().item() for value in values)


@pytest.mark.parametrize("group", GROUPS)
def test_group(place: Path, group: str) -> None:
    results, _ = own_numbers(place, group)
    result = model_of(place).results[f"lm-eval:{group}"]
    assert result["accuracy"] == pytest.approx(results[group]["acc,none"])
    assert bool(result["groups"]) != GROUPS[group][1]


def test_a_perplexity_is_compared_by_rows(place: Path, measured: Path) -> None:
    """Model b is better. The test pairs the rows, and the gate knows that lower is better."""
    a, b = read_models([measured])
    values, weights = (
        [[r[key] for r in m.read_records("lm-eval:rolling")] for m in (a, b)] for key in ("value", "weight")
    )
    first, second = (estimate_measure(v, w, "perplexity") for v, w in zip(values, weights, strict=True))
    result = a.measured["lm-eval:rolling"]["measure"]
    assert math.exp(first.value) == pytest.approx(result["value"])
    assert a.measured["lm-eval:rolling"]["conditions"]["compared"]["max_tokens"]  # the windows of the texts
    assert result["interval"]["low"] < result["value"] < result["interval"]["high"]
    assert (second - first).p_value() < 0.05
    done = {
        pair: command("compare", *pair, "--results", measured, "--fail_on_regression")
        for pair in ("ab", "ba")
    }
    assert done["ab"][0] == ExitCode.DONE and "no regression" in done["ab"][1]
    assert done["ba"][0] == ExitCode.REGRESSION and "lm-eval:rolling word_perplexity" in done["ba"][1]
    assert command("report", measured)[0] == ExitCode.DONE
    report = json.loads((measured / "results.json").read_text())
    (difference,) = report["measure_comparisons"]
    assert difference["direction"] == 1 and "word_perplexity" in report["answer"][0]


def test_report_and_exports(place: Path, tmp_path: Path) -> None:
    out = place / "out"
    assert command("report", out, "--output_path", tmp_path)[0] == ExitCode.DONE
    report = json.loads((tmp_path / "results.json").read_text())
    rows = {row["task"]: row for row in report["harness"] if row["model"] == "a"}
    answers = model_of(place).read_records("lm-eval:answer")
    cut = sum(record["answer_cut"] for record in answers)
    assert 0 < cut < len(answers) and rows["lm-eval:answer"]["answers_cut"] == cut
    assert f"answer: a reached the length limit in {cut} of 15 answers." in report["remarks"]
    assert command("export", out, "--format", "lm-eval", "--name", "a", "--output_path", tmp_path)[0] == 0
    exported = json.loads(next((tmp_path / "a").glob("results_*.json")).read_text())
    for task in TASKS:
        metrics = rows[f"lm-eval:{task}"]["metrics"]
        assert metrics.items() <= exported["results"][task].items()
    assert command("export", out, "--format", "hf", "--name", "a", "--output_path", tmp_path / "hf")[0] == 0
    card = next((tmp_path / "hf").rglob("README.md")).read_text()
    assert "rows loaded by lm-evaluation-harness" in card and "from files" not in card
    dtypes = {result["conditions"]["compared"]["dtype"] for result in model_of(place).all_results.values()}
    assert dtypes == {"float32"}


def test_known_rows_are_not_scored_again(place: Path, tmp_path: Path) -> None:
    """A killed evaluation continues, and a finished one loads no model."""
    from emo.eval.harness import adapter

    arguments = evaluation(place / "a", f"lm-eval:{place / 'tasks' / 'choice.yaml'}", tmp_path)
    answer, seen = adapter.RecordingHFLM.answer, []

    def die_at(chunk: int) -> Any:
        def killed(self: Any, kind: str, requests: list[Any]) -> Any:
            seen.append(len(requests))
            if len(seen) == chunk:
                raise KeyboardInterrupt
            return answer(self, kind, requests)

        return mock.patch.object(adapter.RecordingHFLM, "answer", killed)

    with mock.patch.object(adapter, "CHUNK", 20):
        with die_at(2):
            assert command(*arguments)[0] != ExitCode.DONE
        with die_at(0):
            assert command(*arguments)[0] == ExitCode.DONE
        assert seen == [20, 20, 20, 5]
        with mock.patch.object(adapter, "RecordingHFLM", side_effect=AssertionError("loads the model")):
            code, printed, _ = command(*arguments)
    assert code == ExitCode.DONE and "already known" in printed
    again, before = (
        model.results["lm-eval:choice"] for model in (read_models([tmp_path])[0], model_of(place))
    )
    assert again["metrics"] == before["metrics"]


def test_prompts_longer_than_the_context(place: Path, tmp_path: Path) -> None:
    arguments = evaluation(place / "a", f"lm-eval:{place / 'tasks' / 'shots.yaml'}", tmp_path)
    assert command(*arguments, "--max_tokens", 24, "--limit", 4)[0] == ExitCode.DONE
    (model,) = read_models([tmp_path])
    result = model.results["lm-eval:shots"]
    assert result["n"] == result["rows_shortened"] == 4
    assert all(record["cut"] > 0 for record in model.read_records("lm-eval:shots"))


def test_our_tasks_share_the_model(place: Path, world: Path, tmp_path: Path) -> None:
    names = f"sst2,lm-eval:{place / 'tasks' / 'choice.yaml'}"
    load = EvaluatedModel._load
    with mock.patch.object(EvaluatedModel, "_load", autospec=True, side_effect=load) as loading:
        arguments = evaluation(place / "a", names, tmp_path)
        code, printed, _ = command(*arguments, "--data", world / "data", "--retriever", "bm25")
    assert code == ExitCode.DONE and "mean accuracy" in printed and loading.call_count == 1
    assert read_models([tmp_path])[0].results.keys() == {"sst2", "lm-eval:choice"}


def test_watch(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "export").parent.mkdir()
    Path(run / "export").symlink_to(place / "b")
    task = place / "tasks" / "choice.yaml"
    watch = ["watch", run, "--once", "--tasks", f"lm-eval:{task}", "--no_report"]
    code, printed, error = command(*watch)
    assert code == ExitCode.DONE and "1 evaluated" in printed, error
    assert "0 evaluated" in command(*watch)[1]


@pytest.mark.parametrize(("change", "differ"), [("([b-z])", True), ("([a-z])", False)])
def test_results_of_other_filters_are_not_compared(
    change: str, differ: bool, place: Path, tmp_path: Path
) -> None:
    files = shutil.copytree(place / "tasks", tmp_path / "tasks")
    for name, pattern in (("a", "([a-z])"), ("b", change)):
        task = yaml.safe_load((files / "answer.yaml").read_text())
        task["filter_list"][0]["filter"][0]["regex_pattern"] = pattern
        (files / "answer.yaml").write_text(yaml.safe_dump(task))
        done = command(*evaluation(place / name, f"lm-eval:{files / 'answer.yaml'}", tmp_path / "out"))
        assert done[0] == ExitCode.DONE, done
    compare = ("compare", "a", "b", "--results", tmp_path / "out")
    assert is_mistake(*compare) if differ else command(*compare)[0] == ExitCode.DONE


def test_mistakes(place: Path, tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    empty = tmp_path / "empty.yaml"
    empty.write_text("task: empty\ndataset_path: json\ndataset_kwargs: {data_files: {test: none.jsonl}}\n")
    for names in (f"lm-eval:{empty}", "lm-eval:none.yaml", "sst2"):
        assert is_mistake("eval", "--model", place / "a", "--tasks", names, "--output_path", tmp_path), names
    known = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
    with mock.patch.object(tasks, "_manager", return_value=known):  # reading the list of all tasks is slow
        assert [task.name for task in select_all("lm-eval:mood")] == [
            "lm-eval:choice",
            "lm-eval:few",
            "lm-eval:shots",
        ]
        with pytest.raises(UserError, match="answer"):
            select_all("lm-eval:anwser")
    with (
        mock.patch.object(util, "find_spec", return_value=None),
        pytest.raises(UserError, match="pip install"),
    ):
        select_all("sst2,lm-eval:hellaswag")
