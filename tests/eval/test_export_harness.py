"""lm-evaluation-harness' files, read back by its own code where it is installed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emo.eval.export import harness
from emo.eval.results import pick, read_models
from tests.helpers.evaluating import command, load, naive_nll, tiny_model, write_tasks
from tests.helpers.results import tree

TASKS = ["sst2", "mmlu"]


def read(out: Path, name: str) -> dict[str, Any]:
    """The results file of a model, of which there is one."""
    (path,) = (out / name).glob("results_*.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real evaluation of six of eight rows, exported."""
    root = tmp_path_factory.mktemp("export")
    write_tasks(root / "data", TASKS, train=12, test=8)
    model = tiny_model(root / "models" / "m", num_hidden_layers=1)
    (model / "export.json").write_text(json.dumps({"step": 2, "tokens": 8, "objective": "emo", "run": "/r"}))
    arguments = ["--tasks", ",".join(TASKS), "--data", root / "data"]
    out = ["--output_path", root / "out", "--name", "m", "--limit", 6]
    assert command("eval", "--model", model, *arguments, *out)[0] == 0
    export = ["export", root / "out", "--format", "lm-eval", "--output_path", root / "there"]
    assert command(*export, "--data", root / "data")[0] == 0
    return root


def samples(world: Path) -> dict[str, list[dict[str, Any]]]:
    """The samples of the world's model by task or subtask, as lm-evaluation-harness finds their names."""
    actual = {}
    for path in (world / "there" / "m").glob("samples_*.jsonl"):
        name = path.name[path.name.find("_") + 1 : path.name.rfind("_")]
        actual[name] = [json.loads(line) for line in path.read_text().splitlines()]
    return actual


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_files_have_the_harness_fields(world: Path) -> None:
    """Names and types of lm_eval/result_schema.py, and the hashes of its evaluator."""
    value, rows = read(world / "there", "m"), samples(world)
    assert set(rows) == set(value["configs"]) == set(value["task_hashes"]) == set(value["n-samples"])
    assert set(value["results"]) == set(rows) | {"mmlu"} == set(value["versions"]) == set(value["n-shot"])
    assert value["group_subtasks"] == {"mmlu": sorted(set(rows) - {"sst2"})}
    assert (value["n-shot"]["sst2"], value["n-shot"]["mmlu"]) == (8, 5)
    assert value["n-samples"]["sst2"] == {"original": 8, "effective": 6}
    for name, actual in rows.items():
        assert value["results"][name]["sample_len"] == len(actual) == value["n-samples"][name]["effective"]
        assert value["results"][name]["acc,none"] == pytest.approx(np.mean([s["acc"] for s in actual]))
        for s in actual:
            assert s["doc_hash"] == sha(json.dumps(s["doc"], indent=2, ensure_ascii=False))
            assert s["prompt_hash"] == sha(s["arguments"]["gen_args_0"]["arg_0"])
            assert s["target_hash"] == sha(s["target"])
            chosen = int(np.argmax([float(value) for value, _ in s["filtered_resps"]]))
            assert s["acc"] == float(chosen == int(s["target"]))
            assert value["configs"][name]["doc_to_choice"][int(s["target"])] == s["doc"]["label"]
        hashes = "".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in actual)
        assert value["task_hashes"][name] == sha(hashes)


@pytest.mark.parametrize("task", TASKS)
def test_samples_hold_the_prompts_that_were_scored(world: Path, task: str) -> None:
    """The plainest forward over context and continuation gives the response: minus the mean NLL per token."""
    model, tokenizer = load(world / "models" / "m")
    of_task = [s for name, actual in samples(world).items() if name.startswith(task) for s in actual]
    assert len(of_task) == 6 and len({s["doc_id"] for s in of_task}) == 6
    for sample in of_task[::2]:
        for pair, (messages, greedy) in zip(
            sample["arguments"].values(), sample["filtered_resps"], strict=True
        ):
            ids = tokenizer(pair["arg_0"] + pair["arg_1"]).input_ids
            assert float(messages) == pytest.approx(-naive_nll(model, ids).sum() / len(ids), rel=1e-4)
            assert greedy == "None"  # not known
        assert len({pair["arg_0"] for pair in sample["arguments"].values()}) == 1
        assert all(sample["doc"][name] in pair["arg_0"] for name in ("text",) if task == "sst2")


def test_lm_evaluation_harness_reads_its_files(world: Path) -> None:
    """Its schema, its table, its aggregation of groups and its standard errors."""
    from lm_eval import utils
    from lm_eval.api.metrics import aggregate_subtask_metrics, mean_stderr
    from lm_eval.result_schema import EvalResults, SampleResult

    value, rows = read(world / "there", "m"), samples(world)
    assert value.keys() <= EvalResults.__annotations__.keys()
    for name, actual in rows.items():
        assert all(s.keys() - {"acc"} == SampleResult.__annotations__.keys() for s in actual)
        entry, outcomes = value["results"][name], [s["acc"] for s in actual]
        expected = mean_stderr(outcomes) if len(outcomes) > 1 else "N/A"
        assert entry["acc_stderr,none"] == (pytest.approx(expected) if len(outcomes) > 1 else expected)
    parts = [value["results"][name] for name in value["group_subtasks"]["mmlu"]]
    accuracies, sizes = [part["acc,none"] for part in parts], [part["sample_len"] for part in parts]
    mean = aggregate_subtask_metrics(accuracies, sizes, weight_by_size=False)
    assert value["groups"]["mmlu"]["acc,none"] == pytest.approx(mean)
    table = utils.make_table(value)
    assert f"{value['results']['sst2']['acc,none']:.4f}" in table
    cells = [line.split("|")[1].strip() for line in table.splitlines()[2:] if line]
    assert [cell for cell in cells if cell][:2] == ["MMLU", f"- {parts[0]['alias']}"] and "SST-2" in cells


def test_exporting_again_writes_the_same(world: Path, tmp_path: Path) -> None:
    """Nothing twice, nothing missing, whatever a killed export has left; without the rows results alone."""
    model = pick(read_models([world / "out"]), "m")
    for _ in range(2):
        harness.write_harness(model, tmp_path, str(world / "data"))
        assert tree(tmp_path) == tree(world / "there")
        next(tmp_path.glob("m/results_*")).unlink()
    assert str(world).encode() not in b"".join(tree(world / "there").values()), "a path of this machine"
    alone = json.loads(harness.write_harness(model, tmp_path / "alone", None).read_text())
    whole = read(world / "there", "m")
    assert whole.keys() - alone.keys() == {"n-samples", "task_hashes"} and len(tree(tmp_path / "alone")) == 1
    assert alone == {name: value for name, value in whole.items() if name in alone}


def test_other_rows_than_those_of_the_evaluation_are_refused(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "data", tmp_path / "data")
    arguments = ["export", world / "out", "--format", "lm-eval", "--output_path", tmp_path / "there"]
    for split in ("test", "train"):
        path = tmp_path / "data" / "sst2" / f"{split}.jsonl"
        content = path.read_text()
        path.write_text(content.replace("the", "a", 1))
        assert command(*arguments, "--data", tmp_path / "data")[0] == 2 and not (tmp_path / "there").exists()
        path.write_text(content)
    ours = tmp_path / "sst2.yaml"
    spec = (Path(harness.__file__).parents[1] / "icl" / "tasks" / "sst2.yaml").read_text()
    ours.write_text(spec.replace("It is {label}.'", "So it is {label}.'"))
    assert command(*arguments, "--data", tmp_path / "data", "--tasks", ours)[0] == 2
    assert command(*arguments, "--data", tmp_path / "data")[0] == 0
